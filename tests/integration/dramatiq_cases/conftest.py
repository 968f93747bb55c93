"""What users of Dramatiq rely on, case by case: a broker, a worker in this process, and what became of messages.

Dramatiq's public test-suite says what its users may rely on. These are its cases in words of our own. Where it runs a case
on its StubBroker only, it runs on a real RabbitMQ here. ``stage`` is parametrized, so that every broker of this package can
be put through the same cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dramatiq
import dramatiq.broker
import pytest
from dramatiq.rate_limits.backends import StubBackend as StubLimits
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend as StubResults

from dramatiq_safeops import RabbitmqBroker, safe_stack
from dramatiq_safeops.testing import RabbitmqServer, StubBroker
from tests.harness import queues
from tests.harness.vhosts import virtual_host
from tests.harness.worker import wait_until

#: Seconds that a test waits for something that takes milliseconds.
PATIENCE_S = 30


@dataclass(frozen=True)
class Dead:
    """A dead letter, as far as these cases look at it."""

    reason: str
    actor: str
    args: list[Any]
    attempts: int
    exception: str  # the name of its class; "None" if there was none


class Stage:
    """The global broker of one test, and the worker that runs its actors."""

    def __init__(self, broker: Any, url: str) -> None:
        self.broker = broker
        self.url = url
        self.worker: dramatiq.Worker | None = None

    def start_worker(self, **options: Any) -> dramatiq.Worker:
        """Start a worker in this process. It consumes the queues of actors that are declared later, too."""
        worker = self.worker = dramatiq.Worker(
            self.broker, **{"worker_timeout": 50, "worker_threads": 8, **options}
        )
        worker.start()
        return worker

    def stop_worker(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.stop(timeout=PATIENCE_S * 1000)

    def store_results(self, **options: Any) -> StubResults:
        """Add Results with a backend of its own, as its documentation says: at the end of the list."""
        backend = StubResults()
        self.broker.add_middleware(Results(backend=backend, **options))
        return backend

    def settle(self, *queue_names: str) -> None:
        """Wait until nothing is anywhere any more: queues, ladder, worker."""
        for name in queue_names or sorted(self.broker.queues):
            self.broker.join(name, min_successes=3, idle_time=20, timeout=PATIENCE_S * 1000)
        if self.worker is not None:
            self.worker.join()

    def wait(self, condition: Callable[[], Any], what: str = "") -> Any:
        return wait_until(condition, PATIENCE_S, what)

    def dead_letters(self, queue_name: str = "default") -> list[Dead]:
        return [
            Dead(
                reason=one.headers["x-safeops-reason"],
                actor=one.message["actor_name"],
                args=one.message["args"],
                attempts=one.headers["x-safeops-attempts"],
                exception=str(one.headers.get("x-safeops-exception-type")).rpartition(".")[2],
            )
            for one in queues.look(self.url, f"{queue_name}.dlq")
        ]

    def waiting(self, queue_name: str = "default") -> list[dict[str, Any]]:
        """The messages in a queue, in order, which stay there."""
        return [one.message for one in queues.look(self.url, queue_name)]

    def close(self) -> None:
        """Leave nothing to the next test: it has other actors."""
        self.stop_worker()
        self.broker.flush_all()
        self.broker.close()


class StubStage(Stage):
    """The same on the broker in memory."""

    def settle(self, *queue_names: str) -> None:
        for name in queue_names or sorted(set(self.broker.queues) - self.broker.delay_queues):
            self.broker.join(name, timeout=PATIENCE_S * 1000, fail_fast=False)
        if self.worker is not None:
            self.worker.join()

    def dead_letters(self, queue_name: str = "default") -> list[Dead]:
        return [
            Dead(
                reason=one.letter["x-safeops-reason"],
                actor=json.loads(one.body)["actor_name"],
                args=json.loads(one.body)["args"],
                attempts=one.letter["x-safeops-attempts"],
                exception=str(one.letter.get("x-safeops-exception-type")).rpartition(".")[2],
            )
            for one in self.broker.dead_letters_by_queue[queue_name]
        ]

    def waiting(self, queue_name: str = "default") -> list[dict[str, Any]]:
        return [json.loads(one.body) for one in list(self.broker.queues[queue_name].queue)]


@pytest.fixture(scope="session")
def cases_url(rabbit: RabbitmqServer) -> Iterator[str]:
    """A virtual host that all cases share: the delay ladder is declared once."""
    with virtual_host(rabbit) as url:
        yield url


@pytest.fixture
def global_broker() -> Iterator[None]:
    """Give back what was the global broker before the test."""
    before = dramatiq.broker.global_broker
    yield
    dramatiq.broker.global_broker = before


@pytest.fixture(params=["rabbitmq", "stub"])
def stage(request: pytest.FixtureRequest, global_broker: None) -> Iterator[Stage]:
    """A broker that is the global one, with the safe stack. Its worker is not started yet."""
    stage: Stage
    if request.param == "stub":
        stage = StubStage(StubBroker(safe_stack(), park_limit=3_600_000), url="")
    else:
        url = request.getfixturevalue("cases_url")
        stage = Stage(RabbitmqBroker(url=url, middleware=safe_stack()), url)
    dramatiq.set_broker(stage.broker)
    yield stage
    stage.close()


@pytest.fixture
def working(stage: Stage) -> Stage:
    """The same, with a worker that runs before the first actor is declared, as in Dramatiq's own fixtures."""
    stage.start_worker()
    return stage


@pytest.fixture
def limits() -> StubLimits:
    """An in-memory backend for rate limiters and barriers."""
    return StubLimits()
