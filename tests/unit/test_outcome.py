"""What becomes of a message: every combination of how it ended, how often it failed, and what its actor allows.

A wrong line in this table loses a message, repeats one for ever, or buries one that would have succeeded.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from dramatiq.errors import RateLimitExceeded, Retry
from dramatiq.middleware import Shutdown, TimeLimitExceeded

from dramatiq_safeops import PermanentError
from dramatiq_safeops.delivery import Delivery
from dramatiq_safeops.outcome import NO_RETRIES, Decision, Outcome, Reason, RetryPolicy, decide

WEEK_MS = 7 * 86_400_000


class UnknownPeriod(Exception):
    """What the actors of this table list in ``throws``."""


class UnknownYear(UnknownPeriod):
    """And a class below it."""


class CardRefused(PermanentError):
    """A permanent error of the user's own."""


class HandedOver(Shutdown):
    """A way to be shut down that Dramatiq does not know."""


def delivery(*, retries: int = 0, failed: bool = False, turned_away: Decision | None = None) -> Delivery:
    """A delivery as far as ``decide`` may look at it."""
    found = Delivery(
        SimpleNamespace(gone=False, batches=set()),  # type: ignore[arg-type]
        1,
        queue="default",
        body=b"{}",
        properties=SimpleNamespace(headers=None, message_id="m-1"),
        redelivered=False,
    )
    found.retries = retries
    found.failed = failed
    found.turned_away = turned_away
    return found


# --- the dimensions -----------------------------------------------------------------------------

#: How the processing ended, and to which row of the table that belongs.
ENDINGS: dict[str, tuple[str, Callable[[], BaseException | None]]] = {
    "well": ("well", lambda: None),
    "an exception": ("failure", lambda: RuntimeError("no route")),
    "a rate limit": ("failure", lambda: RateLimitExceeded("too many")),
    "the time limit": ("failure", lambda: TimeLimitExceeded("too long")),
    "SystemExit": ("failure", lambda: SystemExit(3)),
    "KeyboardInterrupt": ("failure", KeyboardInterrupt),
    "Retry without a delay": ("failure", lambda: Retry("again")),
    "Retry in 1,500 ms": ("asked", lambda: Retry("again", delay=1500)),
    "Retry at once": ("asked", lambda: Retry("again", delay=0)),
    "PermanentError": ("permanent", lambda: PermanentError("no")),
    "a subclass of PermanentError": ("permanent", lambda: CardRefused("no")),
    "what the actor throws": ("thrown", lambda: UnknownPeriod("2031-13")),
    "a subclass of what it throws": ("thrown", lambda: UnknownYear("2031")),
    "Shutdown": ("shutdown", Shutdown),
    "a subclass of Shutdown": ("shutdown", HandedOver),
}

#: Attempts: (retries so far, max_retries) and whether another one is left.
BUDGETS = {
    "first of five": (0, 4, True),
    "fourth of five": (3, 4, True),
    "fifth of five": (4, 4, False),
    "beyond its limit": (9, 4, False),
    "the only one": (0, 0, False),
}

#: What retry_when says: None where the actor has no such function.
PREDICATES: dict[str, bool | None] = {"none": None, "says yes": True, "says no": False}

THROWS: dict[str, tuple[type[BaseException], ...]] = {"none": (), "UnknownPeriod": (UnknownPeriod,)}

