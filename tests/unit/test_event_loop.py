"""The event loop of async actors: a thread waits until its coroutine has ended, and an interrupt cancels it at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import dramatiq.asyncio
import dramatiq.threading
import pytest
from dramatiq.asyncio import async_to_sync, get_event_loop_thread, set_event_loop_thread
from dramatiq.middleware import Shutdown, TimeLimitExceeded

from dramatiq_safeops import body, event_loop, executor, interrupter
from dramatiq_safeops.coroutine import LOOK_EVERY_S
from dramatiq_safeops.event_loop import EventLoop
from dramatiq_safeops.interrupter import INTERRUPTER

#: Where a test must not depend on the machine's speed, it waits this long before it gives up.
PATIENCE_S = 10.0

needs_groups = pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")


@pytest.fixture(autouse=True)
def loop() -> Iterator[EventLoop]:
    """The event loop of this process, as a worker has it."""
    user = object()
    loop = event_loop.acquire(user)
    yield loop
    event_loop.release(user)


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "STOP_PATIENCE_S", 0.2)


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Python swallows what is raised in a finalizer, an interrupt too, and pytest takes that for an error."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture
def tiny_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def actor_of(fn: Callable[..., Awaitable[Any]], name: str = "report") -> Callable[..., Any]:
    """What Dramatiq and TimeLimit make of an ``async def``."""
    return body.wrap(async_to_sync(fn), actor_name=name)


def deliver(
    fn: Callable[..., Any], *args: Any, limit_ms: float | None = 600_000, name: str = "report"
) -> Any:
    """What a worker thread does with one delivery."""
    body.begin(limit_ms, actor_name=name, message_id="m-1")
    try:
        return fn(*args)
    finally:
        body.end()


def spin(seconds: float = PATIENCE_S) -> None:
    """Run bytecode, where an exception can land at every turn."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def nothing_arrives() -> None:
    """Fails if an exception is still on its way."""
    for _ in range(2000):
        pass


class Job(threading.Thread):
    """A worker thread whose outcome can be asked for."""

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


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def interrupt(exception: type[BaseException] = TimeLimitExceeded) -> None:
    """Interrupt the one body that runs."""
    wait_for(INTERRUPTER.running)
    (watch,) = INTERRUPTER.running()
    assert INTERRUPTER.interrupt(watch, exception)


# --- what comes out --------------------------------------------------------------------------------


def test_a_coroutine_runs_on_the_loop_and_its_value_comes_back(loop):
    """The usual case."""

    async def report(month: str) -> tuple[str, int]:
        await asyncio.sleep(0.001)
        return month, threading.get_ident()

    assert deliver(actor_of(report), "2013-01") == ("2013-01", loop.ident)
    assert actor_of(report)("2013-02") == ("2013-02", loop.ident)


def test_the_thread_starts_with_the_first_coroutine_and_keeps_no_process_alive(loop):
    """An app without async actors pays nothing; a coroutine that hangs must not hang the end of its process."""
    assert not loop.is_alive()

    async def report() -> None:
        pass

    actor_of(report)()

    assert loop.is_alive()
    assert loop.daemon
    assert loop.loop.is_running()


def test_a_thread_that_could_not_be_started_is_started_by_the_next_coroutine(loop, monkeypatch):
    """Hurts a machine at its limit of threads: each message after the first waited for ever."""

    async def report() -> int:
        return 7

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as at_the_limit:
        at_the_limit.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            loop.run_coroutine(report())
    values: list[int] = []
    waiting = threading.Thread(target=lambda: values.append(loop.run_coroutine(report())), daemon=True)
    waiting.start()
    waiting.join(PATIENCE_S)

    assert values == [7]


def test_many_threads_share_the_loop(loop):
    """One aiohttp session, one pool: whoever awaits it must be on one loop."""

    async def report(n: int) -> tuple[int, asyncio.AbstractEventLoop]:
        await asyncio.sleep(0.01)
        return n, asyncio.get_running_loop()

    jobs = [Job(lambda n=n: deliver(actor_of(report), n)) for n in range(16)]

    assert [job.outcome() for job in jobs] == [(n, loop.loop) for n in range(16)]


