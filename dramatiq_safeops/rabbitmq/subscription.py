"""The wish to consume one queue, kept through lost channels and lost connections.

Runs in: the I/O thread of worker processes. Needs: RabbitMQ.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pika.adapters.select_connection import SelectConnection

from ..delivery import RETURNED, Delivery
from .channel import DeliveryChannel
from .declarer import declare_on
from .io_thread import IOThread
from .settler import Settler
from .topology import Declaration
from .trouble import close_reason
from .waiting import Waiting

logger = logging.getLogger(__name__)

#: Seconds before a consumer whose channel was closed is attached again: doubling, jittered, up to the second number.
RETRY_FIRST_S = 0.25
RETRY_MOST_S = 5.0

#: AMQP's code for a queue that does not exist.
NOT_FOUND = 404

#: AMQP has 16 bits for it.
MOST_PREFETCH = 65_535


class Subscription:
    """The wish to consume one queue, kept through lost channels and connections. Lives on the I/O thread."""

    def __init__(
        self,
        io: IOThread,
        settler: Settler,
        queue_name: str,
        prefetch: int,
        *,
        declarations: Sequence[Declaration],
        admit: Callable[[Delivery, Subscription], None],
    ) -> None:
        self.queue_name = queue_name
        self.prefetch = min(prefetch, MOST_PREFETCH)
        self.buffer: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.retired = threading.Event()
        self._io = io
        self._settler = settler
        self._declarations = declarations
        self._admit = admit
        self._connection: SelectConnection | None = None
        self._channel: DeliveryChannel | None = None
        self._amqp: Any = None  # pika's channel; it has no types
        self._consumer_tag = ""
        self._retiring = False
        self._failures = 0
        #: Whether the queue is known to exist. Declaring it again on each connection would do no harm but in a cluster with
        #: a frozen node: there RabbitMQ (3.10) answers no declaration until that node counts as down, for a minute.
        self._exists = False

    @property
    def unsettled(self) -> int:
        """How many deliveries are neither acked nor returned. Thread-safe."""
        return len(self._channel.deliveries) if self._channel is not None else 0

    @property
    def flushed(self) -> bool:
        """Whether no ack waits to be sent, and nothing is being published about a delivery."""
        return self._channel is None or self._channel.flushed

    def attach(self, connection: SelectConnection) -> None:
        """Open a channel on ``connection``, declare the queue unless it is known to exist, and consume."""
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
        if self._exists:
            self._declared(None)
        else:
            declare_on(self._io, amqp, self._declarations, self._declared)

    def _declared(self, error: str | None) -> None:
        if error is not None:
            logger.error(
                "Queue %r cannot be declared: %s.",
                self.queue_name,
                error,
                extra={"event": "consumer.declare"},
            )
            self._amqp.close()
            return
        self._exists = True
        self._amqp.basic_qos(prefetch_count=self.prefetch, callback=self._io.safely(self._consume))

    def _consume(self, _frame: Any) -> None:
        amqp = self._amqp
        if self._retiring:
            amqp.close()
            return
        channel = DeliveryChannel(
            self._io, self._settler, amqp, self.queue_name, lambda delivery: self._admit(delivery, self)
        )
        self._channel = channel
        amqp.add_on_cancel_callback(self._io.safely(self._cancelled_by_server))
        self._consumer_tag = amqp.basic_consume(
            self.queue_name,
            on_message_callback=channel.on_message,
            callback=self._io.safely(self._attached),
        )
        Waiting(self._io, amqp, channel, self.queue_name)

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
        self._exists = False
        if self._channel is not None:
            # RabbitMQ has its messages back already. Until it has confirmed the close, a copy would be a second one.
            self._channel.lost()
        self._amqp.close()

    def _closed(self, amqp: Any, reason: BaseException) -> None:
        if amqp is not self._amqp:
            return
        if close_reason(reason)[0] == NOT_FOUND:
            self._exists = False
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
