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

#: Seconds between two looks whether the running messages of a queue that is being migrated are settled.
LET_GO_S = 0.05

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
        source: str | None = None,
    ) -> None:
        self.queue_name = queue_name
        #: The queue that is read. Another one than ``queue_name`` is never declared, and read only where it exists.
        self.source = queue_name if source is None else source
        self.prefetch = min(prefetch, MOST_PREFETCH)
        self.buffer: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.retired = threading.Event()
        self._io = io
        self._settler = settler
        self._declarations = declarations
        self._admit = admit
        #: The subscription of what stock Dramatiq left of this queue, if there is one; it comes and goes with this one.
        self.leftovers: Subscription | None = None
        #: Called to attach again, when the channel alone was closed.
        self.reattach: Callable[[Subscription], None] = lambda subscription: None
        self._connection: SelectConnection | None = None
        self._channel: DeliveryChannel | None = None
        self._amqp: Any = None  # pika's channel; it has no types
        self._consumer_tag = ""
        self._retiring = False
        self._opening = False
        self._migrating = False
        self._held: list[Delivery] = []
        self._as_it_is = False
        self._failures = 0
        #: Whether the queue is known to exist. Declaring it again on each connection would do no harm but in a cluster with
        #: a frozen node: there RabbitMQ (3.10) answers no declaration until that node counts as down, for a minute.
        self._exists = False

    @property
    def migrating(self) -> bool:
        """Whether the queue is being migrated, so that nothing of it may start."""
        return self._migrating

    @property
    def attached(self) -> bool:
        """Whether there is a channel, or one on its way."""
        return self._opening or self._amqp is not None

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
        self._migrating = False
        self._opening = True
        connection.channel(on_open_callback=self._io.safely(self._opened))

    def detach(self) -> None:
        """The connection is lost."""
        self._connection = None
        self._opening = False
        self._lost()
        if self._retiring:
            self.retired.set()

    def stand_back(self) -> None:
        """The queue is being migrated: start nothing more, and stop consuming once what runs is settled.

        Until then the consumer stays, and what was taken ahead stays un-acked here: as long as a queue has a consumer it
        may have un-acked messages, and whoever migrates it waits for that. Returned at once, the messages would come
        back to us at once.
        """
        if self._migrating or self._retiring:
            return
        self._migrating = True
        self._exists = False
        logger.info(
            "Queue %r is being migrated, its messages wait until that is done.",
            self.source,
            extra={"event": "consumer.migrating", "queue": self.source},
        )
        if self._channel is not None:
            for delivery in list(self._channel.deliveries.values()):
                self._hold(delivery)
            self._let_go()
        elif self._amqp is not None and self._amqp.is_open:
            self._amqp.close()

    def retire(self) -> None:
        """Take no more messages, return those that wait here, and close the channel once the rest is settled."""
        if self._retiring:
            return
        self._retiring = True
        if self._amqp is None or not self._amqp.is_open:
            self.retired.set()
            return
        self._stop_consuming()

    def _stop_consuming(self) -> None:
        if self._consumer_tag:
            tag, self._consumer_tag = self._consumer_tag, ""
            self._amqp.basic_cancel(tag, callback=self._io.safely(self._cancelled))
        else:
            self._cancelled()

    def _arrived(self, delivery: Delivery) -> None:
        if self._migrating:
            self._hold(delivery)
        else:
            self._admit(delivery, self)

    def _hold(self, delivery: Delivery) -> None:
        if delivery.leave_buffer(RETURNED):
            self._held.append(delivery)

    def _let_go(self) -> None:
        if self._channel is None or self._retiring or not self._migrating:
            return
        if len(self._held) < len(self._channel.deliveries):
            self._io.call_later(LET_GO_S, self._let_go)
        else:
            self._stop_consuming()

    def _opened(self, amqp: Any) -> None:
        self._opening = False
        self._amqp = amqp
        amqp.add_on_close_callback(self._io.safely(self._closed))
        if self._retiring or self._migrating:
            amqp.close()
        elif self.source != self.queue_name:
            # A look at a queue that is not there closes the channel, see _closed.
            amqp.queue_declare(self.source, passive=True, callback=lambda _frame: self._declared(None))
        elif self._exists or self._as_it_is:
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
        if self._retiring or self._migrating:
            amqp.close()
            return
        channel = DeliveryChannel(self._io, self._settler, amqp, self.queue_name, self._arrived)
        self._channel = channel
        amqp.add_on_cancel_callback(self._io.safely(self._cancelled_by_server))
        self._consumer_tag = amqp.basic_consume(
            self.source,
            on_message_callback=channel.on_message,
            callback=self._io.safely(self._attached),
        )
        Waiting(self._io, amqp, channel, self.queue_name)

    def _attached(self, _frame: Any) -> None:
        self._failures = 0
        logger.info(
            "Consuming queue %r, %d messages ahead.",
            self.source,
            self.prefetch,
            extra={"event": "consumer.attached", "queue": self.source, "prefetch": self.prefetch},
        )

    def _cancelled_by_server(self, _frame: Any) -> None:
        # The queue was deleted, or (RabbitMQ 4.3) a delivery was held longer than its consumer timeout.
        logger.warning(
            "RabbitMQ cancelled the consumer of queue %r.",
            self.source,
            extra={"event": "consumer.cancelled", "queue": self.source},
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
        consuming = self._channel is not None
        code, text = close_reason(reason)
        if code == NOT_FOUND:
            self._exists = False
        self._lost()
        connection = self._connection
        if self._retiring:
            self.retired.set()
        elif self._migrating or connection is None or not connection.is_open:
            return  # attached again when the migration is over, or on the next connection
        elif code == NOT_FOUND and self.source != self.queue_name:
            return  # nothing was left; or it is gone now
        elif code == 406 and not consuming and not self._as_it_is:
            # At the start this is an error. A worker that runs goes on: most likely its queue was migrated.
            logger.warning(
                "Queue %r does not exist as this worker would declare it (%s). It is consumed as it is; give the broker"
                " the queue_type and max_priority that the queue has now, or this worker will not start again.",
                self.source,
                text,
                extra={"event": "consumer.as_it_is", "queue": self.source},
            )
            self._as_it_is = True
            self.reattach(self)
        else:
            self._as_it_is = False
            pause = min(RETRY_MOST_S, RETRY_FIRST_S * 2**self._failures) * random.uniform(0.5, 1)
            self._failures = min(self._failures + 1, 10)
            logger.error(
                "The channel of queue %r was closed (%s), consuming again in %.1f seconds.",
                self.source,
                text,
                pause,
                extra={"event": "consumer.closed", "queue": self.source, "pause_s": pause},
            )
            self._io.call_later(pause, self._again, connection)

    def _again(self, connection: SelectConnection) -> None:
        if connection.is_open and connection is self._connection and not self.attached:
            self.reattach(self)

    def _lost(self) -> None:
        self._consumer_tag = ""
        self._amqp = None
        self._held.clear()
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
        held, self._held = self._held, []
        if self._channel is not None:
            back = held + [one for one in waiting if one.leave_buffer(RETURNED)]
            self._channel.give_back(sorted(back, key=lambda delivery: delivery.tag))
            self._channel.retiring = True
            self._channel.close_when_settled()
        if self._retiring:
            self.retired.set()
