"""The guards on Dramatiq's own RabbitmqBroker: they do what it allows, and say once what it does not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker as StockBroker
from dramatiq.middleware import Middleware
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from dramatiq.results.errors import ResultMissing

from dramatiq_safeops import (
    AgeLimit,
    ConfigError,
    DeadLetters,
    Guard,
    PermanentError,
    Retries,
    TimeLimit,
    safe_stack,
)
from tests.harness.worker import wait_until

Start = Callable[..., StockBroker]


@pytest.fixture
def start(amqp_url: str) -> Iterator[Start]:
    """Make a stock broker with a list of middlewares; its worker starts with the first actor that is asked for."""
    made: list[StockBroker] = []
    workers: list[dramatiq.Worker] = []

    def start(middleware: list[Any], declare: Callable[[StockBroker], None]) -> StockBroker:
        broker = StockBroker(url=amqp_url, middleware=middleware)
        made.append(broker)
        declare(broker)
        worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
        workers.append(worker)
        worker.start()
        return broker

    yield start
    for worker in workers:
        worker.stop()
    for broker in made:
        broker.close()


def rejected(broker: StockBroker, queue: str = "default") -> int:
    return broker.get_queue_message_counts(queue)[2]


def test_a_failure_is_retried_with_our_policy_and_then_rejected(start: Start) -> None:
    attempts: list[float] = []

    def declare(broker: StockBroker) -> None:
        @dramatiq.actor(broker=broker, actor_name="fails", max_retries=2, min_backoff=100, time_limit=5_000)
        def fails() -> None:
            attempts.append(time.monotonic())
            raise ValueError("again")

    broker = start(safe_stack(), declare)

    broker.get_actor("fails").send()

    wait_until(lambda: rejected(broker) == 1)
    assert len(attempts) == 3


def test_a_permanent_error_is_rejected_at_once(start: Start) -> None:
    attempts: list[int] = []

    def declare(broker: StockBroker) -> None:
        @dramatiq.actor(broker=broker, actor_name="fails", time_limit=5_000)
        def fails() -> None:
            attempts.append(1)
            raise PermanentError("no such account")

    broker = start(safe_stack(), declare)

    broker.get_actor("fails").send()

    wait_until(lambda: rejected(broker) == 1)
    assert attempts == [1]


@pytest.mark.parametrize(("guards", "kept"), [([], 0), ([DeadLetters()], 1)], ids=["stock", "with the guard"])
def test_what_fails_without_retries_is_rejected_and_not_acked(
    start: Start, guards: list[Guard], kept: int
) -> None:
    """Stock acks it, and it is gone."""
    ran: list[int] = []

    def declare(broker: StockBroker) -> None:
        @dramatiq.actor(broker=broker, actor_name="fails")
        def fails() -> None:
            ran.append(1)
            raise ValueError("no")

        @dramatiq.actor(broker=broker, actor_name="next_one")
        def next_one() -> None:
            ran.append(2)

    broker = start(guards, declare)

    broker.get_actor("fails").send()
    broker.get_actor("next_one").send()

    wait_until(lambda: ran == [1, 2])
    wait_until(lambda: rejected(broker) == kept)


def test_a_guard_that_breaks_keeps_the_actor_from_running_until_it_is_well_again(start: Start) -> None:
    """Dramatiq runs the actor when a before-hook breaks."""
    ran: list[int] = []
    away = [True]

    class Database(Guard):
        def before_process_message(self, broker: Any, message: Any) -> None:
            if away.pop() if away else False:
                raise RuntimeError("database away")

    def declare(broker: StockBroker) -> None:
        @dramatiq.actor(broker=broker, actor_name="charge", time_limit=5_000)
        def charge() -> None:
            ran.append(len(away))

    broker = start([DeadLetters(), Retries(), Database(), TimeLimit()], declare)

    message = broker.get_actor("charge").send()

    wait_until(lambda: ran == [0], timeout=20, what=f"{message} to run after its park")
    assert rejected(broker) == 0


class AsksTheDatabase:
    """A hook that a guard shares with something else. It breaks the first time."""

    def __init__(self) -> None:
        self.asked = 0

    def before_process_message(self, broker: Any, message: Any) -> None:
        self.asked += 1
        if self.asked == 1:
            raise ConnectionError("the database is away")


class FromAMixin(AsksTheDatabase, Guard):
    pass


class SomebodysMiddleware(AsksTheDatabase, Middleware):
    pass


class FromAMiddleware(Guard, SomebodysMiddleware):
    pass


@pytest.mark.parametrize("kind", [FromAMixin, FromAMiddleware])
def test_a_guard_with_an_inherited_hook_keeps_the_actor_from_running_too(
    kind: type[FromAMixin | FromAMiddleware], start: Start
) -> None:
    """Hurts who makes a guard of a middleware by naming both: when it broke, the actor ran."""
    ran_after: list[int] = []
    guard = kind()

    def declare(broker: StockBroker) -> None:
        @dramatiq.actor(broker=broker, actor_name="charge", time_limit=5_000)
        def charge() -> None:
            ran_after.append(guard.asked)

    broker = start([DeadLetters(), Retries(), guard, TimeLimit()], declare)

    broker.get_actor("charge").send()

    wait_until(lambda: ran_after, timeout=20, what="the actor to run after its park")
    assert ran_after == [2]


def test_a_message_that_is_too_old_is_rejected_and_leaves_no_result(start: Start) -> None:
    backend = StubBackend()
    ran: list[int] = []

    def declare(broker: StockBroker) -> None:
        broker.add_middleware(Results(backend=backend))

        @dramatiq.actor(broker=broker, actor_name="charge", time_limit=5_000, store_results=True)
        def charge() -> None:
            ran.append(1)

    broker = start([DeadLetters(), Retries(), AgeLimit(max_age=1), TimeLimit()], declare)
    charge = broker.get_actor("charge")

    old = charge.message().copy(message_timestamp=1)
    broker.enqueue(old)

    wait_until(lambda: rejected(broker) == 1)
    assert ran == []
    with pytest.raises(Exception) as caught:  # noqa: PT011 - a failure, and not the None of a skipped message
        old.get_result(backend=backend)
    assert not isinstance(caught.value, ResultMissing)


def test_one_warning_says_what_the_broker_cannot_promise(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        start(safe_stack(time_limit=5_000), lambda broker: None)

    told = [one for one in caplog.records if getattr(one, "event", "") == "guards.foreign_broker"]
    assert len(told) == 1
    assert "RabbitmqBroker" in told[0].getMessage()
    assert "acked before RabbitMQ has confirmed" in told[0].getMessage()
    assert "while a message is parked, Results shows None" in told[0].getMessage()


def test_a_wrong_order_is_refused_at_the_start_of_a_worker(start: Start) -> None:
    with pytest.raises(ConfigError, match="Retries stands below TimeLimit"):
        start([TimeLimit(), Retries()], lambda broker: None)


def test_a_stock_twin_beside_ours_is_refused_at_the_start_of_a_worker(start: Start) -> None:
    """Both would retry: each failure would become two messages."""
    with pytest.raises(ConfigError, match="Retries"):
        start([dramatiq.middleware.Retries(), Retries()], lambda broker: None)


def test_one_guard_alone_joins_the_list_that_an_app_has(start: Start) -> None:
    """Who moves over guard by guard keeps Dramatiq's for the rest."""
    attempts: list[int] = []
    stock = [one() for one in dramatiq.middleware.default_middleware]

    def declare(broker: StockBroker) -> None:
        @dramatiq.actor(broker=broker, actor_name="fails", max_retries=1, min_backoff=10, max_backoff=10)
        def fails() -> None:
            attempts.append(1)
            raise ValueError("again")

    broker = start([DeadLetters(), *stock], declare)

    broker.get_actor("fails").send()

    wait_until(lambda: rejected(broker) == 1)
    assert len(attempts) == 2