#: What a failure of each kind becomes, in the words of the table in the documentation.
#: (attempt left and allowed) -> outcome, reason; the delay is looked at elsewhere.
EXPECTED: dict[tuple[str, bool, bool], tuple[Outcome, str]] = {
    # kind, an attempt is left, retry_when does not object
    ("failure", True, True): (Outcome.RETRIED, "*"),
    ("failure", True, False): (Outcome.DEAD, Reason.RETRIES_EXHAUSTED),
    ("failure", False, True): (Outcome.DEAD, Reason.RETRIES_EXHAUSTED),
    ("failure", False, False): (Outcome.DEAD, Reason.RETRIES_EXHAUSTED),
    ("asked", True, True): (Outcome.RETRIED, "*"),
    ("asked", True, False): (Outcome.DEAD, Reason.RETRIES_EXHAUSTED),
    ("asked", False, True): (Outcome.DEAD, Reason.RETRIES_EXHAUSTED),
    ("asked", False, False): (Outcome.DEAD, Reason.RETRIES_EXHAUSTED),
    ("permanent", True, True): (Outcome.DEAD, Reason.PERMANENT_ERROR),
    ("permanent", True, False): (Outcome.DEAD, Reason.PERMANENT_ERROR),
    ("permanent", False, True): (Outcome.DEAD, Reason.PERMANENT_ERROR),
    ("permanent", False, False): (Outcome.DEAD, Reason.PERMANENT_ERROR),
    ("shutdown", True, True): (Outcome.RETURNED, Reason.SHUTDOWN),
    ("shutdown", True, False): (Outcome.RETURNED, Reason.SHUTDOWN),
    ("shutdown", False, True): (Outcome.RETURNED, Reason.SHUTDOWN),
    ("shutdown", False, False): (Outcome.RETURNED, Reason.SHUTDOWN),
}

PARK = Decision(Outcome.PARKED, Reason.GUARD_FAILED, "a guard broke", 750)
BURY = Decision(Outcome.DEAD, Reason.TOO_OLD, "too old")


@dataclass(frozen=True)
class Row:
    ending: str
    budget: str
    predicate: str
    throws: str
    failed: bool
    skipped: bool
    turned_away: Decision | None

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.ending, self.budget, self.predicate, self.throws))

    @property
    def expected(self) -> tuple[Outcome, str]:
        if self.turned_away is not None:
            return self.turned_away.outcome, self.turned_away.reason
        kind, _ = ENDINGS[self.ending]
        if kind == "well":
            if self.failed:
                return Outcome.DEAD, Reason.REJECTED
            return (Outcome.SKIPPED if self.skipped else Outcome.DONE), ""
        if kind == "thrown":
            kind = "permanent" if self.throws != "none" else "failure"
        _, _, left = BUDGETS[self.budget]
        return EXPECTED[kind, left, PREDICATES[self.predicate] is not False]


ROWS = [
    Row(*combination)
    for combination in itertools.product(
        ENDINGS, BUDGETS, PREDICATES, THROWS, (False, True), (False, True), (None, PARK, BURY)
    )
]


def run(row: Row, *, jitter: Callable[[], float] = lambda: 0.5) -> tuple[Decision, list[tuple[int, str]]]:
    """Decide ``row``; also return with what retry_when was called."""
    retries, most, _ = BUDGETS[row.budget]
    says = PREDICATES[row.predicate]
    asked: list[tuple[int, str]] = []

    def retry_when(so_far: int, exception: BaseException) -> bool:
        asked.append((so_far, type(exception).__name__))
        return bool(says)

    policy = RetryPolicy(
        max_retries=most,
        min_backoff=1000,
        max_backoff=60_000,
        throws=THROWS[row.throws],
        retry_when=None if says is None else retry_when,
    )
    decision = decide(
        delivery(retries=retries, failed=row.failed, turned_away=row.turned_away),
        exception=ENDINGS[row.ending][1](),
        skipped=row.skipped,
        policy=policy,
        jitter=jitter,
    )
    return decision, asked


def test_every_combination_has_the_outcome_that_the_table_says():
    """Hurts everybody: this decides whether a message is gone, waits, or is a dead letter."""
    wrong = []
    for row in ROWS:
        decision, _ = run(row)
        outcome, reason = row.expected
        if decision.outcome is not outcome or (reason != "*" and decision.reason != reason):
            wrong.append(f"{row}: {decision}, expected {outcome} {reason}")

    assert wrong == []
    assert len(ROWS) == 15 * 5 * 3 * 2 * 2 * 2 * 3  # nothing fell out of the table


