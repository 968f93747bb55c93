"""Lets all publishers of this package pause for a moment: the other side of ``presence``.

Runs in: the command line, on a blocking connection. Needs: RabbitMQ.
"""

from __future__ import annotations

import time
from typing import Any

import pika

from . import topology
from .topology import HOLD_LOCK, PUBLISHERS

#: Seconds that publishers may take to pause. They wait for it with their send(), ten seconds by default.
HOLD_S = 4.0

#: Seconds between two looks whether they have.
LOOK_EVERY_S = 0.01

#: How often the hold is looked for to take it away. With the lock gone, who holds it drops it by itself.
TAKE_TRIES = 100


class Hold:
    """A pause of all publishers. ``begin`` it, and always ``end`` it; it also ends with its connection."""

    def __init__(self, connection: pika.BlockingConnection) -> None:
        self._connection = connection
        self._channel: Any = None
        self._began_at = 0.0
        #: How many publishers had not paused when ``begin`` gave up.
        self.publishing = 0

    def begin(self) -> bool:
        """Let publishers pause; return whether all did in time. It never takes longer than a few seconds."""
        self._began_at = time.monotonic()
        channel = self._channel = self._connection.channel()
        channel.queue_declare(HOLD_LOCK, exclusive=True)
        topology.apply([topology.publishers()], channel)
        channel.queue_purge(PUBLISHERS)  # holds of those who were killed
        channel.basic_publish("", PUBLISHERS, b"hold")
        while time.monotonic() - self._began_at < HOLD_S:
            answer = channel.queue_declare(PUBLISHERS, passive=True).method
            self.publishing = answer.consumer_count
            # The hold is back in the queue, and nobody is there to take it.
            if answer.consumer_count == 0 and answer.message_count > 0:
                return True
            self._connection.sleep(LOOK_EVERY_S)
        return False

    def end(self) -> float:
        """Let publishers go on; return for how many seconds they paused."""
        for _ in range(TAKE_TRIES):
            method, _, _ = self._channel.basic_get(PUBLISHERS, auto_ack=True)
            if method is not None:
                break
            self._connection.sleep(LOOK_EVERY_S)
        self._channel.queue_delete(HOLD_LOCK)
        self._channel.close()
        return time.monotonic() - self._began_at
