"""Tells the subscriptions of a process which of their queues are being migrated (see ``migration``).

Runs in: the I/O thread of worker processes, on the consuming connection. Needs: RabbitMQ.

All that it costs without a migration is one cheap call every few seconds: the count of a queue that holds a message for
each migration that is on. Only while there is one does it look for ``<queue>.migrating``, since a look at a queue that
does not exist closes a channel and writes an error into RabbitMQ's log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from pika.adapters.select_connection import SelectConnection

from .io_thread import IOThread
from .subscription import Subscription
from .topology import MIGRATIONS, migrations, staging_queue
from .trouble import close_reason

logger = logging.getLogger(__name__)

#: Seconds between two looks whether any migration is on.
LOOK_EVERY_S = 5.0

#: Seconds between two looks whether the migration of a queue of ours is over.
OVER_EVERY_S = 1.0

#: While any migration is on: seconds after which queues are looked for again although the count is the same. One may
#: have ended and another begun.
SAME_COUNT_S = 30.0

#: Seconds that a subscription waits for the first answer. Without one it consumes: a migration is rare, and who runs it
#: waits for consumers.
PATIENCE_S = 3.0


class MigrationWatch:
    """Attaches subscriptions unless their queue is being migrated, and lets them stand back when it is going to be.

    Lives on the I/O thread.
    """

    def __init__(self, io: IOThread, subscriptions: Callable[[], list[Subscription]]) -> None:
        self._io = io
        self._subscriptions = subscriptions
        self._connection: Any = None  # the open one; pika has no types
        self._channel: Any = None
        self._asking = False
        self._exists = False
        self._waiting: list[Subscription] = []
        self._count = 0
        self._looked_at = 0.0

    def up(self, connection: SelectConnection) -> None:
        """There is a connection."""
        self._connection = connection
        self._channel = None
        self._asking = False
        self._waiting.clear()
        self._look(connection)
        self._io.call_later(OVER_EVERY_S, self._look_for_ends, connection)

    def down(self) -> None:
        """The connection is lost."""
        self._connection = self._channel = None
        self._waiting.clear()

    def attach(self, subscription: Subscription) -> None:
        """Attach ``subscription`` as soon as its queue is known not to be migrating."""
        connection = self._connection
        if connection is None or subscription in self._waiting:
            return
        self._waiting.append(subscription)
        self._ask(connection)
        self._io.call_later(PATIENCE_S, self._out_of_patience, connection, subscription)

    def _out_of_patience(self, connection: SelectConnection, subscription: Subscription) -> None:
        if connection is self._connection and subscription in self._waiting:
            self._waiting.remove(subscription)
            self._attach(subscription)

    def _attach(self, subscription: Subscription) -> None:
        connection = self._connection
        if connection is not None and connection.is_open and not subscription.attached:
            subscription.attach(connection)

    # -- is any migration on?

    def _look(self, connection: SelectConnection) -> None:
        if connection.is_open and connection is self._connection:
            self._ask(connection)
            self._io.call_later(LOOK_EVERY_S, self._look, connection)

    def _ask(self, connection: SelectConnection) -> None:
        if self._asking or not connection.is_open:
            return
        self._asking = True
        if self._channel is None:
            connection.channel(on_open_callback=self._io.safely(self._opened))
        else:
            self._declare()

    def _opened(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._io.safely(self._closed))
        self._declare()

    def _declare(self) -> None:
        # Declared once only: in a cluster with a frozen node RabbitMQ 3.10 answers no declaration for a minute.
        queue = migrations()
        arguments = {"queue": MIGRATIONS, "passive": True} if self._exists else queue.arguments
        getattr(self._channel, queue.method)(**arguments, callback=self._io.safely(self._counted))

    def _closed(self, channel: Any, reason: BaseException) -> None:
        if channel is not self._channel:
            return
        self._channel = None
        self._asking = False
        self._exists = False
        logger.debug("It cannot be seen whether a migration is on: %s.", close_reason(reason)[1])
        waiting, self._waiting = self._waiting, []
        for subscription in waiting:
            self._attach(subscription)

    def _counted(self, frame: Any) -> None:
        self._asking = False
        self._exists = True
        count, before = int(frame.method.message_count), self._count
        self._count = count
        waiting, self._waiting = self._waiting, []
        if count == 0:
            for subscription in waiting:
                self._attach(subscription)
            return
        asked = waiting
        now = time.monotonic()
        if count != before or now - self._looked_at >= SAME_COUNT_S:
            self._looked_at = now
            asked = [one for one in self._subscriptions() if not one.retired.is_set()]
        for queue_name in {one.queue_name for one in asked}:
            self._probe(queue_name)

    # -- is this queue being migrated?

    def _look_for_ends(self, connection: SelectConnection) -> None:
        if connection.is_open and connection is self._connection:
            for queue_name in {one.queue_name for one in self._standing_back()}:
                self._probe(queue_name)
            self._io.call_later(OVER_EVERY_S, self._look_for_ends, connection)

    def _standing_back(self) -> list[Subscription]:
        return [
            one
            for one in self._subscriptions()
            if one.migrating and not one.attached and not one.retired.is_set()
        ]

    def _probe(self, queue_name: str) -> None:
        connection = self._connection
        if connection is None or not connection.is_open:
            return

        def opened(channel: Any) -> None:
            channel.add_on_close_callback(self._io.safely(closed))
            channel.queue_declare(
                staging_queue(queue_name),
                passive=True,
                callback=self._io.safely(lambda _frame: found(channel)),
            )

        def found(channel: Any) -> None:
            channel.close()
            for subscription in self._of(queue_name):
                subscription.stand_back()

        def closed(_channel: Any, reason: BaseException) -> None:
            # 404 says that it is not. After any other error, too, it is better to consume.
            if close_reason(reason)[0] not in (0, 200) and connection is self._connection:
                for subscription in self._of(queue_name):
                    self._attach(subscription)

        connection.channel(on_open_callback=self._io.safely(opened))

    def _of(self, queue_name: str) -> list[Subscription]:
        return [
            one for one in self._subscriptions() if one.queue_name == queue_name and not one.retired.is_set()
        ]
