"""What stock Dramatiq left in its delay queues is delivered by workers that take over its classic queues.

Real producers and workers of stock Dramatiq leave it there, real workers of ours find it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dramatiq_safeops.rabbitmq.delays import STEPS_MS, step_name
from tests.harness import queues
from tests.harness.worker import App, wait_until

SOURCE = """
from dramatiq.middleware import CurrentMessage

if os.environ["TEST_BROKER"] == "stock":
    broker.add_middleware(CurrentMessage())

@dramatiq.actor(time_limit=60_000)
def work(number, due=0):
    note("ran", number=number, due=due)

@dramatiq.actor(time_limit=60_000, max_retries=3, min_backoff=2_000, max_backoff=3_000)
def failing(number):
    note("tried", number=number, retries=CurrentMessage.get_current_message().options.get("retries", 0))
    raise ConnectionError("always")

def send_after(number, delay_ms):
    work.send_with_options(args=(number, time.time() + delay_ms / 1000), delay=delay_ms)
"""

CLASSIC = {"TEST_BROKER_OPTIONS": json.dumps({"queue_type": "classic"})}
HOUR_MS = 3_600_000


def stock_app(url: str, folder: Path) -> App:
    return App(folder / "stock", SOURCE, url, broker="stock")


def safe_app(url: str, folder: Path, env: dict[str, str] | None = None) -> App:
    return App(folder / "safe", SOURCE, url, env=CLASSIC if env is None else env)


def declare_as_stock(url: str, folder: Path) -> None:
    """Let stock Dramatiq declare ``default`` with its delay queue, and nothing else."""
    stock_app(url, folder).send("broker.declare_queue('default', ensure=True)")


def waiting_in_ladder(url: str) -> int:
    return sum(queues.depth(url, step_name(step)) for step in STEPS_MS)


def test_messages_that_stock_dramatiq_has_delayed_run_once_and_not_early(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts whoever moves over: reminders and retries of the last days would never come."""
    # Given a stock producer that has delayed messages, and a stock worker that has taken them into its memory
    stock = stock_app(amqp_url, tmp_path)
    worker = stock.start_worker()
    stock.send("for n, delay in enumerate([1, 4000, 5000, 7000, 9000]): send_after(n, delay)")
    wait_until(lambda: stock.notes("ran"), what="the message that is due at once")
    worker.terminate()
    before = [one["number"] for one in stock.notes("ran")]

    # When our worker takes over
    safe = safe_app(amqp_url, tmp_path)
    with safe.worker():
        wait_until(lambda: len(before) + len(safe.notes("ran")) >= 5, what="the others")

        # Then each has run once, and none before its time
        assert sorted(before + [one["number"] for one in safe.notes("ran")]) == [0, 1, 2, 3, 4]
        assert min(one["at"] - one["due"] for one in safe.notes("ran")) >= 0
        assert queues.depth(amqp_url, "default.DQ") == 0


def test_a_worker_of_quorum_queues_leaves_delay_queues_alone(amqp_url: str, tmp_path: Path) -> None:
    """The twin: this is what became of them, and becomes of them without ``queue_type="classic"``."""
    # Given a delay queue whose work queue has been replaced
    declare_as_stock(amqp_url, tmp_path)
    queues.publish(
        amqp_url, "default.DQ", queues.body_of("work", 1, queue="default.DQ", eta=int(time.time() * 1000))
    )
    with queues.channel(amqp_url) as channel:
        channel.queue_delete("default")

    safe = safe_app(amqp_url, tmp_path, env={})
    with safe.worker():
        safe.send("work.send(2)")
        wait_until(lambda: safe.notes("ran"), what="a message behind it")

    assert [one["number"] for one in safe.notes("ran")] == [2]
    assert queues.depth(amqp_url, "default.DQ") == 1


def test_retries_of_stock_workers_go_on_counting(amqp_url: str, tmp_path: Path) -> None:
    """Hurts whoever pays per attempt: at each change of workers a failing message would start from the first one."""
    # Given a message whose first attempt failed in a stock worker, and waits for its retry
    stock = stock_app(amqp_url, tmp_path)
    worker = stock.start_worker()
    stock.send("failing.send(1)")
    wait_until(lambda: stock.notes("tried"), what="the first attempt")
    worker.terminate()
    made = [one["retries"] for one in stock.notes("tried")]

    # When our worker goes on
    safe = safe_app(amqp_url, tmp_path)
    with safe.worker():
        wait_until(lambda: queues.depth(amqp_url, "default.dlq") == 1, 60, "the last attempt")

    # Then there were four attempts in all, and the dead letter says so
    assert made + [one["retries"] for one in safe.notes("tried")] == [0, 1, 2, 3]
    [letter] = queues.look(amqp_url, "default.dlq")
    assert letter.headers["x-safeops-attempts"] == 4


