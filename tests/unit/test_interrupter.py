"""The interrupter: who may be struck, when, how often, and what is said about a body that does not react."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller

import pytest
from dramatiq.middleware import Shutdown, TimeLimitExceeded

from dramatiq_safeops import interrupter as interrupter_module
from dramatiq_safeops.body import run
from dramatiq_safeops.interrupter import INTERRUPTER, Interrupter
from dramatiq_safeops.watch import Watch

#: Where a test must not depend on the machine's speed, it waits this long before it gives up.
PATIENCE_S = 10.0


class ByHand(Interrupter):
    """An interrupter without its thread: ``check`` is called by the test, which also turns the clock."""

    def __init__(self) -> None:
        self.time = 1000.0
        super().__init__(now=lambda: self.time)

    def _start(self) -> None:
        pass


def watch_of(interrupter: Interrupter, *, limit_s: float = math.inf, message_id: str = "m-1") -> Watch:
    return interrupter.watch(
        limit_s=limit_s, exception=TimeLimitExceeded, actor_name="build_report", message_id=message_id
    )


def spin(seconds: float = PATIENCE_S) -> str:
    """Run bytecode, where an exception can land at every turn."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "ran to its end"


def nothing_arrives() -> None:
    """Fails (in whatever thread) if an exception is still on its way."""
    for _ in range(2000):
        pass