@pytest.mark.parametrize(
    "error",
    [
        KeyError("k"),
        TimeoutError("late"),
        asyncio.TimeoutError("late"),
        concurrent.futures.TimeoutError("late"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_what_a_coroutine_raises_comes_out_once_as_it_was(error):
    """A time-out that is taken for that of the wait makes an endless loop; SystemExit on the loop ends it for all."""
    runs = []

    async def raises() -> None:
        runs.append(1)
        await asyncio.sleep(0)
        raise error

    async def goes_on() -> str:
        return "the loop goes on"

    with pytest.raises(type(error)) as caught:
        deliver(actor_of(raises))
    assert caught.value is error
    assert runs == [1]
    assert actor_of(goes_on)() == "the loop goes on"
    # Our machinery is not between the actor and who reads the traceback
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)][-2:] == [
        "run_coroutine",
        "raises",
    ]


def test_an_exception_is_freed_as_soon_as_nobody_holds_it():
    """Its traceback holds the actor's locals: kept until the garbage collector comes, they fill a worker's memory."""

    class Big(Exception):
        pass

    async def raises() -> None:
        await asyncio.sleep(0)
        raise Big

    async def sleeps() -> None:
        await asyncio.sleep(PATIENCE_S)

    def freed(call: Callable[[], object], kind: type[BaseException]) -> bool:
        try:
            call()
        except kind as error:
            reference = weakref.ref(error)
        # The loop may be about to drop the task.
        async_to_sync(asyncio.sleep)(0)
        return reference() is None

    gc.disable()
    try:
        assert freed(lambda: deliver(actor_of(raises)), Big)
        assert freed(lambda: deliver(actor_of(sleeps), limit_ms=20), TimeLimitExceeded)
    finally:
        gc.enable()


def test_a_coroutine_that_is_cancelled_by_somebody_else_has_failed_in_an_ordinary_way():
    """``CancelledError`` is no ``Exception``: it would pass by every ``except Exception`` on its way out."""

    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    async def is_cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.sleep(PATIENCE_S)

    for fn in (cancels_itself, is_cancelled):
        with pytest.raises(concurrent.futures.CancelledError, match="not by its worker") as caught:
            deliver(actor_of(fn))
        assert isinstance(caught.value, Exception)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)


def test_a_coroutine_sees_the_context_of_its_worker_thread():
    """CurrentMessage, and the tracing of the user's: both are context variables."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")

    async def reads() -> tuple[str, bool]:
        before = variable.get()
        variable.set("changed in the coroutine")
        return before, asyncio.current_task() is not None

    variable.set("of the worker thread")

    assert deliver(actor_of(reads)) == ("of the worker thread", True)
    assert variable.get() == "of the worker thread"


# --- interrupts --------------------------------------------------------------------------------------


def test_a_coroutine_is_cancelled_at_its_limit_at_once():
    """Dramatiq's looks every 0.1 s. The dead letter shows the text, and where the coroutine was."""
    ended: list[float] = []

    async def sleeps() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            ended.append(time.monotonic())

    delays = []
    for _ in range(10):
        start = time.monotonic()
        with pytest.raises(TimeLimitExceeded, match="longer than its time limit of 50 ms") as caught:
            deliver(actor_of(sleeps), limit_ms=50)
        delays.append(ended[-1] - start - 0.05)
        assert "sleeps" in [f.name for f in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    print(f"cancelled {min(delays) * 1000:.1f} to {max(delays) * 1000:.1f} ms after the limit")  # noqa: T201
    assert min(delays) < 0.05
    assert not INTERRUPTER.runs_here()


def long_clean_up() -> tuple[object, bool]:
    """An async actor that needs 1.5 s to clean up after its limit. What came out, and whether it had ended by then."""
    ended = []

    async def cleans_up() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(1.5)
            ended.append(1)

    try:
        deliver(actor_of(cleans_up), limit_ms=50)
    except BaseException as error:
        return type(error), ended == [1]
    return None, ended == [1]


def test_a_coroutine_that_takes_long_to_clean_up_is_waited_for():
    """Otherwise its message is tried again beside it."""
    assert long_clean_up() == (TimeLimitExceeded, True)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_stock_gives_up_on_it_after_a_second():
    """Red on stock. If it fails, Dramatiq has repaired it, and this package's loop may have become needless."""
    ours = get_event_loop_thread()
    stock = dramatiq.asyncio.EventLoopThread(logging.getLogger(__name__))
    stock.start(timeout=PATIENCE_S)
    set_event_loop_thread(stock)
    try:
        outcome = long_clean_up()
        time.sleep(1)  # so that its coroutine ends before its loop does
    finally:
        stock.stop()
        set_event_loop_thread(ours)

    assert outcome == (RuntimeError, False)


@pytest.mark.parametrize("exception", [TimeLimitExceeded, Shutdown])
def test_what_interrupted_it_comes_out(exception):
    """A time limit is charged, a shutdown is not."""

    async def sleeps() -> None:
        await asyncio.sleep(PATIENCE_S)

    job = Job(lambda: deliver(actor_of(sleeps)))
    interrupt(exception)

    assert job.outcome() is exception


def test_a_coroutine_that_catches_the_cancellation_and_returns_has_returned():
    """As with an actor that catches ``TimeLimitExceeded``: the clean-up may have a result."""

    async def catches() -> str:
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
        return "cleaned up"

    assert deliver(actor_of(catches), limit_ms=50) == "cleaned up"


def test_a_coroutine_that_catches_the_cancellation_and_fails_has_failed_with_its_own_exception():
    """A permanent failure that turns into a time limit is retried for nothing."""

    async def fails() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            raise KeyError("own") from None

    with pytest.raises(KeyError, match="own"):
        deliver(actor_of(fails), limit_ms=50)


def test_a_coroutine_is_interrupted_once_at_most():
    """A second cancellation would strike the clean-up that the first one asked for."""
    begun, cleaning = threading.Event(), threading.Event()

    async def cleans_up() -> str:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            cleaning.set()
            await asyncio.sleep(0.2)
        return "cleaned up"

    job = Job(lambda: deliver(actor_of(cleans_up)))
    assert begun.wait(PATIENCE_S)
    (watch,) = INTERRUPTER.running()

    assert INTERRUPTER.interrupt(watch, TimeLimitExceeded)
    assert cleaning.wait(PATIENCE_S)
    assert not INTERRUPTER.interrupt(watch, Shutdown)
    assert job.outcome() == "cleaned up"


@needs_groups
def test_a_task_group_is_over_when_the_interrupt_comes_out():
    """Nothing of an attempt may be left running beside the next one."""
    ended: list[str] = []

    async def child(n: int) -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0.01 * n)
            ended.append(f"child {n}")

    async def parent() -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(3):
                group.create_task(child(n))
        ended.append("unreachable")

    with pytest.raises(TimeLimitExceeded, match="time limit of 50 ms"):
        deliver(actor_of(parent), limit_ms=50)
    assert ended == ["child 0", "child 1", "child 2"]


