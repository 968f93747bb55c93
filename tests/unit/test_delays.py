"""The delay ladder: any delay is a few hops, and it ends when it should, also where the clocks are wrong.

A mistake here runs a retry too early, loses a scheduled message in the ladder, or lets it circle there for ever.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dramatiq_safeops.rabbitmq.delays import (
    STEPS_MS,
    TOLERANCE_MS,
    TOLERANCE_SHARE,
    Hop,
    first_hop,
    next_hop,
    step_for,
    step_name,
)

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
START_MS = 1_772_000_000_000

#: Headers carry whole milliseconds.
ROUNDING_MS = 1

#: Milliseconds: from nothing to a month, small ones as likely as large ones.
delays = st.one_of(
    st.integers(0, 2_000),
    st.integers(0, 600_000),
    st.integers(0, DAY_MS),
    st.integers(0, 30 * DAY_MS),
    st.sampled_from(STEPS_MS),
    st.sampled_from(STEPS_MS).map(lambda step: step - 1),
    st.sampled_from(STEPS_MS).map(lambda step: step + 1),
)


@dataclass
class Walk:
    """One message on its way through the ladder, on a time that the test keeps.

    ``clocks`` are the errors of the machines that publish it, one after the other; ``late_ms`` is what RabbitMQ and the
    worker need on top of each step.
    """

    delay_ms: float
    exact: bool
    clocks: list[int] = field(default_factory=lambda: [0])
    late_ms: int = 0

    def __post_init__(self) -> None:
        self.elapsed_ms = 0.0
        self.hops: list[int] = []
        clocks = itertools.chain(self.clocks, itertools.repeat(self.clocks[-1]))

        def now() -> int:
            return int(START_MS + self.elapsed_ms) + next(clocks)

        hop: Hop | None = first_hop(self.delay_ms, now_ms=now(), exact=self.exact)
        while hop is not None:
            self.hops.append(hop.step_ms)
            self.elapsed_ms += hop.step_ms + self.late_ms
            # What is published: nothing is left of a retry's delay after a step that covers it.
            carries = self.exact or hop.left_ms > 0
            hop = next_hop(due_ms=hop.due_ms, left_ms=hop.left_ms, now_ms=now()) if carries else None
            assert len(self.hops) < 200, "it never comes out"

    @property
    def tolerance_ms(self) -> float:
        return 0 if self.exact else max(TOLERANCE_MS, TOLERANCE_SHARE * self.delay_ms) + ROUNDING_MS


def most_hops(delay_ms: float) -> int:
    """Twelve hours at a time, then what is left is a few steps down."""
    return int(delay_ms // STEPS_MS[-1]) + 12


@settings(max_examples=600, deadline=None)
@given(delays)
def test_a_delayed_message_never_runs_early(delay_ms: int):
    """Hurts users of ``send_with_options(delay=)``: a reminder at 08:59 for 09:00 is wrong, at 09:00:00.2 it is not."""
    walk = Walk(delay_ms, exact=True)

    assert walk.elapsed_ms >= delay_ms
    assert walk.elapsed_ms <= delay_ms + STEPS_MS[0]


@settings(max_examples=300, deadline=None)
@given(st.floats(0, 30 * DAY_MS, allow_nan=False))
def test_fractions_of_a_millisecond_make_a_delay_no_more_than_one_millisecond_early(delay_ms: float):
    """Hurts nobody by itself, but an error that grew with the number of hops would."""
    assert Walk(delay_ms, exact=True).elapsed_ms > delay_ms - 1


@settings(max_examples=600, deadline=None)
@given(delays)
def test_a_retry_runs_within_its_tolerance_of_its_delay(delay_ms: int):
    """Hurts the service behind the actor: a backoff of 30 s that takes 20 s is no backoff."""
    walk = Walk(delay_ms, exact=False)

    assert walk.elapsed_ms > delay_ms - max(250, 0.02 * delay_ms) - ROUNDING_MS
    assert walk.elapsed_ms <= delay_ms + STEPS_MS[0]


@settings(max_examples=600, deadline=None)
@given(delays, st.booleans())
def test_any_delay_takes_few_hops(delay_ms: int, exact: bool):
    """Hurts RabbitMQ: each hop is a publish and an ack more."""
    walk = Walk(delay_ms, exact=exact)

    assert len(walk.hops) <= most_hops(delay_ms)
    assert walk.hops == sorted(walk.hops, reverse=True)


@settings(max_examples=300, deadline=None)
@given(st.integers(250, 600_000))
def test_a_retry_of_up_to_ten_minutes_takes_two_hops_on_average_and_five_at_most(delay_ms: int):
    """Hurts RabbitMQ in an outage, when thousands of messages are in the ladder at once."""
    assert len(Walk(delay_ms, exact=False).hops) <= 5


def test_retries_of_the_usual_lengths_take_less_than_two_and_a_half_hops_on_average():
    """Hurts RabbitMQ in an outage: this is the number of publishes that each failure costs."""
    draw = random.Random(20260301)
    walks = [Walk(draw.uniform(0, 30_000 * 2 ** draw.randrange(4)), exact=False) for _ in range(2_000)]

    assert sum(len(walk.hops) for walk in walks) / len(walks) < 2.5


@settings(max_examples=400, deadline=None)
@given(delays, st.booleans(), st.integers(0, 5_000))
def test_what_the_steps_take_longer_does_not_add_up(delay_ms: int, exact: bool, late_ms: int):
    """Hurts users of long delays: ten hops in a busy RabbitMQ must not be late ten times."""
    walk = Walk(delay_ms, exact=exact, late_ms=late_ms)

    assert walk.elapsed_ms >= delay_ms - walk.tolerance_ms
    # The last step may be one that no lateness can shorten any more.
    assert walk.elapsed_ms <= delay_ms + STEPS_MS[0] + 2 * late_ms


@settings(max_examples=600, deadline=None)
@given(
    delay_ms=delays,
    exact=st.booleans(),
    clocks=st.lists(st.integers(-HOUR_MS, HOUR_MS), min_size=1, max_size=80),
)
@example(delay_ms=3 * DAY_MS, exact=True, clocks=[0, HOUR_MS] * 20)
def test_clocks_that_are_wrong_by_an_hour_make_a_delay_wrong_by_two_at_most(
    delay_ms: int, exact: bool, clocks: list[int]
):
    """Hurts users of long delays in a fleet with one bad clock: the error must not grow with each machine it meets."""
    walk = Walk(delay_ms, exact=exact, clocks=clocks)

    spread = max(clocks) - min(clocks)
    assert walk.elapsed_ms >= delay_ms - walk.tolerance_ms - spread
    assert walk.elapsed_ms <= delay_ms + STEPS_MS[0]  # never late by more than the smallest step
    assert len(walk.hops) <= most_hops(delay_ms) + 12


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 600_000), st.integers(-(10**15), 10**15))
def test_a_clock_that_is_wrong_by_ages_cannot_keep_a_message_back(delay_ms: int, error_ms: int):
    """Hurts everybody whose message would wait until the year 30,000 because a machine booted in 1970."""
    walk = Walk(delay_ms, exact=True, clocks=[0, error_ms])

    assert walk.elapsed_ms <= delay_ms + STEPS_MS[0]
    assert walk.elapsed_ms >= min(delay_ms * 0.8, delay_ms)  # the first step is served in any case


@settings(max_examples=400, deadline=None)
@given(due_ms=st.integers(0, 2**53), left_ms=st.integers(0, 2**53), now_ms=st.integers(0, 2**53))
def test_any_state_leads_out_of_the_ladder_or_one_step_down(due_ms: int, left_ms: int, now_ms: int):
    """Hurts workers: this state comes from headers, which anybody may write."""
    hop = next_hop(due_ms=due_ms, left_ms=left_ms, now_ms=now_ms)

    if due_ms <= now_ms or left_ms == 0:
        assert hop is None
    else:
        assert hop is not None
        assert hop.step_ms in STEPS_MS
        assert 0 <= hop.left_ms <= max(left_ms - hop.step_ms, 0)


def test_the_steps_grow_by_a_quarter_at_most_up_to_ten_minutes():
    """Hurts the number of hops: with larger gaps more would remain after the first step."""
    short = [step for step in STEPS_MS if step <= 600_000]

    assert short[0] == 250
    assert short[-1] == 600_000
    assert all(later / earlier <= 1.25 for earlier, later in itertools.pairwise(short))


def test_beyond_ten_minutes_the_steps_about_double_up_to_twelve_hours():
    """Hurts RabbitMQ: each step is a queue of its own."""
    long = [step for step in STEPS_MS if step >= 600_000]

    assert long[-1] == 12 * HOUR_MS
    assert all(1.9 <= later / earlier <= 2.3 for earlier, later in itertools.pairwise(long))
    assert len(STEPS_MS) <= 50


@settings(max_examples=300, deadline=None)
@given(st.floats(0, 10 * DAY_MS, allow_nan=False))
def test_no_step_is_much_longer_than_the_delay_and_none_is_shorter_without_need(delay_ms: float):
    """Hurts in both ways: too long a step is late, too short a one costs another hop."""
    step = step_for(delay_ms)

    assert step in STEPS_MS
    assert step - delay_ms <= STEPS_MS[0]
    assert all(other <= step or other > delay_ms for other in STEPS_MS)


def test_every_step_has_a_name_of_its_own_that_people_can_read():
    """Hurts whoever looks for waiting messages in the RabbitMQ UI."""
    names = [step_name(step) for step in STEPS_MS]

    assert len(set(names)) == len(STEPS_MS)
    assert step_name(250) == "safeops.delay.0.25s"
    assert step_name(1_000) == "safeops.delay.1s"
    assert step_name(43_200_000) == "safeops.delay.43200s"


@pytest.mark.parametrize("exact", [True, False])
def test_no_delay_at_all_is_the_smallest_step(exact: bool):
    """Hurts nobody if it holds: zero must not be a division by zero or a step that does not exist."""
    assert Walk(0, exact=exact).hops == [STEPS_MS[0]]
