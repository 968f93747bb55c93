"""A fault each second, and afterwards every message is accounted for.

Workers are killed with kill -9 and replaced, all connections are dropped, RabbitMQ takes no publishes for a while, is
itself killed with kill -9 and comes back, while producers go on sending. What counts is read back from RabbitMQ and from
the file that the actors write their effects to, never from the product's own counters.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import pytest
from dramatiq import Message
from pika.adapters.utils.connection_workflow import AMQPConnectorStackTimeout

from dramatiq_safeops import RabbitmqBroker, SendUncertain
from dramatiq_safeops.rabbitmq.delays import STEPS_MS, step_name
from dramatiq_safeops.testing import RabbitmqServer, TcpProxy
from tests.harness import queues
from tests.harness.counts import queue_counts
from tests.harness.worker import App, Worker, wait_until, with_pid

QUEUE = "orders"
THREADS = 4

#: Messages that Dramatiq's worker takes ahead: twice its threads.
PREFETCH = 2 * THREADS

#: A quorum queue that is killed younger than this comes back broken: that is RabbitMQ's doing.
SETTLING_S = 3.0

#: After the faults: how long the last message may take. Far above what it does.
PATIENCE_S = 90.0

SOURCE = """
    from dramatiq.middleware import CurrentMessage

    def actor(fn):
        return dramatiq.actor(fn, queue_name="orders", max_retries=1, min_backoff=200, time_limit=60_000)

    @actor
    def ok(key):
        note("ran", key=key)

    @actor
    def slow(key):
        time.sleep(0.05)
        note("ran", key=key)

    @actor
    def flaky(key):
        if not CurrentMessage.get_current_message().options.get("retries"):
            note("failed", key=key)
            raise ConnectionError("the first attempt fails")
        note("ran", key=key)

    @actor
    def broken(key):
        note("failed", key=key)
        raise RuntimeError("every attempt fails")

    @actor
    def refused(key):
        note("failed", key=key)
        raise PermanentError("there is no such order")

    @actor
    def first(key):
        note("ran", key=key)
        return key

    @actor
    def second(key):
        note("ran", key=key + "/second")