@needs_groups
def test_a_task_group_that_fails_while_it_is_cancelled_has_failed_with_its_own_exceptions():
    """They say more than the time limit, and whoever catches them in the actor sees the same."""

    async def child() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            raise KeyError("own")

    async def parent() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())

    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: F821 - Python 3.11
        deliver(actor_of(parent), limit_ms=50)
    assert [type(one) for one in caught.value.exceptions] == [KeyError]


@needs_groups
@pytest.mark.parametrize("limit_ms", [50, 600_000])
def test_a_group_of_nothing_but_cancellations_is_one(limit_ms):
    """Interrupted by us it is the interrupt, and else what it is."""

    async def raises_a_group() -> None:
        try:
            await asyncio.sleep(0.2 if limit_ms > 50 else PATIENCE_S)
        finally:
            one = asyncio.CancelledError()
            raise BaseExceptionGroup("all", [one, BaseExceptionGroup("more", [one])])  # noqa: F821

    expected = TimeLimitExceeded if limit_ms == 50 else BaseExceptionGroup  # noqa: F821
    with pytest.raises(expected):
        deliver(actor_of(raises_a_group), limit_ms=limit_ms)


@needs_groups
def test_a_timeout_of_the_actors_own_stays_one():
    """``asyncio.timeout`` works by cancelling, too."""

    async def has_a_timeout() -> None:
        async with asyncio.timeout(0.02):
            await asyncio.sleep(PATIENCE_S)

    async def is_interrupted_within_one() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.sleep(PATIENCE_S)

    with pytest.raises(TimeoutError):
        deliver(actor_of(has_a_timeout))
    with pytest.raises(TimeLimitExceeded):
        deliver(actor_of(is_interrupted_within_one), limit_ms=50)


@pytest.mark.parametrize("exception", [dramatiq.threading.Interrupt, KeyboardInterrupt])
def test_what_somebody_else_raises_into_the_waiting_thread_cancels_it_too(exception):
    """Extensions of Dramatiq abort messages so, and a developer presses Ctrl-C."""
    started, ended = threading.Event(), threading.Event()

    async def sleeps() -> None:
        started.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0.05)
            ended.set()

    job = Job(lambda: (actor_of(sleeps)(), nothing_arrives()))
    assert started.wait(PATIENCE_S)
    dramatiq.threading.raise_thread_exception(job.ident, exception)

    assert job.outcome() is exception
    assert ended.is_set()


@pytest.mark.usefixtures("tiny_switch_interval", "no_garbage")
def test_what_somebody_else_raises_ends_no_wait_wherever_it_lands():
    """Hundreds of aborts, from the coroutine's first step on: none leaves its coroutine behind."""
    ended = [0]

    async def is_aborted(thread: int, turns: int) -> None:
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
            dramatiq.threading.raise_thread_exception(thread, dramatiq.threading.Interrupt)
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0)
            ended[0] += 1

    actor = actor_of(is_aborted)

    def aborted(turns: int) -> int:
        count = 0
        for _ in range(20):
            with pytest.raises(dramatiq.threading.Interrupt):
                actor(threading.get_ident(), turns % 5)
            count += 1
        return count

    jobs = [Job(lambda turns=turns: aborted(turns)) for turns in range(16)]

    assert [job.outcome() for job in jobs] == [20] * 16
    assert ended == [320]