class Job(threading.Thread):
    """A thread whose outcome can be asked for."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.value: object = None
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as error:
            self.failure = error

    def outcome(self) -> object:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the thread did not come back"
        return self.value if self.failure is None else type(self.failure)


@pytest.fixture
def tiny_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# --- who is struck -------------------------------------------------------------------------------


def test_a_body_is_interrupted_at_its_deadline():
    """Without it, an endless loop takes a worker thread for ever."""
    interrupter = Interrupter()
    started = time.monotonic()

    outcome = Job(lambda: run(watch_of(interrupter, limit_s=0.05), spin)).outcome()

    assert outcome is TimeLimitExceeded
    assert time.monotonic() - started < 5


def test_a_short_limit_counts_while_the_thread_sleeps_towards_a_long_one():
    """The thread plans its sleep by the limits it knows; a new, shorter one must not be slept through."""
    # Given a body with a long limit, which the thread has planned for
    interrupter = Interrupter()
    leave = threading.Event()
    long = Job(lambda: run(watch_of(interrupter, limit_s=600), lambda: leave.wait(PATIENCE_S)))
    while interrupter._wakes_at == math.inf:
        time.sleep(0)
    # When one with a short limit starts
    outcome = Job(lambda: run(watch_of(interrupter, limit_s=0.05, message_id="m-2"), spin)).outcome()
    # Then it is interrupted, and the other is not
    assert outcome is TimeLimitExceeded
    leave.set()
    assert long.outcome() is True


def test_a_body_that_starts_while_the_thread_makes_its_plan_is_not_forgotten():
    """Neither in the plan nor a reason for a new one, it would run without a limit."""
    first: list[Watch] = []
    second: list[Job] = []

    class StartsABodyInBetween(Interrupter):
        def check(self) -> float:
            again_at = super().check()
            if first and first[0].interrupted_at is not None and not second:
                second.append(Job(lambda: run(watch_of(self, limit_s=0.1, message_id="m-2"), spin)))
                while "m-2" not in [watch.message_id for watch in self.running()]:
                    time.sleep(0)
            return again_at

    # Given a thread that has interrupted one body, and is about to plan its next look
    interrupter = StartsABodyInBetween(report_after=1000)
    first.append(watch_of(interrupter, limit_s=0.1))
    with pytest.raises(TimeLimitExceeded):
        run(first[0], spin)
    while not second:
        time.sleep(0)
    # Then the body that started just then has its limit, too
    assert second[0].outcome() is TimeLimitExceeded


def test_bodies_with_a_long_limit_do_not_wake_the_thread():
    """A wake-up for each message would cost more than the limit is worth."""
    # Given a thread that has planned for a limit
    interrupter = Interrupter()
    looks = []
    check = interrupter.check
    interrupter.check = lambda: looks.append(1) or check()
    run(watch_of(interrupter, limit_s=600), lambda: None)
    while interrupter._wakes_at == math.inf:
        time.sleep(0)
    before = len(looks)
    # When many more come and go
    for _ in range(1000):
        run(watch_of(interrupter, limit_s=600), lambda: None)
    # Then it slept on
    assert len(looks) == before
    assert interrupter._wake_ups.empty()


def test_a_body_is_struck_once_at_most():
    """A second exception would strike the clean-up that the first one asked for."""
    interrupter = ByHand()
    watch = watch_of(interrupter, limit_s=1)
    answers = []

    def body() -> str:
        answers.append(interrupter.interrupt(watch, Shutdown))
        return "unreachable"

    def cleans_up() -> str:
        try:
            return body()
        except Shutdown:
            interrupter.time += 2
            interrupter.check()
            answers.append(interrupter.interrupt(watch, Shutdown))
            spin(0.02)
            return "cleaned up"

    assert run(watch, cleans_up) == "cleaned up"
    assert answers == [False]  # the first call was struck before it could answer
    nothing_arrives()


def test_only_a_running_body_can_be_interrupted():
    """The drain asks for bodies that it has seen a moment ago: they may have ended, and the thread may run another."""
    interrupter = ByHand()
    watch = watch_of(interrupter)

    before = interrupter.interrupt(watch, Shutdown)
    run(watch, lambda: None)
    after = interrupter.interrupt(watch, Shutdown)
    other = run(watch_of(interrupter), lambda: interrupter.interrupt(watch, Shutdown))

    assert (before, after, other) == (False, False, False)
    nothing_arrives()


def test_a_body_without_a_limit_can_still_be_interrupted():
    """The drain interrupts bodies that state no limit, too."""
    interrupter = Interrupter()
    job = Job(lambda: run(watch_of(interrupter), spin))
    while not interrupter.running():
        time.sleep(0)

    (watch,) = interrupter.running()

    assert interrupter.interrupt(watch, Shutdown)
    assert job.outcome() is Shutdown


@pytest.mark.parametrize("limit_s", [1e12, 1e300, math.inf])
def test_a_limit_of_a_thousand_years_does_not_stop_the_thread(limit_s):
    """Python refuses to wait that long with an OverflowError, and nothing else would be interrupted any more."""
    interrupter = Interrupter()
    run(watch_of(interrupter, limit_s=limit_s), lambda: None)

    assert Job(lambda: run(watch_of(interrupter, limit_s=0.02), spin)).outcome() is TimeLimitExceeded


def test_a_failure_of_the_thread_does_not_end_it(caplog):
    """A log handler that raises must not switch off every time limit of the process."""

    class Failing(Interrupter):
        failures = iter([RuntimeError("disk full")])

        def check(self) -> float:
            for failure in self.failures:
                raise failure
            return super().check()

    interrupter = Failing()

    outcome = Job(lambda: run(watch_of(interrupter, limit_s=0.02), spin)).outcome()

    assert outcome is TimeLimitExceeded
    assert "time_limit.failed" in [getattr(r, "event", None) for r in caplog.records]


# --- the race between the end of a body and the interrupt ------------------------------------------


def test_an_interrupt_that_comes_as_the_body_returns_is_dropped_and_the_result_kept():
    """Otherwise work that is done counts as failed, and is done again."""
    # Given a body in C that is interrupted in its midst: nothing can land before it has returned
    interrupter = ByHand()
    watch = watch_of(interrupter)
    effects: list[object] = []
    started, struck = threading.Lock(), threading.Lock()
    started.acquire()
    struck.acquire()

    def strike() -> bool:
        started.acquire()
        answer = interrupter.interrupt(watch, TimeLimitExceeded)
        struck.release()
        return answer

    striker = Job(strike)
    steps = (started.release, struck.acquire, partial(effects.append, "done"))
    # When it runs
    result = run(watch, partial(list, map(methodcaller("__call__"), steps)))
    # Then it counts as returned
    assert striker.outcome() is True
    assert effects == ["done"]
    assert result == [None, True, None]
    nothing_arrives()


def test_a_body_does_not_leave_while_somebody_is_about_to_interrupt_it(monkeypatch):
    """Decided, but not yet raised: it would be raised into whatever the thread does next."""
    # Given an interrupter that takes its time between the decision and the raising
    interrupter = ByHand()
    watch = watch_of(interrupter)
    deciding = threading.Event()
    set_pending = interrupter_module._set_pending

    def slowly(*args: object) -> int:
        deciding.set()
        time.sleep(0.1)
        return set_pending(*args)

    monkeypatch.setattr(interrupter_module, "_set_pending", slowly)
    armed = threading.Event()
    striker = Job(lambda: armed.wait(PATIENCE_S) and interrupter.interrupt(watch, TimeLimitExceeded))
    # When the body returns in between

    def body() -> str:
        armed.set()
        assert deciding.wait(PATIENCE_S)
        return "done"

    result = run(watch, body)
    # Then it was waited for, and dropped
    assert watch.interrupted_at is not None
    assert result == "done"
    assert striker.outcome() is True
    spin(0.2)


def test_what_was_raised_and_has_not_landed_is_taken_back():
    """It would land in the next guard."""
    # Given a thread in a call into C, with an exception on its way
    interrupter = ByHand()
    lock = threading.Lock()
    lock.acquire()
    watches: queue.SimpleQueue[Watch] = queue.SimpleQueue()

    def waits() -> str:
        watch = watch_of(interrupter)
        watch.arm()
        watches.put(watch)
        lock.acquire()
        nothing_arrives()
        return "unharmed"

    job = Job(waits)
    watch = watches.get(timeout=PATIENCE_S)
    while sys._current_frames()[watch.thread_ident].f_code.co_name != "waits":
        time.sleep(0)
    time.sleep(0.05)  # there is no way to see from outside that it has entered the call
    assert interrupter.interrupt(watch, TimeLimitExceeded)
    # When its watch is taken off (here by us, as it cannot)
    watch.disarm()
    # Then nothing arrives
    lock.release()
    assert job.outcome() == "unharmed"


def test_an_interrupt_that_comes_while_the_watch_is_taken_off_is_dropped():
    """The last place where it can land; from there it would go into the next guard."""

    class StrikesWhenAsked(dict):
        def pop(self, *key: object) -> object:
            interrupter.interrupt(watch, TimeLimitExceeded)
            return super().pop(*key)

    interrupter = ByHand()
    interrupter._armed = StrikesWhenAsked()
    watch = watch_of(interrupter)

    result = run(watch, lambda: "done")

    assert watch.interrupted_at is not None
    assert result == "done"
    assert not interrupter.runs_here()
    nothing_arrives()


def test_a_body_that_fails_while_it_is_interrupted_fails_with_its_own_exception():
    """A permanent failure that turns into a time limit is retried for nothing."""

    class StrikesWhenAsked(dict):
        def pop(self, *key: object) -> object:
            interrupter.interrupt(watch, TimeLimitExceeded)
            return super().pop(*key)

    interrupter = ByHand()
    interrupter._armed = StrikesWhenAsked()
    watch = watch_of(interrupter)

    with pytest.raises(KeyError, match="own"):
        run(watch, partial({}.__getitem__, "own"))
    assert watch.interrupted_at is not None
    nothing_arrives()


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Python swallows what is raised in a finalizer, an interrupt too, and pytest takes that for an error."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("tiny_switch_interval", "no_garbage")
@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_every_race_has_one_consistent_ending(ending):
    """Thousands of interrupts against the start and the end of a body: it is interrupted, or its ending stands.

    The bodies are in C, where nothing can land. So an effect must be there exactly if the interrupt is not.
    """
    # Given a thread that interrupts each body as soon as it can
    interrupter = ByHand()
    watches: queue.SimpleQueue[Watch | None] = queue.SimpleQueue()
    over = [-1]

    def strike() -> None:
        while (watch := watches.get()) is not None:
            while not interrupter.interrupt(watch, TimeLimitExceeded) and int(watch.message_id) > over[0]:
                pass

    striker = Job(strike)
    effects: list[object] = []
    kinds: Counter[tuple[str, bool]] = Counter()
    # When bodies with different distances to the interrupt run
    end = time.monotonic() + 2.5
    for turn in itertools.count():
        if time.monotonic() > end:
            break
        effects.clear()
        # Every eighth body lets the other thread run in its midst: the interrupt then lands as it ends.
        wait = map(time.sleep, (1e-4,) if turn % 8 == 0 else ())
        body = itertools.chain(wait, map(int, ("1", "x") if ending == "raises" else ("1",)))
        watch = watch_of(interrupter, message_id=str(turn))
        watches.put(watch)
        for _ in range(turn % 11):
            pass
        try:
            run(watch, partial(effects.extend, body))
            kind = "returned"
        except ValueError:
            kind = "raised"
        except TimeLimitExceeded:
            kind = "interrupted"
        over[0] = turn
        # Then what happened and what is said about it are the same
        assert (kind == "interrupted") == (effects == [])
        nothing_arrives()
        kinds[kind, watch.interrupted_at is not None] += 1
    watches.put(None)
    striker.outcome()

    print(dict(kinds))  # noqa: T201
    own = "raised" if ending == "raises" else "returned"
    assert kinds[own, True] > 100  # the interrupt came too late, and was dropped
    assert kinds[own, False] > 100
    assert kinds["interrupted", False] == 0
    assert interrupter.running() == []


# --- bodies that do not react ----------------------------------------------------------------------


def stuck_events(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if getattr(r, "event", None) == "time_limit.stuck"]


def test_a_body_stuck_in_a_call_into_c_is_reported_and_again_each_minute(caplog):
    """Its worker thread is gone until somebody acts; nobody acts on what nobody says."""
    # Given a body in a C call that nothing can interrupt
    interrupter = ByHand()
    lock = threading.Lock()
    lock.acquire()

    def waits_for_a_lock() -> None:
        lock.acquire()

    job = Job(lambda: run(watch_of(interrupter, limit_s=10), waits_for_a_lock))
    while not interrupter.running():
        time.sleep(0)
    # When its limit has passed
    interrupter.time += 10
    assert interrupter.check() == interrupter.time + 5
    # Then it has five seconds, is reported once, and again a minute later with the new time
    interrupter.time += 4.9
    interrupter.check()
    assert stuck_events(caplog) == []
    assert interrupter.stuck() == []
    interrupter.time += 0.1
    assert interrupter.check() == interrupter.time + 60
    interrupter.check()
    interrupter.time += 60
    interrupter.check()
    first, second = stuck_events(caplog)
    assert (first.overdue_s, second.overdue_s) == (5, 65)
    assert first.levelname == "ERROR"
    for part in (
        "build_report",
        "m-1",
        "5.0 s",
        "TimeLimitExceeded",
        f"{__file__}:",
        "waits_for_a_lock",
        "into C",
    ):
        assert part in first.getMessage()
    # And health checks can ask
    (body,) = interrupter.stuck()
    assert (body.actor_name, body.message_id, body.overdue_s) == ("build_report", "m-1", 65)
    # And when the call ends, so does the body
    lock.release()
    assert job.outcome() is TimeLimitExceeded
    assert interrupter.stuck() == []


def test_a_body_stuck_in_sleep_is_reported_by_the_thread_itself(caplog):
    """The report must not depend on another message coming by."""
    interrupter = Interrupter(report_after=0.1)
    reported = threading.Event()
    interrupter._report = lambda bodies, report=interrupter._report: (report(bodies), reported.set())

    def sleeps() -> None:
        time.sleep(1.0)

    job = Job(lambda: run(watch_of(interrupter, limit_s=0.05), sleeps))

    assert reported.wait(PATIENCE_S)
    assert job.outcome() is TimeLimitExceeded
    (record,) = stuck_events(caplog)
    assert record.where.endswith(" sleeps")


def test_a_body_that_reacts_is_not_reported(caplog):
    """An error for each time limit would hide the bodies that are really stuck."""
    interrupter = Interrupter(report_after=0.05)

    assert Job(lambda: run(watch_of(interrupter, limit_s=0.02), spin)).outcome() is TimeLimitExceeded
    # A later body makes sure that the thread has looked again since.
    assert Job(lambda: run(watch_of(interrupter, limit_s=0.1), spin)).outcome() is TimeLimitExceeded
    assert stuck_events(caplog) == []


# --- forks -----------------------------------------------------------------------------------------


def outcome_in_child(call: Callable[[], object]) -> int:
    """Fork, call ``call`` in the child, return its exit code: 0 if it returned True."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if call() is True else 2
        finally:
            os._exit(code)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("the child did not come back")


