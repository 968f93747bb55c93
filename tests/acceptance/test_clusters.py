"""Three RabbitMQ nodes, and what happens to senders and workers when some of them die or freeze.

Quorum queues of the product, on nodes of which each is really killed (kill -9) or paused (SIGSTOP). How long a frozen node
is taken for a living one was measured on RabbitMQ 3.10 and is printed by the tests.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dramatiq import Message
from dramatiq.errors import ConnectionFailed

from dramatiq_safeops import RabbitmqBroker, SendUncertain
from dramatiq_safeops.testing import RabbitmqCluster
from dramatiq_safeops.testing.rabbitmq_cluster import ClusterNode
from tests.harness import queues
from tests.harness.vhosts import virtual_host
from tests.harness.worker import App, wait_until

#: A quorum queue that is killed younger than this comes back broken: that is RabbitMQ's doing.
SETTLING_S = 3.0

#: How long a single step may take. Far above what it does, and below the 45 s after which a paused node may count as down.
PATIENCE_S = 40.0

THREADS = 4

#: Messages that Dramatiq's worker takes ahead: twice its threads.
PREFETCH = 2 * THREADS

SOURCE = """
    QUEUE = os.environ["TEST_QUEUE"]
    GATE = os.environ["TEST_GATE"]

    def actor(fn):
        return dramatiq.actor(fn, queue_name=QUEUE, max_retries=1, min_backoff=200, time_limit=120_000)

    @actor
    def work(key):
        note("ran", key=key)

    @actor
    def fails_once(key):
        wait_for_gate(key)
        from dramatiq.middleware import CurrentMessage
        if not CurrentMessage.get_current_message().options.get("retries"):
            note("failed", key=key)
            raise ConnectionError("the first attempt fails")
        note("ran", key=key)

    @actor
    def dies(key):
        wait_for_gate(key)
        note("failed", key=key)
        raise PermanentError("there is no such order")

    def wait_for_gate(key):
        note("started", key=key)
        while not os.path.exists(GATE):
            time.sleep(0.05)
"""


@dataclass
class Place:
    """A virtual host on the cluster, and one queue of a test's own there."""

    cluster: RabbitmqCluster
    vhost: str
    folder: Path
    queue: str = field(default_factory=lambda: f"q{uuid.uuid4().hex[:8]}")

    @property
    def urls(self) -> list[str]:
        return self.cluster.urls_for(self.vhost)

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    def url_at(self, node: ClusterNode) -> str:
        return self.urls[self.cluster.nodes.index(node)]

    def leader(self) -> ClusterNode:
        return self.cluster.leader_of(self.queue, self.vhost)

    def app(self, *first: ClusterNode, name: str = "app", queue: str | None = None) -> App:
        """An app that knows all nodes, ``first`` first."""
        urls = sorted(self.urls, key=lambda url: url not in [self.url_at(one) for one in first])
        settings = {"TEST_QUEUE": self.queue if queue is None else queue, "TEST_GATE": str(self.gate)}
        return App(self.folder / name, SOURCE, ";".join(urls), env=settings)

    def message(self, actor: str = "work", key: str = "") -> Message[Any]:
        key = key if key else uuid.uuid4().hex
        return Message(self.queue, actor, (key,), {}, {}, key, int(time.time() * 1000))

    def hand_leadership_to(self, node: ClusterNode) -> None:
        """Move the queue's leader to ``node``."""

        def moved() -> bool:
            leader = self.leader()
            if leader is node:
                return True
            name = f"'{self.vhost}_{self.queue}'"
            leader.eval(f"ra:transfer_leadership({{{name}, node()}}, {{{name}, '{node.name}'}}).")
            return False

        wait_until(moved, PATIENCE_S, "the leader to move")


@pytest.fixture(scope="module")
def vhost(cluster: RabbitmqCluster) -> Iterator[str]:
    with virtual_host(cluster.nodes[0]) as url:
        yield url.rpartition("/")[2]


@pytest.fixture
def place(cluster: RabbitmqCluster, vhost: str, tmp_path: Path) -> Iterator[Place]:
    yield Place(cluster, vhost, tmp_path)
    cluster.heal()


