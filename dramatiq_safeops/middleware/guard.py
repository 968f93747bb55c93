"""What all guards share: how they turn a message away, and how they are checked.

Runs in: worker processes, and wherever actors are declared. Needs: nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from dramatiq.middleware import Middleware, SkipMessage

from ..delivery import Delivery
from ..outcome import Decision, Outcome

if TYPE_CHECKING:
    from dramatiq import Actor, Broker
    from dramatiq.broker import MessageProxy


class Guard(Middleware):
    """A middleware that must not be passed by accident.

    Without it: Dramatiq logs what an ordinary exception in ``before_process_message`` was, *and runs the actor*. On
    ``RabbitmqBroker`` a guard that breaks is an outcome: the message is parked and looked at again, and the actor does
    not run. Subclass it for guards of your own.
    """

    def check_actor(self, actor: Actor[..., Any]) -> None:
        """Raise ``ConfigError`` if an option of ``actor`` makes no sense. Called when it is declared."""

    def check_boot(self, broker: Broker) -> None:
        """Raise ``ConfigError`` if this guard cannot do its work. Called before a worker starts."""


def turn_away(
    message: MessageProxy, outcome: Outcome, reason: str, detail: str, *, delay_ms: float = 0
) -> NoReturn:
    """Stop the processing of ``message`` in a before-hook: its actor does not run, and ``outcome`` becomes of it.

    ``SkipMessage`` without ``fail()`` would let Results overwrite a stored result and Pipelines go on; an ordinary
    exception would let the actor run.
    """
    if isinstance(message, Delivery):
        message.turned_away = Decision(outcome, reason, detail, delay_ms)
    message.fail()
    raise SkipMessage(detail)
