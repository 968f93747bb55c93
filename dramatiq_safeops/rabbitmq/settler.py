"""Makes the outcome of a delivery true: what it asks for is published, and when all of it is confirmed, the ack goes out.

Runs in: the I/O thread of worker processes. Needs: RabbitMQ.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

from ..delivery import Delivery
from .io_thread import IOThread
from .publication import Batch, Final, Publication
from .publisher import Publisher

logger = logging.getLogger(__name__)

#: Seconds before a publish that was refused is tried again: doubling, jittered, up to the second number.
RETRY_FIRST_S = 0.25
RETRY_MOST_S = 5.0

#: Seconds before the last resort is tried again: each try may cost the channel that others publish over.
LAST_RESORT_S = 60.0

#: Given what was not confirmed, and that RabbitMQ will never take some of it: what to publish instead. None if there is
#: nothing left to try.
Instead = Callable[[Delivery, Sequence[Publication]], "Sequence[Publication] | None"]


class Settler:
    """Publishes, then acks.

    A publish that does not succeed is tried again for as long as the delivery's channel lives. Meanwhile the delivery
    is un-acked: its prefetch place is the back-pressure, and its actor does not run again. When the channel goes,
    RabbitMQ has the message back, and what was to be published about it must not be any more.
    """

    def __init__(self, io: IOThread, publisher: Publisher, instead: Instead) -> None:
        self._io = io
        self._publisher = publisher
        self._instead = instead

    @property
    def frame_max(self) -> int:
        """The largest frame that RabbitMQ takes, in bytes. Thread-safe."""
        return self._publisher.frame_max

    def settle(self, delivery: Delivery, publications: Sequence[Publication], failures: int = 0) -> None:
        """Publish ``publications``, then ack ``delivery``."""
        channel = delivery.channel
        if channel.gone:
            return
        if not publications:
            channel.ack(delivery.tag)
            return
        batch = Batch(publications, lambda batch: self._published(delivery, batch, failures))
        channel.batches.add(batch)
        self._publisher.submit(batch)

    def forget(self, batches: set[Batch]) -> None:
        """The channel of their deliveries is gone."""
        for batch in list(batches):
            self._publisher.forget(batch)

    def _published(self, delivery: Delivery, batch: Batch, failures: int) -> None:
        channel = delivery.channel
        channel.batches.discard(batch)
        if channel.gone:
            return
        missing = batch.unconfirmed
        if not missing:
            channel.ack(delivery.tag)
            return
        pause = min(RETRY_MOST_S, RETRY_FIRST_S * 2 ** min(failures, 10)) * random.uniform(0.5, 1)
        if any(isinstance(one.error, Final) for one in missing):
            instead = self._instead(delivery, missing)
            if instead is not None:
                self.settle(delivery, instead)
                return
            pause = LAST_RESORT_S
        logger.error(
            "Message %r stays un-acked: what must be published about it was not taken (%s). Trying again in %.1f s.",
            delivery.known_id,
            missing[0].error,
            pause,
            extra={"event": "settle.refused", "queue": delivery.queue, "pause_s": pause},
        )
        for publication in missing:
            publication.redeclared = False
        self._io.call_later(pause, self.settle, delivery, missing, failures + 1)
