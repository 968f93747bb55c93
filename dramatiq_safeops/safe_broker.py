"""What every broker of this package is, whatever carries its messages: guards that cannot be passed, outcomes that hold.

Runs in: every process. Needs: nothing; how messages travel is the subclass's.

Two parts do the work: ``processing`` runs the hooks around an actor, ``settlement`` decides where an arriving message
goes and carries out what became of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dramatiq.middleware
from dramatiq.broker import Broker
from dramatiq.common import current_millis, q_name
from dramatiq.middleware import Middleware

from .boot import known_options
from .delivery import Delivery
from .errors import ConfigError, refuse
from .middleware import AsyncIO, DeadLetters, Guard, check_stack
from .options import check_number, is_number
from .processing import Processing
from .settlement import Inbox, Settlement

if TYPE_CHECKING:
    from dramatiq import Actor, Message


#: What Dramatiq's worker announces around ``consumer.ack`` and ``consumer.nack``.
_ENDS = ("ack", "nack")


class SafeBroker(Broker):
    """The part of Dramatiq's ``Broker`` that decides. Mixed in before one that carries messages.

    A subclass implements ``_publish``, hands what arrives to ``admit`` and what its consumers ack to ``carry_out``.
    """

    #: Guards ask: on other brokers they carry out by themselves what they can.
    carries_out_decisions = True

    def __init__(self, *args: Any, park_limit: float, **kwargs: Any) -> None:
        check_number(f"{type(self).__name__}.park_limit", park_limit)
        #: Milliseconds that a message which no worker can run yet is parked in all.
        self.park_limit = park_limit
        #: Writes the record of a dead letter: the guard of that name, if the list has one.
        self.dead_letters_guard = DeadLetters()
        self._processing = Processing(self)
        self._settlement = Settlement(self)
        super().__init__(*args, **kwargs)
        self.actor_options = known_options(self.actor_options)

    def _publish(self, messages: Sequence[Message[Any]], *, delay: float | None) -> None:
        """Send ``messages``; return when they are safe, raise if not."""
        raise NotImplementedError

    # -- declaring

    def declare_actor(self, actor: Actor[..., Any]) -> None:
        """Declare ``actor``, after every guard has looked at its options."""
        try:
            for middleware in self.middleware:
                if isinstance(middleware, Guard):
                    middleware.check_actor(actor)
        except ConfigError as error:
            refuse(str(error))
        super().declare_actor(actor)

    def add_middleware(
        self,
        middleware: Middleware,
        *,
        before: type[Middleware] | None = None,
        after: type[Middleware] | None = None,
    ) -> None:
        """Add a middleware as Dramatiq does, and let a guard look at the actors that exist already.

        Dramatiq's own AsyncIO is left out where ours is there. It is in no default list of Dramatiq's, so every app with
        async actors adds it by hand, and it has no options that could get lost.
        """
        if type(middleware) is dramatiq.middleware.AsyncIO and any(
            isinstance(one, AsyncIO) for one in self.middleware
        ):
            return
        super().add_middleware(middleware, before=before, after=after)
        if isinstance(middleware, DeadLetters):
            self.dead_letters_guard = middleware
        if isinstance(middleware, Guard):
            for actor in self.actors.values():
                middleware.check_actor(actor)

    # -- sending

    def enqueue(self, message: Message[Any], *, delay: float | None = None) -> Message[Any]:
        """Send ``message``, after ``delay`` milliseconds if given. Returns once it is safe.

        Between the end of an actor and the ack of its message this only collects: the message is sent as part of what
        becomes of that one.

        Raises (with RabbitMQ):
            ConfigError: the name of its queue is too long.
            SendRefused, QueueFull: RabbitMQ does not take it.
            SendUncertain: no confirm within ``send_timeout``; carries ``.message``, to be enqueued again.
            QueueMissing: no queue takes it, also after its queue was declared again.
            QueueConflict: its queue exists with other arguments.
        """
        message, delay = _canonical(message, delay)
        self.declare_queue(message.queue_name)
        if self._processing.collecting:
            return self._processing.collect(message, delay)
        self.emit_before("enqueue", message, delay)
        self._publish([message], delay=delay)
        self.emit_after("enqueue", message, delay)
        return message

    def send_many(
        self, messages: Sequence[Message[Any]], *, delay: float | None = None
    ) -> list[Message[Any]]:
        """Send many messages with few round trips. Returns once all of them are safe.

        Raises: as ``enqueue``. The error's ``unconfirmed`` holds exactly the messages that were not confirmed. The time
        budget starts anew with every confirm.
        """
        if self._processing.collecting:
            return [self.enqueue(message, delay=delay) for message in messages]
        messages = [_canonical(message, delay)[0] for message in messages]
        for message in messages:
            self.declare_queue(message.queue_name)
            self.emit_before("enqueue", message, delay)
        self._publish(messages, delay=delay)
        for message in messages:
            self.emit_after("enqueue", message, delay)
        return messages

    # -- the hooks

    def emit_before(self, signal: str, *args: Any, **kwargs: Any) -> None:
        """Run before-hooks as Dramatiq does, but a guard that breaks never lets the actor run."""
        if signal == "process_message":
            self._processing.before(args[0])
            return
        if signal in _ENDS:
            args[0].held_for_hooks = True
            self._processing.before_end(args[0])
        if signal == "worker_boot":
            self._check_boot(args[0])
        if not self._is_told(f"before_{signal}", args):
            return
        try:
            super().emit_before(signal, *args, **kwargs)
        except BaseException:
            if signal not in _ENDS:
                raise
            # Dramatiq would give up here, and the message would stay un-acked for good; SystemExit would end the thread, too.
            self.logger.critical("Unexpected failure in before_%s.", signal, exc_info=True)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        """Run after-hooks as Dramatiq does. The outcome is decided before the first one, and follow-ups are collected."""
        try:
            if signal == "process_message":
                self._processing.after(args[0], **kwargs)
            elif signal == "skip_message":
                self._processing.after_skip(args[0])
            elif not self._is_told(f"after_{signal}", args):
                return
            elif signal == "nack":
                self._processing.after_nack(args[0])
            else:
                super().emit_after(signal, *args, **kwargs)
        except BaseException:
            if signal not in _ENDS:
                raise
            self.logger.critical("Unexpected failure in after_%s.", signal, exc_info=True)
        finally:
            if signal in _ENDS:
                args[0].held_for_hooks = False
                self.carry_out(args[0])

    def _is_told(self, hook: str, args: tuple[Any, ...]) -> bool:
        """Whether anybody is told of this ack or nack: not of a park, which is no end, and not if nobody listens."""
        if not hook.endswith("ack"):
            return True
        decision = args[0].decision
        return bool(self._processing.hooks_of(hook)) and (decision is None or decision.counts_for_hooks)

    def _check_boot(self, worker: dramatiq.Worker) -> None:
        """Refuse a start that cannot go well, before any middleware has started anything for this worker."""
        try:
            check_stack(self.middleware)
            for middleware in self.middleware:
                if isinstance(middleware, Guard):
                    middleware.check_boot(self)
        except ConfigError as error:
            refuse(str(error))

    # -- the two ends of a delivery

    def admit(self, delivery: Delivery, inbox: Inbox) -> None:
        """Hand an arriving delivery to the worker threads, or settle it here. Thread-safe, never blocks, never raises."""
        self._settlement.admit(delivery, inbox)

    def carry_out(self, delivery: Delivery) -> None:
        """Make the outcome of ``delivery`` true. Thread-safe, never blocks, never raises.

        Under a worker only when its after-hooks have run: Results stores a failure in ``after_nack``, and a worker that is
        killed meanwhile must not have acked.
        """
        if delivery.held_for_hooks:
            self._settlement.conclude(delivery)
            return
        self._processing.stop_collecting()
        self._settlement.carry_out(delivery)


def _canonical(message: Message[Any], delay: float | None) -> tuple[Message[Any], float | None]:
    """Return ``message`` as it is sent, and its delay.

    ``eta`` is a note for whoever looks at it; what rules is the ladder. What stock Dramatiq's ``enqueue(delay=)`` returned
    names a delay queue, and has its delay in ``eta`` only.
    """
    queue_name = q_name(message.queue_name)
    if queue_name != message.queue_name:
        eta = message.options.get("eta")
        if delay is None and is_number(eta):
            delay = max(eta - current_millis(), 0)
        message = message.copy(queue_name=queue_name)
    if delay is not None:
        message = message.copy(options={"eta": current_millis() + delay})
    return message, delay
