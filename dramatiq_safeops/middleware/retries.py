"""When a failed message runs again, and when no more.

Runs in: worker processes. Needs: nothing but the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import dramatiq.middleware
from dramatiq.errors import Retry

from ..dead_letter import describe_exception
from ..delivery import Delivery
from ..errors import ConfigError
from ..options import check_number, count_in, number_of, option_of
from ..outcome import Decision, Outcome, Reason, RetryPolicy, after_failure
from .foreign import carry_out, is_foreign
from .guard import Guard

if TYPE_CHECKING:
    from dramatiq import Actor, Broker
    from dramatiq.broker import MessageProxy

logger = logging.getLogger(__name__)

#: Five attempts in all.
DEFAULT_MAX_RETRIES = 4
#: Milliseconds. With full jitter this is the base of the first delay, not its minimum.
DEFAULT_MIN_BACKOFF = 30_000
#: Milliseconds, Dramatiq's own limit: a week.
DEFAULT_MAX_BACKOFF = 7 * 86_400_000
#: Bytes of a traceback that travel in a message's options on a foreign broker.
FOREIGN_TRACEBACK_LIMIT = 16_384


class Retries(Guard, dramatiq.middleware.Retries):
    """Runs a failed message again, later, a bounded number of times; then it is a dead letter.

    Without it a failed message is dead-lettered at its first failure. The decision itself is made by ``outcome.decide``
    and carried out by the broker: a copy of the message is confirmed by RabbitMQ before the original is acked.

    Options (message, then actor, then here):
        max_retries: attempts after the first. Default 4. ``None`` is refused: nothing may run for ever.
        min_backoff: milliseconds, the base of the first delay, doubled by each retry. Default 30,000.
        max_backoff: milliseconds, the cap of a delay before jitter. Default and at most 7 days.
        throws (actor): exception classes that are never retried.
        retry_when (actor, here): called with the retries so far and the exception; False stops. It can stop earlier
            than ``max_retries``, never go on beyond it.
        on_retry_exhausted: name of the actor that is told when a message has used up its attempts.

    An actor may raise ``dramatiq.Retry(delay=...)`` to choose the delay of its next attempt, which counts like any
    other. The delay of all others is drawn from 0 up to the doubled backoff ("full jitter").
    """

    def __init__(
        self,
        *,
        max_retries: int = DEFAULT_MAX_RETRIES,
        min_backoff: float = DEFAULT_MIN_BACKOFF,
        max_backoff: float = DEFAULT_MAX_BACKOFF,
        retry_when: Callable[[int, BaseException], bool] | None = None,
    ) -> None:
        _check_max_retries("Retries.max_retries", max_retries)
        check_number("Retries.min_backoff", min_backoff)
        check_number("Retries.max_backoff", max_backoff)
        _check_callable("Retries.retry_when", retry_when)
        self.max_retries = max_retries
        self.min_backoff = min_backoff  # type: ignore[assignment]  # Dramatiq says int, milliseconds may be a float
        self.max_backoff = max_backoff  # type: ignore[assignment]
        self.retry_when = retry_when

    def check_actor(self, actor: Actor[..., Any]) -> None:
        """Check the options of ``actor``."""
        where = f"of actor {actor.actor_name!r}"
        options = actor.options
        if "max_retries" in options:
            _check_max_retries(f"max_retries {where}", options["max_retries"])
        for name in ("min_backoff", "max_backoff"):
            if options.get(name) is not None:
                check_number(f"{name} {where}", options[name])
        _check_callable(f"retry_when {where}", options.get("retry_when"))
        _classes(f"throws {where}", options.get("throws"))

    def policy_for(self, broker: Broker, message: MessageProxy) -> RetryPolicy:
        """Return the retry policy that holds for ``message``."""
        actor = broker.actors.get(message.actor_name)
        options = message.options
        cap = min(number_of("max_backoff", options, actor, self.max_backoff), DEFAULT_MAX_BACKOFF)
        predicate = option_of("retry_when", {}, actor, self.retry_when)
        return RetryPolicy(
            max_retries=int(number_of("max_retries", options, actor, self.max_retries)),
            min_backoff=number_of("min_backoff", options, actor, self.min_backoff),
            max_backoff=cap,
            throws=_classes("throws", option_of("throws", {}, actor, None)),
            retry_when=None if predicate is None else _asked_safely(predicate),
        )

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        """Tell whom it concerns. What becomes of the message was decided before this hook."""
        # Dramatiq's own hook would decide a second time, and enqueue the retry itself.
        if exception is None:
            return
        if is_foreign(broker):
            decision = self._decide_here(broker, message, exception)
        elif isinstance(message, Delivery) and message.decision is not None:
            decision = message.decision
        else:
            return
        if decision.outcome is Outcome.RETRIED:
            logger.info(
                "Retrying message %r in %d milliseconds.",
                message.message_id,
                decision.delay_ms,
                extra={
                    "event": "retries.retry",
                    "delay_ms": decision.delay_ms,
                    "asked": isinstance(exception, Retry),
                },
            )
        elif decision.reason == Reason.RETRIES_EXHAUSTED:
            self._tell_exhausted(broker, message)

    def _decide_here(self, broker: Broker, message: MessageProxy, exception: BaseException) -> Decision:
        """Decide as ``RabbitmqBroker`` does, and carry it out as far as another broker can."""
        policy = self.policy_for(broker, message)
        decision = after_failure(count_in(message.options, "retries"), exception, policy)
        described = describe_exception(exception, limit=FOREIGN_TRACEBACK_LIMIT)
        carry_out(broker, message, decision, traceback=described.traceback)
        return decision

    def _tell_exhausted(self, broker: Broker, message: MessageProxy) -> None:
        target = option_of("on_retry_exhausted", message.options, broker.actors.get(message.actor_name), None)
        if target is not None:
            policy = self.policy_for(broker, message)
            retries = (
                message.retries if isinstance(message, Delivery) else count_in(message.options, "retries")
            )
            broker.get_actor(target).send(
                message.asdict(), {"retries": retries, "max_retries": policy.max_retries}
            )


def _check_max_retries(name: str, value: object) -> None:
    if value is None:
        raise ConfigError(f"expected {name} to be a number, got None: a message must not be retried for ever")
    check_number(name, value)


def _check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise ConfigError(f"expected {name} to be callable, got {value!r}")


def _classes(name: str, value: object) -> tuple[type[BaseException], ...]:
    if value is None:
        return ()
    classes = value if isinstance(value, tuple) else (value,)
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise ConfigError(f"expected {name} to be an exception class or a tuple of them, got {value!r}")
    return classes


def _asked_safely(predicate: Callable[[int, BaseException], bool]) -> Callable[[int, BaseException], bool]:
    def asked(retries: int, exception: BaseException) -> bool:
        try:
            return bool(predicate(retries, exception))
        except Exception:
            logger.exception(
                "retry_when failed, so the message is retried.", extra={"event": "retries.predicate"}
            )
            return True

    return asked
