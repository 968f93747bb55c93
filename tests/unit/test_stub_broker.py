"""The broker in memory: users' unit tests see what RabbitMQ would show them."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker as DramatiqStubBroker
from dramatiq.errors import QueueJoinTimeout
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from dramatiq.results.errors import ResultFailure

from dramatiq_safeops import ConfigError, Guard, PermanentError, safe_stack
from dramatiq_safeops.testing import DeadLettered, StubBroker


@pytest.fixture
def broker() -> Iterator[StubBroker]:
    made = StubBroker(safe_stack(time_limit=60_000))
    yield made
    made.flush_all()
    made.close()


@pytest.fixture
def worker(broker: StubBroker) -> Iterator[dramatiq.Worker]:
    made = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    made.start()
    yield made
    made.stop()


def actor(broker: StubBroker, body: Any, **options: Any) -> Any:
    name = options.pop("actor_name", "charge")
    return dramatiq.actor(body, broker=broker, actor_name=name, queue_name="payments", **options)


def reasons(broker: StubBroker) -> list[str]:
    return [one.decision.reason for one in broker.dead_letters]


def test_it_is_dramatiqs_stub_broker(broker: StubBroker) -> None:
    """Existing fixtures check for it, and call flush_all, join and dead_letters."""
    assert isinstance(broker, DramatiqStubBroker)


def test_a_message_runs_and_join_waits_for_it(broker: StubBroker, worker: dramatiq.Worker) -> None:
    seen: list[int] = []
    charge = actor(broker, seen.append)

    message = charge.send(7)
    broker.join("payments", timeout=5_000)
    worker.join()

    assert seen == [7]
    assert [one.outcome.value for one in broker.decisions[message.message_id]] == ["done"]


def test_what_an_actor_may_never_retry_is_a_dead_letter_at_once(
    broker: StubBroker, worker: dramatiq.Worker
) -> None:
    """Dramatiq's own stub would retry it: a test of the app would be green, production would not."""

    def body(_: int) -> None:
        raise PermanentError("no such account")

    charge = actor(broker, body)

    charge.send(7)
    broker.join("payments", timeout=5_000, fail_fast=False)

    assert reasons(broker) == ["permanent_error"]
    assert broker.dead_letters[0].letter["x-safeops-reason"] == "permanent_error"
    assert json.loads(broker.dead_letters[0].body)["args"] == [7]


def test_join_raises_what_the_actor_raised(broker: StubBroker, worker: dramatiq.Worker) -> None:
    """As Dramatiq's does: a failing actor is a failing test, with the actor's traceback."""

    def body() -> None:
        raise PermanentError("no such account")

    charge = actor(broker, body)

    charge.send()

    with pytest.raises(PermanentError, match="no such account") as caught:
        broker.join("payments", timeout=5_000)
    assert caught.traceback[-1].name == "body"


def test_a_retry_waits_for_its_backoff(broker: StubBroker, worker: dramatiq.Worker) -> None:
    attempts: list[float] = []

    def body() -> None:
        attempts.append(time.monotonic())
        if len(attempts) < 3:
            raise dramatiq.errors.Retry(delay=600)

    charge = actor(broker, body)

    message = charge.send()
    broker.join("payments", timeout=10_000)

    assert [one.outcome.value for one in broker.decisions[message.message_id]][-1] == "done"
    # A retry may be early by a quarter of a second, see README.
    assert all(later - earlier >= 0.34 for earlier, later in itertools.pairwise(attempts))
    assert len(attempts) == 3


def test_delays_can_be_skipped() -> None:
    """Nobody wants to wait 30 s in a unit test for the default backoff."""
    broker = StubBroker(safe_stack(time_limit=60_000), skip_delays=True)
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()

    def body() -> None:
        raise ValueError("again")

    try:
        charge = actor(broker, body)
        message = charge.send_with_options(delay=3_600_000)
        broker.join("payments", timeout=10_000, fail_fast=False)
    finally:
        worker.stop()

    outcomes = [one.outcome.value for one in broker.decisions[message.message_id]]
    assert outcomes == ["retried"] * 4 + ["dead"]
    assert reasons(broker) == ["retries_exhausted"]


def test_a_delayed_message_is_not_early(broker: StubBroker, worker: dramatiq.Worker) -> None:
    ran: list[float] = []
    charge = actor(broker, lambda: ran.append(time.monotonic()))

    sent = time.monotonic()
    charge.send_with_options(delay=700)
    with pytest.raises(QueueJoinTimeout):
        broker.join("payments", timeout=100)
    broker.join("payments", timeout=10_000)

    assert ran[0] - sent >= 0.7


def test_a_guard_that_breaks_keeps_the_actor_from_running(
    worker: dramatiq.Worker, broker: StubBroker
) -> None:
    class Broken(Guard):
        def before_process_message(self, broker: Any, message: Any) -> None:
            raise RuntimeError("database away")

    broker.add_middleware(Broken())
    ran: list[int] = []
    charge = actor(broker, lambda: ran.append(1))

    charge.send()
    broker.join("payments", timeout=5_000, fail_fast=False)

    assert (ran, reasons(broker)) == ([], ["guard_failed"])