"""

#: Of ten messages: what they are, and where each kind ends.
MIX = ("ok", "ok", "ok", "slow", "slow", "flaky", "broken", "first", "refused", "junk")
DEAD = {"broken": "retries_exhausted", "refused": "permanent_error", "junk": "unreadable"}
ATTEMPTS = {"broken": 2, "refused": 1, "junk": 0}


def kind_of(key: str) -> str:
    return key.partition("-")[0]


@dataclass
class Plan:
    """What is sent, and what must have become of it in the end."""

    count: int

    def __post_init__(self) -> None:
        kinds = itertools.islice(itertools.cycle(MIX), self.count)
        self.keys = [f"{kind}-{number}" for number, kind in enumerate(kinds)]
        self.dead = {key: DEAD[kind_of(key)] for key in self.keys if kind_of(key) in DEAD}
        self.done = {key for key in self.keys if key not in self.dead}
        self.done |= {f"{key}/second" for key in self.keys if kind_of(key) == "first"}


def message(key: str) -> Message[Any]:
    """The message ``key``, under that id."""
    options = {}
    if kind_of(key) == "first":
        following = Message(QUEUE, "second", (), {}, {}, f"{key}/second", int(time.time() * 1000))
        options["pipe_target"] = following.asdict()
    return Message(QUEUE, kind_of(key), (key,), {}, options, key, int(time.time() * 1000))


@dataclass
class Producer(threading.Thread):
    """Sends its keys, spread over the time of the faults, each until it is confirmed."""

    url: str
    keys: list[str]
    over_s: float
    uncertain: int = 0
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.broker = RabbitmqBroker(url=self.url, send_timeout=3_000)
        self.pause = threading.Event()
        #: Where junk is published: over a plain connection, which knows one URL.
        self.junk_url = self.url

    # A dataclass compares by its fields, and threading keeps threads in a set.
    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        try:
            for key in self.keys:
                if kind_of(key) == "junk":
                    self.send_junk(key)
                else:
                    self.send(key)
                self.pause.wait(self.over_s / len(self.keys))
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.broker.close()

    def send(self, key: str) -> None:
        one = message(key)
        while True:
            try:
                self.broker.enqueue(one)
            except SendUncertain as error:
                self.uncertain += 1
                one = error.message
                continue
            return

    def send_junk(self, key: str) -> None:
        """Publish what is no message, as any client may. It is confirmed, too."""
        while True:
            # ValueError: what pika raises where a connection breaks in the moment in which it is made. The timeout, at a
            # frozen node, is none of pika's AMQPErrors.
            with contextlib.suppress(
                pika.exceptions.AMQPError, AMQPConnectorStackTimeout, OSError, ValueError
            ):
                queues.publish(self.junk_url, QUEUE, f"junk {key}".encode(), message_id=key)
                return
            self.pause.wait(0.2)


class Faults:
    """Two workers, a RabbitMQ, and what happens to them."""

    def __init__(self, app: App, rabbit: RabbitmqServer, proxy: TcpProxy, seed: int) -> None:
        self.app, self.rabbit, self.proxy = app, rabbit, proxy
        self.draw = random.Random(seed)
        self.workers: list[Worker] = []
        self.struck: Counter[str] = Counter()
        self.restarting: threading.Thread | None = None
        self.errors: list[BaseException] = []

    def start(self) -> None:
        for _ in range(2):
            self.workers.append(self.app.start_worker(threads=THREADS, wait=False))
        for worker in self.workers:
            worker.wait_ready()

    def tend(self) -> None:
        """Start a worker for each that has ended, as a supervisor does: without RabbitMQ a worker gives up by itself."""
        for place, worker in enumerate(self.workers):
            if worker.process.poll() is not None:
                self.workers[place] = self.app.start_worker(threads=THREADS, wait=False)

    def strike(self, kind: str) -> None:
        if kind in ("close", "restart", "starve") and self.rabbit_is_away:
            kind = "kill"
        self.struck[kind] += 1
        getattr(self, kind)()
        self.tend()

    def kill(self) -> None:
        self.draw.choice(self.workers).kill()

    def cut(self) -> None:
        self.proxy.cut()

    def close(self) -> None:
        self.rabbit.close_all_connections()

    def starve(self) -> None:
        """Kill workers while RabbitMQ takes no publishes, with failed messages in hand: what they ack too early is lost."""
        failed = len(self.app.notes("failed"))
        self.signal_workers(signal.SIGSTOP)
        self.try_for(2, lambda: queues.depth(self.rabbit.url, QUEUE) >= 40)
        self.rabbit.memory_alarm(True)
        self.signal_workers(signal.SIGCONT)
        self.try_for(2, lambda: len(self.app.notes("failed")) >= failed + PREFETCH)
        for worker in self.workers:
            worker.kill()
        self.rabbit.memory_alarm(False)

    def signal_workers(self, what: signal.Signals) -> None:
        for worker in self.workers:
            for pid in worker.pids():
                with_pid(pid, what)

    @staticmethod
    def try_for(seconds: float, condition: Callable[[], bool]) -> None:
        """Wait for what a fault needs to be worst. In the middle of other faults it may not come."""
        with contextlib.suppress(AssertionError):
            wait_until(condition, seconds)

    def restart(self) -> None:
        self.restarting = threading.Thread(target=self.kill_and_restart_rabbit, daemon=True)
        self.restarting.start()

    def kill_and_restart_rabbit(self) -> None:
        try:
            self.rabbit.kill()
            self.rabbit.restart()
        except BaseException as error:
            self.errors.append(error)

    @property
    def rabbit_is_away(self) -> bool:
        return self.restarting is not None and self.restarting.is_alive()

    def end(self) -> None:
        """Let everything be well again: RabbitMQ is there, and two workers are."""
        if self.restarting is not None:
            self.restarting.join(PATIENCE_S)

        def all_ready() -> bool:
            self.tend()
            return all("ready for action" in worker.text for worker in self.workers)

        wait_until(all_ready, PATIENCE_S, "two workers")

    def terminate(self) -> list[int]:
        """Stop both workers as a deploy does, at the same time; return their exit codes."""
        for worker in self.workers:
            worker.process.send_signal(signal.SIGTERM)
        return [worker.process.wait(PATIENCE_S) for worker in self.workers]

    def destroy(self) -> None:
        for worker in self.workers:
            worker.destroy()


@dataclass
class Run:
    """One whole run: everything that happened, and what was found afterwards."""

    plan: Plan
    faults: Faults
    producers: list[Producer]

    @property
    def effects(self) -> Counter[str]:
        return Counter(one["key"] for one in self.faults.app.notes("ran"))

    @property
    def failures(self) -> Counter[str]:
        return Counter(one["key"] for one in self.faults.app.notes("failed"))

    def missing(self) -> set[str]:
        """What has neither its effect nor its dead letter yet."""
        missing = self.plan.done - set(self.effects)
        if not missing and queues.depth(self.faults.rabbit.url, f"{QUEUE}.dlq") >= len(self.plan.dead):
            return set(self.plan.dead) - {one.message_id for one in self.look_at_letters()}
        return missing or set(self.plan.dead)

    def look_at_letters(self) -> list[queues.Seen]:
        return queues.look(self.faults.rabbit.url, f"{QUEUE}.dlq")

    def wait_for_all(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while missing := self.missing():
            if time.monotonic() >= deadline:
                held = queue_counts(self.faults.rabbit, self.faults.rabbit.url)
                raise AssertionError(f"not accounted for: {sorted(missing)[:20]}; {held}")
            time.sleep(0.1)

    def wait_until_quiet(self) -> None:
        """Wait until no message, and no duplicate of one, is anywhere but among the dead letters."""
        url = self.faults.rabbit.url

        def quiet() -> bool:
            counts = queue_counts(self.faults.rabbit, url)
            return not any(
                one.ready + one.unacked for name, one in counts.items() if not name.endswith(".dlq")
            )

        # Twice: the counts of a queue are up to half a second old.
        for _ in range(2):
            wait_until(quiet, PATIENCE_S, "the last duplicates")

    def summary(self, letters: Counter[str], took_s: float) -> str:
        effects = self.effects
        return (
            f"{len(self.plan.keys)} messages, {dict(sorted(self.faults.struck.items()))}"
            f" in {took_s:.0f} s; {sum(one.uncertain for one in self.producers)} sends uncertain;"
            f" {len(self.plan.done)} done with {effects.total() - len(effects)} repeated;"
            f" {len(letters)} dead with {letters.total() - len(letters)} repeated; 0 lost"
        )


def schedule(seed: int, seconds: int) -> Iterator[str]:
    """One fault for each second. RabbitMQ dies where there is time for it to come back."""
    draw = random.Random(seed)
    for second in range(seconds):
        if second % 12 == 1:
            yield "starve"
        elif second % 12 == 3:
            yield "restart"
        elif second < SETTLING_S:
            yield draw.choice(["kill", "cut"])
        else:
            yield draw.choice(["kill", "kill", "kill", "cut", "cut", "close"])


@pytest.mark.parametrize(
    ("count", "seconds", "seed"),
    [
        pytest.param(400, 8, 20260301, id="short"),
        pytest.param(2_000, 30, 20260302, id="full", marks=pytest.mark.long),
        pytest.param(2_000, 30, 20260303, id="full-again", marks=pytest.mark.long),
    ],
)
def test_a_fault_each_second_and_no_message_is_lost(
    tmp_path: Path, own_rabbit: RabbitmqServer, count: int, seconds: int, seed: int
):
    """Hurts everybody: this is what the package is for."""
    parameters = pika.URLParameters(own_rabbit.url)
    started = time.monotonic()
    # Quorum queues that are declared from now on count every half second what they hold, instead of every five.
    own_rabbit.eval("application:set_env(rabbit, quorum_tick_interval, 500).")
    with TcpProxy(parameters.host, parameters.port) as proxy:
        url = proxy.url_for(own_rabbit.url)
        faults = Faults(App(tmp_path, SOURCE, url), own_rabbit, proxy, seed)
        plan = Plan(count)
        keys = random.Random(seed).sample(plan.keys, len(plan.keys))
        producers = [Producer(url, keys[place::3], seconds) for place in range(3)]
        run = Run(plan, faults, producers)
        try:
            # Given two workers, and producers that send all the time
            faults.start()
            for producer in producers:
                producer.start()

            # When something breaks each second
            begin = time.monotonic()
            for second, kind in enumerate(schedule(seed, seconds)):
                time.sleep(max(begin + second - time.monotonic(), 0))
                faults.strike(kind)
            faults.end()
            for producer in producers:
                producer.join(PATIENCE_S)

            # Then every send was confirmed in the end, and every message has its outcome
            assert [error for producer in producers for error in producer.errors] == []
            assert faults.errors == []
            assert not any(producer.is_alive() for producer in producers)
            run.wait_for_all()
            run.wait_until_quiet()
            assert faults.terminate() == [0, 0]
        finally:
            faults.destroy()

    # Nothing is anywhere but among the dead letters, which are taken out and counted
    left = {
        name: found
        for name in [QUEUE, "safeops.unroutable", *map(step_name, STEPS_MS)]
        if (found := [one.message_id for one in queues.take(own_rabbit.url, name)])
    }
    assert left == {}
    letters = queues.take(own_rabbit.url, f"{QUEUE}.dlq")
    by_id = Counter(one.message_id for one in letters)
    assert set(by_id) == set(plan.dead)
    for letter in letters:
        key = letter.message_id
        assert letter.headers["x-safeops-reason"] == plan.dead[key]
        assert letter.headers["x-safeops-attempts"] == ATTEMPTS[kind_of(key)]
        if kind_of(key) == "junk":
            assert letter.body == f"junk {key}".encode()
        else:
            assert letter.message["message_id"] == key
    assert set(run.effects) == plan.done
    for key in plan.dead:
        assert run.failures[key] >= ATTEMPTS[kind_of(key)]

    # No worker has stumbled over itself
    for log in tmp_path.glob("worker-*.log"):
        for wrong in ("Unexpected failure", "could not be"):
            assert wrong not in log.read_text()

    # A repeat needs a fault: at most what two workers held un-acked, or a producer had on its way
    sys.stdout.write(run.summary(by_id, time.monotonic() - started) + "\n")
    most = faults.struck.total() * (2 * PREFETCH + len(producers))
    assert by_id.total() - len(by_id) <= most
    assert run.effects.total() - len(run.effects) <= most


def test_without_faults_nothing_is_repeated(tmp_path: Path, amqp_url: str):
    """Hurts everybody: the twin of the run above shows that its repeats come from its faults, and from nothing else."""
    app = App(tmp_path, SOURCE, amqp_url)
    plan = Plan(200)
    with app.worker(threads=THREADS), app.worker(threads=THREADS):
        producers = [Producer(amqp_url, plan.keys[place::3], 0.1) for place in range(3)]
        for producer in producers:
            producer.start()
        for producer in producers:
            producer.join(PATIENCE_S)
        wait_until(
            lambda: (
                len(app.notes("ran")) >= len(plan.done)
                and queues.depth(amqp_url, f"{QUEUE}.dlq") >= len(plan.dead)
            ),
            PATIENCE_S,
            "all messages",
        )

    assert [error for producer in producers for error in producer.errors] == []
    assert Counter(one["key"] for one in app.notes("ran")) == Counter(plan.done)
    letters = queues.take(amqp_url, f"{QUEUE}.dlq")
    assert Counter(one.message_id for one in letters) == Counter(plan.dead.keys())
    assert {one.message_id: one.headers["x-safeops-reason"] for one in letters} == plan.dead
