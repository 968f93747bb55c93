"""PURE: which acks to send on one channel, so that few frames settle many deliveries and none too early.

Runs in: the I/O thread, one ledger per channel. Needs: nothing.
"""

from __future__ import annotations

from collections.abc import Iterable


class AckLedger:
    """Remembers which delivery tags of a channel are unsettled, and turns finished ones into ack frames.

    ``multiple`` acks all tags up to one, so it may only be used up to the highest tag below which nothing is
    unsettled. Later tags are acked singly, at once: holding them back would keep their prefetch places occupied, and
    a lost connection would run their messages again.
    """

    def __init__(self) -> None:
        self._floor = 0  # every tag up to here is settled, on our side and at RabbitMQ
        self._settled: set[int] = set()  # settled tags above the floor

    def settle(self, tags: Iterable[int]) -> list[tuple[int, bool]]:
        """Return the acks ``(tag, multiple)`` that settle exactly ``tags``. Tags settled before are ignored."""
        new = {tag for tag in tags if tag > self._floor and tag not in self._settled}
        if not new:
            return []
        floor = self._rise(new)
        below = [tag for tag in new if tag <= floor]
        acks: list[tuple[int, bool]] = []
        if below:
            # The tag named must itself be outstanding, so it is the highest new one and not the floor.
            acks.append((max(below), len(below) > 1))
        acks.extend((tag, False) for tag in sorted(new) if tag > floor)
        return acks

    def returned(self, tags: Iterable[int]) -> list[int]:
        """Note ``tags`` as settled by a return to the queue. Gives back those that were not settled before, in order."""
        new = {tag for tag in tags if tag > self._floor and tag not in self._settled}
        self._rise(new)
        return sorted(new)

    def _rise(self, new: set[int]) -> int:
        self._settled |= new
        while self._floor + 1 in self._settled:
            self._floor += 1
            self._settled.discard(self._floor)
        return self._floor