# --- coroutines inside bodies that are not async -----------------------------------------------------------


def test_a_coroutine_inside_an_ordinary_body_is_cancelled_at_the_bodys_limit():
    """An actor that calls an async one; its thread cannot be struck while it waits."""
    ended = []

    async def sleeps() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            ended.append(1)

    for inner in (actor_of(sleeps, "inner"), async_to_sync(sleeps)):
        with pytest.raises(TimeLimitExceeded, match="time limit of 50 ms"):
            deliver(body.wrap(lambda inner=inner: inner(), actor_name="report"), limit_ms=50)
    assert ended == [1, 1]


def test_an_ordinary_body_goes_on_being_limited_after_a_coroutine():
    """The watch must be aimed at the thread again."""

    async def returns() -> str:
        return "value"

    def spins() -> None:
        assert async_to_sync(returns)() == "value"
        assert actor_of(returns, "inner")() == "value"
        spin()

    with pytest.raises(TimeLimitExceeded):
        deliver(body.wrap(spins, actor_name="report"), limit_ms=100)


def test_a_body_that_was_interrupted_may_await_in_its_clean_up():
    """Struck once is enough: the clean-up of an actor may call an async one."""

    async def puts_away() -> str:
        await asyncio.sleep(0.05)
        return "cleaned up"

    def catches(inner: Callable[[], str]) -> str:
        try:
            spin()
        except TimeLimitExceeded:
            return inner()
        return "unreachable"

    for inner in (actor_of(puts_away, "inner"), async_to_sync(puts_away)):
        assert deliver(body.wrap(catches, actor_name="report"), inner, limit_ms=50) == "cleaned up"