@contextmanager
def broker_at(urls: list[str], **options: Any) -> Iterator[RabbitmqBroker]:
    broker = RabbitmqBroker(url=urls, middleware=[], **options)
    try:
        yield broker
    finally:
        broker.close()


class Senders:
    """Threads that send without a pause, each message until it is confirmed."""

    def __init__(self, broker: RabbitmqBroker, make: Callable[[], Message[Any]], count: int = 8) -> None:
        self.broker, self.make = broker, make
        self.sent: list[str] = []
        self.errors: list[BaseException] = []
        self.longest = 0.0
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self._send, daemon=True) for _ in range(count)]

    def _send(self) -> None:
        while not self.stopping.wait(0.02):
            one, began = self.make(), time.monotonic()
            while True:
                try:
                    self.broker.enqueue(one)
                except Exception as error:
                    self.errors.append(error)
                    if self.stopping.is_set():
                        return  # not confirmed: nobody was promised anything
                else:
                    break
            self.sent.append(one.message_id)
            self.longest = max(self.longest, time.monotonic() - began)

    def __enter__(self) -> Senders:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(PATIENCE_S)

    def wait_for_more(self, count: int = 100) -> None:
        goal = len(self.sent) + count
        wait_until(lambda: len(self.sent) >= goal, PATIENCE_S, f"{count} more sends: {self.errors[-3:]}")


def ran(app: App) -> Counter[str]:
    return Counter(one["key"] for one in app.notes("ran"))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def test_senders_and_workers_outlive_the_leader_that_they_are_connected_to(place: Place):
    """Hurts everybody with a cluster: a node that dies takes the leader of a queue and the connections to it along."""
    app = place.app()
    with app.worker() as worker, broker_at(place.urls) as broker:
        # Given a worker and eight threads that send, all connected to the node that leads the queue
        broker.enqueue(place.message())
        place.hand_leadership_to(place.cluster.nodes[0])
        time.sleep(SETTLING_S)
        with Senders(broker, place.message) as senders:
            senders.wait_for_more()

            # When that node is killed
            place.cluster.nodes[0].kill()

            # Then sends go on without a single error, and the worker is back at another node
            senders.wait_for_more()
            wait_until(lambda: worker.text.count("Consuming queue") >= 2, PATIENCE_S, worker.text)
        assert senders.errors == []
        wait_until(lambda: set(senders.sent) <= set(ran(app)), PATIENCE_S, "all messages")
    repeated = ran(app).total() - len(ran(app))
    say(
        f"{len(senders.sent)} sent, the longest send took {senders.longest:.1f} s, {repeated} repeated, 0 lost"
    )


@pytest.mark.timeout(400)
def test_a_frozen_node_is_left_for_another_one(place: Place):
    """Hurts everybody with a cluster: a frozen node keeps its connections, takes new ones, and never answers."""
    first, second, _ = place.cluster.nodes
    app = place.app(first)
    with (
        app.worker(threads=THREADS) as worker,
        broker_at(place.urls) as broker,
        broker_at([place.url_at(second)]) as other,
    ):
        # Given a worker and a sender at a node that does not lead the queue
        broker.enqueue(place.message())
        place.hand_leadership_to(second)
        time.sleep(SETTLING_S)

        # When that node freezes
        first.pause()
        frozen_at = time.monotonic()

        # Then both go on at another node, while it is still frozen; one that starts only now can send at once
        keys = [place.message().message_id for _ in range(20)]
        for key in keys:
            other.enqueue(place.message(key=key))
        while True:
            one = place.message()
            try:
                broker.enqueue(one)
                break
            except SendUncertain:
                assert time.monotonic() - frozen_at < PATIENCE_S, worker.text
        sends_after = time.monotonic() - frozen_at
        wait_until(lambda: one.message_id in ran(app), PATIENCE_S, worker.text)
        works_after = time.monotonic() - frozen_at
        assert first.running
        assert not first.serving

        # What RabbitMQ had handed to the frozen node before comes back when that thaws, or counts as down
        assert len({*keys} - set(ran(app))) <= PREFETCH
        place.cluster.heal()
        wait_until(lambda: {*keys} <= set(ran(app)), PATIENCE_S, worker.text)
    say(f"sends went on after {sends_after:.1f} s, the worker after {works_after:.1f} s")


