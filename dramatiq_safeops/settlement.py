"""The two ends of a delivery: whether it goes to a worker thread when it arrives, and what is published about it at last.

Runs in: worker processes: ``admit`` on the I/O thread, ``carry_out`` in any thread. Needs: nothing; never blocks.
"""

from __future__ import annotations

import logging
import queue
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from .delivery import RETURNED, STARTED, Delivery
from .encoder import Unreadable, decode
from .options import count_in
from .outcome import Decision, Outcome, Reason, decide
from .rabbitmq import copies
from .rabbitmq.connection import UNDECODABLE
from .rabbitmq.publication import Final, Publication
from .signature import misfit

if TYPE_CHECKING:
    from .safe_broker import SafeBroker

logger = logging.getLogger(__name__)

#: Characters of an actor's name or of a mismatch that go into the log and into the dead letter.
MOST_DETAIL = 500


class Inbox(Protocol):
    """Where the deliveries go that a worker thread shall see."""

    buffer: queue.SimpleQueue[Delivery]


class Settlement:
    """Admits and settles the deliveries of one broker. Thread-safe."""

    def __init__(self, broker: SafeBroker) -> None:
        self._broker = broker

    # -- on arrival

    def admit(self, delivery: Delivery, inbox: Inbox) -> None:
        """Hand ``delivery`` to the worker threads, or settle it right here. Never raises.

        What dies here and can be read goes to a worker thread all the same: Results and other middlewares must be told,
        and may do I/O. ``Processing.before`` keeps its actor from running.
        """
        try:
            decision = self._look_at(delivery)
        except Exception as error:
            logger.critical("Unexpected failure on arrival of a message.", exc_info=True)
            decision = Decision(Outcome.DEAD, Reason.UNREADABLE, f"{type(error).__name__} on arrival")
        if decision is None or (decision.outcome is Outcome.DEAD and delivery.readable):
            delivery.turned_away = decision
            inbox.buffer.put(delivery)
            return
        delivery.decision = decision
        delivery.leave_buffer(RETURNED)
        self.carry_out(delivery)

    def _look_at(self, delivery: Delivery) -> Decision | None:
        copies.read_headers(delivery)
        if UNDECODABLE in delivery.headers:
            return Decision(Outcome.DEAD, Reason.UNREADABLE, "its AMQP headers cannot be decoded")
        if copies.next_hop_of(delivery) is not None:
            return Decision(Outcome.DELAYED)
        try:
            message = decode(delivery.body, delivery.queue)
        except Unreadable as error:
            return Decision(Outcome.DEAD, Reason.UNREADABLE, str(error))
        delivery.show(copies.view_of(delivery, message))
        actor = self._broker.actors.get(message.actor_name)
        if actor is None:
            return self._park(
                delivery, Reason.UNKNOWN_ACTOR, f"no actor {message.actor_name!r} in this worker"
            )
        detail = misfit(actor, message.args, message.kwargs)
        if detail is not None:
            return self._park(
                delivery, Reason.ARGUMENTS_DO_NOT_FIT, f"actor {message.actor_name!r}: {detail}"
            )
        return None

    def _park(self, delivery: Delivery, reason: str, detail: str) -> Decision:
        return park(delivery, reason, detail, limit_ms=self._broker.park_limit)

    # -- at the end

    def conclude(self, delivery: Delivery) -> Decision:
        """Set and return the decision, corrected by what after-hooks did since it was made. Never raises.

        May be called again, when more hooks have run.
        """
        try:
            decision = self._final(delivery)
        except Exception as error:
            logger.critical("What becomes of a message could not be decided.", exc_info=True)
            detail = f"settling it failed with {type(error).__name__}"
            decision = Decision(Outcome.DEAD, Reason.GUARD_FAILED, detail)
        delivery.decision = decision
        delivery.follow_up_error = None  # the decision holds it now
        return decision

    def carry_out(self, delivery: Delivery) -> None:
        """Make the outcome of ``delivery`` true at RabbitMQ. Never blocks, never raises."""
        channel = delivery.channel
        try:
            decision = self.conclude(delivery)
            if decision.outcome is Outcome.STALE:
                return
            if decision.outcome is Outcome.RETURNED:
                channel.return_soon([delivery])
                return
            publications = self._publications(delivery, decision)
        except Exception as error:
            logger.critical("What becomes of a message could not be written down.", exc_info=True)
            detail = f"settling it failed with {type(error).__name__}"
            publications = [copies.bare_dead_letter(delivery, Reason.GUARD_FAILED, detail)]
        channel.settle(delivery, publications)

    def instead(self, delivery: Delivery, missing: Sequence[Publication]) -> Sequence[Publication] | None:
        """Say what to publish instead of what RabbitMQ will never take, or None if nothing is left to try.

        ``missing`` is all that was not confirmed. Runs on the I/O thread.
        """
        refused = [one for one in missing if isinstance(one.error, Final)]
        rest = [one for one in missing if not isinstance(one.error, Final)]
        detail = f"RabbitMQ will not take what must be published about it: {refused[0].error}"
        if any(copies.is_dead_letter(one) for one in refused):
            if delivery.last_resort:
                return None
            delivery.last_resort = True
            return [*rest, copies.bare_dead_letter(delivery, Reason.REFUSED, detail)]
        decision = delivery.decision
        goes_on = decision is not None and decision.outcome in (Outcome.RETRIED, Outcome.DEAD)
        if goes_on and all(one in delivery.follow_ups for one in refused):
            logger.error(
                "A follow-up of message %r is lost: %s.",
                delivery.message_id,
                detail,
                extra={"event": "follow_up.lost", "queue": delivery.queue},
            )
            return rest
        delivery.decision = Decision(Outcome.DEAD, Reason.REFUSED, detail)
        others = [one for one in rest if one in delivery.follow_ups]
        return [*others, self._dead_letter(delivery, delivery.decision)]

    def _final(self, delivery: Delivery) -> Decision:
        decision = delivery.decision
        if decision is None:
            if delivery.state == STARTED:
                # Dramatiq's own processing broke: whatever it was, this message is not done.
                return Decision(Outcome.DEAD, Reason.GUARD_FAILED, "its processing ended without an outcome")
            decision = decide(delivery)
        error = delivery.follow_up_error
        if error is not None and decision.outcome in (Outcome.RETRIED, Outcome.DEAD):
            # The message itself goes on, or is dead for a better reason. The log has the traceback.
            detail = f"{decision.detail}; what follows from it could not be sent ({type(error).__name__})"
            decision = replace(decision, detail=detail)
        if decision.outcome in (Outcome.DONE, Outcome.SKIPPED) and error is not None:
            delivery.failure = self._broker.dead_letters_guard.describe(error)
            detail = "the actor has run, but what follows from it cannot be sent"
            return Decision(Outcome.DEAD, Reason.FOLLOW_UP_FAILED, detail)
        if decision.outcome in (Outcome.DONE, Outcome.SKIPPED, Outcome.RETRIED) and delivery.failed:
            return Decision(Outcome.DEAD, Reason.REJECTED, "a middleware called message.fail()")
        return decision

    def _publications(self, delivery: Delivery, decision: Decision) -> list[Publication]:
        outcome = decision.outcome
        if outcome is Outcome.RETRIED:
            changed = copies.changed_options(delivery, decode)
            frame_max = delivery.channel.frame_max
            copy = copies.retry_copy(
                delivery, decision.delay_ms, changed_options=changed, frame_max=frame_max
            )
            return [*delivery.follow_ups, copy]
        if outcome is Outcome.PARKED:
            return [copies.parked_copy(delivery, decision.delay_ms)]
        if outcome is Outcome.DELAYED:
            return [copies.delayed_copy(delivery)]
        if outcome is Outcome.DEAD:
            return [*delivery.follow_ups, self._dead_letter(delivery, decision)]
        return delivery.follow_ups

    def _dead_letter(self, delivery: Delivery, decision: Decision) -> Publication:
        frame_max = delivery.channel.frame_max
        record = self._broker.dead_letters_guard.record(self._broker, delivery, decision, frame_max=frame_max)
        return copies.dead_letter(delivery, record)


def park(delivery: Delivery, reason: str, detail: str, *, limit_ms: float) -> Decision:
    """Return the decision to park ``delivery``, or to bury it if it has been parked for ``limit_ms`` already."""
    parks = count_in(delivery.headers, copies.PARKS)
    decision = Decision.parked(
        reason,
        detail[:MOST_DETAIL],
        parks=parks,
        waited_ms=count_in(delivery.headers, copies.PARKED_MS),
        limit_ms=limit_ms,
        jitter=random.random,
    )
    if parks == 0 and decision.outcome is Outcome.PARKED:
        logger.warning(
            "Message %r is parked (%s). If no worker can run it within %d seconds, it is a dead letter.",
            delivery.known_id,
            decision.detail,
            limit_ms / 1000,
            extra={"event": "message.parked", "queue": delivery.queue, "reason": reason},
        )
    return decision
