"""Queues of stock Dramatiq get new arguments while producers send and workers work, and the migration is killed again and again.

Real producers, workers and ``safeops queues migrate`` on a real RabbitMQ. What counts is read back from the file that the actors
write their effects to, and from RabbitMQ.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import pytest

from dramatiq_safeops.rabbitmq import topology
from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import queues
from tests.harness.counts import attached
from tests.harness.worker import ROOT, App, wait_until

QUEUE = "orders"
STAGING = "orders.migrating"
CLASSIC = {"TEST_BROKER_OPTIONS": json.dumps({"queue_type": "classic"})}

SOURCE = """
from dramatiq_safeops import SendUncertain

@dramatiq.actor(queue_name="orders", time_limit=60_000)
def work(key, due=0.0, takes=0.0):
    time.sleep(takes)
    note("ran", key=key, due=due)
"""

PRODUCER = """
import itertools
for number in itertools.count():
    if os.path.exists("stop"):
        break
    key = prefix + "-" + str(number)
    message = work.message(key, takes={takes})
    begun = time.monotonic()
    while True:
        try:
            broker.enqueue(message)
            break
        except SendUncertain:
            pass
    note("sent", key=key, took=time.monotonic() - begun)
    time.sleep({pause})
broker.close()
"""

STOCK_QUEUES: dict[str, dict[str, Any]] = {
    QUEUE: {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.XQ"},
    "orders.DQ": {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.XQ"},
    "orders.XQ": {"x-message-ttl": 7 * 86_400_000},
}


def declare_as_stock(url: str, **more: Any) -> None:
    """Declare what stock Dramatiq declares; ``tests/unit/test_topology.py`` holds that it is so."""
    with queues.channel(url) as channel:
        for name, arguments in STOCK_QUEUES.items():
            extra = (
                {key.replace("_", "-"): value for key, value in more.items()} if name != "orders.XQ" else {}
            )
            channel.queue_declare(name, durable=True, arguments={**arguments, **extra})


def fill(url: str, queue: str, bodies: Iterator[bytes] | list[bytes], **properties: Any) -> None:
    """Publish ``bodies``, all or none."""
    with queues.channel(url) as channel:
        channel.tx_select()
        for body in bodies:
            channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2, **properties))
        channel.tx_commit()


def body(key: str, *, queue: str = QUEUE, takes: float = 0.0, due: float = 0.0, **options: Any) -> bytes:
    return queues.body_of("work", key, due, takes, queue=queue, message_id=key, **options)


def command(url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "dramatiq_safeops", "queues", "migrate", *arguments]


def environment(url: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "SAFEOPS_AMQP_URL": url}


def migrate(url: str, *arguments: str, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    """Run ``safeops queues migrate`` to its end."""
    return subprocess.run(
        command(url, *arguments),
        env=environment(url),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    [one] = json.loads(done.stdout)["queues"]
    return one  # type: ignore[no-any-return]


# -- the whole of it, under load


@dataclass
class Moment:
    """What is where, looked at from outside."""

    staging: int | None
    quorum: bool

    def __str__(self) -> str:
        return f"{'after' if self.quorum else 'before'} the switch, {self.staging} staged"


class Observer:
    """Looks at the queues through one connection."""

    def __init__(self, url: str) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(url))
        self._channel = self._connection.channel()

    def close(self) -> None:
        with suppress(pika.exceptions.AMQPError):  # closed already, or RabbitMQ has
            self._connection.close()

    def look(self) -> Moment:
        return Moment(self._count(STAGING), self._is_quorum())

    def _count(self, queue: str) -> int | None:
        try:
            return self._channel.queue_declare(queue, passive=True).method.message_count  # type: ignore[no-any-return]
        except pika.exceptions.ChannelClosedByBroker:
            self._channel = self._connection.channel()
            return None

    def _is_quorum(self) -> bool:
        # The binding of its dead letters' name stands for it: a declaration could create the queue.
        return self._count(f"{QUEUE}.DQ") is None


#: When to kill: some time after its start, or at a moment of its work, with some jitter.
KILL_WHEN: dict[str, Callable[[Moment, int], bool]] = {
    "just started": lambda moment, total: True,
    "staging there": lambda moment, total: moment.staging is not None,
    "a little staged": lambda moment, total: (moment.staging or 0) > 0,
    "half of it staged": lambda moment, total: (moment.staging or 0) > total / 2,
    "nearly all staged": lambda moment, total: (moment.staging or 0) > total * 0.9,
    "switched": lambda moment, total: moment.quorum,
    "half of it back": lambda moment, total: moment.quorum and (moment.staging or 0) < total / 2,
    "nearly all back": lambda moment, total: moment.quorum and (moment.staging or 0) < total * 0.1,
}


def run_and_kill(url: str, observer: Observer, when: str, total: int, log: list[str]) -> bool:
    """Start a migration and kill -9 it when told; return False if it came to its end before."""
    process = subprocess.Popen(
        command(url, QUEUE), env=environment(url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            moment = observer.look()
            if KILL_WHEN[when](moment, total):
                break
        time.sleep(random.uniform(0, 0.4))
        ended = process.poll()
        process.kill()
        log.append(f"{when}: {observer.look()}{'' if ended is None else f', had ended with {ended}'}")
        return ended is None
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    ("waiting", "kills", "takes"),
    [
        pytest.param(5_000, 5, 0.01, id="short"),
        pytest.param(50_000, 12, 0.002, id="long", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(900)
def test_a_migration_under_load_that_is_killed_again_and_again_loses_and_doubles_nothing(
    amqp_url: str, tmp_path: Path, waiting: int, kills: int, takes: float
) -> None:
    """Hurts whoever takes over queues with work in them: that must not be the night when orders vanish or are shipped twice."""
    # Given queues of stock Dramatiq with messages that wait, are delayed, and are dead
    delayed, dead = waiting // 10, waiting // 10
    declare_as_stock(amqp_url)
    fill(amqp_url, QUEUE, [body(f"waiting-{n}", takes=takes) for n in range(waiting)])
    dues = [time.time() + random.uniform(0, 60) for _ in range(delayed)]
    later = [
        body(f"delayed-{n}", queue="orders.DQ", due=due, eta=math.ceil(due * 1000))
        for n, due in enumerate(dues)
    ]
    fill(amqp_url, "orders.DQ", later[::2])
    letters = [body(f"dead-{n}", retries=20, traceback="Traceback: boom") for n in range(dead)]
    fill(amqp_url, "orders.XQ", letters)

    # and two producers that send, and two workers that work, all of which know nothing of quorum queues
    app = App(tmp_path, SOURCE, amqp_url, env=CLASSIC)
    with ExitStack() as stack:
        producers = [
            stack.enter_context(
                app.program(f"prefix = {prefix!r}\n" + PRODUCER.format(pause=0.02, takes=takes))
            )
            for prefix in ("first", "second")
        ]
        workers = [stack.enter_context(app.worker()) for _ in range(2)]
        wait_until(lambda: len(app.notes("ran")) > 20 and len(app.notes("sent")) > 20, what="load")
        observer = Observer(amqp_url)
        stack.callback(observer.close)

        # When the migration is killed at moments of its life, and each time started again
        log: list[str] = []
        moments = (list(KILL_WHEN) * 2)[: max(kills, len(KILL_WHEN))]
        while not queues.depth(amqp_url, "safeops.migrations"):
            # Killed still sooner, the workers were not told and nothing has happened.
            run_and_kill(amqp_url, observer, "staging there", 0, log)
        # The workers have emptied the delay queue; now they stand back, and stock Dramatiq goes on delaying.
        wait_until(lambda: attached(amqp_url, "orders.DQ")[1] == 0, what="the workers to stand back")
        fill(amqp_url, "orders.DQ", later[1::2])
        for when in sorted(random.sample(moments, kills - 1), key=list(KILL_WHEN).index):
            run_and_kill(amqp_url, observer, when, attached(amqp_url, QUEUE)[0] + dead, log)
        observer.close()
        done = migrate(amqp_url, QUEUE, "--json", timeout=600)
        print("\n".join(log), done.stdout, done.stderr, sep="\n")  # noqa: T201 - shown when it fails
        assert done.returncode == 0, done.stderr

        # and all goes on for a while
        time.sleep(3)
        (tmp_path / "stop").touch()
        for producer in producers:
            producer.wait(60)
            assert producer.returncode == 0, producer.stderr.read() if producer.stderr else ""
        sent = {one["key"] for one in app.notes("sent")}
        expected = {f"waiting-{n}" for n in range(waiting)} | {f"delayed-{n}" for n in range(delayed)} | sent

        def all_ran() -> bool:
            return len({one["key"] for one in app.notes("ran")}) >= len(expected)

        try:
            wait_until(all_ran, 120 + waiting / 100, "all to run")
        finally:
            ran = Counter(one["key"] for one in app.notes("ran"))
            lost = expected - set(ran)
            doubled = [key for key, count in ran.items() if count > 1]
            slowest = max(one["took"] for one in app.notes("sent"))
            print(  # noqa: T201 - shown when it fails
                f"sent {len(sent)}, ran {len(ran)}, lost {len(lost)} {sorted(lost)[:5]},"
                f" doubled {len(doubled)} {sorted(doubled)[:5]}, slowest send {slowest:.2f} s"
            )

        # Then each message has run once, none before its time
        assert not lost
        assert not doubled
        assert min(one["at"] - one["due"] for one in app.notes("ran")) >= 0
        # each dead letter is there once, with the producer's bytes
        found = queues.take(amqp_url, "orders.dlq")
        assert sorted(one.body for one in found) == sorted(letters)
        assert {one.headers["x-safeops-reason"] for one in found} == {"dead_lettered_by_stock"}
        # nobody had to do anything, and nothing is left behind
        assert all(worker.process.poll() is None for worker in workers)
        for queue in (STAGING, "orders.DQ", "orders.XQ", "safeops.migrations", "safeops.unroutable"):
            assert queues.depth(amqp_url, queue) == 0, queue
        assert report_of(migrate(amqp_url, QUEUE, "--json"))["status"] == "nothing to do"


# -- RabbitMQ is killed


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)], ids=["short", "long"])
@pytest.mark.timeout(900)
def test_a_rabbitmq_that_is_killed_in_the_middle_loses_and_doubles_nothing(
    own_rabbit: RabbitmqServer, kills: int
) -> None:
    """Hurts whoever has a power cut in the same night: the tool says so, and goes on when it is started again."""
    url = own_rabbit.url
    with queues.channel(url) as channel:
        topology.apply([*topology.ladder(), topology.migrations()], channel)
    for number in range(kills):
        # Given a queue of stock Dramatiq with its delayed and dead messages
        waiting, aside = 4_000, 400
        declare_as_stock(url)
        fill(url, QUEUE, [body(f"waiting-{n}") for n in range(waiting)])
        eta = int(time.time() * 1000) + 3_600_000
        fill(url, "orders.DQ", [body(f"delayed-{n}", queue="orders.DQ", eta=eta) for n in range(aside)])
        fill(url, "orders.XQ", [body(f"dead-{n}") for n in range(aside)])

        # When RabbitMQ is killed with kill -9 before or after the change of the queue
        observer = Observer(url)
        migration = subprocess.Popen(
            command(url, QUEUE),
            env=environment(url),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        threshold = random.randint(1, waiting)

        before, deadline = number % 2 == 0, time.monotonic() + 90
        while migration.poll() is None and time.monotonic() < deadline:
            moment = observer.look()
            staged = -1 if moment.staging is None else moment.staging
            if staged > threshold if before else moment.quorum and 0 <= staged < threshold:
                break
        observer.close()
        own_rabbit.kill()
        _, said = migration.communicate(timeout=60)
        own_rabbit.restart()

        # Then the command has said so, and ends well the next time
        assert migration.returncode == 3, said
        assert "start it again" in said
        done = migrate(url, QUEUE, "--json")
        assert done.returncode == 0, done.stderr

        # and every message is there once
        found = [one.message_id for one in queues.take(url, QUEUE)]
        letters = [one.message_id for one in queues.take(url, "orders.dlq")]
        assert sorted(found) == sorted(
            [f"waiting-{n}" for n in range(waiting)] + [f"delayed-{n}" for n in range(aside)]
        )
        assert sorted(letters) == sorted(f"dead-{n}" for n in range(aside))
        with queues.channel(url) as channel:
            channel.queue_delete(QUEUE)
