"""One delivery: a message as it came over one channel, and what is known about it.

Runs in: worker processes. Needs: nothing.

Dramatiq sees a ``MessageProxy`` with a *view* of the message. The producer's exact bytes stay beside it: whatever is
published about this message later (retry, park, dead letter) carries those bytes and never the view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dramatiq import Message
from dramatiq.broker import MessageProxy

from .dead_letter import ExceptionRecord

if TYPE_CHECKING:
    from .outcome import Decision

#: The states of a delivery. It leaves ``BUFFERED`` once, by whoever asks first.
BUFFERED = "buffered"
STARTED = "started"
RETURNED = "returned"
STALE = "stale"


class DeliveryChannel(Protocol):
    """What a delivery knows of the channel that it came over. Its tag means nothing on any other."""

    #: Whether the channel is closed, so that RabbitMQ delivers again what was unsettled on it.
    gone: bool
    #: What is being published about deliveries of this channel.
    batches: set[Any]

    @property
    def frame_max(self) -> int:
        """The largest frame that RabbitMQ takes, in bytes."""
        ...

    def ack(self, tag: int) -> None:
        """Ack ``tag`` soon. Thread-safe, never blocks."""
        ...

    def settle(self, delivery: Delivery, publications: Sequence[Any]) -> None:
        """Publish, and ack ``delivery`` once all is confirmed. Thread-safe, never blocks."""
        ...

    def return_soon(self, deliveries: Sequence[Delivery]) -> None:
        """Return deliveries to their queue. Thread-safe, never blocks."""
        ...


class Delivery(MessageProxy):
    """A message as delivered once. Unlike its message id, it is never shared with a redelivery.

    ``attempt`` and ``retries`` come from headers and not from the body, which nobody changes. Attributes are written by
    one thread at a time: the I/O thread until it is buffered, then the worker thread, then the I/O thread again.
    """

    def __init__(
        self,
        channel: DeliveryChannel,
        tag: int,
        *,
        queue: str,
        body: bytes,
        properties: Any,
        redelivered: bool,
    ) -> None:
        # The message is set by read(): what cannot be decoded is a delivery, too.
        super().__init__(None)  # type: ignore[arg-type]
        self.channel = channel
        self.tag = tag
        self.queue = queue
        self.body = body
        self.properties = properties
        self.redelivered = redelivered
        self.headers: Mapping[str, Any] = properties.headers if properties.headers is not None else {}
        self.retries = 0
        self.ran = False
        self.entered = 0  # how many before-hooks were called
        self.first_seen_ms = 0
        self.turned_away: Decision | None = None
        self.decision: Decision | None = None
        self.failure: ExceptionRecord | None = None
        self.follow_ups: list[Any] = []
        self.follow_up_error: BaseException | None = None
        self.held_for_hooks = False  # not settled before the after-hooks of its ack or nack have run
        self.last_resort = False  # its full dead letter was refused, and the bare one has been tried
        self._word: dict[str, list[str]] = {}

    def show(self, message: Message[Any]) -> None:
        """Make ``message`` what Dramatiq and the middlewares see."""
        self._message = message
        # Plain attributes: MessageProxy would look each of them up through __getattr__, many times a message.
        self.queue_name = message.queue_name
        self.actor_name = message.actor_name
        self.args = message.args
        self.kwargs = message.kwargs
        self.options = message.options
        self.message_id = message.message_id
        self.message_timestamp = message.message_timestamp

    def empty(self) -> None:
        """Free the content of what was returned: Dramatiq's work queue keeps it until a thread is free, in hours perhaps."""
        self.body = b""
        if self.readable:
            self.show(
                Message(self.queue_name, self.actor_name, (), {}, {}, self.message_id, self.message_timestamp)
            )

    @property
    def readable(self) -> bool:
        """Whether the body could be decoded, so that there is a message to look at."""
        return self._message is not None

    @property
    def known_id(self) -> Any:
        """The message id from the body, or else from the AMQP properties; None if it is nowhere to be read."""
        return self.message_id if self.readable else self.properties.message_id

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.retries + 1

    @property
    def attempts(self) -> int:
        """How many attempts have been made: this one counts once the actor has run."""
        return self.retries + int(self.ran)

    @property
    def delivery_count(self) -> int:
        """How often RabbitMQ says it has delivered this message before. Classic queues only know ``redelivered``."""
        # RabbitMQ 4.3 does not count in x-delivery-count what was returned by a nack; x-acquired-count has them all.
        for name in ("x-acquired-count", "x-delivery-count"):
            count = self.headers.get(name)
            if isinstance(count, int):
                return count
        return int(self.redelivered)

    @property
    def state(self) -> str:
        """``buffered``, ``started``, ``returned`` or ``stale``."""
        left_as = self._word.get("left")
        return BUFFERED if left_as is None else left_as[0]

    def leave_buffer(self, state: str) -> bool:
        """Move from ``buffered`` to ``state``; False if somebody else was first, who then rules. Thread-safe."""
        # setdefault is one atomic step: worker thread, I/O thread and drain may ask at the same time. A list of one's own,
        # since two may ask for the same state.
        mine = [state]
        return self._word.setdefault("left", mine) is mine
