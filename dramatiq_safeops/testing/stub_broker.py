"""A broker in memory for users' unit tests, with the outcomes of the real one.

Runs in: the test process. Needs: nothing.

Dramatiq's ``StubBroker`` acks and nacks by rules of its own. This one has the real guards, the real decisions and the
real publications; only what RabbitMQ does with those is played here: queues, the delay ladder, dead letters.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import dramatiq.brokers.stub
from dramatiq.broker import Consumer, MessageProxy
from dramatiq.common import dq_name, q_name
from dramatiq.errors import QueueNotFound
from dramatiq.middleware import Middleware, SkipMessage

from ..delivery import RETURNED, Delivery
from ..encoder import encode
from ..errors import SafeOpsError
from ..middleware import safe_stack
from ..outcome import Decision
from ..rabbitmq.copies import DUE, LEFT, is_dead_letter, new_message
from ..rabbitmq.publication import Publication
from ..safe_broker import SafeBroker

if TYPE_CHECKING:
    from dramatiq import Message
    from typing_extensions import Self

#: Seconds between two looks for what has come due.
_TICK_S = 0.02

#: What an AMQP frame holds on a RabbitMQ with its default settings, in bytes.
_FRAME_MAX = 131_072


class DeadLettered(SafeOpsError):
    """What ``join`` raises for a dead letter that no exception of an actor's stands behind: says reason and detail."""


class StubBroker(SafeBroker, dramatiq.brokers.stub.StubBroker):
    """Dramatiq's ``StubBroker`` with the outcomes of ``RabbitmqBroker``, for unit tests. Thread-safe.

    ::

        broker = StubBroker()
        dramatiq.set_broker(broker)
        ...
        charge.send(7)
        broker.join(charge.queue_name, fail_fast=False)
        worker.join()

        assert [one.decision.reason for one in broker.dead_letters] == ["permanent_error"]

    Parameters:
        middleware: the whole list of middlewares; ``safe_stack()`` when None.
        fail_fast_default: as Dramatiq's: whether ``join`` raises for a dead letter. Default True.
        skip_delays: run delayed and retried messages at once, so that a test need not wait for a backoff. Default False.
        park_limit: as ``RabbitmqBroker``'s, milliseconds. Default 0: what no worker can run is a dead letter at once.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(
        self,
        middleware: list[Middleware] | None = None,
        *,
        fail_fast_default: bool = True,
        skip_delays: bool = False,
        park_limit: float = 0,
    ) -> None:
        #: What became of each message, by its id, in the order of its deliveries.
        self.decisions: defaultdict[str, list[Decision]] = defaultdict(list)
        self.skip_delays = skip_delays
        #: What waits in memory for each delay queue's messages: when they are due, a tie-breaker, the message.
        self._waiting: defaultdict[str, list[tuple[float, int, Publication]]] = defaultdict(list)
        self._waiting_lock = threading.Lock()
        self._ticket = itertools.count()
        super().__init__(
            safe_stack() if middleware is None else middleware,
            park_limit=park_limit,
            fail_fast_default=fail_fast_default,
        )

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue, as Dramatiq's ``StubBroker`` does."""
        name = q_name(queue_name)
        self.dead_letters_by_queue[
            name
        ]  # made now: tests read the dictionary while worker threads add to its lists
        super().declare_queue(name)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 100) -> Consumer:
        """Return a consumer of ``queue_name``; that of a delay queue moves what has come due.

        Raises:
            QueueNotFound: the queue was never declared.
        """
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)
        if queue_name in self.delay_queues:
            return _Delays(self, queue_name, timeout_s=timeout / 1000)
        return _Consumer(self, queue_name, prefetch, timeout_s=timeout / 1000)

    def join(self, queue_name: str, *, timeout: int | None = None, fail_fast: bool | None = None) -> None:
        """Wait until the queue is empty and nothing of it is delayed, as Dramatiq's ``StubBroker`` does.

        Raises:
            QueueNotFound, QueueJoinTimeout: as Dramatiq's; ``timeout`` is in milliseconds.
            The exception of the actor, or ``DeadLettered``: with ``fail_fast``, for the first dead letter of the queue.
        """
        super().join(queue_name, timeout=timeout, fail_fast=False)
        if self.fail_fast_default if fail_fast is None else fail_fast:
            for letter in self.dead_letters_by_queue[queue_name]:
                assert isinstance(letter, StubDelivery)
                raise letter.cause from None

    def _publish(self, messages: Sequence[Message[Any]], *, delay: float | None) -> None:
        for message in messages:
            self.route(new_message(message, encode(message), delay_ms=delay))

    def route(self, publication: Publication) -> None:
        """Do what RabbitMQ does with a publication that is no dead letter."""
        name = publication.routing_key
        delay_ms = dict(publication.needs).get("delay")
        if delay_ms is None or self.skip_delays:
            for header in (DUE, LEFT):
                (publication.properties.headers or {}).pop(header, None)
            self.queues[name].put(publication)
        else:
            due = time.monotonic() + delay_ms / 1000
            self.queues[dq_name(name)].put((due, next(self._ticket), publication))

    def settle(self, delivery: StubDelivery, publications: Sequence[Publication]) -> None:
        """Carry out what was decided about ``delivery``."""
        if delivery.decision is not None:
            self.decisions[str(delivery.known_id)].append(delivery.decision)
        for publication in publications:
            if is_dead_letter(publication):
                delivery.letter = publication.properties.headers
                self.dead_letters_by_queue[delivery.queue].append(delivery)
            else:
                self.route(publication)

    def move_due(self, delay_queue: str, *, wait_s: float) -> None:
        """Wait for ``wait_s``, then move what has come due to its queue."""
        time.sleep(wait_s)
        with self._waiting_lock:  # taken before a message is, so that flush() finds it here or there
            waiting = self._waiting[delay_queue]
            with suppress(queue.Empty):
                while True:
                    heapq.heappush(waiting, self.queues[delay_queue].get_nowait())
            while waiting and waiting[0][0] <= time.monotonic():
                publication = heapq.heappop(waiting)[2]
                self.queues[publication.routing_key].put(publication)
                self.queues[delay_queue].task_done()

    def flush(self, queue_name: str) -> None:
        """Drop all messages from the queue, as Dramatiq does."""
        super().flush(queue_name)
        with self._waiting_lock:
            for _ in range(len(self._waiting[queue_name])):
                self.queues[queue_name].task_done()
            self._waiting[queue_name].clear()

    def flush_all(self) -> None:
        """Drop all messages from all queues, as Dramatiq does."""
        for name in list(self.delay_queues):  # first, or what comes due meanwhile would be left
            self.flush(name)
        super().flush_all()


