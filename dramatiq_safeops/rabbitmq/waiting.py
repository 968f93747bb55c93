"""Returns what waits here behind busy threads while another worker may be idle.

Runs in: the I/O thread of worker processes. Needs: RabbitMQ.

A worker holds a few messages ahead, so that its threads need not wait for a round trip between two short ones. Behind a
long one they would wait for its end, though other workers are idle. So what has waited for a moment goes back to its
queue, but only if nothing waits there: where there is a backlog nobody is idle, and it would come back at once.
"""

from __future__ import annotations

from typing import Any

from ..delivery import BUFFERED, RETURNED, Delivery
from .channel import DeliveryChannel
from .io_thread import IOThread

#: Seconds between two looks. A message is returned after one to two of them.
LOOK_S = 0.5

#: A message that was returned before waits twice as long each time, up to 2 to this power: where all workers are busy it
#: would go back and forth.
MOST_DOUBLINGS = 7

#: How many messages are remembered as returned: classic queues do not count how often they have delivered one.
MOST_REMEMBERED = 1000


class Waiting:
    """Looks after the buffered deliveries of one channel, for as long as it is open."""

    def __init__(self, io: IOThread, amqp: Any, channel: DeliveryChannel, queue_name: str) -> None:
        self._io = io
        self._amqp = amqp
        self._channel = channel
        self._queue_name = queue_name
        #: At how many looks in a row a delivery was seen waiting, by its tag.
        self._looks: dict[int, int] = {}
        #: How often a message was returned, by its id; the one that was returned last comes last.
        self._returns: dict[Any, int] = {}
        #: Whether an answer is awaited. A frozen node gives none for a minute; a cancel would have to wait for each.
        self._asking = False
        io.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        channel = self._channel
        if channel.gone or channel.retiring or not self._amqp.is_open:
            return
        waiting = [one for one in channel.deliveries.values() if one.state == BUFFERED]
        self._looks = {one.tag: self._looks.get(one.tag, 0) + 1 for one in waiting}
        if not self._asking and any(self._is_overdue(one) for one in waiting):
            self._asking = True
            self._amqp.queue_declare(
                self._queue_name, passive=True, callback=self._io.safely(self._return_overdue)
            )
        self._io.call_later(LOOK_S, self._look)

    def _is_overdue(self, delivery: Delivery) -> bool:
        returns = max(delivery.delivery_count, self._returns.get(delivery.known_id, 0))
        return self._looks.get(delivery.tag, 0) > 1 << min(returns, MOST_DOUBLINGS)

    def _return_overdue(self, answer: Any) -> None:
        self._asking = False
        channel = self._channel
        if answer.method.message_count or channel.gone or channel.retiring:
            return
        overdue = [one for one in channel.deliveries.values() if self._is_overdue(one)]
        returned = [one for one in overdue if one.leave_buffer(RETURNED)]
        for one in returned:
            self._returns[one.known_id] = self._returns.pop(one.known_id, 0) + 1
            one.empty()
        while len(self._returns) > MOST_REMEMBERED:
            del self._returns[next(iter(self._returns))]
        channel.give_back(returned)
