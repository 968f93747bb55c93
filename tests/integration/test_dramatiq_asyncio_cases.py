"""What Dramatiq's own tests say of AsyncIO, said again of this package's, on a real RabbitMQ where a broker is needed.

Who moves over expects each of these. The last section is about several brokers in one process, where Dramatiq has one
global for all of them.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
import dramatiq.middleware
import dramatiq.threading
import pytest
from dramatiq import group, pipeline
from dramatiq.asyncio import EventLoopThread, async_to_sync, get_event_loop_thread, set_event_loop_thread
from dramatiq.middleware import CurrentMessage, Shutdown, TimeLimitExceeded
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

from dramatiq_safeops import AsyncIO, ConfigError, RabbitmqBroker, safe_stack
from dramatiq_safeops.event_loop import EventLoop
from dramatiq_safeops.testing import RabbitmqServer
from tests.harness.queues import depth, look
from tests.harness.vhosts import virtual_host
from tests.harness.worker import wait_until

PATIENCE_S = 30.0


@contextmanager
def working(broker: RabbitmqBroker, **options: Any) -> Iterator[dramatiq.Worker]:
    worker = dramatiq.Worker(broker, **{"worker_timeout": 100, "worker_threads": 2, **options})
    worker.start()
    try:
        yield worker
    finally:
        worker.stop(timeout=int(PATIENCE_S * 1000))
        broker.close()


@pytest.fixture
def broker(amqp_url: str) -> RabbitmqBroker:
    return RabbitmqBroker(
        url=amqp_url, middleware=safe_stack(max_retries=1, min_backoff=0, time_limit=60_000)
    )


@pytest.fixture
def thread() -> Iterator[EventLoop]:
    """A started loop that is Dramatiq's, as in a worker."""
    thread = EventLoop()
    thread.start(timeout=PATIENCE_S)
    set_event_loop_thread(thread)
    yield thread
    set_event_loop_thread(None)
    thread.stop()


# -- the thread


def test_a_started_thread_has_a_running_loop_and_a_stopped_one_has_not():
    """Whoever starts one themselves, in tests."""
    thread = EventLoop()
    thread.start(timeout=1.0)
    loop = thread.loop

    assert isinstance(thread, EventLoopThread)
    assert isinstance(loop, asyncio.AbstractEventLoop)
    assert loop.is_running()
    thread.stop()
    thread.join()
    assert not thread.is_alive()
    assert loop.is_closed()


def test_a_loop_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """Rather than a start that hangs."""
    go_on = threading.Event()
    run = EventLoop.run
    monkeypatch.setattr(EventLoop, "run", lambda self: (go_on.wait(PATIENCE_S), run(self)))
    thread = EventLoop()

    with pytest.raises(RuntimeError, match="Event loop failed to start"):
        thread.start(timeout=0.1)
    go_on.set()
    thread.stop()


def test_a_coroutine_runs_in_the_thread_of_the_loop(thread: EventLoop):
    """And not in the one that waits for it."""

    async def where() -> int:
        return threading.get_ident()

    assert thread.run_coroutine(where()) == thread.ident != threading.get_ident()


@pytest.mark.parametrize("kind", [TypeError, TimeoutError, asyncio.TimeoutError])
def test_an_exception_comes_out_with_the_traceback_of_the_coroutine(thread: EventLoop, kind: type[Exception]):
    """And a TimeoutError is not taken for one of the wait."""

    async def inner() -> None:
        raise kind("of the actor's own")

    async def outer() -> None:
        await inner()

    with pytest.raises(kind, match="of the actor's own") as caught:
        thread.run_coroutine(outer())

    assert [entry.name for entry in caught.traceback[-2:]] == ["outer", "inner"]


def test_an_interrupt_in_the_waiting_thread_cancels_the_coroutine_and_waits_for_its_clean_up(
    thread: EventLoop,
):
    """Whoever raises it: dramatiq.threading is a public module."""
    cleaned = []

    async def is_interrupted(worker_thread: int) -> None:
        dramatiq.threading.raise_thread_exception(worker_thread, dramatiq.threading.Interrupt)
        try:
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(1)

    with pytest.raises(dramatiq.threading.Interrupt):
        thread.run_coroutine(is_interrupted(threading.get_ident()))

    assert cleaned == [1]


def test_an_async_function_made_sync_runs_on_the_loop(thread: EventLoop):
    """``dramatiq.asyncio.async_to_sync`` is public, too."""

    async def plus_one(value: int = 2) -> int:
        return value + 1

    assert async_to_sync(plus_one)(2) == 3
    assert async_to_sync(plus_one)() == 3


@pytest.mark.filterwarnings("error")
def test_without_a_loop_it_says_which_middleware_is_missing():
    """The same error as ever, in a process where no worker runs."""

    async def nothing() -> None: ...

    with pytest.raises(RuntimeError, match="AsyncIO middleware"):
        async_to_sync(nothing)()


# -- the middleware


