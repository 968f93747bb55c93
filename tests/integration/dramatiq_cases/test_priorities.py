"""Priorities: of actors, within what a worker has fetched; and of messages, at RabbitMQ."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dramatiq
import dramatiq.worker
import pytest

from dramatiq_safeops import RabbitmqBroker, safe_stack
from tests.harness import counts

if TYPE_CHECKING:
    from .conftest import Stage


class Gate:
    """An actor that keeps the only worker thread busy until it is told to go."""

    def __init__(self, queue_name: str = "default") -> None:
        self.started, self._go = threading.Event(), threading.Event()

        @dramatiq.actor(queue_name=queue_name)
        def gate() -> None:
            self.started.set()
            assert self._go.wait(30)

        self.actor = gate

    def close(self) -> None:
        self.actor.send()
        assert self.started.wait(30)

    def open(self) -> None:
        self._go.set()


def test_of_what_a_worker_has_fetched_the_actor_of_higher_priority_runs_first(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    """Hurts users of ``priority``: the smaller number first, in the order in which they were sent."""
    monkeypatch.setattr(dramatiq.worker, "QUEUE_PREFETCH", 21)
    ran: list[Any] = []
    gate = Gate()

    @dramatiq.actor(priority=0)
    def urgent(number: int) -> None:
        ran.append(("urgent", number))

    @dramatiq.actor(priority=10)
    def idle(number: int) -> None:
        ran.append(("idle", number))

    worker = stage.start_worker(worker_threads=1)
    gate.close()
    for number in range(10):
        idle.send(number)
        urgent.send(number)
    stage.wait(lambda: worker.work_queue.qsize() == 20, "all 20 messages to be fetched")
    gate.open()

    stage.wait(lambda: len(ran) == 20)
    assert ran == [(name, number) for name in ("urgent", "idle") for number in range(10)]


# -- at RabbitMQ


@pytest.fixture
def prioritized(cases_url: str, global_broker: None) -> Iterator[Stage]:
    """A broker with priorities, which only classic queues have, on queues of its own."""
    from .conftest import Stage

    broker = RabbitmqBroker(url=cases_url, middleware=safe_stack(), queue_type="classic", max_priority=5)
    dramatiq.set_broker(broker)
    stage = Stage(broker, cases_url)
    yield stage
    stage.close()


@pytest.mark.parametrize(("prefetch", "place"), [(1, 1), (0, 2)], ids=["prefetch 1", "twice the threads"])
def test_an_urgent_message_overtakes_all_that_no_worker_has_fetched(
    prioritized: Stage, monkeypatch: pytest.MonkeyPatch, prefetch: int, place: int
):
    """Hurts users of ``broker_priority``: what a worker has fetched cannot be overtaken any more.

    With ``dramatiq_queue_prefetch=1`` an urgent message is the next; by default a worker with one thread has fetched one more.
    """
    stage = prioritized
    monkeypatch.setattr(dramatiq.worker, "QUEUE_PREFETCH", prefetch)
    ran: list[int] = []
    started, go = threading.Event(), threading.Event()

    @dramatiq.actor(queue_name="prioritized")
    def work(number: int) -> None:
        started.set()
        assert go.wait(30)
        ran.append(number)

    for number in range(20):
        work.send(number)
    worker = stage.start_worker(worker_threads=1)
    assert started.wait(30)
    fetched = prefetch or 2
    stage.wait(lambda: worker.work_queue.qsize() == fetched - 1, "the worker to fetch what it may")
    assert counts.attached(stage.url, "prioritized")[0] == 20 - fetched
    work.send_with_options(args=(99,), broker_priority=5)
    go.set()

    stage.wait(lambda: len(ran) == 21)
    assert ran == [*range(place), 99, *range(place, 20)]


def test_messages_run_in_the_order_of_their_priorities(prioritized: Stage, monkeypatch: pytest.MonkeyPatch):
    """Hurts users of ``broker_priority``: the larger number first, none is the smallest, and too large is the largest."""
    stage = prioritized
    monkeypatch.setattr(dramatiq.worker, "QUEUE_PREFETCH", 1)
    ran: list[int | None] = []

    @dramatiq.actor(queue_name="prioritized")
    def work(priority: int | None) -> None:
        ran.append(priority)

    for priority in (None, 1, 3, 5, 9, 4, 2):
        work.send_with_options(
            args=(priority,), **({} if priority is None else {"broker_priority": priority})
        )
    stage.start_worker(worker_threads=1)

    stage.wait(lambda: len(ran) == 7)
    assert ran == [5, 9, 4, 3, 2, 1, None]


def test_a_retry_keeps_its_priority(prioritized: Stage, monkeypatch: pytest.MonkeyPatch):
    """Hurts what is urgent and fails: it must not come behind everything else."""
    stage = prioritized
    monkeypatch.setattr(dramatiq.worker, "QUEUE_PREFETCH", 1)
    ran: list[str] = []
    gate = Gate("prioritized")

    @dramatiq.actor(queue_name="prioritized", min_backoff=0)
    def work(name: str) -> None:
        ran.append(name)
        if ran.count(name) == 1 and name == "urgent":
            raise RuntimeError("no route")
        if name == "0" and ran.count("urgent") == 1:
            # It was on its way to the worker before the retry was at RabbitMQ: let that come in, beside the other four.
            stage.wait(lambda: counts.attached(stage.url, "prioritized")[0] == 5, "the retry")

    stage.start_worker(worker_threads=1)
    gate.close()
    for number in range(5):
        work.send(str(number))
    work.send_with_options(args=("urgent",), broker_priority=5)
    gate.open()

    stage.wait(lambda: len(ran) == 7)
    others = ["1", "2", "3", "4"]
    assert ran in (["urgent", "urgent", "0", *others], ["urgent", "0", "urgent", *others])
