"""Drain: who is interrupted when a worker shuts down, and that nothing but the body is. On Dramatiq's StubBroker."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
import dramatiq.middleware
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Middleware, Shutdown

from dramatiq_safeops import testing
from dramatiq_safeops.errors import ConfigError
from dramatiq_safeops.interrupter import INTERRUPTER
from dramatiq_safeops.middleware import AsyncIO, Drain, TimeLimit

#: Where a test must not depend on the machine's speed, it waits this long before it gives up.
PATIENCE_S = 10.0


class Guarded(Middleware):
    """A guard of a user's that may be held up before and after the body, and notes what became of each actor."""

    def __init__(self) -> None:
        self.outcomes: dict[str, BaseException | None] = {}
        self.interrupted: list[str] = []
        self.hold: str = ""
        self.held, self.released = threading.Event(), threading.Event()

    def _io(self, hook: str) -> None:
        if self.hold != hook:
            return
        self.held.set()
        try:
            end = time.monotonic() + PATIENCE_S
            while not self.released.is_set() and time.monotonic() < end:
                time.sleep(0.001)
        except BaseException:
            self.interrupted.append(hook)
            raise

    def before_process_message(self, broker, message):
        self._io("before")

    def after_process_message(self, broker, message, *, result=None, exception=None):
        self.outcomes[message.actor_name] = exception
        self._io("after")


@pytest.fixture(autouse=True)
def quiet_dramatiq() -> Iterator[None]:
    """Dramatiq logs each failed message with a traceback."""
    logger = logging.getLogger("dramatiq")
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(logging.NOTSET)


@contextmanager
def working(broker: StubBroker, threads: int = 4) -> Iterator[dramatiq.Worker]:
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=threads)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop(timeout=int(PATIENCE_S * 1000))