def test_the_middleware_makes_the_loop_known_at_the_start_of_a_worker_and_forgets_it_at_its_end(
    broker: RabbitmqBroker,
):
    """Extensions ask ``get_event_loop_thread()`` in their own hooks."""
    seen: list[Any] = []

    class Opens(dramatiq.middleware.Middleware):
        async def connect(self) -> str:
            return "connected"

        def before_worker_boot(self, broker: Any, worker: Any) -> None:
            seen.append(get_event_loop_thread().run_coroutine(self.connect()))

        def after_worker_shutdown(self, broker: Any, worker: Any) -> None:
            seen.append(get_event_loop_thread().run_coroutine(self.connect()))

    broker.add_middleware(Opens())
    assert get_event_loop_thread() is None
    with working(broker):
        assert isinstance(get_event_loop_thread(), EventLoop)
    assert get_event_loop_thread() is None
    assert seen == ["connected", "connected"]


def test_an_app_without_async_actors_pays_nothing(broker: RabbitmqBroker):
    """No loop, no thread."""
    done = threading.Event()

    @dramatiq.actor(broker=broker)
    def job() -> None:
        done.set()

    with working(broker):
        job.send()
        assert done.wait(PATIENCE_S)
        assert "safeops-event-loop" not in [thread.name for thread in threading.enumerate()]


def test_a_stock_asyncio_that_is_added_by_hand_is_left_out(amqp_url: str):
    """Existing apps do: on Dramatiq's broker it is in no default list."""
    broker = RabbitmqBroker(url=amqp_url)
    before = list(broker.middleware)

    broker.add_middleware(dramatiq.middleware.AsyncIO())

    assert broker.middleware == before


def test_a_stock_asyncio_instead_of_it_is_refused_with_a_sentence(amqp_url: str):
    """With it a message is tried again beside a coroutine that still runs."""
    broker = RabbitmqBroker(url=amqp_url, middleware=[dramatiq.middleware.AsyncIO()])

    with pytest.raises(ConfigError, match=r"use dramatiq_safeops\.AsyncIO in its place"):
        dramatiq.Worker(broker).start()


# -- actors


def test_async_actors_receive_their_arguments_and_know_their_message(broker: RabbitmqBroker):
    """CurrentMessage in a coroutine, and None outside of actors."""
    seen: dict[str, Any] = {}

    @dramatiq.actor(broker=broker)
    async def job(number: int, *, unit: str) -> None:
        await asyncio.sleep(0)
        message = CurrentMessage.get_current_message()
        assert message is not None
        seen[message.message_id] = (number, unit)

    sent = [job.send(number, unit="km") for number in range(2)]
    with working(broker):
        broker.join("default", timeout=int(PATIENCE_S * 1000))
        assert CurrentMessage.get_current_message() is None

    assert seen == {message.message_id: (number, "km") for number, message in enumerate(sent)}


def test_async_actors_of_several_worker_threads_run_side_by_side(broker: RabbitmqBroker):
    """As many at once as there are threads, on one loop."""
    together = asyncio.Event()
    running: list[int] = []

    @dramatiq.actor(broker=broker)
    async def job() -> None:
        running.append(1)
        if len(running) == 2:
            together.set()
        await asyncio.wait_for(together.wait(), PATIENCE_S)

    with working(broker):
        job.send()
        job.send()
        broker.join("default", timeout=int(PATIENCE_S * 1000))
    assert running == [1, 1]


def test_arguments_that_do_not_fit_an_async_actor_are_seen_before_it_runs(broker: RabbitmqBroker):
    """The wrappers around it carry its signature."""
    from dramatiq_safeops.signature import misfit

    @dramatiq.actor(broker=broker)
    async def job(number: int, *, unit: str = "km") -> None: ...

    assert misfit(job, (1,), {"unit": "m"}) is None
    assert "too many" in str(misfit(job, (1, 2), {}))
    assert "unit_" in str(misfit(job, (1,), {"unit_": "m"}))


def test_an_async_actor_called_as_a_function_runs_where_a_loop_is(thread: EventLoop, broker: RabbitmqBroker):
    """In users' unit tests; without a loop it is Dramatiq's error, as ever."""

    @dramatiq.actor(broker=broker)
    async def job(number: int) -> int:
        return number + 1

    assert job(1) == 2
    assert job.fn(2) == 3


def test_the_exception_of_an_async_actor_is_freed(broker: RabbitmqBroker, caplog: pytest.LogCaptureFixture):
    """Without the help of the garbage collector; pytest keeps what is logged, so nothing is."""
    caplog.set_level("CRITICAL", logger="dramatiq")
    caplog.set_level("CRITICAL", logger="dramatiq_safeops")

    class Payload:
        pass

    class PayloadError(Exception):
        def __init__(self, payload: Payload) -> None:
            self.payload = payload

    payloads: list[weakref.ref[Payload]] = []

    @dramatiq.actor(broker=broker)
    async def fails() -> None:
        payload = Payload()
        payloads.append(weakref.ref(payload))
        raise PayloadError(payload)

    gc.disable()
    try:
        with working(broker, worker_threads=1):
            fails.send()
            broker.join("default", timeout=int(PATIENCE_S * 1000))
            wait_until(lambda: [one() for one in payloads] == [None, None], PATIENCE_S, "both to be freed")
    finally:
        gc.enable()


