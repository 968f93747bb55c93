"""Retries, limits and interrupts, as users of Dramatiq know them."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq.common import current_millis
from dramatiq.errors import RateLimitExceeded, Retry
from dramatiq.middleware import CurrentMessage, Shutdown, TimeLimitExceeded
from dramatiq.rate_limits import BucketRateLimiter, ConcurrentRateLimiter, WindowRateLimiter
from dramatiq.rate_limits.backends import StubBackend as StubLimits

if TYPE_CHECKING:
    from .conftest import Stage

#: For a case that is about RabbitMQ, or about what StubBroker has from Dramatiq's.
on_rabbitmq = pytest.mark.parametrize("stage", ["rabbitmq"], indirect=True)


class NoSuchMonth(Exception):
    """An error that an actor expects."""


class NoSuchYear(Exception):
    """Another."""


def test_an_actor_that_fails_once_runs_again_and_succeeds(working: Stage):
    """Hurts everybody: it is what Retries is for."""
    runs: list[str] = []

    @dramatiq.actor(min_backoff=50, max_backoff=500)
    def build() -> None:
        runs.append("failed" if not runs else "done")
        if len(runs) == 1:
            raise RuntimeError("no route")

    build.send()

    working.wait(lambda: len(runs) == 2)
    working.settle()
    assert runs == ["failed", "done"]
    assert working.dead_letters() == []


def test_an_actor_that_always_fails_runs_max_retries_times_more_and_is_a_dead_letter(working: Stage):
    """Hurts whoever looks for it: on stock Dramatiq the dead letter is in another queue and says less."""
    runs: list[int] = []

    @dramatiq.actor(max_retries=3, min_backoff=10, max_backoff=100)
    def build(month: str) -> None:
        runs.append(1)
        raise RuntimeError("no route")

    build.send("march")

    working.wait(lambda: len(runs) == 4)
    working.settle()
    assert len(runs) == 4
    (dead,) = working.dead_letters()
    assert (dead.reason, dead.args, dead.attempts) == ("retries_exhausted", ["march"], 4)
    assert dead.exception == "RuntimeError"


@on_rabbitmq
def test_joining_with_dramatiqs_own_arguments_waits_for_retries(working: Stage):
    """Hurts existing test-suites: ``broker.join(queue)`` and ``worker.join()`` are all that they have."""
    runs: list[int] = []

    @dramatiq.actor(max_retries=2, min_backoff=400, max_backoff=400)
    def build() -> None:
        runs.append(1)
        raise RuntimeError("no route")

    build.send()

    working.broker.join(build.queue_name)
    assert working.worker is not None
    working.worker.join()
    assert len(runs) == 3


def test_a_message_is_retried_until_it_is_too_old(working: Stage):
    """Hurts users of ``max_age`` with many retries: the age ends them."""
    runs: list[int] = []

    @dramatiq.actor(max_age=2_500, max_retries=1000, min_backoff=500, max_backoff=500)
    def build() -> None:
        runs.append(1)
        raise RuntimeError("no route")

    build.send()

    (dead,) = working.wait(working.dead_letters)
    assert dead.reason == "too_old"
    assert dead.attempts == len(runs) >= 1


def test_a_message_that_waited_longer_than_its_max_age_does_not_run(stage: Stage):
    """Hurts whoever has no use for late work."""
    runs: list[int] = []

    @dramatiq.actor(max_age=1)
    def build() -> None:
        runs.append(1)

    sent = build.send()
    stage.wait(lambda: current_millis() > sent.message_timestamp + 1)

    stage.start_worker()

    (dead,) = stage.wait(stage.dead_letters)
    assert dead.reason == "too_old"
    assert runs == []


def test_asking_for_a_retry_is_not_logged_as_an_error(working: Stage, caplog: pytest.LogCaptureFixture):
    """Hurts on-call: ``Retry`` is a plan, not an accident."""

    @dramatiq.actor(max_retries=0)
    def build() -> None:
        raise Retry("later")

    build.send()

    working.wait(working.dead_letters)
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


def test_an_actor_can_say_after_how_long_it_wants_to_run_again(working: Stage):
    """Hurts clients of servers that send Retry-After. A retry may be a quarter of a second early, see the README."""
    runs: list[float] = []

    @dramatiq.actor(max_retries=1, min_backoff=60_000)
    def build() -> None:
        runs.append(time.monotonic())
        if len(runs) == 1:
            raise Retry(delay=1000)

    build.send()

    working.wait(lambda: len(runs) == 2)
    assert runs[1] - runs[0] >= 0.74


@pytest.mark.parametrize("by", ["actor", "message"])
@pytest.mark.parametrize("option", ["min_backoff", "max_backoff"])
def test_a_backoff_of_zero_means_at_once(working: Stage, by: str, option: str):
    """Hurts users and their tests: zero is a number, not "unset"."""
    runs: list[int] = []
    options: dict[str, Any] = {"max_retries": 10, "min_backoff": 3_600_000}

    @dramatiq.actor(**{**options, option: 0} if by == "actor" else options)
    def build() -> None:
        runs.append(1)
        raise RuntimeError("no route")

    if by == "actor":
        build.send()
    else:
        build.send_with_options(**{option: 0})

    working.wait(lambda: len(runs) == 11)
    working.settle()
    assert len(runs) == 11


def test_options_of_the_message_come_before_those_of_the_actor(working: Stage):
    """Hurts callers who know better for this one message."""
    runs: list[int] = []

    @dramatiq.actor(max_retries=99, min_backoff=3_600_000, max_backoff=3_600_000)
    def build() -> None:
        runs.append(1)
        raise RuntimeError("no route")

    build.send_with_options(max_retries=4, min_backoff=10, max_backoff=50)

    working.wait(lambda: len(runs) == 5)
    working.settle()
    assert len(runs) == 5


def test_a_predicate_can_stop_retries_early_but_not_prolong_them(working: Stage):
    """Hurts users of ``retry_when``. On stock Dramatiq it replaces ``max_retries``; here nothing goes beyond that."""
    runs: list[str] = []

    def some(retries: int, exception: BaseException) -> bool:
        return retries < 3 and isinstance(exception, RuntimeError)

    def build(what: str) -> None:
        runs.append(what)
        raise RuntimeError("again") if what != "wrong" else ValueError("never again")

    often = dramatiq.actor(build, actor_name="often", retry_when=some, min_backoff=0)
    once = dramatiq.actor(build, actor_name="once", retry_when=some, max_retries=0, min_backoff=0)

    often.send("wrong")
    often.send("again")
    once.send("capped")
    working.wait(lambda: len(runs) == 6)
    working.settle()
    assert sorted(runs) == ["again"] * 4 + ["capped", "wrong"]


@pytest.mark.parametrize(
    ("error", "throws"),
    [(NoSuchMonth, NoSuchMonth), (NoSuchMonth, (NoSuchMonth,)), (NoSuchYear, (NoSuchMonth, NoSuchYear))],
)
def test_an_expected_exception_is_never_retried_and_no_error_in_the_log(
    working: Stage, caplog: pytest.LogCaptureFixture, error: type[Exception], throws: Any
):
    """Hurts on-call: an expected exception is told as information. That it is a dead letter is a warning here."""
    runs: list[int] = []

    @dramatiq.actor(throws=throws)
    def build() -> None:
        runs.append(1)
        raise error("of the calendar")

    with caplog.at_level(logging.INFO):
        build.send()
        (dead,) = working.wait(working.dead_letters)
        working.settle()

    assert runs == [1]
    assert dead.reason == "permanent_error"
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []
    assert any("with expected exception" in one.getMessage() for one in caplog.records)


def test_whom_on_retry_exhausted_names_is_told_once_at_the_end(working: Stage):
    """Hurts users whose alarm this is."""
    told: list[tuple[Any, ...]] = []

    @dramatiq.actor(max_retries=1, min_backoff=0, on_retry_exhausted="alarm")
    def build(month: str) -> None:
        raise RuntimeError("no route")

    @dramatiq.actor
    def alarm(message: dict[str, Any], retries: dict[str, int]) -> None:
        told.append((message["args"], retries))

    build.send("march")

    working.wait(lambda: told)
    working.settle()
    assert told == [(["march"], {"retries": 1, "max_retries": 1})]


def test_an_actor_can_see_how_often_its_message_was_retried_and_why(working: Stage):
    """Hurts actors that do something else the second time: the options stand where Dramatiq puts them."""
    seen: list[tuple[Any, str]] = []

    @dramatiq.actor(max_retries=2, min_backoff=0)
    def build() -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        seen.append((message.options.get("retries"), message.options.get("traceback", "")[-9:].strip()))
        raise RuntimeError("no route")

    build.send()

    working.wait(lambda: len(seen) == 3)
    assert seen == [(None, ""), (1, "no route"), (2, "no route")]


# -- rate limits


def test_a_rate_limit_that_is_exceeded_is_retried_and_no_error_in_the_log(
    working: Stage, limits: StubLimits, caplog: pytest.LogCaptureFixture
):
    """Hurts users of rate limiters: "not now" must neither lose the message nor wake anybody."""
    running = threading.Semaphore(0)
    release = threading.Event()
    most: list[int] = []
    inside = 0
    mutex = ConcurrentRateLimiter(limits, "mutex", limit=1)

    @dramatiq.actor(max_retries=100, min_backoff=50, max_backoff=300)
    def build() -> None:
        nonlocal inside
        with mutex.acquire():
            inside += 1
            most.append(inside)
            running.release()
            assert release.wait(30)
            inside -= 1

    for _ in range(3):
        build.send()
    assert running.acquire(timeout=30)
    release.set()

    working.wait(lambda: len(most) == 3)
    working.settle()
    assert most == [1, 1, 1]
    assert working.dead_letters() == []
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("kind", ["bucket", "window"])
def test_a_limiter_that_says_no_ends_in_a_dead_letter_when_nothing_is_retried(
    working: Stage, limits: StubLimits, kind: str
):
    """Hurts nobody by surprise: ``RateLimitExceeded`` counts like any other exception."""
    limiter: Any = (
        BucketRateLimiter(limits, kind, limit=1, bucket=60_000)
        if kind == "bucket"
        else WindowRateLimiter(limits, kind, limit=1, window=60)
    )
    runs: list[str] = []

    @dramatiq.actor(max_retries=0)
    def build() -> None:
        with limiter.acquire():
            runs.append("inside")

    build.send()
    working.wait(lambda: runs)
    working.settle()
    build.send()

    (dead,) = working.wait(working.dead_letters)
    assert dead.exception == RateLimitExceeded.__name__
    assert runs == ["inside"]


def test_a_limiter_can_be_asked_without_an_exception(working: Stage, limits: StubLimits):
    """Hurts actors that do something smaller instead."""
    answers: list[bool] = []
    limiter = WindowRateLimiter(limits, "window", limit=1, window=60)

    @dramatiq.actor
    def build() -> None:
        with limiter.acquire(raise_on_failure=False) as acquired:
            answers.append(acquired)

    for count in (1, 2):
        build.send()
        working.wait(lambda count=count: len(answers) == count)
    assert answers == [True, False]


# -- limits of time, and the end of a worker


@pytest.mark.parametrize("by", ["actor", "message"])
def test_an_actor_that_runs_longer_than_its_time_limit_fails(working: Stage, by: str):
    """Hurts every worker with a body that never ends."""
    ended: list[str] = []

    @dramatiq.actor(max_retries=0, time_limit=300 if by == "actor" else 600_000)
    def build() -> None:
        try:
            for _ in range(3000):
                time.sleep(0.01)
            ended.append("well")
        except TimeLimitExceeded:
            ended.append("interrupted")
            raise

    build.send_with_options(**({} if by == "actor" else {"time_limit": 300}))

    (dead,) = working.wait(working.dead_letters)
    assert ended == ["interrupted"]
    assert dead.exception == "TimeLimitExceeded"


def test_an_actor_that_wants_to_know_is_interrupted_when_its_worker_stops_and_runs_again_elsewhere(
    working: Stage,
):
    """Hurts long actors in a deploy. Dramatiq charges an attempt for it; here the message goes back as it was."""
    started = threading.Event()
    ended: list[str] = []

    @dramatiq.actor(notify_shutdown=True, max_retries=0)
    def build() -> None:
        started.set()
        if ended:
            ended.append("well")
            return
        try:
            for _ in range(3000):
                time.sleep(0.01)
        except Shutdown:
            ended.append("interrupted")
            raise

    build.send()
    assert started.wait(30)
    working.stop_worker()
    assert ended[0] == "interrupted"

    working.start_worker()  # another thread of the first may have been quick enough to take it

    working.wait(lambda: len(ended) == 2)
    assert ended == ["interrupted", "well"]
    assert working.dead_letters() == []


def test_an_actor_that_does_not_want_to_know_ends_in_peace_when_its_worker_stops(working: Stage):
    """Hurts actors that cannot be interrupted."""
    started, ended = threading.Event(), threading.Event()

    @dramatiq.actor
    def build() -> None:
        started.set()
        time.sleep(0.3)
        ended.set()

    build.send()
    assert started.wait(30)
    working.stop_worker()

    assert ended.is_set()
    assert working.waiting() == []
