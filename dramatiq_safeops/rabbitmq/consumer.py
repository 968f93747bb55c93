"""Consuming: a channel per queue, deliveries bound to it, and the settling of what became of them.

Runs in: worker processes; everything here is on the I/O thread, but ``Consumer``, which Dramatiq's threads use.
Needs: RabbitMQ.

    RabbitMQ ─▶ DeliveryChannel ─▶ admit (broker) ─▶ Consumer ─▶ Dramatiq's work queue ─▶ worker thread
                     ▲                   │ not for a worker                                   │ carry_out
                     └── acks ◀── Settler ◀───────────────────────────────────────────────────┘

A connection that only consumes and acks is never blocked by a memory alarm, so acks go on while publishing waits.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pika
from dramatiq.broker import Consumer as DramatiqConsumer
from dramatiq.broker import MessageProxy
from pika.adapters.select_connection import SelectConnection

from ..delivery import BUFFERED, RETURNED, STALE, Delivery
from .acks import AckLedger
from .connection import IOThread, Link, close_reason
from .publisher import Batch, Impossible, Publication, Publisher
from .topology import Declaration

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

#: Seconds before a consumer whose channel was closed is attached again, and before a publish that was refused is
#: tried again: doubling, jittered, up to the second number.
RETRY_FIRST_S = 0.25
RETRY_MOST_S = 5.0

#: Seconds before a publish is tried again that costs the channel each time: others publish over it, too.
IMPOSSIBLE_S = 60.0


class DeliveryChannel:
    """One AMQP channel and all that was delivered over it. When it is gone, so are its tags."""

    def __init__(
        self, io: IOThread, channel: Any, queue_name: str, admit: Callable[[Delivery], None]
    ) -> None:
        self._io = io
        self._channel = channel
        self._queue_name = queue_name
        self._admit = admit
        self._ledger = AckLedger()
        self._acks: deque[int] = deque()
        self._acks_scheduled = False
        self.deliveries: dict[int, Delivery] = {}
        #: What is being published about these deliveries.
        self.batches: set[Batch] = set()
        self.gone = False
        self.retiring = False

    def on_message(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """Take one delivery and let the broker decide where it goes, which never raises."""
        tag = method.delivery_tag
        delivery = self.deliveries[tag] = Delivery(
            self,
            tag,
            queue=self._queue_name,
            body=body,
            properties=properties,
            redelivered=method.redelivered,
        )
        self._admit(delivery)

    def ack(self, tag: int) -> None:
        """Ack ``tag`` soon, together with others. Thread-safe, never blocks."""
        self._acks.append(tag)
        if not self._acks_scheduled:
            self._acks_scheduled = True
            self._io.call(self.flush)

    @property
    def flushed(self) -> bool:
        """Whether no ack waits to be sent, and nothing is being published about a delivery."""
        return not self._acks and not self.batches

    def flush(self) -> None:
        """Send the acks that are waiting."""
        self._acks_scheduled = False
        tags = [self._acks.popleft() for _ in range(len(self._acks))]
        if self.gone or not self._channel.is_open:
            return  # RabbitMQ delivers them again; on another channel these tags would be other messages
        for tag in tags:
            self.deliveries.pop(tag, None)
        for tag, multiple in self._ledger.settle(tags):
            self._channel.basic_ack(tag, multiple)
        self.close_when_settled()

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Return ``deliveries`` to the queue, in delivery order, so that they keep their place there."""
        self.flush()
        if self.gone or not self._channel.is_open:
            return
        for tag in self._ledger.returned(delivery.tag for delivery in deliveries):
            self.deliveries.pop(tag, None)
            self._channel.basic_nack(tag, requeue=True)

    def lost(self) -> None:
        """The channel is closed: what had not started will not start, the rest will find its acks ignored."""
        self.gone = True
        for delivery in self.deliveries.values():
            delivery.leave_buffer(STALE)
        self.deliveries.clear()
        # RabbitMQ has the messages back. A copy that is made now would be a second one.
        for batch in self.batches:
            batch.withdraw()

    def close_when_settled(self) -> None:
        """Close the channel if nobody consumes over it any more and nothing is unsettled."""
        if self.retiring and not self.deliveries and self._channel.is_open:
            self._channel.close()


