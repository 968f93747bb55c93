"""What one process has of RabbitMQ: an I/O thread with two connections, opened when first needed.

Runs in: every process that sends or consumes. Needs: RabbitMQ. Thread-safe: every method may be called from any thread.

One connection consumes and acks, one publishes, and nothing is ever published on the first: RabbitMQ stops reading from
connections that publish while it is short of memory or disk, and acks must not wait for that.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import pika
from dramatiq.common import dq_name

from ..delivery import Delivery
from . import leftovers
from .intake import Intake
from .io_thread import IOThread
from .publication import Batch, Need, Publication, Refused
from .publisher import Publisher
from .settler import Instead, Settler
from .subscription import Subscription
from .topology import Declaration

#: Seconds that the end of a process may wait for its connections to close.
EXIT_PATIENCE_S = 1.0
#: Seconds that a publisher waits, out of its time budget, for a queue that refuses to take messages after all: an election
#: takes half a second, on a busy machine two. And the pauses between its tries, doubling.
REFUSAL_PATIENCE_S = 3.0
REFUSAL_PAUSE_FIRST_S = 0.1
REFUSAL_PAUSE_MOST_S = 0.5


class Client:
    """The two connections of this process. It belongs to the process that made it: a forked child makes its own."""

    def __init__(
        self,
        parameters: Sequence[pika.connection.Parameters],
        declarations_for: Callable[[Need], list[Declaration]],
        explain_refusal: Callable[[Need, str], str],
        instead: Instead,
    ) -> None:
        self.pid = os.getpid()
        self.closed = False
        self._declarations_for = declarations_for
        self._io = IOThread("safeops-io")
        self._publisher = Publisher(self._io, parameters, declarations_for, explain_refusal)
        self._intake = Intake(self._io, parameters)
        self._settler = Settler(self._io, self._publisher, instead)
        self._io.start()
        _clients.add(self)
        _close_at_exit()

    @property
    def publishing_trouble(self) -> str:
        """Why nothing can be published just now, for people; empty when all is well."""
        return self._publisher.trouble

    @property
    def frame_max(self) -> int:
        """The largest frame that RabbitMQ takes, in bytes: all headers of a message must fit into one."""
        return self._publisher.frame_max

    def publish(self, publications: Sequence[Publication], *, patience_s: float) -> None:
        """Publish and wait for the confirms. Gives up when none came for ``patience_s``; each publication tells its fate.

        What RabbitMQ refuses is tried again for a few seconds: on a new channel it also refuses what is for a quorum queue
        whose leader has just died, until there is a new one.

        Raises:
            RuntimeError: called on the I/O thread (by a logging handler, for example), which would wait for itself.
        """
        if self._io.is_here:
            raise RuntimeError("the I/O thread cannot wait for a send(): hand it to a thread of your own")
        began = time.monotonic()
        self._publish_once(publications, patience_s)
        if any(one.confirmed for one in publications):
            began = time.monotonic()  # the budget starts anew with every confirm
        deadline = began + patience_s
        give_up_at = min(deadline, time.monotonic() + REFUSAL_PATIENCE_S)
        pause = REFUSAL_PAUSE_FIRST_S
        while refused := [one for one in publications if isinstance(one.error, Refused)]:
            if time.monotonic() + pause >= give_up_at:
                return
            time.sleep(pause)
            pause = min(2 * pause, REFUSAL_PAUSE_MOST_S)
            self._publish_once(refused, deadline - time.monotonic())

    def _publish_once(self, publications: Sequence[Publication], patience_s: float) -> None:
        batch = Batch(publications)
        self._io.call(self._publisher.submit, batch)
        try:
            open_before = batch.open
            while not batch.done.wait(patience_s) and batch.open != open_before:
                open_before = batch.open
        finally:
            if not batch.done.is_set():  # also when a time limit strikes in here
                self._io.call(self._publisher.forget, batch)

    def subscribe(
        self,
        queue_name: str,
        prefetch: int,
        admit: Callable[[Delivery, Subscription], None],
        *,
        admit_leftover: Callable[[Delivery], None] | None = None,
    ) -> Subscription:
        """Consume ``queue_name`` from now on. Returns at once; deliveries come as soon as there is a connection.

        With ``admit_leftover`` also what stock Dramatiq left in the delay queue of that name, where it exists.
        """
        subscription = Subscription(
            self._io,
            self._settler,
            queue_name,
            prefetch,
            declarations=self._declarations_for(("queue", queue_name)),
            admit=admit,
        )
        # At the start of the worker, which ends where that is refused.
        self._io.call(self._publisher.was_declared, ("queue", queue_name))
        if admit_leftover is not None:
            subscription.leftovers = Subscription(
                self._io,
                self._settler,
                queue_name,
                leftovers.PREFETCH,
                declarations=(),
                admit=lambda delivery, _subscription: admit_leftover(delivery),
                source=dq_name(queue_name),
            )
            self._io.call(self._intake.add, subscription.leftovers)
        self._io.call(self._intake.add, subscription)
        return subscription

    def retire(self, subscription: Subscription) -> None:
        """Stop consuming and return what has not started. Never blocks; ``close`` waits for it."""
        for one in (subscription, subscription.leftovers):
            if one is not None:
                self._io.call(self._intake.retire, one)

    def unsettled(self, queue_name: str | None = None) -> int:
        """Return how many deliveries (of one queue) this process holds un-acked."""
        return sum(
            one.unsettled for one in list(self._intake.subscriptions) if queue_name in (None, one.queue_name)
        )

    def close(self, timeout_s: float) -> None:
        """Wait for what is on its way, ``timeout_s`` at most, then close both connections.

        What is un-acked then, RabbitMQ delivers again.
        """
        self.closed = True
        deadline = time.monotonic() + timeout_s
        self._wait_until(lambda: self._publisher.idle and self._intake.flushed, timeout_s)
        self._io.call(self._intake.close)
        self._io.call(self._publisher.close)
        left = max(deadline - time.monotonic(), 1.0)
        self._wait_until(lambda: self._publisher.closed and self._intake.closed, left)
        self._io.stop(timeout=1.0)

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``condition``, which is looked at on the I/O thread, holds; ``timeout_s`` at most."""
        holds = threading.Event()

        def look() -> None:
            if condition():
                holds.set()
            else:
                self._io.call_later(0.01, look)

        self._io.call(look)
        holds.wait(timeout_s)


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_finalized = 0  # the process to which multiprocessing's clean-up was added


def _close_at_exit() -> None:
    """See to it that this process closes its connections when it ends: RabbitMQ logs one that breaks off as a fault."""
    global _finalized
    if multiprocessing.parent_process() is not None and _finalized != os.getpid():
        # Children of multiprocessing end without Python's atexit, and forget what they inherit of its own.
        _finalized = os.getpid()
        multiprocessing.util.Finalize(None, _close_all, exitpriority=0)


def _close_all() -> None:
    for client in list(_clients):
        if client.pid == os.getpid() and not client.closed:
            client.close(EXIT_PATIENCE_S)


# When this is imported, so that handlers of the user's, which are called in reverse order, may still send.
atexit.register(_close_all)
