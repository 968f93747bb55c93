"""RabbitMQ as anybody sees it from outside: plain pika, nothing of the product.

Runs in: demo. Needs: RabbitMQ.

Dead letters are looked at and put back, so that they are still there for people. One thread only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

import pika
import pika.exceptions

#: More demos than these at a time, on one RabbitMQ, are refused.
MOST_DEMOS = 9

#: Stop looking through a dead letter queue after this many: then it is not this demo's queue any more.
MOST_LETTERS = 10_000


class RabbitmqUnusable(RuntimeError):
    """Raised with a sentence for people: RabbitMQ does not answer, or does not let us in."""


@dataclass(frozen=True)
class DeadLetter:
    """A message in a dead letter queue, as RabbitMQ holds it."""

    body: bytes
    message_id: str
    reason: str
    attempts: int | None
    why: str

    def is_of(self, message_id: str, body: bytes | None) -> bool:
        """Whether this is the dead letter of that message. Junk has no id, only its ``body``."""
        return self.body == body if body is not None else self.message_id == message_id


class Rabbitmq:
    """A connection that is opened again when it was lost."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None

    def __enter__(self) -> Rabbitmq:
        self._connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._connection is not None and self._connection.is_open:
            self._connection.close()

    def claim_queue(self, name: str) -> str:
        """Return ``name``, or ``name-2``... if a demo that runs now has it: workers must not share a queue.

        The claim is an exclusive queue. RabbitMQ removes it with our connection, however we end.
        """
        for number in range(1, MOST_DEMOS + 1):
            queue = name if number == 1 else f"{name}-{number}"
            with self._channel(expected=405) as channel:  # RESOURCE_LOCKED
                channel.queue_declare(f"{queue}.demo-is-running", exclusive=True)
                return queue
        raise RabbitmqUnusable(
            f"{MOST_DEMOS} demos are running on {place(self._url)} already, wait for one to end"
        )

    def publish(self, queue: str, body: bytes) -> None:
        """Put bytes on a queue as they are, confirmed by RabbitMQ."""
        with self._channel() as channel:
            channel.confirm_delivery()
            channel.basic_publish("", queue, body, mandatory=True)

    def waiting(self, queue: str) -> int:
        """Return how many messages are ready in a queue; 0 if there is no such queue."""
        with self._channel(expected=404) as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)
        return 0

    def dead_letters(self, queue: str) -> list[DeadLetter]:
        """Return the messages of a dead letter queue, which stay there; none if there is no such queue."""
        letters: list[DeadLetter] = []
        with self._channel(expected=404) as channel:
            last_tag = 0
            while len(letters) < MOST_LETTERS:
                method, properties, body = channel.basic_get(queue)
                if method is None:
                    break
                last_tag = method.delivery_tag
                letters.append(_read(properties, body))
            if last_tag:
                channel.basic_nack(last_tag, multiple=True, requeue=True)
        return letters

    @contextmanager
    def _channel(self, *, expected: int | None = None) -> Iterator[Any]:
        """Give a channel of its own. The body ends quietly where RabbitMQ answers with the ``expected`` AMQP code.

        Raises RabbitmqUnusable when the connection is lost, or something else is wrong.
        """
        if self._connection is None or not self._connection.is_open:
            self._connect()
        try:
            channel = self._connection.channel()
            yield channel
            # What is in hand and not settled goes back to its queue.
            channel.close()
        except pika.exceptions.ChannelClosedByBroker as error:
            if error.reply_code != expected:
                raise RabbitmqUnusable(
                    f"RabbitMQ at {place(self._url)} refuses: {error.reply_text}"
                ) from error
        except pika.exceptions.AMQPError as error:
            raise RabbitmqUnusable(f"the connection to RabbitMQ at {place(self._url)} is lost") from error

    def _connect(self) -> None:
        where = place(self._url)
        # pika takes an empty URL, or one of another kind, for the RabbitMQ on this machine's standard port.
        if not self._url.startswith(("amqp://", "amqps://")):
            raise RabbitmqUnusable(f"SAFEOPS_AMQP_URL cannot be used, {_EXPECTED}")
        try:
            parameters = pika.URLParameters(self._url)
        except (ValueError, TypeError) as error:
            raise RabbitmqUnusable(f"SAFEOPS_AMQP_URL cannot be used ({error}), {_EXPECTED}") from error
        try:
            self._connection = pika.BlockingConnection(parameters)
        except pika.exceptions.ProbableAuthenticationError as error:
            raise RabbitmqUnusable(f"RabbitMQ at {where} refuses this user name and password") from error
        except pika.exceptions.ProbableAccessDeniedError as error:
            raise RabbitmqUnusable(f"the user has no access to the virtual host of {where}") from error
        except pika.exceptions.ConnectionClosedByBroker as error:
            raise RabbitmqUnusable(
                f"RabbitMQ at {where} closes the connection: {error.reply_text}"
            ) from error
        except (pika.exceptions.AMQPError, OSError) as error:
            raise RabbitmqUnusable(
                f"no RabbitMQ answers at {where}, start it or unset SAFEOPS_AMQP_URL to get a private one"
            ) from error


_EXPECTED = "expected amqp://user:password@host:5672/vhost"


def place(url: str) -> str:
    """Return an AMQP URL without the password, for people."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "localhost", parts.port
    except ValueError:
        return "that URL"
    return f"{host}:{5672 if port is None else port}{parts.path}"


def ui_of(url: str) -> tuple[str, str]:
    """Return address and user of the management UI that belongs to an AMQP URL by default."""
    parts = urlsplit(url)
    user = "guest" if parts.username is None else unquote(parts.username)
    return f"http://{parts.hostname or 'localhost'}:15672", user


def _read(properties: Any, body: bytes) -> DeadLetter:
    headers = properties.headers if properties.headers is not None else {}
    attempts = headers.get("x-safeops-attempts")
    return DeadLetter(
        body=body,
        message_id=properties.message_id or str(headers.get("x-safeops-message-id", "")),
        reason=str(headers.get("x-safeops-reason", "")),
        attempts=attempts if isinstance(attempts, int) else None,
        why=_why(headers),
    )


def _why(headers: dict[str, Any]) -> str:
    """Return what the exception said, or where there was none, what the worker said."""
    kind = headers.get("x-safeops-exception-type")
    if kind is None:
        return str(headers.get("x-safeops-detail", ""))
    return f"{str(kind).rpartition('.')[2]}: {headers.get('x-safeops-exception-message', '')}"


def says_id(letter: DeadLetter, message_id: str) -> bool:
    """Whether the body, which must be the producer's own, is a Dramatiq message with that id."""
    try:
        message = json.loads(letter.body)
    except ValueError:
        return False
    return isinstance(message, dict) and message.get("message_id") == message_id
