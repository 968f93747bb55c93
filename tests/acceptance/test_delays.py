"""Messages that wait: in RabbitMQ and not in workers, as long as they like, and none behind another.

Real workers on a real RabbitMQ. A ``test_stock_...`` shows the fault on Dramatiq's own broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import counts, queues
from tests.harness.worker import App, Worker, wait_until

DELAYED = """
@dramatiq.actor(time_limit=60_000)
def work(due, text=""):
    note("ran", due=due)

def send_after(delay_ms, text=""):
    work.send_with_options(args=(time.time() + delay_ms / 1000, text), delay=delay_ms)
"""

HOUR_MS = 3_600_000


def lateness(app: App) -> list[float]:
    """Return by how many seconds each message that ran was late."""
    return [one["at"] - one["due"] for one in app.notes("ran")]


# -- delays that are longer than RabbitMQ lets a consumer hold a message

DELAY_S = 9


@dataclass
class Patient:
    """A worker whose one message is delayed for longer than the consumer timeout, and its app."""

    app: App
    worker: Worker
    server: RabbitmqServer


@pytest.fixture(scope="module", autouse=True)
def patients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Patient]]:
    """Ours and stock on a RabbitMQ that gives a consumer 4 s. They wait while other tests run."""
    folder = tmp_path_factory.mktemp("patients")
    with ExitStack() as stack:
        server = stack.enter_context(RabbitmqServer.start(plugins=(), config={"consumer_timeout": 4000}))
        # It looks for late acks once a minute otherwise.
        server.eval("application:set_env(rabbit, channel_tick_interval, 1000).")
        found = {}
        for broker in ("safe", "stock"):
            source = DELAYED.replace("time_limit", f"queue_name='{broker}', time_limit")
            app = App(folder / broker, source, server.url, broker=broker)
            found[broker] = Patient(app, stack.enter_context(app.worker()), server)
            app.send(f"send_after({DELAY_S * 1000})")
        yield found


# -- near and far


def five_far_ones_and_a_near_one(app: App) -> None:
    app.send(f"for _ in range(5): send_after({HOUR_MS})")
    app.send("send_after(2000)")


def test_a_near_delay_does_not_wait_behind_far_ones(amqp_url: str, tmp_path: Path) -> None:
    """A reminder for next month must not hold back the retry of this second."""
    app = App(tmp_path, DELAYED, amqp_url, env={"dramatiq_delay_queue_prefetch": "5"})
    with app.worker():
        five_far_ones_and_a_near_one(app)
        wait_until(lambda: lateness(app), what="the near message to run")

    [late] = lateness(app)
    assert 0 <= late < 10


def test_stock_lets_far_delays_hold_back_a_near_one(amqp_url: str, tmp_path: Path) -> None:
    """The twin: the window is full of messages that are due in an hour."""
    app = App(tmp_path, DELAYED, amqp_url, broker="stock", env={"dramatiq_delay_queue_prefetch": "5"})
    with app.worker():
        five_far_ones_and_a_near_one(app)
        # Five are held, and as nothing else happens for an hour, the sixth stays where it is.
        wait_until(lambda: counts.attached(amqp_url, "default.DQ") == (1, 1), what="the window to be full")
        with pytest.raises(AssertionError, match="in vain"):
            wait_until(lambda: lateness(app), timeout=5)


# -- late rather than early


def test_delays_end_late_rather_than_early(amqp_url: str, tmp_path: Path) -> None:
    """Whoever waits for a payment to settle must not be called before."""
    # Given delays below, on and between the steps of the ladder, some of several hops
    delays = [1, 100, 250, 260, 499, 700, 1000, 1001, 1900, 2600, 3333]
    app = App(tmp_path, DELAYED, amqp_url)
    with app.worker():
        app.send(f"for delay in {delays}: send_after(delay)")
        wait_until(lambda: len(lateness(app)) == len(delays), what="all messages to run")

    assert min(lateness(app)) >= 0
    assert max(lateness(app)) < 10


def test_a_delay_goes_on_while_no_worker_runs(amqp_url: str, tmp_path: Path) -> None:
    """Deploys and weekends: the message is there when somebody is there again, and was not forgotten."""
    app = App(tmp_path, DELAYED, amqp_url)
    app.send("send_after(600)")
    # It waits for its last hop, or is done with the ladder; whether it is due is seen when it arrives.
    wait_until(lambda: queues.depth(amqp_url, "default") == 1, what="the message to leave the ladder")

    with app.worker():
        wait_until(lambda: lateness(app), what="the message to run")

    assert min(lateness(app)) >= 0


# -- what waits costs no worker anything


SEND_MANY = f"""
broker.send_many([work.message_with_options(args=(0, "x" * 2000)) for _ in range(10_000)], delay={HOUR_MS})
"""

SEND_MANY_STOCK = f"""
for _ in range(10_000):
    send_after({HOUR_MS}, "x" * 2000)
"""


def growth_by_delayed_messages(app: App, code: str, *, queue: str, left: int) -> int:
    """Return by how many bytes a worker grows when 10,000 messages of 2 kB wait for an hour, ``left`` of them in ``queue``."""
    with app.worker(threads=10) as worker:
        app.send("work.send(time.time())")
        wait_until(lambda: lateness(app), what="the worker to be warm")
        [pid] = worker.pids()
        before = psutil.Process(pid).memory_info().rss

        app.send(code)
        app.send("work.send(time.time())")
        wait_until(lambda: len(lateness(app)) == 2, what="a message behind them to run")
        wait_until(
            lambda: queues.depth(app.url, queue) == left, what="the delayed messages to be where they wait"
        )
        return psutil.Process(pid).memory_info().rss - before


def test_ten_thousand_delayed_messages_use_no_memory_of_a_worker(amqp_url: str, tmp_path: Path) -> None:
    """Memory must follow what runs, not what waits."""
    grown = growth_by_delayed_messages(
        App(tmp_path, DELAYED, amqp_url), SEND_MANY, queue="safeops.delay.2400s", left=10_000
    )

    assert grown < 10_000_000


def test_stock_holds_delayed_messages_in_the_memory_of_a_worker(amqp_url: str, tmp_path: Path) -> None:
    """The twin: a thousand per thread."""
    grown = growth_by_delayed_messages(
        App(tmp_path, DELAYED, amqp_url, broker="stock"), SEND_MANY_STOCK, queue="default.DQ", left=0
    )

    assert grown > 20_000_000


# -- and the ends of what was started at the top


def test_a_delay_longer_than_the_consumer_timeout_closes_no_channel(patients: dict[str, Patient]) -> None:
    """RabbitMQ takes a channel away from who holds a message for too long, half an hour by default."""
    app, worker = patients["safe"].app, patients["safe"].worker
    wait_until(lambda: lateness(app), what="the message to run")

    [late] = lateness(app)
    assert 0 <= late < 10
    assert "was closed" not in worker.text
    assert worker.text.count("Consuming queue") == 1


def test_stock_loses_its_channel_while_a_message_is_delayed(patients: dict[str, Patient]) -> None:
    """The twin: the channel goes again and again, three seconds of standstill each time."""
    app, worker = patients["stock"].app, patients["stock"].worker
    wait_until(lambda: lateness(app), timeout=60, what="the message to run")

    # From RabbitMQ 4.3 on there is no consumer timeout for classic queues, and stock declares no others.
    loses = patients["stock"].server.version < (4, 3)
    assert ("Consumer encountered a connection error" in worker.text) == loses