def test_a_body_that_catches_the_interrupt_of_its_coroutine_is_not_struck_again():
    """The same, where it was the coroutine that was struck."""

    async def sleeps(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    def catches() -> str:
        try:
            return async_to_sync(sleeps)(PATIENCE_S)
        except TimeLimitExceeded:
            nothing_arrives()
            return async_to_sync(sleeps)(0.05)

    assert deliver(body.wrap(catches, actor_name="report"), limit_ms=50) == "slept"


def test_an_interrupt_between_two_targets_is_raised_and_the_coroutine_never_begins(monkeypatch):
    """The interrupter has decided, and has not raised yet, when the thread begins to wait for a coroutine."""
    # Given an interrupter that takes its time between the decision and the raising
    deciding, begun = threading.Event(), []
    set_pending = interrupter._set_pending

    def slowly(*args: object) -> int:
        deciding.set()
        time.sleep(0.1)
        return set_pending(*args)

    monkeypatch.setattr(interrupter, "_set_pending", slowly)

    async def begins() -> None:
        begun.append(1)

    made = async_to_sync(begins)

    def starts_one() -> None:
        assert deciding.wait(PATIENCE_S)
        made()

    job = Job(lambda: (deliver(body.wrap(starts_one, actor_name="report")), nothing_arrives()))
    # When it decides just before the coroutine
    interrupt()
    # Then the interrupt comes out, and nothing has begun
    assert job.outcome() is TimeLimitExceeded
    assert begun == []


def test_an_interrupt_that_has_landed_before_its_raiser_knows_is_not_raised_again(monkeypatch):
    """The thread may handle the exception, and await in its clean-up, before the one who raised it gets on."""
    # Given an interrupter that is held up right after the raising
    set_pending, landed = interrupter._set_pending, threading.Event()

    def held_up(*args: object) -> int:
        count = set_pending(*args)
        assert landed.wait(PATIENCE_S)
        time.sleep(0.1)
        return count

    monkeypatch.setattr(interrupter, "_set_pending", held_up)

    def catches(inner: Callable[..., str]) -> str:
        try:
            spin()
        except TimeLimitExceeded:
            landed.set()
            # When the body goes on to await something
            return inner(0, "cleaned up")
        return "unreachable"

    for inner in (actor_of(asyncio.sleep, "inner"), async_to_sync(asyncio.sleep)):
        landed.clear()
        # Then it may
        assert deliver(body.wrap(catches, actor_name="report"), inner, limit_ms=50) == "cleaned up"


def race(call: Callable[[], object], *, wanted: dict[str, int]) -> Counter[str]:
    """Deliver ``call`` again and again while another thread interrupts whatever body it sees. Count what comes out.

    For two seconds at least, and until each outcome has come as often as ``wanted``.
    """
    over = threading.Event()

    def strike() -> None:
        turn = 0
        while not over.is_set():
            for watch in INTERRUPTER.running():
                turn += 1
                for _ in range(turn % 97):
                    pass
                INTERRUPTER.interrupt(watch, TimeLimitExceeded)
            time.sleep(0)

    striker = Job(strike)
    outcomes: Counter[str] = Counter()
    start = time.monotonic()
    try:
        while time.monotonic() < start + 2 or any(outcomes[one] < count for one, count in wanted.items()):
            assert time.monotonic() < start + 40, f"not enough of some: {dict(outcomes)}"
            try:
                outcomes[str(deliver(call))] += 1
            except TimeLimitExceeded:
                outcomes["interrupted"] += 1
            nothing_arrives()
    finally:
        over.set()
    striker.outcome()
    assert INTERRUPTER.running() == []
    assert get_event_loop_thread()._running == set()
    return outcomes


@pytest.mark.usefixtures("tiny_switch_interval", "no_garbage")
@pytest.mark.parametrize("turns", [0, 1, 4])
def test_every_race_of_an_async_actor_has_one_consistent_ending(turns):
    """Thousands of interrupts against the start and the end of a coroutine: it is cancelled, or its ending stands."""
    effects: list[str] = []
    mixed: list[list[str]] = []

    async def works() -> str:
        effects.append("begun")
        try:
            for _ in range(turns):
                await asyncio.sleep(0)
            effects.append("done")
            return "returned"
        finally:
            effects.append("ended")

    actor = actor_of(works)

    def delivery() -> object:
        effects.clear()
        try:
            value = actor()
        except BaseException:
            if effects not in ([], ["begun", "ended"]):
                mixed.append(list(effects))
            raise
        if effects != ["begun", "done", "ended"]:
            mixed.append([*effects, "and returned"])
        return value

    # `delivery` is what counts the effects of one delivery; announced is the actor inside
    outcomes = race(delivery, wanted={"interrupted": 200, "returned": 200})

    print(dict(outcomes))  # noqa: T201
    assert mixed == []
    assert outcomes.keys() <= {"interrupted", "returned"}


@pytest.mark.usefixtures("tiny_switch_interval", "no_garbage")
def test_every_race_of_a_coroutine_inside_an_ordinary_body_has_one_consistent_ending():
    """The thread is struck before and after, and the coroutine in between. Whatever has begun has ended."""
    begun, ended = [0], [0]

    async def works() -> None:
        begun[0] += 1
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        finally:
            ended[0] += 1

    inner = actor_of(works, "inner")

    def outer() -> str:
        inner()
        inner()
        return "returned"

    outcomes = race(body.wrap(outer, actor_name="report"), wanted={"interrupted": 500})

    print(dict(outcomes), begun)  # noqa: T201
    assert begun == ended
    assert outcomes.keys() <= {"interrupted", "returned"}


@pytest.mark.usefixtures("tiny_switch_interval", "no_garbage")
def test_a_race_strikes_once_whatever_the_body_waits_for():
    """An interrupt that is counted by the thread and by the coroutine would strike the clean-up."""
    struck_twice = []

    async def works() -> None:
        await asyncio.sleep(0)

    inner = actor_of(works, "inner")

    def outer() -> str:
        try:
            while True:
                inner()
        except TimeLimitExceeded:
            try:
                inner()
                nothing_arrives()
                inner()
            except TimeLimitExceeded:
                struck_twice.append(1)
        return "cleaned up"

    # Struck before it came to its `try`, or while it left it, it is just interrupted.
    outcomes = race(body.wrap(outer, actor_name="report"), wanted={"cleaned up": 500})

    print(dict(outcomes))  # noqa: T201
    assert struck_twice == []


# --- a loop that is blocked, a coroutine that does not end ------------------------------------------------


def stuck_soon(report_after: float = 0.0) -> list[interrupter.StuckBody]:
    INTERRUPTER._report_after, before = report_after, INTERRUPTER._report_after
    try:
        wait_for(INTERRUPTER.stuck)
        return INTERRUPTER.stuck()
    finally:
        INTERRUPTER._report_after = before


def test_a_coroutine_that_waits_behind_a_blocked_loop_never_begins_once_it_was_interrupted():
    """Its message can be tried elsewhere at once, and nobody has to wait for the one that blocks."""
    leave, blocking, begun = threading.Event(), threading.Event(), []

    async def blocks() -> None:
        blocking.set()
        leave.wait(PATIENCE_S)

    async def begins() -> None:
        begun.append(1)

    blocker = Job(lambda: actor_of(blocks)())
    assert blocking.wait(PATIENCE_S)

    with pytest.raises(TimeLimitExceeded):
        deliver(actor_of(begins), limit_ms=50)
    assert blocker.is_alive()

    leave.set()
    assert blocker.outcome() is None
    async_to_sync(asyncio.sleep)(0)
    assert begun == []


def test_a_coroutine_that_does_not_end_is_reported_with_the_line_where_it_waits():
    """Not that of asyncio.sleep: who reads it has to find the actor's mistake."""
    begun, leave = threading.Event(), threading.Event()

    async def inner() -> None:
        while not leave.is_set():
            await asyncio.sleep(0.01)

    async def swallows() -> str:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            await inner()
        return "ended after all"

    job = Job(lambda: deliver(actor_of(swallows)))
    assert begun.wait(PATIENCE_S)
    interrupt()
    wait_for(lambda: stuck_soon()[0].where.endswith(" inner"))
    (stuck,) = stuck_soon()

    assert stuck.where.startswith(f"{__file__}:")
    assert "was cancelled there" in stuck.why
    assert stuck.actor_name == "report"
    leave.set()
    assert job.outcome() == "ended after all"
    assert INTERRUPTER.stuck() == []


def test_a_loop_that_is_blocked_is_reported_as_that_with_the_line_that_blocks_it():
    """Thirty other actors on the loop look stuck, too, and must not be blamed."""
    leave, blocking, waiting = threading.Event(), threading.Event(), threading.Event()

    async def innocent() -> None:
        waiting.set()
        await asyncio.sleep(PATIENCE_S)

    async def blocks() -> None:
        blocking.set()
        while not leave.is_set():
            time.sleep(0.01)

    job = Job(lambda: deliver(actor_of(innocent)))
    assert waiting.wait(PATIENCE_S)
    blocker = Job(lambda: actor_of(blocks)())
    assert blocking.wait(PATIENCE_S)
    interrupt()
    (stuck,) = stuck_soon()

    assert stuck.actor_name == "report"
    assert stuck.where.endswith(" blocks")
    assert "blocks the event loop" in stuck.why
    leave.set()
    assert blocker.outcome() is None
    assert job.outcome() is TimeLimitExceeded


def test_an_async_actor_called_from_a_coroutine_says_what_to_do():
    """On stock it waits for itself, and with it every coroutine of the process, for ever."""

    async def inner() -> None:
        pass

    async def outer() -> None:
        actor_of(inner)()

    with pytest.raises(RuntimeError, match="send it a message, or await the function"):
        deliver(actor_of(outer))


def test_what_throws_the_loop_out_of_its_turn_hurts_nobody_else(loop, caplog):
    """SystemExit in a task that an actor left behind; a coroutine that stops the loop. Others wait for theirs."""
    released = threading.Event()

    async def waits() -> str:
        while not released.is_set():
            await asyncio.sleep(0.01)
        return "unharmed"

    async def exits() -> None:
        async def leaves() -> None:
            raise SystemExit(3)

        loop.left = asyncio.create_task(leaves())

    async def stops() -> None:
        asyncio.get_running_loop().stop()

    job = Job(lambda: deliver(actor_of(waits)))
    wait_for(INTERRUPTER.running)
    actor_of(exits)()
    actor_of(stops)()
    assert actor_of(asyncio.sleep)(0.01, "goes on") == "goes on"
    released.set()

    assert job.outcome() == "unharmed"
    assert "event_loop.broken" in [getattr(record, "event", None) for record in caplog.records]
    assert isinstance(loop.left.exception(), SystemExit)


# --- work that a coroutine gives to threads -----------------------------------------------------------------


class ThreadCall:
    """What an actor calls by ``asyncio.to_thread``: it goes on until it is let go."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        self.let_go = False

    def works(self) -> str:
        self.begun.set()
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and not self.let_go:  # no Event: this must be the innermost frame
            time.sleep(0.001)
        self.ended.set()
        return "worked"


async def to_thread(call: Callable[[], object]) -> object:
    return await asyncio.to_thread(call)


async def in_executor(call: Callable[[], object]) -> object:
    return await asyncio.get_running_loop().run_in_executor(None, call)


async def by_a_task(call: Callable[[], object]) -> object:
    return (await asyncio.gather(asyncio.to_thread(call)))[0]


async def within_a_timeout(call: Callable[[], object]) -> object:
    return await asyncio.wait_for(asyncio.to_thread(call), PATIENCE_S)


@pytest.mark.parametrize("waits", [to_thread, in_executor, by_a_task, within_a_timeout])
def test_an_interrupted_coroutine_is_over_when_the_thread_that_works_for_it_is(waits):
    """No thread can be cancelled, and its message would be tried again beside it."""
    call = ThreadCall()
    job = Job(lambda: deliver(actor_of(waits), call.works))
    assert call.begun.wait(PATIENCE_S)
    # When it is interrupted, it is reported with the place of the thread
    interrupt()
    wait_for(lambda: stuck_soon()[0].where.endswith(" works"))
    (stuck,) = stuck_soon()
    assert "no thread can be cancelled" in stuck.why
    # And over only when the thread is done
    job.join(2 * LOOK_EVERY_S)
    assert job.is_alive()
    call.let_go = True
    assert job.outcome() is TimeLimitExceeded
    assert call.ended.is_set()


def test_a_coroutine_that_gives_up_on_its_thread_has_failed_when_that_is_done():
    """``wait_for`` is how everybody gives a thread a timeout; the retry must not run beside it either."""
    call = ThreadCall()
    given_up = threading.Event()

    async def gives_up() -> None:
        try:
            await asyncio.wait_for(asyncio.to_thread(call.works), 0.05)
        finally:
            given_up.set()

    job = Job(lambda: deliver(actor_of(gives_up)))
    assert given_up.wait(PATIENCE_S)
    job.join(2 * LOOK_EVERY_S)
    assert job.is_alive()
    call.let_go = True

    assert issubclass(job.outcome(), (TimeoutError, asyncio.TimeoutError))
    assert call.ended.is_set()


def test_a_coroutine_that_returns_does_not_wait_for_what_it_left_to_a_thread(loop):
    """It is done and is not tried again. What it left has a moment to end when the last worker stops."""
    call = ThreadCall()

    async def leaves_it() -> str:
        loop.left = asyncio.get_running_loop().run_in_executor(None, call.works)
        return "returned"

    assert deliver(actor_of(leaves_it)) == "returned"
    assert call.begun.wait(PATIENCE_S)
    stopping = Job(loop.stop)
    loop.join(PATIENCE_S)
    call.let_go = True

    assert stopping.outcome() is None
    assert call.ended.is_set()


def test_a_call_that_waits_for_a_thread_never_begins_once_its_coroutine_is_cancelled(monkeypatch):
    """All threads may be taken by others, who have nothing to do with it."""
    monkeypatch.setattr(executor, "MAX_THREADS", 1)
    call, begun = ThreadCall(), []
    other = Job(lambda: actor_of(to_thread)(call.works))
    assert call.begun.wait(PATIENCE_S)

    with pytest.raises(TimeLimitExceeded):
        deliver(actor_of(to_thread), lambda: begun.append(1), limit_ms=50)

    assert other.is_alive()
    call.let_go = True
    assert other.outcome() == "worked"
    assert actor_of(to_thread)(lambda: "next") == "next"
    assert begun == []


def test_threads_are_used_again_and_see_the_context_and_what_they_raise_is_freed():
    """As with Python's own executor."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    threads = set()

    class Big(Exception):
        pass

    def reads() -> str:
        threads.add(threading.current_thread())
        return variable.get()

    async def calls() -> list[str]:
        return [await asyncio.to_thread(reads) for _ in range(20)]

    def raises() -> None:
        raise Big

    variable.set("of the worker")
    assert deliver(actor_of(calls)) == ["of the worker"] * 20
    assert [thread.daemon for thread in threads] == [True]
    gc.disable()
    try:
        try:
            deliver(actor_of(to_thread), raises)
        except Big as error:
            reference = weakref.ref(error)
        assert deliver(actor_of(to_thread), lambda: "the thread goes on") == "the thread goes on"
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("tiny_switch_interval", "no_garbage")
def test_every_race_of_a_thread_and_an_interrupt_ends_with_no_thread_at_work():
    """Thousands of interrupts while a call waits, begins and ends. Whatever has begun has ended."""
    begun, ended, beside = [0], [0], []

    def works() -> str:
        begun[0] += 1
        for _ in range(100):
            pass
        ended[0] += 1
        return "worked"

    actor = actor_of(to_thread)

    def delivery() -> object:
        try:
            return actor(works)
        finally:
            if begun != ended:
                beside.append((*begun, *ended))

    outcomes = race(delivery, wanted={"interrupted": 200, "worked": 200})

    print(dict(outcomes), begun)  # noqa: T201
    assert beside == []
    assert outcomes.keys() <= {"interrupted", "worked"}


# --- the end --------------------------------------------------------------------------------------------------


def test_what_actors_have_left_behind_is_cancelled_at_the_end(loop):
    """Background tasks and generators get the chance to clean up, as at the end of ``asyncio.run``."""
    cleaned: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append("task")

    async def generator() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            cleaned.append("generator")

    async def leaves_them() -> None:
        loop.left = [asyncio.create_task(background()), generator()]
        assert await loop.left[1].__anext__() == 1
        await asyncio.sleep(0)

    deliver(actor_of(leaves_them))
    real = loop.loop
    loop.stop()

    assert cleaned == ["task", "generator"]
    assert real.is_closed()
    assert not loop.is_alive()
    with pytest.raises(RuntimeError, match="not running"):
        actor_of(leaves_them)()
    loop.stop()


def test_an_actor_that_still_runs_at_the_end_is_interrupted_by_the_shutdown(loop):
    """Its worker waited long enough. It is not charged, and not left to run beside its next attempt."""
    begun, ended = [], []

    async def sleeps() -> None:
        begun.append(1)
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            ended.append(1)

    jobs = [Job(lambda: deliver(actor_of(sleeps))), Job(lambda: actor_of(sleeps)())]
    wait_for(lambda: len(begun) == 2)
    loop.stop()

    assert [job.outcome() for job in jobs] == [Shutdown, Shutdown]
    assert ended == [1, 1]


@pytest.mark.usefixtures("short_patience")
def test_a_coroutine_that_does_not_end_does_not_hang_the_end_and_runs_no_more(loop, caplog):
    """The process is about to end; its message is delivered again, and must not run beside this one."""
    alive: list[float] = []

    async def swallows() -> None:
        while True:
            try:
                alive.append(time.monotonic())
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                pass

    job = Job(lambda: deliver(actor_of(swallows)))
    wait_for(lambda: alive)
    start = time.monotonic()
    loop.stop()
    took, count = time.monotonic() - start, len(alive)

    assert took < 2
    assert not loop.is_alive()
    time.sleep(0.05)
    assert len(alive) == count
    assert job.outcome() is Shutdown
    assert "event_loop.left" in [getattr(record, "event", None) for record in caplog.records]


@pytest.mark.usefixtures("short_patience")
def test_a_blocked_loop_does_not_hang_the_end(loop, caplog):
    """On stock it does, past every time-out."""
    leave, blocking = threading.Event(), threading.Event()

    async def blocks() -> None:
        blocking.set()
        leave.wait(PATIENCE_S)

    job = Job(lambda: deliver(actor_of(blocks)))
    assert blocking.wait(PATIENCE_S)
    start = time.monotonic()
    loop.stop()

    assert time.monotonic() - start < 3
    (record,) = [r for r in caplog.records if getattr(r, "event", None) == "event_loop.left"]
    assert "blocked at" in record.getMessage()
    leave.set()
    job.outcome()
    loop.join(PATIENCE_S)
    assert not loop.is_alive()


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("swallows", [False, True], ids=["cancelled", "goes on"])
def test_a_thread_that_does_not_end_does_not_hang_the_end_and_its_coroutine_is_not_over(
    loop, caplog, swallows
):
    """Its message must not be returned while the thread runs; the end of the process lets RabbitMQ have it."""
    call = ThreadCall()

    async def waits() -> None:
        while True:
            try:
                await asyncio.to_thread(call.works)
            except asyncio.CancelledError:
                if not swallows:
                    raise
                await asyncio.sleep(PATIENCE_S)

    job = Job(lambda: deliver(actor_of(waits)))
    assert call.begun.wait(PATIENCE_S)
    start = time.monotonic()
    loop.stop()

    assert time.monotonic() - start < 3
    assert job.is_alive()
    (record,) = [r for r in caplog.records if getattr(r, "event", None) == "event_loop.left"]
    assert "a thread is at" in record.getMessage()
    assert record.getMessage().endswith(" works.")
    call.let_go = True
    assert job.outcome() is Shutdown
    assert call.ended.is_set()


def test_the_loop_lives_as_long_as_somebody_needs_it(loop):
    """Two brokers in one process have a worker each: the first to stop must not stop the other's loop."""

    async def returns() -> str:
        return "runs"

    first, second = object(), object()
    assert event_loop.acquire(first) is event_loop.acquire(second) is loop is get_event_loop_thread()
    event_loop.release(first)
    event_loop.release(first)
    assert actor_of(returns)() == "runs"
    event_loop.release(second)
    assert actor_of(returns)() == "runs"  # the fixture needs it still


def test_the_last_one_stops_it_and_the_next_gets_a_new_one():
    """Workers come and go in a test process."""

    async def returns() -> str:
        return "runs"

    loops = []
    set_event_loop_thread(None)  # that of the fixture
    event_loop._users, before = [], event_loop._users
    try:
        for _ in range(2):
            user = object()
            loops.append(event_loop.acquire(user))
            assert actor_of(returns)() == "runs"
            event_loop.release(user)
            assert get_event_loop_thread() is None
            assert not loops[-1].is_alive()
            with pytest.raises(RuntimeError, match="Global event loop thread not set"):
                async_to_sync(returns)()
    finally:
        event_loop._users = before
    assert loops[0] is not loops[1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_loop_and_can_have_its_own(loop):
    """The parent's thread does not exist there: a coroutine would be waited for for ever."""

    async def returns() -> str:
        return "runs"

    assert actor_of(returns)() == "runs"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert get_event_loop_thread() is None
            user = object()
            assert event_loop.acquire(user) is not loop
            assert deliver(actor_of(returns)) == "runs"
            event_loop.release(user)
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + PATIENCE_S
    done = 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)
    if not done:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        pytest.fail("the child did not come back")
    assert os.waitstatus_to_exitcode(status) == 0
    assert actor_of(returns)() == "runs"
