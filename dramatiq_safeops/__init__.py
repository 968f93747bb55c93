"""Dramatiq on RabbitMQ that loses nothing and says why something failed."""

from __future__ import annotations

from .broker import RabbitmqBroker
from .errors import (
    ConfigError,
    PermanentError,
    QueueConflict,
    QueueFull,
    QueueMissing,
    SafeOpsError,
    SendRefused,
    SendUncertain,
)
from .middleware import AgeLimit, AsyncIO, DeadLetters, Drain, Guard, Retries, TimeLimit, safe_stack

__all__ = [
    "AgeLimit",
    "AsyncIO",
    "ConfigError",
    "DeadLetters",
    "Drain",
    "Guard",
    "PermanentError",
    "QueueConflict",
    "QueueFull",
    "QueueMissing",
    "RabbitmqBroker",
    "Retries",
    "SafeOpsError",
    "SendRefused",
    "SendUncertain",
    "TimeLimit",
    "safe_stack",
]

__version__ = "0.1.0"
