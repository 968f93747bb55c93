"""Sending: confirmed within a time budget, and an error that says exactly what was not.

Runs in: every process that sends, in the calling thread. Needs: RabbitMQ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .encoder import encode
from .errors import QueueConflict, QueueFull, QueueMissing, SendRefused, SendUncertain
from .rabbitmq.client import Client
from .rabbitmq.copies import new_message
from .rabbitmq.publication import Impossible, Publication, Refused, Undeclarable, Unroutable

if TYPE_CHECKING:
    from dramatiq import Message


def send(client: Client, messages: Sequence[Message[Any]], *, delay: float | None, patience_s: float) -> None:
    """Publish ``messages`` and wait for the confirms. Gives up when none came for ``patience_s``.

    Raises: see ``RabbitmqBroker.enqueue``.
    """
    publications = [new_message(message, encode(message), delay_ms=delay) for message in messages]
    client.publish(publications, patience_s=patience_s)
    missing = [
        (message, one) for message, one in zip(messages, publications, strict=True) if not one.confirmed
    ]
    if missing:
        raise _error(client, missing, total=len(messages), patience_s=patience_s)


def _error(
    client: Client, missing: list[tuple[Message[Any], Publication]], *, total: int, patience_s: float
) -> Exception:
    unconfirmed = [message for message, _ in missing]
    what = f"message {unconfirmed[0].message_id!r}" if total == 1 else f"{len(missing)} of {total} messages"
    error = next((one.error for _, one in missing if one.error is not None), None)
    if isinstance(error, Undeclarable):
        return QueueConflict(f"{what} not sent: {error}", unconfirmed)
    if isinstance(error, Unroutable):
        return QueueMissing(f"{what} not sent: {error}", unconfirmed)
    if isinstance(error, Refused):
        return QueueFull(
            f"{what} not sent: {error}; send later, or raise the limit of the queue", unconfirmed
        )
    if isinstance(error, Impossible):
        return SendRefused(f"{what} not sent, RabbitMQ refuses it: {error}", unconfirmed)
    why = client.publishing_trouble or "RabbitMQ did not confirm in time"
    fate = "may or may not have arrived" if any(one.written for _, one in missing) else "was not sent"
    return SendUncertain(
        f"{what} {fate} within {patience_s:g} s ({why}); enqueue it again, the id stays", unconfirmed
    )
