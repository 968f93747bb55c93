"""Stop a body that runs for too long, and nothing but the body.

Runs in: worker. Needs: CPython.
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import TYPE_CHECKING, Any, TypeGuard

import dramatiq.middleware
from dramatiq.threading import current_platform

from .. import body
from ..errors import ConfigError
from ..watch import CAN_INTERRUPT
from .guard import Guard

if TYPE_CHECKING:
    from dramatiq import Actor, Broker, Message
    from dramatiq.broker import MessageProxy

logger = logging.getLogger(__name__)

#: Dramatiq's own default: 10 minutes.
DEFAULT_TIME_LIMIT_MS = 600_000.0

#: 30,000 years. A longer limit is none, and an integer much longer cannot be divided as a float.
_FOREVER_MS = 1e15


class TimeLimit(Guard, dramatiq.middleware.TimeLimit):
    """Raises ``TimeLimitExceeded`` into actors that run for longer than their limit.

    Dramatiq's own raises it until the after-hooks have run: it may strike a guard that is writing to a database, repeat
    a message that had succeeded, lose one that had failed, or end the worker thread. This one strikes only inside the
    actor's function; once that has returned, its result stands.

    An actor may catch the exception to clean up. It is raised once. It cannot end a call into C (a query, a download, a
    ``sleep``): a body that goes on running is reported as an error, see ``dramatiq_safeops.interrupter``.

    Options (message, then actor, then here):
        time_limit: milliseconds, above 0; ``float("inf")`` for none. Default: 600,000. A message that carries anything
            else is treated as if it carried none.

    Options (here):
        strict: refuse to boot with actors that state no ``time_limit``. Default: False, one warning.

    Emits:
        event ``time_limit.unset`` (WARNING), at boot, with the actors that state none.
        event ``time_limit.ignored`` (WARNING), when a message carries a limit that is none.
    """

    def __init__(self, *, time_limit: float = DEFAULT_TIME_LIMIT_MS, strict: bool = False) -> None:
        # Not super().__init__(): it would build the thread that this class is here to replace.
        _check_limit("TimeLimit.time_limit", time_limit)
        self.logger = logger
        self.time_limit = _usable(time_limit)
        self.strict = strict

    def check_actor(self, actor: Actor[..., Any]) -> None:
        """Raise ``ConfigError`` if ``actor`` was declared with a limit that is none."""
        if actor.options.get("time_limit") is not None:
            _check_limit(f"time_limit of actor {actor.actor_name!r}", actor.options["time_limit"])

    def check_boot(self, broker: Broker) -> None:
        """Name the actors that state no limit. Raises ``ConfigError`` if there are any and ``strict`` is on."""
        for actor in broker.actors.values():
            # Again, for brokers that swallow what is raised at declaration.
            self.check_actor(actor)
        unset = sorted(
            name for name, actor in broker.actors.items() if actor.options.get("time_limit") is None
        )
        if not unset:
            return
        names = ", ".join(map(repr, unset))
        if self.strict:
            raise ConfigError(
                f"actors without a time_limit: {names}; give each one: @dramatiq.actor(time_limit=<milliseconds>)"
            )
        logger.warning(
            "These actors state no time_limit, so %s: %s.",
            "nothing stops them"
            if math.isinf(self.time_limit)
            else f"{self.time_limit / 1000:g} s holds for them",
            names,
            extra={"event": "time_limit.unset", "actors": unset, "limit_ms": self.time_limit},
        )

    def limit_of(self, message: MessageProxy | Message[Any], actor: Actor[..., Any]) -> float:
        """Return the limit in milliseconds. A message comes from outside and must not be able to break a worker."""
        for options in (message.options, actor.options):
            limit = options.get("time_limit")
            if limit is None:
                continue
            if _is_limit(limit):
                return _usable(limit)
            logger.warning(
                "The time_limit of message %r for actor %r is no number of milliseconds above 0 (%s) and is ignored.",
                message.message_id,
                actor.actor_name,
                type(limit).__name__,
                extra={
                    "event": "time_limit.ignored",
                    "actor_name": actor.actor_name,
                    "message_id": message.message_id,
                },
            )
        return self.time_limit

    def after_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        """Put the wrapper around the actor's function."""
        actor.fn = body.wrap(actor.fn, actor_name=actor.actor_name)

    def after_process_boot(self, broker: Broker) -> None:
        """Warn where no limit can hold. Starts nothing: the interrupter starts with the first body."""
        if not CAN_INTERRUPT:
            warnings.warn(
                f"TimeLimit cannot interrupt threads on {current_platform!r}: no time limit holds.",
                category=RuntimeWarning,
                stacklevel=2,
            )

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Announce the body and its limit."""
        actor = broker.get_actor(message.actor_name)
        body.begin(self.limit_of(message, actor), actor_name=actor.actor_name, message_id=message.message_id)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        """Take back what was not used."""
        body.end()

    # Dramatiq's TimeLimit makes these two hooks one, so mypy holds this one to the other's signature.
    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:  # type: ignore[override]
        """Take back what was not used."""
        body.end()


def _usable(limit: float) -> float:
    return float(limit) if limit < _FOREVER_MS else math.inf


def _is_limit(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _check_limit(name: str, value: object) -> None:
    if not _is_limit(value):
        raise ConfigError(f"expected {name} to be a number above 0, got {value!r}")