@pytest.mark.parametrize(
    ("args", "reason"), [((1, 2), "arguments_do_not_fit")], ids=["arguments that do not fit"]
)
def test_what_no_worker_can_run_is_a_dead_letter_with_its_reason(
    broker: StubBroker, worker: dramatiq.Worker, args: tuple[int, ...], reason: str
) -> None:
    charge = actor(broker, lambda amount: None)

    charge.send(*args)

    with pytest.raises(DeadLettered, match=reason):
        broker.join("payments", timeout=5_000)
    assert reasons(broker) == [reason]


def test_an_unknown_actor_is_a_dead_letter_with_its_reason(
    broker: StubBroker, worker: dramatiq.Worker
) -> None:
    broker.declare_queue("payments")

    broker.enqueue(
        dramatiq.Message(queue_name="payments", actor_name="nobody", args=(), kwargs={}, options={})
    )
    broker.join("payments", timeout=5_000, fail_fast=False)

    assert reasons(broker) == ["unknown_actor"]


def test_a_pipeline_goes_on_and_results_are_stored(broker: StubBroker, worker: dramatiq.Worker) -> None:
    broker.add_middleware(Results(backend=StubBackend()))
    double = actor(broker, lambda n: n * 2, store_results=True)

    pipe = dramatiq.pipeline([double.message(1), double.message(), double.message()], broker=broker)

    assert pipe.run().get_result(block=True, timeout=5_000) == 8


def test_results_hear_of_a_message_that_died_on_arrival(broker: StubBroker, worker: dramatiq.Worker) -> None:
    """Whoever waits for its result should get a failure and not a timeout."""
    backend = StubBackend()
    broker.add_middleware(Results(backend=backend))
    charge = actor(broker, lambda amount: amount, store_results=True)

    message = charge.send(1, 2)

    with pytest.raises(ResultFailure):
        message.get_result(backend=backend, block=True, timeout=5_000)


def test_what_a_stopped_worker_held_runs_in_the_next(broker: StubBroker) -> None:
    seen: list[int] = []
    charge = actor(broker, seen.append)
    for number in range(20):
        charge.send(number)

    for _ in range(2):
        worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
        worker.start()
        worker.stop()
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    broker.join("payments", timeout=5_000)
    worker.stop()

    assert sorted(seen) == list(range(20))


def test_a_wrong_stack_is_refused_at_boot() -> None:
    broker = StubBroker([dramatiq.middleware.Retries()])

    with pytest.raises(ConfigError, match="Retries"):
        dramatiq.Worker(broker).start()


def test_a_flush_drops_also_what_a_worker_is_just_taking_from_the_delay_queue(broker: StubBroker) -> None:
    """Hurts the next test: it finds a message of the one before."""
    # Given a delayed message that a worker has just got hold of
    charge = actor(broker, lambda _: None)
    charge.send_with_options(args=(7,), delay=60_000)
    delayed = broker.queues["payments.DQ"]
    get, threads = delayed.get, []

    def get_and_dawdle(*args: Any, **kwargs: Any) -> Any:
        item = get(*args, **kwargs)
        # When the test flushes in this very moment
        threads.append(threading.Thread(target=broker.flush_all))
        threads[0].start()
        threads[0].join(timeout=0.5)
        return item

    delayed.get = get_and_dawdle  # type: ignore[method-assign]
    broker.move_due("payments.DQ", wait_s=0.01)
    threads[0].join(timeout=5)

    # Then it is gone
    assert broker._waiting["payments.DQ"] == []
    assert delayed.unfinished_tasks == 0


def test_a_flush_drops_also_what_comes_due_meanwhile(
    broker: StubBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hurts the next test: it finds a message of the one before."""
    # Given a delayed message
    charge = actor(broker, lambda _: None)
    charge.send_with_options(args=(7,), delay=1)
    flush = broker.flush

    def flush_and_dawdle(queue_name: str) -> None:
        flush(queue_name)
        # When it comes due while one queue after the other is flushed
        wait_until_due = time.monotonic() + 0.3
        while time.monotonic() < wait_until_due:
            broker.move_due("payments.DQ", wait_s=0.01)

    monkeypatch.setattr(broker, "flush", flush_and_dawdle)
    broker.flush_all()

    # Then it is gone
    assert [one.qsize() for one in broker.queues.values()] == [0, 0]


def test_dead_letters_may_be_looked_at_while_the_first_one_of_a_queue_arrives(broker: StubBroker) -> None:
    """Hurts tests that wait for one: a dictionary that grows while it is read raises."""
    # Given somebody who looks
    for name in ("refunds", "payments"):
        broker.declare_queue(name)
    broker.dead_letters_by_queue["refunds"].clear()
    looks = iter(broker.dead_letters_by_queue.values())
    next(looks)

    # When the first one of another queue comes
    broker.dead_letters_by_queue["payments"].clear()

    # Then the look goes on
    assert list(looks) == [[]]
