"""Tell actors that ask for it that their worker is shutting down.

Runs in: worker. Needs: CPython.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import dramatiq.middleware
from dramatiq.middleware import Shutdown

from ..delivery import Delivery
from ..errors import ConfigError
from ..interrupter import INTERRUPTER
from ..outcome import Outcome, Reason
from .guard import Guard, turn_away

if TYPE_CHECKING:
    from dramatiq import Actor, Broker, Worker
    from dramatiq.broker import MessageProxy

logger = logging.getLogger(__name__)

#: How long the shutdown waits for bodies that are about to start, to interrupt these, too.
START_PATIENCE_S = 1.0


class Drain(Guard, dramatiq.middleware.ShutdownNotifications):
    """Raises ``Shutdown`` into actors that ask for it when their worker shuts down; their messages go back to the queue.

    Dramatiq's own raises it wherever the worker thread happens to be, in a guard's I/O or between two messages, where it
    loses a message or ends the thread. This one strikes only inside the actor's function, and cancels the coroutine of an
    async actor. Actors that do not ask for it run to their end.

    Options (message, then actor, then here):
        notify_shutdown: whether the actor is interrupted. Default: False.

    Emits:
        event ``drain.interrupted`` (INFO), for each actor that is interrupted.
    """

    def __init__(self, *, notify_shutdown: bool = False) -> None:
        # Not super().__init__(): it would build what this class is here to replace.
        _check("Drain.notify_shutdown", notify_shutdown)
        self.logger = logger
        self.notify_shutdown = notify_shutdown
        # The threads of workers that are shutting down; in tests a broker may have several workers.
        self._draining: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        # The threads whose message has asked for it. One step in C each, so no lock.
        self._asked: set[int] = set()

    def check_actor(self, actor: Actor[..., Any]) -> None:
        """Raise ``ConfigError`` if ``notify_shutdown`` of ``actor`` is neither True nor False."""
        if actor.options.get("notify_shutdown") is not None:
            _check(f"notify_shutdown of actor {actor.actor_name!r}", actor.options["notify_shutdown"])

    def should_notify(self, actor: Actor[..., Any], message: MessageProxy) -> bool:
        """Tell whether the body of ``message`` is to be interrupted. What a message carries may be anything."""
        for options in (message.options, actor.options):
            notify = options.get("notify_shutdown")
            if isinstance(notify, bool):
                return notify
        return self.notify_shutdown

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Note who asks for it. Return at once what comes when the others have been interrupted already."""
        if not self.should_notify(broker.get_actor(message.actor_name), message):
            return
        self._asked.add(threading.get_ident())
        # Only where "returned" is an outcome: on another broker Results would take the skipped message for done.
        if isinstance(message, Delivery) and threading.current_thread() in self._draining:
            turn_away(broker, message, Outcome.RETURNED, Reason.SHUTDOWN, "its worker is shutting down")

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        """Forget who asked for it."""
        self._asked.discard(threading.get_ident())

    # Dramatiq's makes these two hooks one, so mypy holds this one to the other's signature.
    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:  # type: ignore[override]
        """Forget who asked for it."""
        self._asked.discard(threading.get_ident())

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Interrupt each body that asks for it, also one whose guards are not through yet."""
        self._draining.update(worker.workers)
        # What the worker would do next anyway: threads that are free, or get free now, start nothing of what is buffered.
        for thread in worker.workers:
            thread.stop()
        left = self._asked & {thread.ident for thread in worker.workers}
        give_up_at = time.monotonic() + START_PATIENCE_S
        while left:
            for watch in INTERRUPTER.running():
                # Looked up again: the thread may have gone on to a message that does not ask for it.
                if watch.thread_ident in left and watch.thread_ident in self._asked:
                    left.discard(watch.thread_ident)
                    if INTERRUPTER.interrupt(watch, Shutdown):
                        logger.info(
                            "Actor %r is interrupted, as its worker is shutting down (message %r).",
                            watch.actor_name,
                            watch.message_id,
                            extra={
                                "event": "drain.interrupted",
                                "actor_name": watch.actor_name,
                                "message_id": watch.message_id,
                            },
                        )
            left &= self._asked
            if not left or time.monotonic() >= give_up_at:
                return
            time.sleep(0.005)


def _check(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"expected {name} to be True or False, got {value!r}")