@dataclass
class Outage:
    """What was seen while a queue had lost its majority, and after it was back."""

    place: Place
    keys: dict[str, str]  # actor -> key
    held: Counter[str] = field(default_factory=Counter)  # runs that ended while the majority was away
    letters_meanwhile: int = -1
    uncertain: SendUncertain | None = None
    send_took_s: float = 0.0
    join: BaseException | None = None
    boot: str = ""
    boot_code: int | None = None
    boot_took_s: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    letters: list[queues.Seen] = field(default_factory=list)
    waiting: int = -1


@pytest.fixture(scope="module")
def outage(cluster: RabbitmqCluster, vhost: str, tmp_path_factory: pytest.TempPathFactory) -> Outage:
    """The whole story, once: two of three nodes are killed with messages in hand, then one of them comes back."""
    place = Place(cluster, vhost, tmp_path_factory.mktemp("outage"))
    survivor, *others = cluster.nodes
    app = place.app(survivor)
    seen = Outage(place, {"fails_once": "fails", "dies": "dies"})
    with app.worker() as worker, broker_at(place.urls, send_timeout=3_000) as broker:
        for actor, key in seen.keys.items():
            broker.enqueue(place.message(actor, key))
        wait_until(lambda: len(app.notes("started")) == 2, PATIENCE_S, worker.text)
        place.hand_leadership_to(survivor)
        time.sleep(SETTLING_S)
        try:
            for node in others:
                node.kill()
            place.gate.touch()
            wait_until(lambda: len(app.notes("failed")) == 2, PATIENCE_S, worker.text)
            began = time.monotonic()
            try:
                broker.enqueue(place.message("work", "late"))
            except SendUncertain as error:
                seen.uncertain = error
            seen.send_took_s = time.monotonic() - began
            try:
                broker.join(place.queue, timeout=60_000)
            except Exception as error:
                seen.join = error
            began = time.monotonic()
            newcomer = place.app(survivor, name="newcomer", queue=f"{place.queue}-new").start_worker(
                wait=False
            )
            try:
                seen.boot_code = newcomer.process.wait(PATIENCE_S)
                seen.boot_took_s = time.monotonic() - began
            finally:
                newcomer.destroy()
                seen.boot = newcomer.text
            seen.held = Counter(one["key"] for one in app.notes("failed"))

            # The majority is back
            others[0].restart()
            assert seen.uncertain is not None
            wait_until(lambda: _sent_again(broker, seen.uncertain), PATIENCE_S, "a send after the outage")
            wait_until(lambda: {"fails", "late"} <= set(ran(app)), 2 * PATIENCE_S, worker.text)
            dlq = f"{place.queue}.dlq"
            wait_until(lambda: queues.depth(place.url_at(survivor), dlq), PATIENCE_S, worker.text)
        finally:
            cluster.heal()
        seen.failed = Counter(one["key"] for one in app.notes("failed"))
        seen.ran = ran(app)
        assert worker.terminate() == 0
    seen.letters = queues.take(place.urls[0], dlq)
    seen.waiting = len(queues.look(place.urls[0], place.queue))
    return seen


def _sent_again(broker: RabbitmqBroker, error: SendUncertain | None) -> bool:
    assert error is not None
    try:
        broker.enqueue(error.message)
    except SendUncertain:
        return False
    return True


def test_a_send_without_the_majority_ends_within_its_time_budget(outage: Outage):
    """Hurts a web request: RabbitMQ says nothing at all then, and pika waits for ever."""
    assert outage.uncertain is not None
    assert outage.uncertain.message.message_id == "late"
    assert outage.send_took_s < 5 * 3.0
    say(f"send() gave up after {outage.send_took_s:.1f} s")


def test_without_the_majority_what_ran_is_held_and_does_not_run_again(outage: Outage):
    """Hurts whoever pays for each run: the copy or dead letter cannot be stored, which is no reason to run again."""
    assert outage.held == Counter(["fails", "dies"])
    assert outage.failed == Counter(["fails", "dies"])
    assert outage.ran["fails"] == 1
    assert outage.ran["late"] in (1, 2)  # it was sent twice, under one id