def test_junk_in_a_delay_queue_becomes_a_dead_letter_and_the_next_one_goes_on(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts everybody behind it: stock Dramatiq leaves what it cannot read un-acked in a consumer that restarts for ever."""
    declare_as_stock(amqp_url, tmp_path)
    junk = [b"\xff\x00no json", b"", b"[]", b'{"options": null}']
    for body in [*junk, queues.body_of("work", 7, queue="default.DQ", eta=1)]:
        queues.publish(amqp_url, "default.DQ", body)

    safe = safe_app(amqp_url, tmp_path)
    with safe.worker():
        wait_until(lambda: safe.notes("ran"), what="the message behind the junk")
        wait_until(lambda: queues.depth(amqp_url, "default.dlq") == len(junk), what="the dead letters")

    letters = queues.take(amqp_url, "default.dlq")
    assert sorted(one.body for one in letters) == sorted(junk)
    assert {one.headers["x-safeops-reason"] for one in letters} == {"unreadable"}
    assert {one.headers["x-safeops-queue"] for one in letters} == {"default"}


NO_INSTANTS: list[Any] = [None, "soon", True, [], {}, float("nan"), float("-inf"), -(10**400), 0, 1.5, -1]
FAR_INSTANTS: list[Any] = [10**18, 10**400, 1e300, float("inf")]


def test_a_delay_that_is_no_instant_is_over_and_one_beyond_reason_waits(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts the whole queue: one odd number must not take down the consumer, nor make a message go round for ever."""
    declare_as_stock(amqp_url, tmp_path)
    for number, eta in enumerate(NO_INSTANTS):
        queues.publish(amqp_url, "default.DQ", queues.body_of("work", number, queue="default.DQ", eta=eta))
    far = [queues.body_of("work", "far", queue="default.DQ", eta=eta) for eta in FAR_INSTANTS]
    for body in far:
        queues.publish(amqp_url, "default.DQ", body)

    safe = safe_app(amqp_url, tmp_path)
    with safe.worker() as worker:
        wait_until(lambda: len(safe.notes("ran")) >= len(NO_INSTANTS), what="those that are due")
        longest = step_name(STEPS_MS[-1])
        wait_until(lambda: queues.depth(amqp_url, longest) == len(far), what="those that wait")

        assert sorted(one["number"] for one in safe.notes("ran")) == list(range(len(NO_INSTANTS)))
        assert "CRITICAL" not in worker.text
    # the producer's exact bytes
    assert [one.body for one in queues.look(amqp_url, longest)] == far
    assert queues.depth(amqp_url, "default.DQ") == 0


def test_a_worker_without_leftovers_logs_nothing_about_them(amqp_url: str, tmp_path: Path) -> None:
    """Hurts whoever reads logs: a new app with classic queues has no delay queues and needs none."""
    safe = safe_app(amqp_url, tmp_path)
    with safe.worker() as worker:
        safe.send("work.send(1)")
        wait_until(lambda: safe.notes("ran"), what="the message")

        assert "default.DQ" not in worker.text
        assert not [one for one in ("WARNING", "ERROR", "CRITICAL") if f"[{one}]" in worker.text]


def test_leftovers_go_on_being_delivered_while_stock_producers_still_send(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts a move in steps: workers first, producers later."""
    stock, safe = stock_app(amqp_url, tmp_path), safe_app(amqp_url, tmp_path)
    declare_as_stock(amqp_url, tmp_path)

    with safe.worker() as worker:
        worker.wait_for_log("Consuming queue 'default.DQ'")
        stock.send("send_after(1, 1000)")
        wait_until(lambda: safe.notes("ran"), what="the delayed message")

        # and a worker that is stopped leaves none of them behind
        worker.terminate()
    [ran] = safe.notes("ran")
    assert ran["at"] >= ran["due"]


@pytest.mark.parametrize(
    "count", [5_000, pytest.param(100_000, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_leftovers_use_no_memory_of_a_worker(amqp_url: str, tmp_path: Path, count: int) -> None:
    """Hurts the first start after the move: a month of reminders in one process's memory."""
    # Given many messages that stock Dramatiq delayed until tomorrow
    declare_as_stock(amqp_url, tmp_path)
    body = queues.body_of("work", "x" * 1000, queue="default.DQ", eta=int(time.time() * 1000) + 24 * HOUR_MS)
    with queues.channel(amqp_url) as channel:
        channel.tx_select()
        for _ in range(count):
            channel.basic_publish("", "default.DQ", body)
        channel.tx_commit()

    # When a worker moves them
    safe = safe_app(amqp_url, tmp_path)
    with safe.worker() as worker:
        worker.wait_for_log("Consuming queue 'default.DQ'")
        [pid] = worker.pids()
        most = before = psutil.Process(pid).memory_info().rss

        def moved() -> bool:
            nonlocal most
            most = max(most, psutil.Process(pid).memory_info().rss)
            return waiting_in_ladder(amqp_url) == count

        wait_until(moved, 60 + count / 200, "all to be in the ladder")

    # Then the worker has not grown with their number
    assert most - before < 12_000_000
