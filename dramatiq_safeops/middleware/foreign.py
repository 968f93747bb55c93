"""Guards on a broker of somebody else's, such as Dramatiq's own: they do what it allows, and say what it does not.

Runs in: worker processes. Needs: nothing but the broker.

``RabbitmqBroker`` carries out decisions itself. Any other broker knows ack and nack only, so here a retry is enqueued
and the original acked, a dead letter is nacked, and a park is a delayed copy.
"""

from __future__ import annotations

import logging
import random
import weakref
from typing import TYPE_CHECKING, Any

from dramatiq.common import current_millis
from dramatiq.middleware import MiddlewareError

from ..errors import ConfigError, leave, under_dramatiq_command
from ..options import count_in
from ..outcome import Decision, Outcome

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.broker import MessageProxy

logger = logging.getLogger(__name__)

#: Options of a message in which a foreign broker carries how often, and for how long in all, it has been parked.
PARKS = "safeops_parks"
PARKED_MS = "safeops_parked_ms"

#: What only RabbitmqBroker can keep.
_NOT_KEPT = (
    "a retry or a parked message is acked before RabbitMQ has confirmed its copy",
    "after a lost connection an ack may remove another message",
    "follow-ups (pipelines, callbacks) are sent before the outcome of their message is safe",
    "dead letters carry no reason, and where and for how long they stay is the broker's business",
    "delayed messages wait in the memory of workers",
    "while a message is parked, Results shows None as its result",
    "a message that is interrupted by a shutdown goes to the end of its queue",
)

_told: weakref.WeakSet[Any] = weakref.WeakSet()


class Refused(ConfigError, MiddlewareError):
    """A ``ConfigError`` that a foreign broker lets out of a hook: of all exceptions it only logs most."""


def is_foreign(broker: Broker) -> bool:
    """Tell whether ``broker`` does not carry out decisions by itself."""
    return not getattr(broker, "carries_out_decisions", False)


def refuse_boot(error: ConfigError) -> None:
    """Stop the start of a worker on a foreign broker with the sentence of ``error``."""
    if under_dramatiq_command():
        leave(str(error), 1)
    raise Refused(str(error)) from error


def warn_once(broker: Broker) -> None:
    """Say, once per broker, which promises it cannot keep."""
    if broker in _told:
        return
    _told.add(broker)
    logger.warning(
        "The broker is %s.%s and not dramatiq_safeops.RabbitmqBroker: the guards do what it allows. It cannot promise"
        " what theirs does: %s.",
        type(broker).__module__,
        type(broker).__name__,
        "; ".join(_NOT_KEPT),
        extra={"event": "guards.foreign_broker"},
    )


def carry_out(broker: Broker, message: MessageProxy, decision: Decision, *, traceback: str = "") -> None:
    """Do what ``decision`` says, as far as ``broker`` can. What cannot be enqueued again is nacked, not lost."""
    if decision.outcome is Outcome.DEAD:
        message.fail()
        return
    options: dict[str, Any] = {}
    if decision.outcome is Outcome.RETRIED:
        options["retries"] = count_in(message.options, "retries") + 1
        options["traceback"] = traceback
        options["requeue_timestamp"] = current_millis()
    elif decision.outcome is Outcome.PARKED:
        options[PARKS] = count_in(message.options, PARKS) + 1
        options[PARKED_MS] = count_in(message.options, PARKED_MS) + round(decision.delay_ms)
    message.options.update(options)  # on_failure and on_retry_exhausted look at them
    try:
        copy = message.copy(options=options)
        broker.enqueue(copy, delay=round(decision.delay_ms) or None)
    except Exception:
        logger.exception(
            "Message %r could not be enqueued again, so it is rejected.",
            message.message_id,
            extra={"event": "guards.enqueue_failed", "queue": message.queue_name},
        )
        message.fail()


def parked(message: MessageProxy, reason: str, detail: str, *, limit_ms: float) -> Decision:
    """Return the decision to park ``message``, or to give it up if it has been parked for ``limit_ms`` already."""
    return Decision.parked(
        reason,
        detail,
        parks=count_in(message.options, PARKS),
        waited_ms=count_in(message.options, PARKED_MS),
        limit_ms=limit_ms,
        jitter=random.random,
    )