def is_limited() -> bool:
    try:
        run(watch_of(INTERRUPTER, limit_s=0.05), spin)
    except TimeLimitExceeded:
        return True
    return False


pytest_fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest_fork
def test_time_limits_hold_in_a_forked_child():
    """Worker processes are forked after the parent may have run bodies: threads do not come along."""
    assert is_limited()

    assert outcome_in_child(is_limited) == 0
    assert is_limited()


@pytest_fork
def test_a_child_forked_inside_a_body_is_not_interrupted_and_its_parent_still_is():
    """multiprocessing in an actor: the child is no delivery, and nobody would count its interrupt."""

    def forks() -> int:
        watch = INTERRUPTER.running()[0]
        code = outcome_in_child(
            lambda: (
                not INTERRUPTER.runs_here() and not INTERRUPTER.interrupt(watch, Shutdown) and is_limited()
            )
        )
        assert code == 0
        spin()
        return code

    with pytest.raises(TimeLimitExceeded):
        run(watch_of(INTERRUPTER, limit_s=1), forks)


@pytest_fork
def test_a_child_forked_inside_an_interrupted_body_can_leave_it():
    """The thread that was about to raise does not exist in the child: waiting for it would be for ever."""
    interrupter = ByHand()
    watch = watch_of(interrupter)
    watch.arm()
    watch._decided_for(object())  # the parent's thread has decided, and was forked away before it raised

    def leaves() -> bool:
        interrupter._after_fork_in_child()
        watch.disarm()
        return True

    assert outcome_in_child(leaves) == 0
