"""The wrapper around an actor's function, and TimeLimit, which arms it: in real workers on Dramatiq's StubBroker."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
import dramatiq.middleware
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, Middleware, SkipMessage, TimeLimitExceeded

from dramatiq_safeops import body
from dramatiq_safeops.errors import ConfigError
from dramatiq_safeops.interrupter import INTERRUPTER
from dramatiq_safeops.middleware.time_limit import TimeLimit

#: Where a test must not depend on the machine's speed, it waits this long before it gives up.
PATIENCE_S = 10.0


def spin(seconds: float = PATIENCE_S) -> str:
    """Run bytecode, where an exception can land at every turn."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "ran to its end"


def deliver(
    fn: Callable[..., Any], *args: Any, limit_ms: float | None = 600_000, name: str = "report"
) -> Any:
    """What a worker thread does with one delivery."""
    body.begin(limit_ms, actor_name=name, message_id="m-1")
    try:
        return fn(*args)
    finally:
        body.end()


# --- plain calls ---------------------------------------------------------------------------------


def test_a_direct_call_is_just_a_call():
    """Actors are called directly in users' unit tests, where nothing may interrupt them."""
    called = []

    def report(month: str, *, currency: str) -> tuple[str, str, bool]:
        called.append(month)
        return month, currency, INTERRUPTER.runs_here()

    wrapped = body.wrap(report, actor_name="report")

    assert wrapped("2013-01", currency="EUR") == ("2013-01", "EUR", False)
    assert called == ["2013-01"]


def test_a_wrapper_looks_like_the_function_and_is_not_wrapped_twice():
    """Arguments are checked against the actor's signature; two wrappers would arm twice."""

    def report(month: str, pages: int = 3) -> None:
        """Build it."""

    wrapped = body.wrap(report, actor_name="report")

    assert inspect.signature(wrapped) == inspect.signature(report)
    assert (wrapped.__name__, wrapped.__doc__) == ("report", "Build it.")
    assert body.wrap(wrapped, actor_name="report") is wrapped


def test_one_function_under_two_names_is_limited_under_both():
    """A function may be declared as two actors, the second time wrapped already."""

    def runs_here() -> bool:
        return INTERRUPTER.runs_here()

    first = body.wrap(runs_here, actor_name="first")
    second = body.wrap(first, actor_name="second")

    assert deliver(first, name="first") is True
    assert deliver(second, name="second") is True
    assert deliver(second, name="first") is True


# --- deliveries ------------------------------------------------------------------------------------


def test_a_delivery_is_interrupted_at_its_limit_and_says_so():
    """The dead letter shows this text."""
    wrapped = body.wrap(spin, actor_name="report")

    with pytest.raises(TimeLimitExceeded, match="longer than its time limit of 50 ms"):
        deliver(wrapped, limit_ms=50)
    assert not INTERRUPTER.runs_here()


@pytest.mark.parametrize("limit_ms", [None, math.inf, 600_000])
def test_a_delivery_within_its_limit_returns_what_the_body_returned(limit_ms):
    """The usual case."""
    wrapped = body.wrap(lambda month: (month, INTERRUPTER.runs_here()), actor_name="report")

    assert deliver(wrapped, "2013-01", limit_ms=limit_ms) == ("2013-01", True)


def test_a_delivery_is_announced_once():
    """After a delivery the thread may call the actor as a plain function, and nothing may interrupt that."""
    wrapped = body.wrap(lambda: INTERRUPTER.runs_here(), actor_name="report")

    assert deliver(wrapped) is True
    assert wrapped() is False
    # Nor is it announced any more if it never ran: a guard turned the message away.
    body.begin(50, actor_name="report", message_id="m-2")
    body.end()
    assert wrapped() is False


def test_another_actor_called_before_the_body_does_not_take_its_limit():
    """A guard below TimeLimit that calls an actor's function must not be interrupted in the body's stead."""
    report = body.wrap(lambda: INTERRUPTER.runs_here(), actor_name="report")
    other = body.wrap(lambda: INTERRUPTER.runs_here(), actor_name="other")

    body.begin(600_000, actor_name="report", message_id="m-1")

    assert other() is False
    assert report() is True


def test_actors_called_inside_a_body_share_its_limit():
    """Disarming at the end of an inner call would leave the rest of the outer one without a limit."""
    inner = body.wrap(lambda: "inner", actor_name="inner")

    def countdown(n: int) -> str:
        assert INTERRUPTER.runs_here()
        assert inner() == "inner"
        assert INTERRUPTER.runs_here()
        return wrapped(n - 1) if n else spin()

    wrapped = body.wrap(countdown, actor_name="report")

    with pytest.raises(TimeLimitExceeded):
        deliver(wrapped, 3, limit_ms=100)


