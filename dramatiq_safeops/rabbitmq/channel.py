"""One AMQP channel that consumes, and the deliveries that came over it. When it is gone, so are its tags.

Runs in: the I/O thread of worker processes; ``ack``, ``settle`` and ``return_soon`` may be called from any thread.
Needs: RabbitMQ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..delivery import STALE, Delivery
from .acks import AckLedger
from .io_thread import IOThread
from .publication import Batch, Publication
from .settler import Settler


class DeliveryChannel:
    """Binds deliveries to the channel that they came over: nothing about them is ever done over another one."""

    def __init__(
        self, io: IOThread, settler: Settler, channel: Any, queue_name: str, admit: Callable[[Delivery], None]
    ) -> None:
        self._io = io
        self._settler = settler
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

    # -- from any thread

    @property
    def frame_max(self) -> int:
        """The largest frame that RabbitMQ takes, in bytes: all headers of a message must fit into one."""
        return self._settler.frame_max

    def settle(self, delivery: Delivery, publications: Sequence[Publication]) -> None:
        """Publish ``publications``, and ack ``delivery`` once all are confirmed. Never blocks."""
        if publications:
            self._io.call(self._settler.settle, delivery, publications)
        else:
            self.ack(delivery.tag)

    def ack(self, tag: int) -> None:
        """Ack ``tag`` soon, together with others. Never blocks."""
        self._acks.append(tag)
        if not self._acks_scheduled:
            self._acks_scheduled = True
            self._io.call(self.flush)

    def return_soon(self, deliveries: Sequence[Delivery]) -> None:
        """Return ``deliveries`` to their queue. Never blocks."""
        self._io.call(self.give_back, deliveries)

    # -- on the I/O thread

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
        self.close_when_settled()

    def lost(self) -> None:
        """The channel is closed: what had not started will not start, the rest will find its acks ignored."""
        self.gone = True
        for delivery in self.deliveries.values():
            delivery.leave_buffer(STALE)
        self.deliveries.clear()
        # RabbitMQ has the messages back. A copy that is made now would be a second one.
        self._settler.forget(self.batches)

    def close_when_settled(self) -> None:
        """Close the channel if nobody consumes over it any more and nothing is unsettled."""
        if self.retiring and not self.deliveries and self._channel.is_open:
            self._channel.close()