def test_a_dead_letter_is_on_the_majority_before_its_message_is_gone(outage: Outage):
    """Hurts whoever counts on dead letters: RabbitMQ's own dead-lettering is not confirmed by anybody."""
    assert [one.message_id for one in outage.letters] == ["dies"]
    assert outage.waiting == 0


def test_an_empty_answer_of_a_queue_without_its_majority_is_not_believed(outage: Outage):
    """Hurts whoever waits for the end of the work: RabbitMQ says that such a queue is empty, with messages in it."""
    assert isinstance(outage.join, ConnectionFailed)
    assert "too few of its nodes are up" in str(outage.join)


def test_a_worker_that_starts_without_the_majority_says_so_and_ends(outage: Outage):
    """Hurts whoever deploys then: a start that hangs is seen by nobody, and a traceback helps nobody."""
    assert outage.boot_code == 3
    assert "too few of its nodes are up" in outage.boot
    assert "rabbitmqctl cluster_status" in outage.boot
    assert "Traceback" not in outage.boot
    say(f"the worker gave up after {outage.boot_took_s:.1f} s")


def test_a_message_that_died_without_the_majority_is_not_lost_with_its_worker(place: Place):
    """Hurts whoever restarts workers in an outage: until its dead letter is stored, the message itself must be."""
    survivor, *others = place.cluster.nodes
    app = place.app(survivor)
    dlq = f"{place.queue}.dlq"
    with app.worker() as worker, broker_at(place.urls) as broker:
        # Given a message that dies while its queue has lost the majority
        broker.enqueue(place.message("dies", "dies"))
        wait_until(lambda: app.notes("started"), PATIENCE_S, worker.text)
        place.hand_leadership_to(survivor)
        time.sleep(SETTLING_S)
        for node in others:
            node.kill()
        place.gate.touch()
        wait_until(lambda: app.notes("failed"), PATIENCE_S, worker.text)

        # When its worker is killed, and the nodes come back
        worker.kill()
    place.cluster.heal()
    assert queues.depth(place.urls[0], dlq) == 0

    # Then it comes again, and its dead letter is there before it is gone
    with app.worker() as worker:
        wait_until(lambda: queues.depth(place.urls[0], dlq), PATIENCE_S, worker.text)
        assert len(app.notes("failed")) == 2
        assert worker.terminate() == 0
    assert [one.message_id for one in queues.take(place.urls[1], dlq)] == ["dies"]
    assert queues.look(place.urls[2], place.queue) == []


def test_stock_loses_a_dead_letter_whose_node_is_away(place: Place):
    """The twin: RabbitMQ drops what it cannot dead-letter, and has removed the original by then."""
    home, other, _ = place.cluster.nodes
    source = """
        QUEUE, GATE = os.environ["TEST_QUEUE"], os.environ["TEST_GATE"]

        @dramatiq.actor(queue_name=QUEUE, max_retries=0)
        def dies(key):
            note("started", key=key)
            while not os.path.exists(GATE):
                time.sleep(0.05)
            note("failed", key=key)
            raise RuntimeError("there is no such order")
    """
    settings = {"TEST_QUEUE": place.queue, "TEST_GATE": str(place.gate)}
    app = App(place.folder / "stock", source, place.url_at(home), broker="stock", env=settings)
    # Given a queue of stock Dramatiq's on one node, its dead letters on another, and a message that runs
    with queues.channel(place.url_at(other)) as channel:
        channel.queue_declare(f"{place.queue}.XQ", durable=True, arguments={"x-message-ttl": 604_800_000})
    with app.worker() as worker:
        app.send("dies.send('dies')")
        wait_until(lambda: app.notes("started"), PATIENCE_S, worker.text)

        # When it dies while that other node is away
        other.kill()
        place.gate.touch()
        wait_until(lambda: app.notes("failed"), PATIENCE_S, worker.text)
        wait_until(lambda: "Rejecting" in worker.text or "Failed to process" in worker.text, PATIENCE_S)
        assert worker.terminate() == 0
    place.cluster.heal()

    # Then there is neither a message nor a dead letter
    left = {name: queues.depth(place.urls[0], f"{place.queue}{name}") for name in ("", ".DQ", ".XQ")}
    assert left == {"": 0, ".DQ": 0, ".XQ": 0}
    assert len(app.notes("failed")) == 1
