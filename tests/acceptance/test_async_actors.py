"""Async actors in real workers: a message is never tried again beside a coroutine that still runs, and every worker ends.

The tests named ``test_stock_...`` run the same on Dramatiq's own broker and loop, and show what becomes of it there.
"""

from __future__ import annotations

import json
import signal
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.queues import body_of, depth, look, publish, publish_many
from tests.harness.worker import App, wait_until

#: Above every app: the modules that async actors need, and for the twins the middleware that Dramatiq needs.
HEADER = """
    import asyncio, gc
    import dramatiq.middleware
    if os.environ["TEST_BROKER"] == "stock":
        broker.add_middleware(dramatiq.middleware.AsyncIO())
"""

#: What the command gives its workers to finish, in milliseconds; then it stops what is left.
SHORT_WINDOW = ("--worker-shutdown-timeout", "1000")

LONG_CLEAN_UP = """
    @dramatiq.actor(time_limit=500, max_retries=1, min_backoff=10, max_backoff=10)
    async def job():
        note("begun")
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(5)
            note("ended")
"""


def app_of(folder: Path, source: str, url: str, **options: Any) -> App:
    return App(folder / "app", textwrap.dedent(HEADER) + textwrap.dedent(source), url, **options)


def events_of(worker_text: str, event: str) -> int:
    return worker_text.count(event)


def whats(app: App) -> list[str]:
    return [one["what"] for one in app.notes()]


# -- time limits


def test_the_next_attempt_begins_after_a_long_clean_up_has_ended(amqp_url: str, tmp_path: Path) -> None:
    """Two attempts at once write the same files; whoever cleans up last destroys the work of the other."""
    app = app_of(tmp_path, LONG_CLEAN_UP, amqp_url)
    with app.worker():
        publish(amqp_url, "default", body_of("job"))
        wait_until(lambda: len(app.notes("ended")) == 2, 60, "both attempts")

    assert whats(app) == ["begun", "ended", "begun", "ended"]


def test_stock_begins_the_next_attempt_beside_the_clean_up_of_the_last(amqp_url: str, tmp_path: Path) -> None:
    """The twin: it waits for a second, then the message has failed, whatever its coroutine does."""
    app = app_of(tmp_path, LONG_CLEAN_UP, amqp_url, broker="stock")
    app.send("broker.declare_queue('default', ensure=True)")
    with app.worker():
        publish(amqp_url, "default", body_of("job"))
        wait_until(lambda: app.notes("ended"), 60, "the first attempt to end")

    assert whats(app) == ["begun", "begun", "ended"]


def test_a_coroutine_past_its_limit_is_retried_and_its_dead_letter_says_where_it_was(
    amqp_url: str, tmp_path: Path
) -> None:
    """A dead letter that shows only the wait of a worker thread helps nobody."""
    app = app_of(
        tmp_path,
        """
        async def fetch():
            await asyncio.sleep(3600)

        @dramatiq.actor(time_limit=200, max_retries=1, min_backoff=10, max_backoff=10)
        async def job():
            note("begun")
            await fetch()
        """,
        amqp_url,
    )
    with app.worker():
        publish(amqp_url, "default", body_of("job"))
        wait_until(lambda: depth(amqp_url, "default.dlq") == 1, 60, "the dead letter")

    (letter,) = look(amqp_url, "default.dlq")
    shown = json.dumps(letter.headers, default=str)
    assert len(app.notes("begun")) == 2
    assert "longer than its time limit of 200 ms" in shown
    assert " in fetch" in shown


@pytest.mark.parametrize("error", ["TimeoutError", "asyncio.TimeoutError"])
def test_an_async_actor_that_times_out_by_itself_fails_once_and_is_retried(
    amqp_url: str, tmp_path: Path, error: str
) -> None:
    """Taken for the time-out of the wait, it made an endless loop of older Dramatiqs."""
    app = app_of(
        tmp_path,
        f"""
        @dramatiq.actor(time_limit=60_000, max_retries=1, min_backoff=10, max_backoff=10)
        async def job():
            note("begun")
            raise {error}("too late")
        """,
        amqp_url,
    )
    with app.worker():
        publish(amqp_url, "default", body_of("job"))
        wait_until(lambda: depth(amqp_url, "default.dlq") == 1, 60, "the dead letter")

    assert len(app.notes("begun")) == 2
    (letter,) = look(amqp_url, "default.dlq")
    assert "too late" in json.dumps(letter.headers, default=str)


