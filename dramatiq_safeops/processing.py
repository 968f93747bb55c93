"""The hooks around an actor: a guard that breaks never lets it run, and what follows from it is collected.

Runs in: worker threads. Needs: nothing.

Dramatiq logs an ordinary exception in a before-hook and runs the actor anyway, swallows what after-hooks raise, and sends
what they enqueue at once. Here the outcome is decided before the first after-hook, and all that is enqueued between the
end of the body and the ack is sent together with what becomes of the message.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dramatiq.common import current_millis
from dramatiq.middleware import Callbacks, GroupCallbacks, Middleware, MiddlewareError, Pipelines, SkipMessage
from dramatiq.results import ResultFailure, ResultMissing, Results

from .delivery import RETURNED, STARTED, Delivery
from .encoder import encode
from .middleware import DeadLetters, Guard, Retries
from .outcome import NO_RETRIES, STALE, Decision, Outcome, Reason, RetryPolicy, decide
from .rabbitmq.copies import new_message
from .settlement import park

if TYPE_CHECKING:
    from dramatiq import Message

    from .safe_broker import SafeBroker

logger = logging.getLogger(__name__)

#: Middlewares of Dramatiq's whose after-hook does nothing but enqueue follow-ups: when it fails, a follow-up is lost.
_FOLLOW_UP_MIDDLEWARE = (Pipelines, Callbacks, GroupCallbacks)

#: For the ids of follow-ups. Never to be changed: a repeat must get the same ids.
_NAMESPACE = uuid.UUID("7f3d1a52-5b4e-4c58-9d0e-1f6a3a5c2b11")

Hook = tuple[Middleware, Callable[..., None]]


class _Here(threading.local):
    """The delivery whose follow-ups this thread collects, the middleware whose hook runs, and what it could not send."""

    delivery: Delivery | None = None
    kind: str = ""
    not_collected: Exception | None = None


class Processing:
    """Runs the hooks of one broker. Thread-safe: what it remembers is kept per thread or on the delivery."""

    def __init__(self, broker: SafeBroker) -> None:
        self._broker = broker
        self._here = _Here()
        self._hooks: dict[str, list[Hook]] = {}
        self._hooks_of: list[Middleware] = []  # whose hooks are cached

    # -- before the actor

    def before(self, delivery: Delivery) -> None:
        """Run the before-hooks. What they raise keeps the actor from running."""
        self._here.delivery = None  # a hook may have kept the last message of this thread from being settled
        if not delivery.leave_buffer(STARTED):
            delivery.decision = STALE
            raise SkipMessage("its channel is gone, RabbitMQ delivers it again")
        if delivery.turned_away is not None:
            delivery.fail()
            raise SkipMessage(delivery.turned_away.detail)
        for middleware, hook in self.hooks_of("before_process_message"):
            delivery.entered += 1
            try:
                hook(self._broker, delivery)
            except MiddlewareError:
                raise
            except BaseException as error:
                logger.critical(
                    "Unexpected failure in before_process_message of %r.", middleware, exc_info=True
                )
                # SystemExit and its like would be charged to an actor that has not run.
                if isinstance(middleware, Guard) or not isinstance(error, Exception):
                    self._turn_away(delivery, middleware, error)

    def _turn_away(self, delivery: Delivery, guard: Middleware, error: BaseException) -> None:
        detail = f"{type(guard).__name__} failed with {type(error).__name__}"
        delivery.failure = self._dead_letters.describe(error)
        delivery.turned_away = park(delivery, Reason.GUARD_FAILED, detail, limit_ms=self._broker.park_limit)
        delivery.fail()
        raise SkipMessage(detail) from error

    # -- after the actor

    def after(
        self, delivery: Delivery, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Decide what becomes of ``delivery``, then run the after-hooks. Never raises."""
        delivery.ran = not delivery.failed  # Dramatiq comes here also for what a before-hook has failed
        try:
            policy = NO_RETRIES if exception is None else self._policy_for(delivery)
            delivery.decision = decide(delivery, exception=exception, policy=policy)
            if exception is not None:
                self._note_failure(delivery, exception, delivery.decision)
        except Exception as error:
            logger.critical(
                "The outcome of message %r could not be decided.", delivery.message_id, exc_info=True
            )
            detail = f"deciding what becomes of it failed with {type(error).__name__}"
            delivery.decision = Decision(Outcome.DEAD, Reason.GUARD_FAILED, detail)
            delivery.fail()
        self._run_after_hooks("after_process_message", delivery, result=result, exception=exception)

    def after_skip(self, delivery: Delivery) -> None:
        """Decide what becomes of a message that was skipped, then run the after-hooks. Never raises."""
        if delivery.decision is STALE:
            return
        delivery.decision = decide(delivery, skipped=True)
        self._run_after_hooks("after_skip_message", delivery)

    def _policy_for(self, delivery: Delivery) -> RetryPolicy:
        retries = next((one for one in self._broker.middleware if isinstance(one, Retries)), None)
        return NO_RETRIES if retries is None else retries.policy_for(self._broker, delivery)

    def _note_failure(self, delivery: Delivery, exception: BaseException, decision: Decision) -> None:
        if decision.outcome not in (Outcome.RETRIED, Outcome.DEAD):
            return
        delivery.failure = self._dead_letters.describe(exception)
        # What Dramatiq's Retries leaves in the options: callbacks and on_retry_exhausted look at it.
        delivery.options["retries"] = delivery.retries + 1
        delivery.options["traceback"] = delivery.failure.traceback
        delivery.options["requeue_timestamp"] = current_millis()
        if decision.outcome is Outcome.DEAD:
            delivery.fail()

    def _run_after_hooks(self, signal: str, delivery: Delivery, **kwargs: Any) -> None:
        here = self._here
        here.delivery = delivery  # from now on enqueue() collects, until carry_out()
        # Dramatiq calls after-hooks also where the before-hook was not reached: a gauge goes below zero, a lock is
        # released that was never taken.
        not_entered = [
            middleware for middleware, _ in self.hooks_of("before_process_message")[delivery.entered :]
        ]
        for middleware, hook in self.hooks_of(signal):
            if middleware in not_entered:
                continue
            here.kind, here.not_collected = type(middleware).__name__, None
            try:
                hook(self._broker, delivery, **kwargs)
            except BaseException as error:  # of SystemExit Dramatiq would say that the actor has failed
                logger.critical("Unexpected failure in %s of %r.", signal, middleware, exc_info=True)
                if isinstance(middleware, _FOLLOW_UP_MIDDLEWARE):
                    delivery.follow_up_error = error
                elif here.not_collected is not None:
                    delivery.follow_up_error = here.not_collected
        here.kind, here.not_collected = "", None

    def before_end(self, delivery: Delivery) -> None:
        """Take what ends without having reached a worker thread out of the buffer, unless somebody else was first.

        Dramatiq rejects a message of an unknown actor where it arrives. Returned to the queue meanwhile, it would die again.
        """
        if delivery.decision is None and not delivery.leave_buffer(RETURNED) and delivery.state != STARTED:
            delivery.decision = STALE

    def after_nack(self, delivery: Delivery) -> None:
        """Tell of a message that is dead. Never raises.

        What has not run this time may have been done before, by a worker that was killed before its ack: a result that
        is stored is not overwritten with "too old" or "its guard failed".
        """
        for middleware, hook in self.hooks_of("after_nack"):
            try:
                if isinstance(middleware, Results) and not delivery.ran and _has_result(middleware, delivery):
                    continue
                hook(self._broker, delivery)
            except BaseException:
                logger.critical("Unexpected failure in after_nack of %r.", middleware, exc_info=True)

    # -- follow-ups

    @property
    def collecting(self) -> bool:
        """Whether this thread is between the end of a body and the ack of its message."""
        return self._here.delivery is not None

    def stop_collecting(self) -> None:
        """The message of this thread is about to be settled."""
        self._here.delivery = None

    def collect(self, message: Message[Any], delay: float | None) -> Message[Any]:
        """Keep ``message`` until its parent is settled. Returns it with the id that it will have.

        A follow-up that cannot be encoded, or that a middleware refuses, makes a dead letter of its parent: nothing of a
        chain is lost silently. A hook that catches the error has dealt with it.
        """
        delivery = self._here.delivery
        assert delivery is not None
        try:
            message = self._with_lasting_id(delivery, message)
            self._broker.emit_before("enqueue", message, delay)
            delivery.follow_ups.append(new_message(message, encode(message), delay_ms=delay))
            self._broker.emit_after("enqueue", message, delay)
        except Exception as error:
            if self._here.kind:
                self._here.not_collected = error
            else:
                delivery.follow_up_error = error  # between the after-hooks and the ack Dramatiq swallows it
            raise
        return message

    def _with_lasting_id(self, delivery: Delivery, message: Message[Any]) -> Message[Any]:
        """Give a follow-up an id that is the same every time, so that a repeat of its parent makes a duplicate.

        What stands in the parent's own body (the next step of a pipeline, the callbacks of a group) has such an id.
        """
        if message.message_id in _ids_in(delivery.options):
            return message
        retried = delivery.decision is not None and delivery.decision.outcome is Outcome.RETRIED
        attempt = delivery.attempt if retried else "final"
        name = f"{delivery.message_id}:{attempt}:{self._here.kind}:{len(delivery.follow_ups)}"
        return message.copy(message_id=str(uuid.uuid5(_NAMESPACE, name)))

    # --

    @property
    def _dead_letters(self) -> DeadLetters:
        return self._broker.dead_letters_guard

    def hooks_of(self, signal: str) -> list[Hook]:
        """Return the middlewares that implement ``signal``, in the order in which they are called.

        Most implement few of the many hooks, and asking all of them costs more than the rest of a short message.
        """
        if self._hooks_of != self._broker.middleware:
            self._hooks, self._hooks_of = {}, list(self._broker.middleware)
        hooks = self._hooks.get(signal)
        if hooks is None:
            default = getattr(Middleware, signal)
            all_hooks = [(middleware, getattr(middleware, signal)) for middleware in self._hooks_of]
            hooks = [one for one in all_hooks if getattr(one[1], "__func__", None) is not default]
            if signal.startswith("after_"):
                hooks.reverse()
            self._hooks[signal] = hooks
        return hooks


def _has_result(results: Results, delivery: Delivery) -> bool:
    try:
        results.backend.get_result(delivery)
    except ResultMissing:
        return False
    except ResultFailure:
        return True
    return True


def _ids_in(options: Mapping[str, Any]) -> set[str]:
    """Return the ids of the messages that a parent carries: they are the same each time it runs."""
    carried = [options.get("pipe_target"), *(options.get("group_completion_callbacks") or ())]
    return {one["message_id"] for one in carried if isinstance(one, dict) and "message_id" in one}
