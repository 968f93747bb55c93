"""Every error this package raises, and what Dramatiq does with each.

Runs in: every process. Needs: nothing.

SafeOpsError
├── ConfigError        a wrong option or set-up, raised at declaration or at boot (also ValueError)
│   └── QueueConflict  send() to a queue that exists with other arguments
├── PermanentError     raise it in an actor: dead letter at once, no retry
├── QueueMissing       send() to a queue that somebody deletes again and again (also Dramatiq's QueueNotFound)
├── SendUncertain      send() ran out of its time budget unconfirmed; carries the message
└── SendRefused        RabbitMQ will not take this message as it is; nothing was enqueued
    └── QueueFull      the queue is over its length limit: try again later

An error that leaves ``send()`` inside an actor fails that actor like any other exception: it is retried.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from dramatiq.errors import BrokerConnectionError, BrokerError, QueueNotFound

if TYPE_CHECKING:
    from dramatiq import Message


P = ParamSpec("P")
R = TypeVar("R")


class SafeOpsError(Exception):
    """Base class of every error of this package."""


class ConfigError(SafeOpsError, ValueError):
    """A wrong option or set-up: names what was wrong, where, and what to do."""


class PermanentError(SafeOpsError):
    """Raised by an actor whose message can never succeed: it is dead-lettered at once, without a retry."""


class _SendError(SafeOpsError):
    """What the errors of ``send()`` and ``send_many()`` carry.

    ``unconfirmed`` holds the messages that RabbitMQ did not confirm, ``message`` the first of them.
    """

    def __init__(self, text: str, unconfirmed: Sequence[Message[Any]] = ()) -> None:
        super().__init__(text)
        self.unconfirmed = list(unconfirmed)
        self.message: Any = self.unconfirmed[0] if self.unconfirmed else None

    def __str__(self) -> str:
        # Dramatiq's errors print their ``message``, which here is the message that was sent.
        return str(self.args[0])


class SendUncertain(_SendError, BrokerConnectionError):
    """Raised when ``send()`` ran out of its time budget before RabbitMQ confirmed the message.

    The message may or may not have arrived. ``broker.enqueue(error.message)`` sends it again under the same message
    id. It is one of Dramatiq's ``BrokerConnectionError``, so existing ``except`` clauses go on working.
    """


class SendRefused(_SendError, BrokerError):
    """Raised when RabbitMQ will not take a message as it is: too large, or no permission. It was not enqueued."""


class QueueFull(SendRefused):
    """Raised when RabbitMQ refuses a message for seconds: its queue is over its length limit, or its cluster has lost too
    many nodes. It was not enqueued.
    """


class QueueConflict(_SendError, ConfigError):
    """Raised when a message's queue exists with other arguments, so that nothing can be sent to it. Also a ``ConfigError``."""


class QueueMissing(_SendError, QueueNotFound):
    """Raised when no queue takes a message, also after its queue was declared again. Also Dramatiq's ``QueueNotFound``."""


#: What a refused worker process leaves with (Dramatiq's own codes: 1 killed, 2 import failed, 3 no connection).
EXIT_REFUSED = 1
EXIT_UNREACHABLE = 3

#: Seconds that a refused worker process may take to leave by itself.
LEAVE_AFTER_S = 1.0


def refuse(sentence: str, *, exit_code: int = EXIT_REFUSED) -> NoReturn:
    """Stop a start that cannot go well, with one sentence that says what to do.

    In a program of the user's own this is a ``ConfigError``. In a worker process of the ``dramatiq`` command it is a
    ``SystemExit`` after the sentence was printed, since there the sentence would drown in a traceback of Dramatiq's.
    """
    if not under_dramatiq_command():
        raise ConfigError(sentence)
    leave(sentence, exit_code)


def refusing(function: Callable[P, R]) -> Callable[P, R]:
    """Let what ``function`` raises as ``ConfigError`` end a worker's start with the sentence alone, see ``refuse``."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            refuse(str(error))

    return wrapper


def leave(sentence: str, exit_code: int) -> NoReturn:
    """Print ``sentence`` and end this process with ``exit_code``, whatever threads others have started."""
    print(f"dramatiq-safeops: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 - the only output of a refused start
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if others and under_dramatiq_command():
        # Python would wait for these threads, and nobody is going to stop them any more. Not at once: Dramatiq's main
        # process waits to be told that this one has booted, which happens on the way out.
        last = threading.Timer(LEAVE_AFTER_S, os._exit, [exit_code])
        last.daemon = True
        last.start()
    raise SystemExit(exit_code)


def under_dramatiq_command() -> bool:
    """Tell whether this is a worker process that the ``dramatiq`` command started."""
    return "dramatiq.cli" in sys.modules and multiprocessing.parent_process() is not None