class Subscription:
    """The wish to consume one queue, kept through lost channels and connections. Lives on the I/O thread."""

    def __init__(
        self,
        io: IOThread,
        queue_name: str,
        prefetch: int,
        *,
        declarations: Sequence[Declaration],
        admit: Callable[[Delivery, Subscription], None],
    ) -> None:
        self.queue_name = queue_name
        self.prefetch = prefetch
        self.buffer: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.retired = threading.Event()
        self._io = io
        self._declarations = declarations
        self._admit = admit
        self._connection: SelectConnection | None = None
        self._channel: DeliveryChannel | None = None
        self._amqp: Any = None  # pika's channel; it has no types
        self._consumer_tag = ""
        self._retiring = False
        self._failures = 0

    @property
    def attached(self) -> bool:
        """Whether RabbitMQ delivers to us now. Thread-safe."""
        return bool(self._consumer_tag)

    @property
    def unsettled(self) -> int:
        """How many deliveries are neither acked nor returned. Thread-safe."""
        return len(self._channel.deliveries) if self._channel is not None else 0

    @property
    def flushed(self) -> bool:
        """Whether no ack waits to be sent, and nothing is being published about a delivery."""
        return self._channel is None or self._channel.flushed

    def attach(self, connection: SelectConnection) -> None:
        """Open a channel on ``connection``, declare the queue if need be, and consume."""
        if self._retiring:
            self.retired.set()
            return
        self._connection = connection
        connection.channel(on_open_callback=self._io.safely(self._opened))

    def detach(self) -> None:
        """The connection is lost."""
        self._connection = None
        self._lost()
        if self._retiring:
            self.retired.set()

    def retire(self) -> None:
        """Take no more messages, return those that wait here, and close the channel once the rest is settled."""
        if self._retiring:
            return
        self._retiring = True
        if self._amqp is None or not self._amqp.is_open:
            self.retired.set()
            return
        if self._consumer_tag:
            tag, self._consumer_tag = self._consumer_tag, ""
            self._amqp.basic_cancel(tag, callback=self._io.safely(self._cancelled))
        else:
            self._cancelled()

    def _opened(self, amqp: Any) -> None:
        self._amqp = amqp
        amqp.add_on_close_callback(self._io.safely(self._closed))
        self._declare(deque(self._declarations))

    def _declare(self, steps: deque[Declaration], _frame: Any = None) -> None:
        if steps:
            step = steps.popleft()
            getattr(self._amqp, step.method)(
                **step.arguments, callback=self._io.safely(lambda frame: self._declare(steps, frame))
            )
            return
        self._amqp.basic_qos(prefetch_count=self.prefetch, callback=self._io.safely(self._consume))

    def _consume(self, _frame: Any) -> None:
        amqp = self._amqp
        if self._retiring:
            amqp.close()
            return
        channel = DeliveryChannel(
            self._io, amqp, self.queue_name, lambda delivery: self._admit(delivery, self)
        )
        self._channel = channel
        amqp.add_on_cancel_callback(self._io.safely(self._cancelled_by_server))
        self._consumer_tag = amqp.basic_consume(
            self.queue_name,
            on_message_callback=channel.on_message,
            callback=self._io.safely(self._attached),
        )

    def _attached(self, _frame: Any) -> None:
        self._failures = 0
        logger.info(
            "Consuming queue %r, %d messages ahead.",
            self.queue_name,
            self.prefetch,
            extra={"event": "consumer.attached", "queue": self.queue_name, "prefetch": self.prefetch},
        )

    def _cancelled_by_server(self, _frame: Any) -> None:
        # The queue was deleted, or (RabbitMQ 4.3) a delivery was held longer than its consumer timeout.
        logger.warning(
            "RabbitMQ cancelled the consumer of queue %r.",
            self.queue_name,
            extra={"event": "consumer.cancelled", "queue": self.queue_name},
        )
        self._consumer_tag = ""
        self._amqp.close()

    def _closed(self, amqp: Any, reason: BaseException) -> None:
        if amqp is not self._amqp:
            return
        self._lost()
        connection = self._connection
        if self._retiring:
            self.retired.set()
        elif connection is not None and connection.is_open:
            pause = min(RETRY_MOST_S, RETRY_FIRST_S * 2**self._failures) * random.uniform(0.5, 1)
            self._failures = min(self._failures + 1, 10)
            logger.error(
                "The channel of queue %r was closed (%s), consuming again in %.1f seconds.",
                self.queue_name,
                close_reason(reason)[1],
                pause,
                extra={"event": "consumer.closed", "queue": self.queue_name, "pause_s": pause},
            )
            self._io.call_later(pause, self._again, connection)

    def _again(self, connection: SelectConnection) -> None:
        if connection.is_open and connection is self._connection:
            self.attach(connection)

    def _lost(self) -> None:
        self._consumer_tag = ""
        self._amqp = None
        if self._channel is not None:
            self._channel.lost()
            self._channel = None

    def _cancelled(self, _frame: Any = None) -> None:
        """No more deliveries come. Return the buffered ones; the others' worker threads still hold theirs."""
        waiting: list[Delivery] = []
        while True:
            try:
                waiting.append(self.buffer.get_nowait())
            except queue.Empty:
                break
        if self._channel is not None:
            self._channel.give_back(one for one in waiting if one.leave_buffer(RETURNED))
            self._channel.retiring = True
            self._channel.close_when_settled()
        self.retired.set()