def test_what_a_guard_decided_stands_whatever_came_after():
    """Hurts users of guards: a later exception must not turn a park into a charged attempt."""
    for row in ROWS:
        if row.turned_away is not None:
            assert run(row)[0] is row.turned_away


def test_a_dead_letter_and_a_retry_say_why():
    """Hurts whoever is on call: a dead letter without a word is a riddle."""
    for row in ROWS:
        decision, _ = run(row)
        if decision.outcome in (Outcome.DEAD, Outcome.RETRIED, Outcome.RETURNED, Outcome.PARKED):
            assert decision.reason, row
            assert decision.detail, row


def test_only_what_waits_has_a_delay():
    """Hurts everybody: a delay on a dead letter would be a sign that somebody reads the wrong field."""
    for row in ROWS:
        decision, _ = run(row)
        if decision.outcome in (Outcome.DONE, Outcome.SKIPPED, Outcome.DEAD, Outcome.RETURNED):
            assert decision.delay_ms == 0, row


def test_retry_when_is_asked_once_and_only_while_an_attempt_is_left():
    """Hurts users whose retry_when counts or calls out: it can stop earlier than max_retries, never go beyond."""
    for row in ROWS:
        decision, asked = run(row)
        retries, _, left = BUDGETS[row.budget]
        kind, _ = ENDINGS[row.ending]
        concerns = kind in ("failure", "asked") or (kind == "thrown" and row.throws == "none")
        if row.turned_away is None and concerns and left and PREDICATES[row.predicate] is not None:
            assert [so_far for so_far, _ in asked] == [retries], row
        else:
            assert asked == [], row
        if not left:
            assert decision.outcome is not Outcome.RETRIED


def test_deciding_changes_nothing_and_gives_the_same_answer_twice():
    """Hurts whoever reads the decision later: a decision that leaves traces is not one."""
    failed = delivery(retries=2)
    before = dict(vars(failed))
    error = RuntimeError("no route")
    policy = RetryPolicy(max_retries=4, min_backoff=1000, max_backoff=60_000)

    first = decide(failed, exception=error, policy=policy, jitter=lambda: 0.25)
    second = decide(failed, exception=error, policy=policy, jitter=lambda: 0.25)

    assert first == second
    assert vars(failed) == before
    assert error.args == ("no route",)
    assert error.__traceback__ is None


def test_without_jitter_of_the_callers_only_the_delay_differs():
    """Hurts nobody if it holds: chance decides about the delay and about nothing else."""
    policy = RetryPolicy(max_retries=4, min_backoff=1000, max_backoff=60_000)
    decisions = {
        (one.outcome, one.reason, one.detail)
        for one in (decide(delivery(), exception=RuntimeError(), policy=policy) for _ in range(50))
    }

    assert len(decisions) == 1


def test_without_a_policy_a_failure_is_final():
    """Hurts users of a list without Retries: a failed message must become a dead letter, never an ack."""
    decision = decide(delivery(), exception=RuntimeError("no route"))

    assert (decision.outcome, decision.reason) == (Outcome.DEAD, Reason.RETRIES_EXHAUSTED)
    assert NO_RETRIES.max_retries == 0


@pytest.mark.parametrize(("retries", "words"), [(0, "failed once"), (4, "failed 5 times")])
def test_a_dead_letter_counts_its_attempts_in_words(retries: int, words: str):
    """Hurts whoever is on call: "failed 4 times" for five attempts sends people searching."""
    decision = decide(delivery(retries=retries), exception=RuntimeError("no route"))

    assert words in decision.detail
    assert "RuntimeError" in decision.detail


def test_the_ack_hooks_hear_of_ends_and_charged_attempts_only():
    """Hurts users of Results: a park that looks like an end would overwrite a stored result."""
    told = {outcome for outcome in Outcome if Decision(outcome).counts_for_hooks}

    assert told == {Outcome.DONE, Outcome.SKIPPED, Outcome.RETRIED, Outcome.DEAD}


# --- delays -------------------------------------------------------------------------------------


