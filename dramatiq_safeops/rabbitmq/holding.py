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

#: How many holds there are beyond one for each publisher: for those that start or come back during the pause. Who finds none,
#: because the only one is just in another's hands, would publish.
SPARE_HOLDS = 100

#: How often the holds are looked for to take them away. With the lock gone, who has one drops it by itself.
TAKE_TRIES = 100


class Hold:
    """A pause of all publishers. ``begin`` it, and always ``end`` it; it also ends with its connection."""

    def __init__(self, connection: pika.BlockingConnection) -> None:
        self._connection = connection
        self._channel: Any = None
        self._began_at = 0.0
        self._holds = 0
        #: How many publishers had not paused when ``begin`` gave up.
        self.publishing = 0

    def begin(self) -> bool:
        """Let publishers pause; return whether all did in time. It never takes longer than a few seconds."""
        self._began_at = time.monotonic()
        channel = self._channel = self._connection.channel()
        channel.queue_declare(HOLD_LOCK, exclusive=True)
        topology.apply([topology.publishers()], channel)
        channel.queue_purge(PUBLISHERS)  # holds of those who were killed
        # One for each, so that they pause at once and not one after the other.
        self._holds = channel.queue_declare(PUBLISHERS, passive=True).method.consumer_count + SPARE_HOLDS
        for _ in range(self._holds):
            channel.basic_publish("", PUBLISHERS, b"hold")
        while time.monotonic() - self._began_at < HOLD_S:
            answer = channel.queue_declare(PUBLISHERS, passive=True).method
            self.publishing = answer.consumer_count
            # Nobody is there, and who comes now finds a hold.
            if answer.consumer_count == 0 and answer.message_count > 0:
                return True
            self._connection.sleep(LOOK_EVERY_S)
        return False

    def end(self) -> float:
        """Let publishers go on; return for how many seconds they paused."""
        taken = 0
        for _ in range(TAKE_TRIES):
            taken += self._channel.queue_purge(PUBLISHERS).method.message_count
            if taken >= self._holds:
                break
            self._connection.sleep(LOOK_EVERY_S)
        self._channel.queue_delete(HOLD_LOCK)
        self._channel.close()
        return time.monotonic() - self._began_at