def test_an_async_actor_that_fails_is_retried_and_then_a_dead_letter(broker: RabbitmqBroker, amqp_url: str):
    """Like any other."""
    attempts = []

    @dramatiq.actor(broker=broker)
    async def fails() -> None:
        attempts.append(1)
        raise RuntimeError("no route")

    with working(broker):
        fails.send()
        wait_until(lambda: depth(amqp_url, "default.dlq") == 1, PATIENCE_S, "the dead letter")
    assert attempts == [1, 1]


@pytest.mark.parametrize("by", ["itself", "somebody else"])
def test_an_async_actor_that_is_cancelled_is_an_ordinary_failure(
    broker: RabbitmqBroker, amqp_url: str, by: str
):
    """A library that lets a CancelledError escape must not end a worker thread, nor lose the message."""
    attempts = []

    @dramatiq.actor(broker=broker)
    async def job() -> None:
        attempts.append(1)
        if by == "itself":
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.sleep(PATIENCE_S)

    with working(broker) as worker:
        job.send()
        wait_until(lambda: depth(amqp_url, "default.dlq") == 1, PATIENCE_S, "the dead letter")
        assert all(thread.is_alive() for thread in worker.workers)
    assert attempts == [1, 1]
    (letter,) = look(amqp_url, "default.dlq")
    assert "CancelledError" in str(letter.headers)


def test_an_async_actor_is_cancelled_at_its_time_limit(broker: RabbitmqBroker, amqp_url: str):
    """And may clean up before the message goes on."""
    cleaned: list[float] = []

    @dramatiq.actor(broker=broker, time_limit=100, max_retries=0)
    async def sleeps() -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            cleaned.append(time.monotonic())
            raise

    with working(broker):
        sleeps.send()
        wait_until(lambda: depth(amqp_url, "default.dlq") == 1, PATIENCE_S, "the dead letter")
    (letter,) = look(amqp_url, "default.dlq")
    assert len(cleaned) == 1
    assert TimeLimitExceeded.__name__ in str(letter.headers)


def test_an_async_actor_is_cancelled_by_the_shutdown_of_its_worker(broker: RabbitmqBroker, amqp_url: str):
    """If it asks for it, and its message is back in the queue."""
    begun, seen = threading.Event(), []

    class Notes(dramatiq.middleware.Middleware):
        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
        ) -> None:
            seen.append(type(exception))

    broker.add_middleware(Notes())

    @dramatiq.actor(broker=broker, notify_shutdown=True, max_retries=0)
    async def sleeps() -> None:
        begun.set()
        await asyncio.sleep(PATIENCE_S)

    with working(broker):
        sleeps.send()
        assert begun.wait(PATIENCE_S)
    assert seen == [Shutdown]
    assert depth(amqp_url, "default") == 1
    assert depth(amqp_url, "default.dlq") == 0


def test_results_pipelines_and_groups_of_async_actors(broker: RabbitmqBroker):
    """What a coroutine returns is what the next one gets."""
    broker.add_middleware(Results(backend=StubBackend()))

    @dramatiq.actor(broker=broker, store_results=True)
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    @dramatiq.actor(broker=broker, store_results=True)
    def plus_one(number: int) -> int:
        return number + 1

    with working(broker):
        chain = pipeline([double.message(1), plus_one.message(), double.message()], broker=broker).run()
        several = group([double.message(n) for n in range(3)], broker=broker).run()
        timeout = int(PATIENCE_S * 1000)
        assert chain.get_result(block=True, timeout=timeout) == 6
        assert sorted(several.get_results(block=True, timeout=timeout)) == [0, 2, 4]


# -- several brokers in one process


def test_the_first_of_two_workers_to_stop_leaves_the_other_its_loop(rabbit: RabbitmqServer):
    """Dramatiq has one loop for all brokers of a process, and whoever stops first stops it."""
    done: list[str] = []

    def job_on(broker: RabbitmqBroker, name: str) -> dramatiq.Actor[Any, Any]:
        @dramatiq.actor(broker=broker, actor_name=name)
        async def job() -> None:
            await asyncio.sleep(0)
            done.append(name)

        return job

    with virtual_host(rabbit) as first_url, virtual_host(rabbit) as second_url:
        first, second = (
            RabbitmqBroker(url=url, middleware=safe_stack(time_limit=60_000))
            for url in (first_url, second_url)
        )
        first_job, second_job = job_on(first, "first"), job_on(second, "second")
        with working(second):
            with working(first):
                first_job.send()
                second_job.send()
                wait_until(lambda: sorted(done) == ["first", "second"], PATIENCE_S, "both")
            second_job.send()
            wait_until(lambda: done.count("second") == 2, PATIENCE_S, "the second, alone")
        assert get_event_loop_thread() is None


def test_every_stack_has_an_asyncio_of_its_own():
    """They share the loop, not the middleware."""
    first, second = safe_stack()[0], safe_stack()[0]

    assert isinstance(first, AsyncIO)
    assert isinstance(second, AsyncIO)
    assert first is not second
