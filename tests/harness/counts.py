"""What RabbitMQ says of itself: connections, and counts of queues.

What needs a ``RabbitmqServer`` asks ``rabbitmqctl``, which costs about 0.7 s of CPU: wait for something else first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import pika.exceptions

from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import queues


@dataclass(frozen=True)
class Connection:
    """An AMQP connection as RabbitMQ sees it. ``name`` is the one that the client gave."""

    name: str
    port: int


@dataclass(frozen=True)
class QueueCount:
    """The messages of a queue that wait (``ready``), and that some consumer holds (``unacked``)."""

    ready: int
    unacked: int
    consumers: int


def vhost_of(url: str) -> str:
    """Return the virtual host that ``url`` leads to."""
    return unquote(urlsplit(url).path[1:])


def connections(rabbit: RabbitmqServer, url: str) -> list[Connection]:
    """Return the open connections to the virtual host of ``url``."""
    rows = _rows(rabbit, "list_connections", "vhost", "peer_port", "client_properties")
    return [
        Connection(_connection_name(row["client_properties"]), row["peer_port"])
        for row in rows
        if row["vhost"] == vhost_of(url)
    ]


def queue_counts(rabbit: RabbitmqServer, url: str) -> dict[str, QueueCount]:
    """Return the counts of all queues in the virtual host of ``url``. Those of quorum queues are up to 5 s old."""
    columns = ("name", "messages_ready", "messages_unacknowledged", "consumers")
    rows = _rows(rabbit, "list_queues", "--vhost", vhost_of(url), *columns)
    return {
        row["name"]: QueueCount(row["messages_ready"], row["messages_unacknowledged"], row["consumers"])
        for row in rows
    }


def attached(url: str, queue: str) -> tuple[int, int]:
    """Return how many messages of ``queue`` wait, and how many consumers it has; none if there is no such queue.

    Exact and cheap.
    """
    with queues.channel(url) as channel:
        try:
            declared = channel.queue_declare(queue, passive=True).method
        except pika.exceptions.ChannelClosedByBroker:
            return 0, 0
        return declared.message_count, declared.consumer_count


def close_connections(rabbit: RabbitmqServer, url: str) -> None:
    """Close all connections to the virtual host of ``url`` from the server's side, as an operator does."""
    rabbit.rabbitmqctl("close_all_connections", "--vhost", vhost_of(url), "closed by a test")


def _rows(rabbit: RabbitmqServer, command: str, *arguments: str) -> list[dict[str, Any]]:
    said = rabbit.rabbitmqctl("--formatter", "json", command, *arguments)
    return [row for row in json.loads(said) if isinstance(row, dict)]


def _connection_name(properties: list[list[Any]]) -> str:
    return next((str(value) for key, _kind, value in properties if key == "connection_name"), "")
