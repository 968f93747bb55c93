"""Where a test run or the demo gets its servers from: the environment, else private ones.

Runs in: test runs, the demo, ``python -m dramatiq_safeops.testing``. Needs: see the servers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dramatiq_safeops.testing.postgres_server import PostgresServer
from dramatiq_safeops.testing.rabbitmq_server import RabbitmqServer

AMQP_URL = "SAFEOPS_AMQP_URL"
DATABASE_URL = "SAFEOPS_DATABASE_URL"


@dataclass(frozen=True)
class Servers:
    """The servers of a run.

    ``rabbitmq`` and ``postgres`` are None where the environment names a server (it is not ours to kill) and where
    none was asked for. The URL of a server that was not asked for is None, too.
    """

    amqp_url: str | None
    database_url: str | None
    rabbitmq: RabbitmqServer | None
    postgres: PostgresServer | None


@contextlib.contextmanager
def servers(*, rabbitmq: bool = True, postgres: bool = True) -> Iterator[Servers]:
    """Yield the servers that SAFEOPS_AMQP_URL and SAFEOPS_DATABASE_URL name, and private ones for what is unset.

    The private ones are stopped at the end. A test that kills its server must not take it from here:
    ``RabbitmqServer.start()`` and ``PostgresServer.start()`` are always private.
    """
    amqp_url = named_url(AMQP_URL) if rabbitmq else None
    database_url = named_url(DATABASE_URL) if postgres else None
    own_rabbitmq, own_postgres = start_private(
        rabbitmq=rabbitmq and amqp_url is None, postgres=postgres and database_url is None
    )
    try:
        yield Servers(
            amqp_url=amqp_url if own_rabbitmq is None else own_rabbitmq.url,
            database_url=database_url if own_postgres is None else own_postgres.url,
            rabbitmq=own_rabbitmq,
            postgres=own_postgres,
        )
    finally:
        stop_all(own_rabbitmq, own_postgres)


def start_private(*, rabbitmq: bool, postgres: bool) -> tuple[RabbitmqServer | None, PostgresServer | None]:
    """Start private servers at the same time; none is left if one of them fails."""
    with ThreadPoolExecutor(2) as pool:
        booting_rabbitmq = pool.submit(RabbitmqServer.start) if rabbitmq else None
        booting_postgres = pool.submit(PostgresServer.start) if postgres else None
    # The pool has waited for both.
    boots = [boot for boot in (booting_rabbitmq, booting_postgres) if boot is not None]
    failed = [error for boot in boots if (error := boot.exception()) is not None]
    if failed:
        stop_all(*[boot.result() for boot in boots if boot.exception() is None])
        raise failed[0]
    return (
        None if booting_rabbitmq is None else booting_rabbitmq.result(),
        None if booting_postgres is None else booting_postgres.result(),
    )


def stop_all(*started: RabbitmqServer | PostgresServer | None) -> None:
    """Stop every server that is one."""
    for server in started:
        if server is not None:
            server.stop()


def named_url(variable: str) -> str | None:
    """Return the URL in an environment variable. An empty one names nothing: that is how make unsets them."""
    value = os.environ.get(variable)
    return None if value == "" else value
