"""The guards, and ``safe_stack()``: all of them with Dramatiq's own middlewares, in the one right order."""

from __future__ import annotations

from .age_limit import AgeLimit
from .async_io import AsyncIO
from .dead_letters import DeadLetters
from .drain import Drain
from .guard import Guard, turn_away
from .retries import Retries
from .stack import ORDER, STOCK_TWINS, check_stack, safe_stack
from .time_limit import TimeLimit

__all__ = [
    "ORDER",
    "STOCK_TWINS",
    "AgeLimit",
    "AsyncIO",
    "DeadLetters",
    "Drain",
    "Guard",
    "Retries",
    "TimeLimit",
    "check_stack",
    "safe_stack",
    "turn_away",
]