def test_a_message_processed_inside_a_body_shares_its_limit():
    """Brokers for tests process messages inside send(): a delivery inside a delivery."""
    inner = body.wrap(lambda: INTERRUPTER.running(), actor_name="inner")

    def sends() -> str:
        (outer,) = INTERRUPTER.running()
        assert deliver(inner, name="inner", limit_ms=1e9) == [outer]
        return spin()

    with pytest.raises(TimeLimitExceeded):
        deliver(body.wrap(sends, actor_name="report"), limit_ms=100)


def test_a_body_that_catches_the_interrupt_and_returns_has_returned():
    """Clean-up in the actor: what it returns afterwards is its result."""

    def catches() -> str:
        try:
            return spin()
        except TimeLimitExceeded:
            return "cleaned up"

    assert deliver(body.wrap(catches, actor_name="report"), limit_ms=50) == "cleaned up"
    spin(0.01)


@pytest.mark.parametrize("error", [StopIteration("end"), KeyError("k"), SystemExit(3), GeneratorExit()])
def test_what_a_body_raises_comes_out_as_it_was(error):
    """Every kind, and among them those that iterators and generators swallow."""

    def raises() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        deliver(body.wrap(raises, actor_name="report"))
    assert caught.value is error
    # The wrapper stands once in the traceback, and above the user's function.
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-2:] == ["run", "raises"]
    assert names.count("run") == 1


def test_an_exception_is_freed_as_soon_as_nobody_holds_it():
    """Its traceback holds the actor's locals: kept until the garbage collector comes, they fill a worker's memory."""

    class Big(Exception):
        pass

    def raises() -> None:
        raise Big

    gc.disable()
    try:
        try:
            deliver(body.wrap(raises, actor_name="report"))
        except Big as error:
            freed = weakref.ref(error)
        assert freed() is None
    finally:
        gc.enable()


def test_what_a_delivery_costs():
    """Printed, not judged: two calls and a wrapper around each body."""

    def seconds_for(call: Callable[[], Any], n: int = 20_000) -> float:
        start = time.perf_counter()
        for _ in range(n):
            call()
        return (time.perf_counter() - start) / n

    wrapped = body.wrap(lambda: None, actor_name="report")

    def watch() -> None:
        w = INTERRUPTER.watch(limit_s=600, exception=TimeLimitExceeded, actor_name="a", message_id="m")
        w.arm()
        w.disarm()

    def delivery() -> None:
        body.begin(600_000, actor_name="report", message_id="m-1")
        wrapped()
        body.end()

    for name, call in {
        "watch, arm, disarm": watch,
        "a whole delivery": delivery,
        "a direct call": wrapped,
    }.items():
        print(f"{name}: {min(seconds_for(call) for _ in range(3)) * 1e6:.2f} us")  # noqa: T201
    assert not INTERRUPTER.runs_here()


# --- in a real worker ------------------------------------------------------------------------------


class NosyGuard(Middleware):
    """A guard that does I/O around each body, for longer than the body's limit, and notes what became of it."""

    def __init__(self, io_s: float, *, before: bool = True) -> None:
        self.io_s = io_s
        self.before = before
        self.interrupted: list[str] = []
        self.outcomes: dict[str, list[BaseException | None]] = {}
        self._never = threading.Event()

    def _io(self, hook: str) -> None:
        try:
            self._never.wait(self.io_s)
            for _ in range(200):  # where what was raised during the wait would land
                pass
        except BaseException:
            self.interrupted.append(hook)
            raise

    def before_process_message(self, broker, message):
        if self.before:
            self._io("before")

    def after_process_message(self, broker, message, *, result=None, exception=None):
        self.outcomes.setdefault(message.message_id, []).append(exception)
        self._io("after")


@contextmanager
def working(broker: StubBroker, threads: int) -> Iterator[list[threading.Thread]]:
    """A real worker on ``broker``; gives its worker threads."""
    broker.emit_after("process_boot")
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=threads)
    worker.start()
    try:
        yield worker.workers
    finally:
        worker.stop()


