"""What all guards share: how they turn a message away, how they are checked, and that none is passed by accident.

Runs in: worker processes, and wherever actors are declared. Needs: nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage

from ..delivery import Delivery
from ..errors import ConfigError
from ..outcome import DEFAULT_PARK_LIMIT, Decision, Outcome, Reason
from . import foreign

if TYPE_CHECKING:
    from dramatiq import Actor, Broker, Worker
    from dramatiq.broker import MessageProxy

logger = logging.getLogger(__name__)

#: Tells a hook that is made safe from one that is not yet.
_MARK = "__safeops_never_passed__"


class Guard(Middleware):
    """A middleware that must not be passed by accident.

    Without it: Dramatiq logs what an ordinary exception in ``before_process_message`` was, *and runs the actor*. A guard
    that breaks is an outcome: the message is parked and looked at again, and the actor does not run. Subclass it for
    guards of your own.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hook = cls.before_process_message  # also that of a mixin, or of a middleware named after Guard
        if hook is not Middleware.before_process_message and not hasattr(hook, _MARK):
            cls.before_process_message = _never_passed(hook)  # type: ignore[method-assign]

    def check_actor(self, actor: Actor[..., Any]) -> None:
        """Raise ``ConfigError`` if an option of ``actor`` makes no sense. Called when it is declared."""

    def check_boot(self, broker: Broker) -> None:
        """Raise ``ConfigError`` if this guard cannot do its work. Called before a worker starts."""

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """On a foreign broker, which checks nothing: check what ``RabbitmqBroker`` checks, and say what is not promised."""
        if not foreign.is_foreign(broker):
            return
        from .stack import check_stack  # it knows all guards, and each guard needs it at this one moment

        try:
            check_stack(broker.middleware, on_foreign_broker=True)
            for actor in broker.actors.values():
                self.check_actor(actor)
            self.check_boot(broker)
        except ConfigError as error:
            foreign.refuse_boot(error)
        foreign.warn_once(broker)


def turn_away(
    broker: Broker,
    message: MessageProxy,
    outcome: Outcome,
    reason: str,
    detail: str,
    *,
    delay_ms: float = 0,
) -> NoReturn:
    """Stop the processing of ``message`` in a before-hook: its actor does not run, and ``outcome`` becomes of it.

    ``SkipMessage`` without ``fail()`` would let Results overwrite a stored result and Pipelines go on; an ordinary
    exception would let the actor run. On a foreign broker ``fail()`` means a dead letter, so what is parked is skipped.
    """
    decision = Decision(outcome, reason, detail, delay_ms)
    if foreign.is_foreign(broker):
        foreign.carry_out(broker, message, decision)
    else:
        if isinstance(message, Delivery):
            message.turned_away = decision
        message.fail()
    raise SkipMessage(detail)


def _never_passed(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the before-hook of a guard made so that a foreign broker cannot run the actor when it breaks."""

    @functools.wraps(hook)
    def guarded(self: Guard, broker: Broker, message: MessageProxy) -> None:
        try:
            hook(self, broker, message)
        except MiddlewareError:
            raise
        except Exception as error:
            if not foreign.is_foreign(broker):
                raise  # the broker makes an outcome of it
            logger.critical("Unexpected failure in before_process_message of %r.", self, exc_info=True)
            detail = f"{type(self).__name__} failed with {type(error).__name__}"
            decision = foreign.parked(message, Reason.GUARD_FAILED, detail, limit_ms=DEFAULT_PARK_LIMIT)
            foreign.carry_out(broker, message, decision)
            raise SkipMessage(detail) from error

    setattr(guarded, _MARK, True)
    return guarded