def wait_for(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def stack(drain: Middleware | None = None) -> tuple[StubBroker, Guarded]:
    guard = Guarded()
    return StubBroker(middleware=[AsyncIO(), drain or Drain(), guard, TimeLimit()]), guard


# --- who ------------------------------------------------------------------------------------------------


def test_those_who_ask_for_it_are_interrupted_and_the_others_finish():
    """An actor that knows nothing of shutdowns must not see an exception that it cannot expect."""
    broker, guard = stack()

    @dramatiq.actor(broker=broker, notify_shutdown=True)
    def asks() -> None:
        spin(PATIENCE_S)

    @dramatiq.actor(broker=broker, notify_shutdown=True)
    async def asks_async() -> None:
        await asyncio.sleep(PATIENCE_S)

    @dramatiq.actor(broker=broker)
    def finishes() -> None:
        spin(0.5)

    @dramatiq.actor(broker=broker)
    async def finishes_async() -> None:
        await asyncio.sleep(0.5)

    with working(broker):
        for actor in (asks, asks_async, finishes, finishes_async):
            actor.send()
        wait_for(lambda: len(INTERRUPTER.running()) == 4)
        start = time.monotonic()

    assert time.monotonic() - start < PATIENCE_S / 2
    assert {name: type(outcome) for name, outcome in guard.outcomes.items()} == {
        "asks": Shutdown,
        "asks_async": Shutdown,
        "finishes": type(None),
        "finishes_async": type(None),
    }


def test_the_shutdown_of_one_worker_leaves_those_of_other_brokers_alone():
    """Two brokers in one process: the bodies of both stand in one list."""
    (mine, my_guard), (other, other_guard) = stack(), stack()

    @dramatiq.actor(broker=mine, notify_shutdown=True)
    def my_actor() -> None:
        spin(PATIENCE_S)

    @dramatiq.actor(broker=other, notify_shutdown=True)
    def other_actor() -> None:
        spin(1)

    with working(other):
        with working(mine):
            my_actor.send()
            other_actor.send()
            wait_for(lambda: len(INTERRUPTER.running()) == 2)
        assert type(my_guard.outcomes["my_actor"]) is Shutdown
        wait_for(lambda: "other_actor" in other_guard.outcomes)
    assert other_guard.outcomes == {"other_actor": None}


def test_the_shutdown_of_one_worker_leaves_the_other_of_its_broker_alone():
    """Test-suites stop one of two: the other returned each message that asks for it, hundreds of times a second."""
    # Given two workers of one broker, each with a body that asks to be interrupted
    broker = testing.StubBroker([Drain(notify_shutdown=True), TimeLimit()])
    started: list[threading.Thread] = []
    finished: list[threading.Thread] = []
    over = threading.Event()

    @dramatiq.actor(broker=broker)
    def report() -> None:
        started.append(threading.current_thread())
        while not over.is_set():
            time.sleep(0.001)
        finished.append(threading.current_thread())

    stays, goes = (dramatiq.Worker(broker, worker_timeout=50, worker_threads=1) for _ in range(2))
    stays.queue_prefetch = 1  # the second message is for the other
    stays.start()
    report.send()
    wait_for(lambda: len(started) == 1)
    goes.start()
    report.send()
    wait_for(lambda: len(started) == 2)
    assert started == [*stays.workers, *goes.workers]

    # When one of them is stopped
    goes.stop(timeout=int(PATIENCE_S * 1000))
    over.set()

    # Then the other runs its own to the end, and then what has come back
    wait_for(lambda: len(finished) == 2)
    stays.stop(timeout=int(PATIENCE_S * 1000))
    assert finished == [*stays.workers, *stays.workers]
    outcomes = [one.outcome.value for decisions in broker.decisions.values() for one in decisions]
    assert sorted(outcomes) == ["done", "done"]


@pytest.mark.parametrize(
    ("of_message", "of_actor", "here", "expected"),
    [
        (None, None, False, False),
        (None, None, True, True),
        (None, False, True, False),
        (False, True, True, False),
        (True, False, False, True),
        ("yes", None, False, False),
        (1, True, False, True),
    ],
)
def test_what_stands_closest_to_the_message_holds(of_message, of_actor, here, expected):
    """Message, then actor, then here; what is neither True nor False comes from outside and counts as unset."""
    drain = Drain(notify_shutdown=here)
    broker, _ = stack(drain)
    actor = dramatiq.actor(lambda: None, broker=broker, actor_name="a", notify_shutdown=of_actor)

    message = actor.message_with_options(notify_shutdown=of_message)

    assert drain.should_notify(actor, message) is expected


def test_a_wrong_option_is_an_error_that_names_it():
    """``notify_shutdown="no"`` would mean yes."""
    with pytest.raises(ConfigError, match=r"Drain\.notify_shutdown to be True or False, got 'no'"):
        Drain(notify_shutdown="no")
    broker, _ = stack()
    actor = dramatiq.actor(lambda: None, broker=broker, actor_name="a", notify_shutdown="no")
    with pytest.raises(ConfigError, match="notify_shutdown of actor 'a'"):
        Drain().check_actor(actor)


def test_it_stands_in_for_dramatiqs_own():
    """``add_middleware(before=dramatiq.middleware.ShutdownNotifications)`` in users' code goes on working."""
    broker = StubBroker(middleware=[Drain()])
    broker.add_middleware(Guarded(), before=dramatiq.middleware.ShutdownNotifications)

    assert [type(one) for one in broker.middleware] == [Guarded, Drain]
    assert "notify_shutdown" in broker.actor_options
    assert not hasattr(broker.middleware[1], "manager")


# --- when ---------------------------------------------------------------------------------------------


def guard_in_io(drain: Middleware) -> Guarded:
    """A worker shuts down while a guard is in I/O after a body that asks for it."""
    broker, guard = stack(drain)
    guard.hold = "after"

    @dramatiq.actor(broker=broker, notify_shutdown=True)
    def asks() -> None:
        pass

    # The guard is held until the shutdown has told whoever it tells.
    class Releases(Middleware):
        def before_worker_shutdown(self, broker, worker):
            time.sleep(0.05)
            guard.released.set()

    broker.add_middleware(Releases())
    with working(broker, threads=1):
        asks.send()
        assert guard.held.wait(PATIENCE_S)
    return guard


def test_a_guard_in_io_is_left_alone():
    """The twin of the test below."""
    guard = guard_in_io(Drain())

    assert guard.interrupted == []
    assert guard.outcomes == {"asks": None}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_with_dramatiqs_own_the_guard_is_interrupted():
    """Red on stock. If it fails, Dramatiq has repaired it."""
    assert guard_in_io(dramatiq.middleware.ShutdownNotifications()).interrupted == ["after"]


def test_a_body_whose_guards_are_not_through_yet_is_interrupted_once_it_starts():
    """Nobody would tell it later, and the worker would wait for it until its window ends."""
    broker, guard = stack()
    guard.hold = "before"

    @dramatiq.actor(broker=broker, notify_shutdown=True)
    def asks() -> None:
        spin(PATIENCE_S)

    start = 0.0
    with working(broker, threads=1):
        asks.send()
        assert guard.held.wait(PATIENCE_S)
        threading.Timer(0.2, guard.released.set).start()
        start = time.monotonic()

    assert time.monotonic() - start < PATIENCE_S / 2
    assert type(guard.outcomes["asks"]) is Shutdown


def test_a_guard_that_takes_its_time_does_not_hold_up_the_shutdown_of_the_others():
    """It may wait for a database that is away."""
    broker, guard = stack()
    guard.hold = "before"

    @dramatiq.actor(broker=broker, notify_shutdown=True)
    def asks() -> None:
        pass

    with working(broker, threads=1) as worker:
        asks.send()
        assert guard.held.wait(PATIENCE_S)
        start = time.monotonic()
        next(one for one in broker.middleware if isinstance(one, Drain)).before_worker_shutdown(
            broker, worker
        )
        took = time.monotonic() - start
        guard.released.set()

    assert took < 5


def test_what_waits_in_the_worker_is_not_started_any_more():
    """Each would be told to stop as soon as it has begun."""
    broker, _guard = stack()
    ran = []

    @dramatiq.actor(broker=broker, notify_shutdown=True)
    def asks(n: int) -> None:
        ran.append(n)
        spin(PATIENCE_S)

    with working(broker, threads=1):
        for n in range(5):
            asks.send(n)
        wait_for(INTERRUPTER.running)

    assert ran == [0]


def test_a_worker_that_starts_again_runs_what_asks_for_it():
    """Test suites start several workers on one broker."""
    broker, guard = stack()

    @dramatiq.actor(broker=broker, notify_shutdown=True)
    def asks() -> None:
        pass

    for _ in range(2):
        guard.outcomes.clear()
        with working(broker, threads=1):
            asks.send()
            wait_for(lambda: guard.outcomes)
        assert guard.outcomes == {"asks": None}


def test_a_shutdown_says_whom_it_interrupted(caplog):
    """Who wonders why a message ran twice finds it in the log."""
    broker, _ = stack()

    @dramatiq.actor(broker=broker, notify_shutdown=True)
    def asks() -> None:
        spin(PATIENCE_S)

    with caplog.at_level(logging.INFO), working(broker, threads=1):
        asks.send()
        wait_for(INTERRUPTER.running)

    (record,) = [r for r in caplog.records if getattr(r, "event", None) == "drain.interrupted"]
    assert record.actor_name == "asks"
