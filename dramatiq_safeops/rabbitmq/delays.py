"""PURE: the delay ladder, the fixed steps that delayed messages wait in, and how a delay is walked down them.

Runs in: every process. Needs: nothing.

A message takes the largest step that fits its delay and what remains is delayed again on arrival, so any delay is a
few hops, and no worker holds a waiting message in its memory. Each step is one queue with one TTL: RabbitMQ expires
messages from the head only, so a queue must not mix delays.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

#: The steps in milliseconds: at most 1.25 times the one before up to 10 minutes, then about doubling up to 12 hours.
STEPS_MS = (
    *(250, 300, 370, 450, 550, 670, 820),
    *(1_000, 1_250, 1_500, 1_800, 2_200, 2_700, 3_300, 4_000, 5_000, 6_000, 7_500, 9_000),
    *(11_000, 13_500, 16_500, 20_000, 25_000, 30_000, 37_000, 45_000, 55_000, 67_000, 82_000),
    *(100_000, 120_000, 150_000, 180_000, 220_000, 270_000, 330_000, 400_000, 500_000, 600_000),
    *(1_200_000, 2_400_000, 4_800_000, 10_800_000, 21_600_000, 43_200_000),
)

#: Ten years. Whoever asks for more has made a mistake, and headers hold 64 bits.
LONGEST_MS = 10 * 365 * 86_400_000

#: A retry or a park that has no more than this left, or than this share of its whole delay, runs at once: nobody
#: counts on its exact instant, and each further hop costs a publish.
TOLERANCE_MS = 250
TOLERANCE_SHARE = 0.02


@dataclass(frozen=True)
class Hop:
    """One stay in the ladder.

    ``step_ms`` is the queue to wait in; ``due_ms`` is the instant (Unix time in ms, by the publisher's clock) before
    which the message must wait on; ``left_ms`` is what may remain after this step. The clocks of two machines may
    differ, so on arrival the smaller of the two rules.
    """

    step_ms: int
    due_ms: int
    left_ms: int


def first_hop(delay_ms: float, *, now_ms: int, exact: bool) -> Hop:
    """Return the first hop of a new delay.

    ``exact`` is for ``send_with_options(delay=)``: late rather than early. A retry or a park may be early by
    ``TOLERANCE_MS`` or ``TOLERANCE_SHARE``.
    """
    delay_ms = min(delay_ms, LONGEST_MS)
    due = delay_ms if exact else delay_ms - max(TOLERANCE_MS, delay_ms * TOLERANCE_SHARE)
    due = math.ceil(max(due, 0))  # late by less than a millisecond rather than early
    return _hop(delay_ms, due_in=due, due_ms=now_ms + due)


def next_hop(*, due_ms: int, left_ms: int, now_ms: int) -> Hop | None:
    """Return the next hop of a message that came out of the ladder, or None when it is due.

    Its due instant stays that of the first hop, so that the errors of several clocks do not add up.
    """
    remaining = min(due_ms - now_ms, left_ms)
    if remaining <= 0:
        return None
    return _hop(remaining, due_in=remaining, due_ms=due_ms)


def step_for(delay_ms: float) -> int:
    """Return the largest step that is not longer than ``delay_ms``, so that nothing is early.

    Among the short steps it is the next longer one: what a shorter one left over would wait for the smallest step of all
    next, and be later.
    """
    after = bisect_left(STEPS_MS, delay_ms)
    if after == len(STEPS_MS):
        return STEPS_MS[-1]
    longer, shorter = STEPS_MS[after], STEPS_MS[max(after - 1, 0)]
    return longer if longer == delay_ms or longer - shorter <= STEPS_MS[0] else shorter


def step_name(step_ms: int) -> str:
    """Return the name of a step's exchange and queue, as people read it in the RabbitMQ UI."""
    return f"safeops.delay.{step_ms / 1000:g}s"


def _hop(delay_ms: float, *, due_in: int, due_ms: int) -> Hop:
    step = step_for(delay_ms)
    return Hop(step, due_ms=due_ms, left_ms=max(due_in - step, 0))