class StubDelivery(Delivery):
    """A delivery of ``StubBroker``'s: as a dead letter it keeps its exception, for the traceback in a failing test."""

    #: The headers of its dead letter, as people see them in the RabbitMQ UI.
    letter: Mapping[str, Any] = {}

    def clear_exception(self) -> None:
        """Do nothing: see the class."""

    @property
    def cause(self) -> BaseException:
        """What stands behind its death: the actor's exception, or else a sentence that says why."""
        exception = self._exception
        if exception is not None and not isinstance(exception, SkipMessage):
            return exception
        decision = self.decision
        why = "without a decision" if decision is None else f"{decision.reason}: {decision.detail}"
        return DeadLettered(f"message {self.known_id!r} is a dead letter ({why})")


class _Channel:
    """What a delivery knows of its channel: here, of its consumer."""

    gone = False
    frame_max = _FRAME_MAX

    def __init__(self, consumer: _Consumer, publication: Publication) -> None:
        self.batches: set[Any] = set()
        self._consumer = consumer
        self._publication = publication

    def ack(self, tag: int) -> None:
        self._consumer.settled()

    def settle(self, delivery: Delivery, publications: Sequence[Any]) -> None:
        assert isinstance(delivery, StubDelivery)
        # First what goes on, then the ack: join() must not see an empty queue in between.
        self._consumer.broker.settle(delivery, publications)
        self._consumer.settled()

    def return_soon(self, deliveries: Sequence[Delivery]) -> None:
        for _ in deliveries:  # the one delivery of this channel
            self._consumer.queue.put(self._publication)
            self._consumer.settled()


class _Consumer(Consumer):
    """Takes publications from one queue and lets ``admit`` say which of them a worker thread shall see."""

    def __init__(self, broker: StubBroker, queue_name: str, prefetch: int, *, timeout_s: float) -> None:
        self.broker = broker
        self.queue = broker.queues[queue_name]
        self.buffer: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._queue_name = queue_name
        self._places = threading.Semaphore(prefetch)
        self._timeout_s = timeout_s
        self._tags = itertools.count(1)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MessageProxy | None:
        if not self._places.acquire(timeout=self._timeout_s):
            return None
        try:
            publication = self.queue.get(timeout=self._timeout_s)
        except queue.Empty:
            self._places.release()
            return None
        delivery = StubDelivery(
            _Channel(self, publication),
            next(self._tags),
            queue=self._queue_name,
            body=publication.body,
            properties=publication.properties,
            redelivered=False,
        )
        self.broker.admit(delivery, self)
        return None if self.buffer.empty() else self.buffer.get_nowait()

    def settled(self) -> None:
        """One delivery has come to its end here."""
        self.queue.task_done()
        self._places.release()

    def ack(self, message: MessageProxy) -> None:
        assert isinstance(message, Delivery)
        self.broker.carry_out(message)

    nack = ack

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        for message in messages:
            if isinstance(message, Delivery) and message.leave_buffer(RETURNED):
                message.channel.return_soon([message])


class _Delays(Consumer):
    """Stands for the delay ladder: Dramatiq gives each delay queue a thread that asks for messages."""

    def __init__(self, broker: StubBroker, queue_name: str, *, timeout_s: float) -> None:
        self._broker = broker
        self._queue_name = queue_name
        self._wait_s = min(timeout_s, _TICK_S)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> None:
        self._broker.move_due(self._queue_name, wait_s=self._wait_s)