# -- coroutines that cannot be ended

SWALLOWS = """
    @dramatiq.actor(time_limit=300, max_retries=0)
    async def job():
        note("begun")
        end = time.monotonic() + (45 if not os.path.exists("behave") else 0)
        while time.monotonic() < end:
            try:
                note("alive")
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                note("swallowed")
        note("done")
"""

BLOCKS = """
    @dramatiq.actor(time_limit=300, max_retries=0)
    async def job():
        note("begun")
        end = time.monotonic() + (45 if not os.path.exists("behave") else 0)
        while time.monotonic() < end:
            note("alive")
            time.sleep(0.02)
        note("done")
"""


@pytest.mark.parametrize("source", [SWALLOWS, BLOCKS], ids=["swallows", "blocks"])
def test_a_coroutine_that_does_not_end_is_reported_holds_its_message_and_runs_elsewhere_after_its_worker_has_ended(
    amqp_url: str, tmp_path: Path, source: str
) -> None:
    """It may do anything yet: its message must not be anywhere else as long as it runs, and a deploy must not hang."""
    app = app_of(tmp_path, source, amqp_url)
    # Given a coroutine that goes on past its limit
    with app.worker(arguments=SHORT_WINDOW) as first:
        publish(amqp_url, "default", body_of("job"))
        wait_until(lambda: app.notes("begun"), what="the coroutine")
        first.wait_for_log("still runs", 60)
        (app.folder / "behave").touch()
        # And another worker that is free
        with app.worker() as second:
            assert len(app.notes("begun")) == 1
            # When its worker is told to end
            started = time.monotonic()
            code = first.terminate(40)
            took = time.monotonic() - started
            # Then it ends, and the message runs on the other
            wait_until(lambda: app.notes("done"), 60, "the message to run elsewhere")
            assert second.terminate() == 0
    pid = app.notes("begun")[0]["pid"]
    begun, again = app.notes("begun")
    last_alive = max(one["at"] for one in app.notes() if one["pid"] == pid)
    print(  # noqa: T201
        f"ended with {code} after {took:.1f} s, began again {(again['at'] - last_alive) * 1000:.0f} ms after its last"
        " sign of life"
    )
    assert (pid, again["pid"]) == (begun["pid"], app.notes("done")[0]["pid"])
    assert pid != again["pid"]
    assert took < 30
    # In the report, the line that is to blame
    report = next(line for line in first.text.splitlines() if "still runs" in line)
    assert "app.py" in report
    assert " job. " in report
    assert ("blocks the event loop" in report) == (source is BLOCKS)
    # And not beside its next run. What blocks the loop can be stopped by nobody, and goes on while the process ends.
    assert again["at"] > last_alive - (1.0 if source is BLOCKS else 0)
    assert depth(amqp_url, "default") == 0
    assert depth(amqp_url, "default.dlq") == 0


def test_stock_does_not_end_while_a_coroutine_blocks_the_loop(amqp_url: str, tmp_path: Path) -> None:
    """The twin: the same window of a second, and the process waits for the coroutine for as long as it blocks."""
    app = app_of(tmp_path, BLOCKS, amqp_url, broker="stock")
    app.send("broker.declare_queue('default', ensure=True)")
    with app.worker(arguments=SHORT_WINDOW) as worker:
        publish(amqp_url, "default", body_of("job"))
        wait_until(lambda: app.notes("begun"), what="the coroutine")
        with pytest.raises(subprocess.TimeoutExpired):
            worker.terminate(20)


# -- threads that work for a coroutine

ASKS_A_THREAD = """
    def work(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            note("alive")
            time.sleep(0.05)
        note("ended")

    @dramatiq.actor(time_limit=500, max_retries=1, min_backoff=10, max_backoff=10)
    async def job(seconds):
        note("begun")
        await asyncio.to_thread(work, 0 if os.path.exists("behave") else seconds)
        note("done")
"""