@pytest.fixture
def quiet_dramatiq() -> Iterator[None]:
    """Dramatiq logs each failed message with a traceback."""
    logger = logging.getLogger("dramatiq")
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def tiny_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Python swallows what is raised in a finalizer, an interrupt too, and pytest takes that for an error."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("quiet_dramatiq", "tiny_switch_interval", "no_garbage")
def test_a_thousand_time_limits_around_guards_in_io_strike_bodies_only():
    """Struck in a guard, a message is lost or repeated, or its worker thread ends."""
    # Given guards above and below TimeLimit whose I/O takes longer than the limit, and bodies that end around it
    limit_ms, messages = 2, 1000
    above, below = NosyGuard(2 * limit_ms / 1000), NosyGuard(2 * limit_ms / 1000)
    broker = StubBroker(middleware=[above, TimeLimit(time_limit=limit_ms), below])
    started: list[int] = []
    finished: list[int] = []

    @dramatiq.actor(broker=broker)
    def work(number: int) -> None:
        started.append(number)
        spin((0, 0.9, 1.0, 1.1, 1000)[number % 5] * limit_ms / 1000)
        finished.append(number)

    ids = {work.send(number).message_id: number for number in range(messages)}
    # When a worker works them off
    with working(broker, threads=8) as threads:
        broker.join(work.queue_name, timeout=60_000)
        alive = [thread.is_alive() for thread in threads]
    # Then no guard was interrupted and no thread died
    assert above.interrupted == []
    assert below.interrupted == []
    assert alive == [True] * 8
    # And each body ran once and ended in one way, which is the one that the guards saw
    assert Counter(started) <= Counter(range(messages))
    assert above.outcomes.keys() == below.outcomes.keys() == ids.keys()
    kinds: Counter[str] = Counter()
    for message_id, number in ids.items():
        (outcome,) = above.outcomes[message_id]
        assert below.outcomes[message_id] == [outcome]
        if outcome is None:
            assert number in finished
            kinds["done"] += 1
        else:
            assert type(outcome) is TimeLimitExceeded
            kinds["interrupted"] += 1
    print(dict(kinds))  # noqa: T201
    assert kinds["interrupted"] >= messages // 5
    assert kinds["done"] >= 50
    assert not INTERRUPTER.running()


def slow_guard_and_failing_actor(time_limit: dramatiq.middleware.TimeLimit) -> tuple[NosyGuard, bool, int]:
    """One message fails at once, then a guard is in I/O past the limit. The guard, is the thread alive, messages left."""
    guard = NosyGuard(io_s=0.3, before=False)
    broker = StubBroker(middleware=[time_limit, guard])

    @dramatiq.actor(broker=broker, time_limit=100)
    def fails() -> None:
        raise KeyError("own")

    first, second = fails.send(), fails.send()
    with working(broker, threads=1) as (thread,):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and thread.is_alive():
            if len(guard.outcomes) == 2 and not broker.queues[fails.queue_name].unfinished_tasks:
                break
            thread.join(0.01)
        alive = thread.is_alive()
    return guard, alive, len({first.message_id, second.message_id} - guard.outcomes.keys())


@pytest.mark.usefixtures("quiet_dramatiq")
def test_a_guard_in_io_past_the_limit_is_left_alone():
    """The twin of the test below."""
    guard, alive, left = slow_guard_and_failing_actor(TimeLimit())

    assert guard.interrupted == []
    assert alive
    assert left == 0
    assert all(type(e) is KeyError for outcomes in guard.outcomes.values() for e in outcomes)


@pytest.mark.usefixtures("quiet_dramatiq")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_with_dramatiqs_own_time_limit_the_guard_is_interrupted_and_the_thread_dies():
    """Red on stock. If it fails, Dramatiq has repaired it, and this package's wrapper may have become needless."""
    stock = dramatiq.middleware.TimeLimit(interval=1)
    try:
        guard, alive, left = slow_guard_and_failing_actor(stock)
    finally:
        stock.manager.interval = 3600  # its thread never ends, but it need not look a thousand times a second

    assert guard.interrupted != []
    assert not alive
    assert left == 1


@pytest.mark.usefixtures("quiet_dramatiq")
def test_an_async_actor_is_cancelled_at_its_limit():
    """Its worker thread only waits for the event loop: the wait is what is interrupted."""
    cancelled = threading.Event()
    guard = NosyGuard(io_s=0)
    broker = StubBroker(middleware=[guard, AsyncIO(), TimeLimit()])

    @dramatiq.actor(broker=broker, time_limit=100)
    async def sleeps() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    message = sleeps.send()
    with working(broker, threads=1):
        broker.join(sleeps.queue_name, timeout=10_000)

    assert cancelled.is_set()
    assert [type(e) for e in guard.outcomes[message.message_id]] == [TimeLimitExceeded]


def test_a_generator_function_returns_its_generator():
    """Dramatiq does not run generators, and neither may the wrapper."""

    def pages() -> Iterator[int]:
        yield 1

    pages_of = deliver(body.wrap(pages, actor_name="report"))

    assert list(pages_of) == [1]


# --- TimeLimit's options ---------------------------------------------------------------------------


def declared(guard: TimeLimit, **options: Any) -> tuple[StubBroker, dramatiq.Actor]:
    broker = StubBroker(middleware=[guard])
    return broker, dramatiq.actor(lambda: None, actor_name="report", broker=broker, **options)


