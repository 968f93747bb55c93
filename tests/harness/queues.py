"""What RabbitMQ holds, read by tests through a connection of their own: never through the product."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pika
import pika.exceptions


@dataclass(frozen=True)
class Seen:
    """A message as RabbitMQ holds it."""

    body: bytes
    headers: dict[str, Any]
    properties: pika.BasicProperties

    @property
    def message(self) -> dict[str, Any]:
        return json.loads(self.body)  # type: ignore[no-any-return]

    @property
    def message_id(self) -> str:
        return self.properties.message_id or self.message["message_id"]


@contextmanager
def channel(url: str) -> Iterator[Any]:
    """Yield a channel on a blocking connection."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        yield connection.channel()
    finally:
        if connection.is_open:
            connection.close()


def depth(url: str, queue: str) -> int:
    """Return the ready messages of ``queue``; 0 if there is no such queue."""
    with channel(url) as ch:
        try:
            return ch.queue_declare(queue, passive=True).method.message_count  # type: ignore[no-any-return]
        except pika.exceptions.ChannelClosedByBroker:
            return 0


def look(url: str, queue: str) -> list[Seen]:
    """Return all messages of ``queue`` and leave them there."""
    seen = []
    with channel(url) as ch:
        while True:
            try:
                method, properties, body = ch.basic_get(queue)
            except pika.exceptions.ChannelClosedByBroker:
                return seen
            if method is None:
                return seen  # closing the connection returns them
            seen.append(Seen(body, properties.headers or {}, properties))


def take(url: str, queue: str) -> list[Seen]:
    """Return all messages of ``queue`` and remove them."""
    seen = []
    with channel(url) as ch:
        while True:
            try:
                method, properties, body = ch.basic_get(queue, auto_ack=True)
            except pika.exceptions.ChannelClosedByBroker:
                return seen
            if method is None:
                return seen
            seen.append(Seen(body, properties.headers or {}, properties))


def publish(url: str, queue: str, body: bytes, **properties: Any) -> None:
    """Publish raw bytes onto ``queue``, confirmed."""
    with channel(url) as ch:
        ch.confirm_delivery()
        ch.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2, **properties), mandatory=True)


def publish_many(url: str, queue: str, bodies: Iterable[bytes]) -> None:
    """Publish raw bytes one after the other over one connection, confirmed."""
    with channel(url) as ch:
        ch.confirm_delivery()
        for body in bodies:
            ch.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2), mandatory=True)


def body_of(actor: str, *args: Any, queue: str = "default", message_id: str = "", **options: Any) -> bytes:
    """Return the bytes that a producer sends for a call of ``actor``."""
    call = {
        "queue_name": queue,
        "actor_name": actor,
        "args": args,
        "kwargs": {},
        "options": options,
        "message_id": message_id or str(uuid.uuid4()),
        "message_timestamp": int(time.time() * 1000),
    }
    return json.dumps(call).encode()