def test_the_next_attempt_begins_after_the_thread_of_the_last_has_ended(
    amqp_url: str, tmp_path: Path
) -> None:
    """``asyncio.to_thread`` is how async actors call everything that blocks, and no thread can be cancelled."""
    app = app_of(tmp_path, ASKS_A_THREAD, amqp_url)
    with app.worker():
        publish(amqp_url, "default", body_of("job", 4))
        wait_until(lambda: len(app.notes("ended")) == 2, 60, "both attempts")

    assert [what for what in whats(app) if what != "alive"] == ["begun", "ended", "begun", "ended"]


def test_stock_begins_the_next_attempt_beside_the_thread_of_the_last(amqp_url: str, tmp_path: Path) -> None:
    """The twin: the coroutine is cancelled, and nobody asks what it waited for."""
    app = app_of(tmp_path, ASKS_A_THREAD, amqp_url, broker="stock")
    app.send("broker.declare_queue('default', ensure=True)")
    with app.worker():
        publish(amqp_url, "default", body_of("job", 4))
        wait_until(lambda: app.notes("ended"), 60, "the first attempt to end")

    assert [what for what in whats(app) if what != "alive"][:3] == ["begun", "begun", "ended"]


def test_a_thread_that_does_not_end_is_reported_holds_its_message_and_does_not_keep_its_worker_alive(
    amqp_url: str, tmp_path: Path
) -> None:
    """Python waits for the threads of its executor at the end of a process, and a deploy hangs for as long."""
    app = app_of(tmp_path, ASKS_A_THREAD, amqp_url)
    # Given a thread that works on past the limit of its actor
    with app.worker(arguments=SHORT_WINDOW) as first:
        publish(amqp_url, "default", body_of("job", 60))
        wait_until(lambda: app.notes("begun"), what="the actor")
        first.wait_for_log("still runs", 60)
        (app.folder / "behave").touch()
        # And another worker that is free
        with app.worker() as second:
            assert len(app.notes("begun")) == 1
            # When its worker is told to end
            started = time.monotonic()
            code = first.terminate(40)
            took = time.monotonic() - started
            # Then it ends, and the message runs on the other
            wait_until(lambda: app.notes("done"), 60, "the message to run elsewhere")
            assert second.terminate() == 0
    begun, again = app.notes("begun")
    last_alive = max(one["at"] for one in app.notes("alive") if one["pid"] == begun["pid"])
    print(  # noqa: T201
        f"ended with {code} after {took:.1f} s, began again {(again['at'] - last_alive) * 1000:.0f} ms after its last"
        " sign of life"
    )
    assert again["pid"] == app.notes("done")[0]["pid"] != begun["pid"]
    assert took < 30
    report = next(line for line in first.text.splitlines() if "still runs" in line)
    assert "app.py" in report
    assert " work. " in report
    # No thread can be stopped: it goes on while the process ends.
    assert again["at"] > last_alive - 1.0
    assert depth(amqp_url, "default") == 0
    assert depth(amqp_url, "default.dlq") == 0


def test_stock_does_not_end_while_a_thread_of_its_executor_works(amqp_url: str, tmp_path: Path) -> None:
    """The twin: the same window of a second."""
    app = app_of(tmp_path, ASKS_A_THREAD, amqp_url, broker="stock")
    app.send("broker.declare_queue('default', ensure=True)")
    with app.worker(arguments=SHORT_WINDOW) as worker:
        publish(amqp_url, "default", body_of("job", 60))
        wait_until(lambda: app.notes("begun"), what="the actor")
        with pytest.raises(subprocess.TimeoutExpired):
            worker.terminate(20)


# -- the shutdown


def test_an_async_actor_that_asks_for_it_is_cancelled_by_the_shutdown_and_goes_back_uncharged(
    amqp_url: str, tmp_path: Path
) -> None:
    """A deploy must neither wait for it nor take one of its attempts."""
    app = app_of(
        tmp_path,
        """
        @dramatiq.actor(time_limit=600_000, notify_shutdown=True, max_retries=0)
        async def job():
            note("begun")
            try:
                await asyncio.sleep(0 if os.path.exists("behave") else 3600)
            finally:
                await asyncio.sleep(0.1)
                note("ended")

        @dramatiq.actor(time_limit=600_000)
        async def patient():
            note("patient begun")
            await asyncio.sleep(3)
            note("patient ended")
        """,
        amqp_url,
    )
    with app.worker() as worker:
        publish_many(amqp_url, "default", [body_of("job"), body_of("patient")])
        wait_until(lambda: len(app.notes()) == 2, what="both")
        assert worker.terminate(30) == 0
    assert whats(app)[2:] == ["ended", "patient ended"]
    assert depth(amqp_url, "default") == 1
    (back,) = look(amqp_url, "default")
    assert back.message["actor_name"] == "job"
    assert not [name for name in back.headers if name.startswith("x-safeops")]

    (app.folder / "behave").touch()
    with app.worker():
        wait_until(lambda: len(app.notes("ended")) == 2, what="the second run")
    assert depth(amqp_url, "default.dlq") == 0