@pytest.fixture
def seeded() -> Any:
    """Python's own generator, which ``decide`` uses, at a known place."""
    state = random.getstate()
    random.seed(20260301)
    yield
    random.setstate(state)


@pytest.mark.usefixtures("seeded")
def test_delays_are_spread_evenly_from_zero_to_the_backoff():
    """Hurts whatever is behind the actors: messages that failed together must not come back as one wave."""
    policy = RetryPolicy(max_retries=9, min_backoff=30_000, max_backoff=WEEK_MS)
    cap, count = 30_000 * 2**2, 20_000

    drawn = sorted(
        decide(delivery(retries=2), exception=RuntimeError(), policy=policy).delay_ms for _ in range(count)
    )

    assert 0 <= drawn[0] < 0.001 * cap  # the base of the backoff is no minimum
    assert 0.999 * cap < drawn[-1] < cap
    assert sum(drawn) / count == pytest.approx(cap / 2, rel=0.01)
    for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        assert drawn[int(share * count)] == pytest.approx(share * cap, abs=0.01 * cap)
    # Kolmogorov and Smirnov: a fair draw is further away than this once in a thousand tries.
    distance = max(abs((place + 0.5) / count - value / cap) for place, value in enumerate(drawn))
    assert distance < 1.95 / math.sqrt(count)


def test_the_backoff_doubles_with_each_retry_up_to_its_cap():
    """Hurts a service that is down: attempts must thin out, and still never be a month apart."""
    policy = RetryPolicy(max_retries=99, min_backoff=1000, max_backoff=60_000)

    caps = [policy.backoff(retries, lambda: 1.0) for retries in range(8)]

    assert caps == [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]


@pytest.mark.parametrize("retries", [64, 1023, 1024, 1025, 10**6, 2**53])
def test_a_message_that_failed_absurdly_often_still_has_a_backoff(retries: int):
    """Hurts a worker that gets a hostile count: doubling must not overflow."""
    policy = RetryPolicy(max_retries=2**60, min_backoff=1000, max_backoff=60_000)

    assert policy.backoff(retries, lambda: 1.0) == 60_000


def test_a_backoff_of_zero_means_at_once():
    """Hurts users who ask for it: Dramatiq itself turns an explicit 0 into 15 seconds."""
    policy = RetryPolicy(max_retries=4, min_backoff=0, max_backoff=60_000)

    assert decide(delivery(retries=3), exception=RuntimeError(), policy=policy).delay_ms == 0


def test_a_cap_below_the_base_rules():
    """Hurts users who lower max_backoff and forget min_backoff."""
    policy = RetryPolicy(max_retries=4, min_backoff=30_000, max_backoff=500)

    assert policy.backoff(0, lambda: 1.0) == 500


@pytest.mark.parametrize(("asked", "given"), [(1500, 1500), (0, 0), (-5, 0), (0.5, 0.5)])
def test_a_delay_that_the_actor_asks_for_is_kept_to_the_letter(asked: float, given: float):
    """Hurts users who pass on a server's Retry-After: jitter would send them back too early."""
    policy = RetryPolicy(max_retries=4, min_backoff=30_000, max_backoff=60_000)

    decision = decide(delivery(), exception=Retry("again", delay=asked), policy=policy)  # type: ignore[arg-type]

    assert decision.delay_ms == given


@pytest.mark.parametrize("asked", [math.inf, -math.inf, math.nan, 10**30, 1e300, "soon", [], True])
def test_a_delay_that_makes_no_sense_becomes_one_that_does(asked: Any):
    """Hurts the whole worker: a message that cannot be published as a retry stays un-acked and holds its place."""
    policy = RetryPolicy(max_retries=4, min_backoff=30_000, max_backoff=60_000)

    decision = decide(delivery(), exception=Retry("again", delay=asked), policy=policy)

    assert decision.outcome is Outcome.RETRIED
    assert 0 <= decision.delay_ms <= 53 * WEEK_MS
