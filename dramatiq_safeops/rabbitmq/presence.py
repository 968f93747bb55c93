"""Lets who migrates a queue pause all publishers of this package for a moment (see ``migration``).

Runs in: the I/O thread of every process that publishes, on the publishing connection. Needs: RabbitMQ.

A message that is published while its queue is being deleted is lost, and RabbitMQ confirms it all the same: the queue
"has taken" it (measured on 3.10: two or three at each deletion under load). So nobody may publish at that moment.

Each publishing process has a consumer on ``safeops.publishers``, a queue that holds nothing. Whoever is present may
publish. Who migrates declares a lock and puts messages, the holds, into that queue, one for each consumer and some more.
A process that gets one stops publishing, waits until all that it has published is confirmed, cancels its consumer, and
returns the hold, for those who come later. When no consumer is left, nobody publishes. The lock is an exclusive queue: it is gone when the
connection of its holder is, so publishers go on also when that one was killed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pika.adapters.select_connection import SelectConnection

from .io_thread import IOThread
from .topology import HOLD_LOCK, PUBLISHERS, publishers
from .trouble import close_reason

logger = logging.getLogger(__name__)

#: Seconds between two looks whether publishing has come to rest, and whether the hold is over.
QUIET_EVERY_S = 0.005
OVER_EVERY_S = 0.1

#: Seconds after which a process publishes without being present. To publish matters more than to be pausable: without
#: the permission to consume, for example, only migrations go without this protection.
PATIENCE_S = 2.0

#: Seconds before a process that could not be present tries it again.
AGAIN_S = 5.0


class Presence:
    """Says whether this process may publish just now. Lives on the I/O thread.

    ``quiet()`` tells whether nothing that was published is unconfirmed; ``on_present()`` is called when this process may
    declare; ``on_free(held)`` is called whenever publishing
    may begin or go on, with whether it had to pause.
    """

    def __init__(
        self,
        io: IOThread,
        *,
        quiet: Callable[[], bool],
        on_present: Callable[[], None],
        on_free: Callable[[bool], None],
    ) -> None:
        self._io = io
        self._quiet = quiet
        self._on_present = on_present
        self._on_free = on_free
        self._connection: Any = None  # the open one; pika has no types
        self._channel: Any = None
        self._consumer_tag = ""
        self._hold: int | None = None  # the delivery tag of the hold
        self._held = False
        self._entry: object = None  # the try to be present that we wait for
        #: Whether the queue is known to exist. In a cluster with a frozen node RabbitMQ 3.10 answers no declaration for a minute.
        self._exists = False
        #: Whether this process may declare: it has a consumer, and is waited for. A queue that it declares in the last moment of a
        #: pause does no harm, it is found and replaced again.
        self.present = False
        #: Whether this process may publish.
        self.free = False

    def up(self, connection: SelectConnection) -> None:
        """There is a connection."""
        self._connection = connection
        self._channel = None
        self.present = self.free = False
        self._enter(connection)

    def down(self) -> None:
        """The connection is lost."""
        self._connection = self._channel = self._entry = None
        self._hold = None
        self.present = self.free = False

    # -- to be present

    def _enter(self, connection: SelectConnection) -> None:
        if not connection.is_open or connection is not self._connection or self._channel is not None:
            return
        self._hold = None
        entry = self._entry = object()
        connection.channel(on_open_callback=self._io.safely(self._opened))
        self._io.call_later(PATIENCE_S, self._out_of_patience, entry)

    def _opened(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._io.safely(self._closed))
        channel.add_on_cancel_callback(self._io.safely(lambda _frame: self._cancelled(channel)))
        if self._exists:
            self._consume(channel)
            return
        queue = publishers()
        getattr(channel, queue.method)(
            **queue.arguments, callback=self._io.safely(lambda _frame: self._consume(channel))
        )

    def _cancelled(self, channel: Any) -> None:
        self._exists = False
        channel.close()

    def _consume(self, channel: Any) -> None:
        # Before the consumer, or it does not count for it: it would take the holds of the others.
        channel.basic_qos(prefetch_count=1)
        self._consumer_tag = channel.basic_consume(
            PUBLISHERS,
            on_message_callback=lambda _channel, method, _properties, _body: self._io.run_safely(
                self._on_hold, channel, method.delivery_tag
            ),
            callback=self._io.safely(lambda _frame: self._consuming(channel)),
        )

    def _consuming(self, channel: Any) -> None:
        self._exists = True
        self.present = True
        self._on_present()
        # If a hold waits in the queue, the queue has sent it before it answers this, and it is here before the answer
        # to the call after that.
        channel.queue_declare(
            PUBLISHERS,
            passive=True,
            callback=self._io.safely(
                lambda _frame: channel.basic_qos(
                    prefetch_count=1, callback=self._io.safely(lambda _frame: self._present(channel))
                )
            ),
        )

    def _present(self, channel: Any) -> None:
        if channel is self._channel and self._hold is None:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, False
        if not self.free:
            self.free = True
            if held:
                logger.info("Publishing goes on.", extra={"event": "publisher.released"})
            self._on_free(held)

    def _out_of_patience(self, entry: object) -> None:
        if entry is self._entry:
            self._release()

    def _closed(self, channel: Any, reason: BaseException) -> None:
        connection = self._connection
        if channel is not self._channel or connection is None or not connection.is_open:
            return
        self._channel = None
        # Deleted, it is declared at once. What is not there although it was just declared is on a node that is down.
        again_s = 0 if self.present or self._exists else AGAIN_S
        if close_reason(reason)[0] == 404:
            self._exists = False
        if self._hold is not None:
            self._hold = None
            self._ask_whether_over(connection)
            return
        code, text = close_reason(reason)
        if code != 200:
            logger.debug("A migration could not pause this process: %s.", text)
        self._release()
        if code != 403:  # a missing permission
            self._io.call_later(again_s if code in (200, 404) else AGAIN_S, self._enter, connection)

    # -- to pause

    def _on_hold(self, channel: Any, tag: int) -> None:
        connection = self._connection
        if channel is not self._channel or connection is None:
            return
        self._hold = tag
        self._entry = None
        self.present = self.free = False
        # Who put it there may be dead: then nobody would ever take it away.
        self._look_at_lock(
            connection, locked=lambda: self._pause(channel, 0), free=lambda: self._drop_hold(channel)
        )

    def _drop_hold(self, channel: Any) -> None:
        if channel is self._channel and channel.is_open and self._hold is not None:
            channel.basic_ack(self._hold)
            self._hold = None
            self._release()

    def _pause(self, channel: Any, looks: int) -> None:
        connection = self._connection
        if channel is not self._channel or connection is None or not channel.is_open:
            return
        if not self._held:
            self._held = True
            logger.info(
                "Publishing pauses for a moment: a queue is being migrated.",
                extra={"event": "publisher.held"},
            )
        if self._quiet():
            channel.basic_cancel(
                self._consumer_tag, callback=self._io.safely(lambda _frame: self._left(channel))
            )
        elif looks < OVER_EVERY_S / QUIET_EVERY_S:
            self._io.call_later(QUIET_EVERY_S, self._pause, channel, looks + 1)
        else:
            self._look_at_lock(
                connection, locked=lambda: self._pause(channel, 0), free=lambda: self._drop_hold(channel)
            )

    def _left(self, channel: Any) -> None:
        if self._hold is not None:
            channel.basic_nack(self._hold, requeue=True)
        channel.close()  # _closed goes on: it asks until the hold is over

    def _ask_whether_over(self, connection: SelectConnection) -> None:
        def again() -> None:
            self._io.call_later(OVER_EVERY_S, self._ask_whether_over, connection)

        self._look_at_lock(connection, locked=again, free=lambda: self._enter(connection))

    def _look_at_lock(
        self, connection: SelectConnection, *, locked: Callable[[], None], free: Callable[[], None]
    ) -> None:
        if not connection.is_open or connection is not self._connection:
            return

        def opened(channel: Any) -> None:
            channel.add_on_close_callback(self._io.safely(closed))
            # 405: another connection's exclusive queue. 404: there is none.
            channel.queue_declare(
                HOLD_LOCK, passive=True, callback=self._io.safely(lambda _frame: channel.close())
            )

        def closed(_channel: Any, reason: BaseException) -> None:
            if connection.is_open and connection is self._connection:
                (locked if close_reason(reason)[0] == 405 else free)()

        connection.channel(on_open_callback=self._io.safely(opened))