def test_what_an_actor_leaves_behind_on_the_loop_is_cancelled_at_the_end(
    amqp_url: str, tmp_path: Path
) -> None:
    """Background tasks close their connections, if somebody tells them."""
    app = app_of(
        tmp_path,
        """
        kept = []

        async def background():
            try:
                await asyncio.sleep(3600)
            finally:
                note("closed")

        @dramatiq.actor(time_limit=60_000)
        async def job():
            kept.append(asyncio.create_task(background()))
            await asyncio.sleep(0)
            note("done")
        """,
        amqp_url,
    )
    with app.worker() as worker:
        publish(amqp_url, "default", body_of("job"))
        wait_until(lambda: app.notes("done"), what="the actor")
        assert worker.terminate(30) == 0

    assert whats(app) == ["done", "closed"]


def test_a_worker_killed_in_the_midst_of_a_coroutine_loses_nothing(amqp_url: str, tmp_path: Path) -> None:
    """The message is un-acked for as long as its coroutine runs."""
    app = app_of(
        tmp_path,
        """
        @dramatiq.actor(time_limit=60_000)
        async def job():
            note("begun")
            await asyncio.sleep(0 if os.path.exists("behave") else 3600)
            note("done")
        """,
        amqp_url,
    )
    with app.worker() as worker:
        publish(amqp_url, "default", body_of("job"))
        wait_until(lambda: app.notes("begun"), what="the coroutine")
        worker.kill()
    (app.folder / "behave").touch()
    with app.worker():
        wait_until(lambda: app.notes("done"), what="the second run")
    assert len(app.notes("begun")) == 2


# -- memory

#: The garbage collector is off, so that whatever is freed by it alone, some time, shows as growth.
FAILS_WITH_MUCH_IN_HAND = """
    gc.disable()

    class Failed(Exception):
        pass

    @dramatiq.actor(time_limit=60_000, max_retries=0)
    async def job(number):
        much = bytearray(100_000)
        try:
            await asyncio.sleep(0)
            raise Failed(number)
        finally:
            if number % 100 == 0:
                note("failed", number=number, much=len(much))
"""


def growth(app: App, messages: int) -> float:
    """Let ``messages`` fail and return by how many MB the worker has grown since the first quarter of them."""
    url = app.url
    with app.worker(threads=4) as worker:
        (pid,) = worker.pids()
        process = psutil.Process(pid)
        first = messages // 4
        publish_many(url, "default", [body_of("job", number) for number in range(1, first + 1)])
        wait_until(lambda: depth(url, "default.dlq") == first, 300, "the first messages")
        before = process.memory_info().rss
        publish_many(url, "default", [body_of("job", number) for number in range(first + 1, messages + 1)])
        wait_until(lambda: depth(url, "default.dlq") == messages, 900, "the other messages")
        after = process.memory_info().rss
        worker.process.send_signal(signal.SIGTERM)
        worker.process.wait(60)
    grown = (after - before) / 1e6
    print(f"{messages} failed: {before / 1e6:.0f} MB after a quarter, {grown:+.1f} MB since")  # noqa: T201
    return grown


def test_failed_coroutines_leave_nothing_in_memory(amqp_url: str, tmp_path: Path) -> None:
    """An exception keeps its actor's locals: kept by accident, a worker grows by them with every failure."""
    # 1,200 of them would be 120 MB
    assert growth(app_of(tmp_path, FAILS_WITH_MUCH_IN_HAND, amqp_url), 1_600) < 30


@pytest.mark.long
def test_ten_thousand_failed_coroutines_leave_nothing_in_memory(amqp_url: str, tmp_path: Path) -> None:
    """The long form. 7,500 of them would be 750 MB."""
    assert growth(app_of(tmp_path, FAILS_WITH_MUCH_IN_HAND, amqp_url), 10_000) < 60
