"""What Dramatiq's threads see of a subscription.

Runs in: Dramatiq's ConsumerThreads and WorkerThreads of a worker process. Needs: nothing; does no I/O.

    RabbitMQ ─▶ DeliveryChannel ─▶ admit ─▶ Subscription.buffer ─▶ Consumer ─▶ Dramatiq's work queue ─▶ worker thread
                     ▲               │ not for a worker                                                    │ ack, nack
                     └── acks ◀── Settler ◀───────────────────────── carry_out ◀───────────────────────────┘
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dramatiq.broker import Consumer as DramatiqConsumer
from dramatiq.broker import MessageProxy
from dramatiq.errors import ConnectionClosed

from ..delivery import BUFFERED, RETURNED, Delivery
from .client import Client
from .subscription import Subscription

if TYPE_CHECKING:
    from typing_extensions import Self


class Consumer(DramatiqConsumer):
    """What Dramatiq's ConsumerThread iterates over. It does no I/O and never raises for a lost connection.

    ``ack`` and ``nack`` are both "carry out what was decided": the delivery knows.
    """

    def __init__(
        self,
        client: Client,
        subscription: Subscription,
        *,
        timeout_s: float,
        carry_out: Callable[[Delivery], None],
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._timeout_s = timeout_s
        self._carry_out = carry_out

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MessageProxy | None:
        try:
            delivery = self._subscription.buffer.get(timeout=self._timeout_s)
        except queue.Empty:
            if self._client.closed:
                raise ConnectionClosed("the broker was closed under its worker") from None
            return None
        return delivery if delivery.state == BUFFERED else None

    def ack(self, message: MessageProxy) -> None:
        """Carry out the outcome of ``message``. Never blocks, never raises."""
        assert isinstance(message, Delivery)
        self._carry_out(message)

    nack = ack

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Return messages that have not started to the queue."""
        by_channel = defaultdict(list)
        for message in messages:
            if isinstance(message, Delivery) and message.leave_buffer(RETURNED):
                by_channel[message.channel].append(message)
        for channel, group in by_channel.items():
            channel.return_soon(group)

    def close(self) -> None:
        """Stop consuming. What worker threads still hold is settled over the old channel. Never blocks."""
        self._client.retire(self._subscription)
