"""A message that waited too long is not run.

Runs in: worker processes. Needs: nothing but the broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dramatiq.middleware
from dramatiq.common import current_millis

from ..options import check_above_zero, number_of
from ..outcome import Outcome, Reason
from .guard import Guard, turn_away

if TYPE_CHECKING:
    from dramatiq import Actor, Broker
    from dramatiq.broker import MessageProxy


class AgeLimit(Guard, dramatiq.middleware.AgeLimit):
    """Turns away a message that is older than its ``max_age``: it becomes a dead letter that says so.

    Options (message, then actor, then here):
        max_age: milliseconds since the message was first sent. Default None: no limit.
    """

    def __init__(self, *, max_age: float | None = None) -> None:
        if max_age is not None:
            check_above_zero("AgeLimit.max_age", max_age)
        self.max_age = max_age  # type: ignore[assignment]  # Dramatiq says int, milliseconds may be a float

    def check_actor(self, actor: Actor[..., Any]) -> None:
        """Check the options of ``actor``."""
        if actor.options.get("max_age") is not None:
            check_above_zero(f"max_age of actor {actor.actor_name!r}", actor.options["max_age"])

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Turn away what is too old."""
        default = 0.0 if self.max_age is None else self.max_age
        max_age = number_of("max_age", message.options, broker.actors.get(message.actor_name), default)
        if max_age <= 0:
            return
        age = current_millis() - message.message_timestamp
        if age >= max_age:
            turn_away(
                broker, message, Outcome.DEAD, Reason.TOO_OLD, f"{age} ms old, max_age is {max_age:g} ms"
            )