@pytest.mark.parametrize(
    ("of_message", "of_actor", "expected"),
    [
        (None, None, 600_000),
        (None, 5, 5),
        (7, 5, 7),
        (0.5, None, 0.5),
        (math.inf, 5, math.inf),
        pytest.param(10**400, 5, math.inf, id="an integer too long for a float"),
    ],
)
def test_the_limit_closest_to_the_message_holds(of_message, of_actor, expected):
    """Message, then actor, then default."""
    time_limit = TimeLimit()
    _, actor = declared(time_limit, time_limit=of_actor)

    assert time_limit.limit_of(actor.message_with_options(time_limit=of_message), actor) == expected


@pytest.mark.parametrize("junk", [0, -1, "600", True, [], {}, math.nan, -math.inf])
def test_a_message_with_a_senseless_limit_gets_its_actors(junk, caplog):
    """Messages come from outside: a limit of 0 must not make a worker useless, nor an odd type break it."""
    time_limit = TimeLimit()
    _, actor = declared(time_limit, time_limit=5)

    assert time_limit.limit_of(actor.message_with_options(time_limit=junk), actor) == 5
    assert [record.event for record in caplog.records] == ["time_limit.ignored"]


@pytest.mark.parametrize("wrong", [0, -1, "600", True, math.nan])
def test_an_actor_with_a_senseless_limit_is_refused(wrong):
    """Dramatiq takes 0 for "not set"."""
    time_limit = TimeLimit()
    broker, actor = declared(time_limit, time_limit=wrong)

    with pytest.raises(ConfigError, match=r"time_limit of actor 'report'.*above 0"):
        time_limit.check_actor(actor)
    with pytest.raises(ConfigError, match="report"):
        time_limit.check_boot(broker)
    with pytest.raises(ConfigError, match=r"TimeLimit\.time_limit"):
        TimeLimit(time_limit=wrong)


def test_actors_without_a_limit_are_named_once_at_boot(caplog):
    """Ten minutes may be too short for them, and nobody remembers that it holds."""
    time_limit = TimeLimit()
    broker, _ = declared(time_limit)
    dramatiq.actor(lambda: None, actor_name="other", broker=broker)
    dramatiq.actor(lambda: None, actor_name="limited", broker=broker, time_limit=5)

    time_limit.check_boot(broker)

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert (
        record.getMessage() == "These actors state no time_limit, so 600 s holds for them: 'other', 'report'."
    )


def test_actors_without_a_limit_are_an_error_under_strict():
    """For teams that want each limit to be a decision."""
    broker, _ = declared(TimeLimit(strict=True))
    (strict,) = broker.middleware

    with pytest.raises(ConfigError, match=r"'report'.*@dramatiq\.actor\(time_limit="):
        strict.check_boot(broker)
    broker.actors["report"].options["time_limit"] = math.inf
    strict.check_boot(broker)


def test_it_stands_in_for_dramatiqs_own():
    """``add_middleware(before=dramatiq.middleware.TimeLimit)`` in users' code goes on working."""
    broker = StubBroker(middleware=[TimeLimit()])

    broker.add_middleware(NosyGuard(0), before=dramatiq.middleware.TimeLimit)

    assert [type(m) for m in broker.middleware] == [NosyGuard, TimeLimit]
    assert "time_limit" in broker.actor_options
    assert not hasattr(broker.middleware[1], "manager")


@pytest.mark.usefixtures("quiet_dramatiq")
def test_actors_declared_before_it_was_added_are_limited_too():
    """``add_middleware`` after the actors' modules were imported."""
    guard = NosyGuard(0)
    broker = StubBroker(middleware=[guard])
    actor = dramatiq.actor(spin, broker=broker)
    broker.add_middleware(TimeLimit(time_limit=50))

    message = actor.send()
    with working(broker, threads=1):
        broker.join(actor.queue_name, timeout=10_000)

    assert [type(e) for e in guard.outcomes[message.message_id]] == [TimeLimitExceeded]


def test_a_skipped_message_leaves_no_limit_behind():
    """A guard below turns a message away: the next call in this thread is none of its business."""

    class TurnsAway(Middleware):
        def before_process_message(self, broker, message):
            raise SkipMessage

    seen = []

    class CallsTheActor(Middleware):
        def after_skip_message(self, broker, message):
            seen.append(broker.get_actor(message.actor_name).fn())

    broker = StubBroker(middleware=[CallsTheActor(), TimeLimit(), TurnsAway()])
    actor = dramatiq.actor(lambda: INTERRUPTER.runs_here(), actor_name="report", broker=broker)

    actor.send()
    with working(broker, threads=1):
        broker.join(actor.queue_name, timeout=10_000)

    assert seen == [False]


def test_a_platform_that_cannot_interrupt_is_told_at_boot(monkeypatch):
    """As Dramatiq does."""
    monkeypatch.setattr("dramatiq_safeops.middleware.time_limit.CAN_INTERRUPT", False)

    with pytest.warns(RuntimeWarning, match="no time limit holds"):
        TimeLimit().after_process_boot(StubBroker(middleware=[]))
