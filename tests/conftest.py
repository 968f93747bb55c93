"""What all tests share: their order, and servers of their own.

The folders say what a test needs: ``unit`` nothing, ``typing`` the type checkers, ``contract`` one suite per contract,
``integration`` RabbitMQ and Postgres, ``acceptance`` real processes that get killed. ``harness`` holds
what they share beyond this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import dramatiq
import pytest

from dramatiq_safeops.testing import PostgresServer, RabbitmqCluster, RabbitmqServer
from dramatiq_safeops.testing.binaries import find_postgres, find_rabbitmq
from tests.harness.vhosts import virtual_host

#: Cheap ones first: a wrong decision should fail in a second, not after ten minutes of killed processes.
ORDER = ("unit", "typing", "contract", "integration", "acceptance")


class NoBroker(dramatiq.Broker):
    """The global broker where a test has set none. Dramatiq would make one of localhost's standard port."""

    def __init__(self) -> None:
        super().__init__(middleware=[])
        self.queues: set[str] = set()

    def declare_queue(self, queue_name: str) -> None:
        self.queues.add(queue_name)

    def enqueue(self, message: dramatiq.Message, *, delay: int | None = None) -> dramatiq.Message:
        raise AssertionError("this test names no broker for what it sends: dramatiq.set_broker(), or broker=")


dramatiq.set_broker(NoBroker())

#: For a test marked long that names no timeout of its own.
LONG_TIMEOUT_S = 1200

#: For the cluster: a message that could not be handed on from the delay ladder while a node was away is tried again after 5 s
#: instead of 180, and quorum queues count twice a second what they hold, instead of every five seconds.
CLUSTER_CONFIG = """
[{rabbit, [{dead_letter_worker_publisher_confirm_timeout, 5000}, {quorum_tick_interval, 500}]}].
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
    items.sort(key=_place)  # stable: within a folder the order stays


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return ORDER.index(folder) if folder in ORDER else len(ORDER)


def need(service: str, found: object) -> None:
    """At home a missing server skips; in CI it fails, so that a broken job cannot look green."""
    if found is None:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(f"{service} is not installed, `make test` installs it")


@pytest.fixture(scope="session")
def rabbit() -> Iterator[RabbitmqServer]:
    """A RabbitMQ that all tests share. Take ``amqp_url`` for a place of your own on it, and never kill it."""
    need("RabbitMQ", find_rabbitmq())
    with RabbitmqServer.start() as server:
        yield server


@pytest.fixture
def amqp_url(rabbit: RabbitmqServer) -> Iterator[str]:
    """The URL of an empty virtual host of this test's own on ``rabbit``; it is deleted afterwards."""
    with virtual_host(rabbit) as url:
        yield url


@pytest.fixture
def own_rabbit() -> Iterator[RabbitmqServer]:
    """A RabbitMQ of this test's own, to be killed, paused, restarted or put under an alarm."""
    need("RabbitMQ", find_rabbitmq())
    with RabbitmqServer.start() as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Iterator[RabbitmqCluster]:
    """Three RabbitMQ nodes that all tests share. Whoever kills or pauses some of them calls ``heal()`` afterwards."""
    need("RabbitMQ", find_rabbitmq())
    with RabbitmqCluster.start(advanced_config=CLUSTER_CONFIG) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL that all tests share."""
    need("PostgreSQL", find_postgres())
    with PostgresServer.start() as server:
        yield server
