"""The consuming half of a process: one connection, a subscription per queue.

Runs in: the I/O thread of worker processes. Needs: RabbitMQ.

Nothing is ever published on this connection, so that a memory alarm does not hold up the acks.
"""

from __future__ import annotations

from collections.abc import Sequence

import pika
from pika.adapters.select_connection import SelectConnection

from .connection import Link
from .io_thread import IOThread
from .migration_watch import MigrationWatch
from .subscription import Subscription


class Intake:
    """The consuming half of a process: one connection, a subscription per queue. Lives on the I/O thread."""

    def __init__(self, io: IOThread, parameters: Sequence[pika.connection.Parameters]) -> None:
        self._link = Link(io, parameters, "consume", on_up=self._up, on_down=self._down)
        self.subscriptions: list[Subscription] = []
        self._watch = MigrationWatch(io, lambda: self.subscriptions)

    def add(self, subscription: Subscription) -> None:
        """Consume from now on."""
        self.subscriptions = [one for one in self.subscriptions if one.unsettled or not one.retired.is_set()]
        self.subscriptions.append(subscription)
        subscription.reattach = self._watch.attach
        self._link.open()
        self._watch.attach(subscription)

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
        return self._link.closed

    def close(self) -> None:
        """Close the connection politely. What is unsettled then, RabbitMQ delivers to others."""
        self._link.close()

    def _up(self, connection: SelectConnection) -> None:
        self._watch.up(connection)
        for subscription in self.subscriptions:
            if not subscription.retired.is_set():
                self._watch.attach(subscription)

    def _down(self, _code: int, _text: str) -> None:
        self._watch.down()
        for subscription in self.subscriptions:
            subscription.detach()