class Consumer(DramatiqConsumer):
    """What Dramatiq's ConsumerThread iterates over. It does no I/O and never raises for a lost connection.

    ``ack`` and ``nack`` are both "carry out what was decided": the delivery knows.
    """

    def __init__(
        self,
        subscription: Subscription,
        *,
        timeout_s: float,
        carry_out: Callable[[Delivery], None],
        give_back: Callable[[Sequence[Delivery]], None],
        retire: Callable[[Subscription], None],
    ) -> None:
        self._subscription = subscription
        self._timeout_s = timeout_s
        self._carry_out = carry_out
        self._give_back = give_back
        self._retire = retire

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MessageProxy | None:
        try:
            delivery = self._subscription.buffer.get(timeout=self._timeout_s)
        except queue.Empty:
            return None
        return delivery if delivery.state == BUFFERED else None

    def ack(self, message: MessageProxy) -> None:
        """Carry out the outcome of ``message``. Never blocks, never raises."""
        assert isinstance(message, Delivery)
        self._carry_out(message)

    nack = ack

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Return messages that have not started to the queue."""
        self._give_back([one for one in messages if isinstance(one, Delivery) and one.leave_buffer(RETURNED)])

    def close(self) -> None:
        """Stop consuming. What worker threads still hold is settled over the old channel."""
        self._retire(self._subscription)


class Intake:
    """The consuming half of a process: one connection, a subscription per queue. Lives on the I/O thread."""

    def __init__(self, io: IOThread, parameters: Sequence[pika.connection.Parameters]) -> None:
        self._link = Link(io, parameters, "consume", on_up=self._up, on_down=self._down)
        self.subscriptions: list[Subscription] = []

    @property
    def trouble(self) -> str:
        """Why nothing is consumed just now, for people; empty when all is well. Thread-safe."""
        return self._link.trouble

    def add(self, subscription: Subscription) -> None:
        """Consume from now on."""
        self.subscriptions = [one for one in self.subscriptions if one.unsettled or not one.retired.is_set()]
        self.subscriptions.append(subscription)
        self._link.open()
        connection = self._link.connection
        if connection is not None and connection.is_open:
            subscription.attach(connection)

    def retire(self, subscription: Subscription) -> None:
        """Consume no longer."""
        subscription.retire()

    @property
    def flushed(self) -> bool:
        """Whether no ack or return waits to be sent, and nothing is being published about a delivery."""
        return all(one.flushed for one in self.subscriptions)

    @property
    def closed(self) -> bool:
        """Whether there is no connection any more."""
        return self._link.connection is None

    def close(self) -> None:
        """Close the connection politely. What is unsettled then, RabbitMQ delivers to others."""
        self._link.close()

    def drop_socket(self) -> None:
        """After a fork: let go of the parent's socket."""
        self._link.drop_socket()

    def _up(self, connection: SelectConnection) -> None:
        for subscription in self.subscriptions:
            if not subscription.retired.is_set():
                subscription.attach(connection)

    def _down(self, _code: int, _text: str) -> None:
        for subscription in self.subscriptions:
            subscription.detach()


class Settler:
    """Publishes what an outcome asks for, and acks when all of it is confirmed. Lives on the I/O thread.

    A publish that does not succeed is tried again for as long as the delivery's channel lives. Meanwhile the delivery
    is un-acked: its prefetch place is the back-pressure, and its actor does not run again. When the channel goes,
    RabbitMQ has the message back and this copy must not be made any more.
    """

    def __init__(self, io: IOThread, publisher: Publisher) -> None:
        self._io = io
        self._publisher = publisher

    def settle(self, delivery: Delivery, publications: Sequence[Publication], failures: int = 0) -> None:
        """Publish ``publications``, then ack ``delivery``."""
        channel = delivery.channel
        if channel.gone:
            return
        batch = Batch(publications, lambda batch: self._published(delivery, batch, failures))
        channel.batches.add(batch)
        self._publisher.submit(batch)

    def _published(self, delivery: Delivery, batch: Batch, failures: int) -> None:
        channel = delivery.channel
        channel.batches.discard(batch)
        if channel.gone:
            return
        missing = batch.unconfirmed
        if not missing:
            channel.ack(delivery.tag)
            return
        pause = min(RETRY_MOST_S, RETRY_FIRST_S * 2 ** min(failures, 10)) * random.uniform(0.5, 1)
        if any(isinstance(one.error, Impossible) for one in missing):
            pause = IMPOSSIBLE_S
        logger.error(
            "Message %r stays unsettled: what must be published about it was refused (%s). Trying again in %.1f seconds.",
            delivery.properties.message_id,
            missing[0].error,
            pause,
            extra={"event": "settle.refused", "queue": delivery.queue, "pause_s": pause},
        )
        for publication in missing:
            publication.redeclared = False
        self._io.call_later(pause, self.settle, delivery, missing, failures + 1)
