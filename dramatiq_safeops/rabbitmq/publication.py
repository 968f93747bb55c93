"""One message to publish, a batch of them, and what may become of them.

Runs in: every process; made in any thread, then changed on the I/O thread only. Needs: nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pika

#: What must exist before a publication can be routed, for example ("queue", "default") or ("delay", 1000).
Need = tuple[str, Any]


class PublishError(Exception):
    """Why a publication was not confirmed."""


class Withdrawn(PublishError):
    """Nobody waits for it any more."""


class Unroutable(PublishError):
    """No queue takes it, also after its queue was declared again."""


class Refused(PublishError):
    """RabbitMQ said no to this one: its queue is over its length limit, or has no leader just now."""


class Final(PublishError):
    """No waiting will help."""


class Impossible(Final):
    """RabbitMQ closes the channel for it (too large, for example), or it cannot be written as AMQP."""


class Undeclarable(Final):
    """What it needs exists with other arguments."""


@dataclass(eq=False)
class Publication:
    """One message to publish, and what became of it."""

    exchange: str
    routing_key: str
    body: bytes
    properties: pika.BasicProperties
    needs: Sequence[Need] = ()
    confirmed: bool = False
    error: PublishError | None = None
    #: Whether it was handed to the connection at least once, so that it may have arrived.
    written: bool = False
    returned: bool = False
    redeclared: bool = False
    suspect: bool = False
    batch: Batch | None = field(default=None, repr=False)

    @property
    def destination(self) -> tuple[str, str]:
        """What it may have to wait for: a queue by name, or an exchange with one queue behind it."""
        return self.exchange, "" if self.exchange.startswith("safeops.delay.") else self.routing_key


class Batch:
    """Publications handed over together. ``done`` is set once each of them is confirmed or has failed for good."""

    def __init__(
        self, publications: Sequence[Publication], on_done: Callable[[Batch], None] | None = None
    ) -> None:
        self.publications = publications
        self.done = threading.Event()
        #: How many of them are neither confirmed nor failed.
        self.open = len(publications)
        self._on_done = on_done
        for publication in publications:
            publication.batch = self
        if not publications:
            self.done.set()

    @property
    def unconfirmed(self) -> list[Publication]:
        """What RabbitMQ has not confirmed."""
        return [one for one in self.publications if not one.confirmed]

    def settle(self, publication: Publication, error: PublishError | None) -> None:
        """Note what became of ``publication``. On the I/O thread."""
        publication.error = error
        publication.confirmed = error is None
        self.open -= 1
        if self.open == 0:
            self.done.set()
            if self._on_done is not None:
                self._on_done(self)
