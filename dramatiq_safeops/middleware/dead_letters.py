"""Why a message died, written beside it.

Runs in: worker processes. Needs: nothing but the broker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import dramatiq.middleware

from ..dead_letter import ExceptionRecord, dead_letter_headers, describe_exception
from ..errors import ConfigError
from ..options import count_in
from ..rabbitmq import copies
from ..rabbitmq.topology import dead_letter_queue
from .foreign import is_foreign
from .guard import Guard
from .retries import Retries

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.broker import MessageProxy

    from ..delivery import Delivery
    from ..outcome import Decision

logger = logging.getLogger(__name__)

#: Bytes of a traceback that are kept: its end, where the reason stands. All headers must fit into one AMQP frame.
TRACEBACK_LIMIT = 16_384


class DeadLetters(Guard):
    """Writes the record that goes with a dead letter: reason, exception, traceback, attempts, times, host, versions.

    The dead letter itself waits in ``<queue>.dlq``: the producer's exact bytes, readable in the RabbitMQ UI, without an
    expiry. Whatever the list of middlewares holds, a message that failed for good is dead-lettered; this guard is where
    the record can be told more. Passwords and tokens in exceptions and URLs are masked.

    Options (here):
        app_version: the version of your app, shown in its dead letters. Default None.

    Emits:
        event ``dead_letters.dead`` (WARNING), with queue, actor, reason and attempts.
    """

    def __init__(self, *, app_version: str | None = None) -> None:
        if app_version is not None and not isinstance(app_version, str):
            raise ConfigError(f"expected DeadLetters.app_version to be a string, got {app_version!r}")
        self.app_version = app_version

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        """On a foreign broker: reject what failed where nobody else would, as such a broker acks it."""
        if exception is None or not is_foreign(broker):
            return
        if not any(isinstance(one, dramatiq.middleware.Retries) for one in broker.middleware):
            message.fail()

    def describe(self, exception: BaseException) -> ExceptionRecord:
        """Return what is kept of ``exception``: bounded, masked, without a reference to its frames."""
        return describe_exception(exception, limit=TRACEBACK_LIMIT)

    def record(
        self, broker: Broker, delivery: Delivery, decision: Decision, *, frame_max: int
    ) -> dict[str, Any]:
        """Return the headers of the dead letter, and say in the log where it is."""
        actor = delivery.actor_name if delivery.readable else None
        logger.warning(
            "Message %r of actor %r is dead (%s: %s). It waits in %r.",
            delivery.known_id,
            actor,
            decision.reason,
            decision.detail,
            dead_letter_queue(delivery.queue),
            extra={
                "event": "dead_letters.dead",
                "queue": delivery.queue,
                "actor": actor,
                "reason": decision.reason,
                "attempts": delivery.attempts,
            },
        )
        headers = dead_letter_headers(
            reason=decision.reason,
            detail=decision.detail,
            exception=delivery.failure,
            attempts=delivery.attempts,
            max_attempts=self._max_attempts(broker, delivery) if actor in broker.actors else None,
            parks=count_in(delivery.headers, copies.PARKS),
            first_seen_ms=delivery.first_seen_ms,
            failed_at_ms=copies.now_ms(),
            enqueued_at_ms=delivery.message_timestamp if delivery.readable else None,
            queue=delivery.queue,
            actor=actor,
            message_id=delivery.known_id,
            app_version=self.app_version,
            frame_max=frame_max,
        )
        last = delivery.headers.get(copies.TRACEBACK)
        if delivery.failure is None and isinstance(last, str):
            # It did not fail this time (too old, no actor any more), but it did before: that is what people look for.
            headers[copies.TRACEBACK] = last[-frame_max // copies.TRACEBACK_SHARE :]
        return headers

    def _max_attempts(self, broker: Broker, delivery: Delivery) -> int:
        retries = next((one for one in broker.middleware if isinstance(one, Retries)), None)
        return 1 if retries is None else retries.policy_for(broker, delivery).max_retries + 1
