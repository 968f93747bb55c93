"""PURE: which exchanges and queues exist on RabbitMQ, and with which arguments.

Runs in: every process. Needs: nothing. Data in, declarations out; ``apply`` is the one function that talks to a channel.

    default exchange ─▶ <queue> ─(worker)─▶ safeops.dlx ─▶ <queue>.dlq
                          ▲                      └ alternate ─▶ safeops.unroutable
                          │
    safeops.delay.<step> (fanout) ─▶ safeops.delay.<step> (TTL) ─expired─▶ safeops.delivery ─▶ <queue>
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dramatiq.common import xq_name

from .delays import STEPS_MS, step_name

DEAD_LETTER_EXCHANGE = "safeops.dlx"
DELIVERY_EXCHANGE = "safeops.delivery"
UNROUTABLE = "safeops.unroutable"

#: Holds a message for each migration that is on: workers look at its count, see ``migration_watch``.
MIGRATIONS = "safeops.migrations"
#: Has a consumer for each process that publishes, see ``presence``.
PUBLISHERS = "safeops.publishers"
#: Exclusive queues, gone with the connection of who migrates: one says that nobody else may migrate meanwhile, one that
#: publishers pause.
MIGRATION_LOCK = "safeops.migrations.lock"
HOLD_LOCK = "safeops.publishers.hold"

#: Never reached, but set: without a limit RabbitMQ 4 destroys a message after 20 returns (so does looking at a dead
#: letter in the UI), RabbitMQ 3.10 moves a returned message to the tail, and -1 means "unlimited" on one and
#: "drop after the first delivery" on the other. Crash limits are ours to keep.
DELIVERY_LIMIT = 100_000

QUEUE_TYPES = ("quorum", "classic")

#: Bytes of a name in AMQP.
LONGEST_NAME = 255


@dataclass(frozen=True)
class Declaration:
    """One call on an AMQP channel: pika's method name and its arguments."""

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)


def dead_letter_queue(queue_name: str) -> str:
    """Return the name of the queue that holds the dead letters of ``queue_name``."""
    return f"{queue_name}.dlq"


def staging_queue(queue_name: str) -> str:
    """Return the name of the queue that holds the messages of ``queue_name`` while it is being migrated."""
    return f"{queue_name}.migrating"


def migrations() -> Declaration:
    """Return the queue that says whether a migration is on. Declared by whoever wants to know."""
    return _queue(MIGRATIONS, _quorum())


def publishers() -> Declaration:
    """Return the queue that publishing processes are present at. Classic: no message ever stays in it."""
    return _queue(PUBLISHERS, {"x-queue-type": "classic"})


def staging(queue_name: str) -> Declaration:
    """Return the queue that messages wait in while ``queue_name`` is deleted and declared anew."""
    return _queue(staging_queue(queue_name), _quorum())


def topology_for(
    queue_name: str, queue_type: str = "quorum", *, max_priority: int | None = None
) -> list[Declaration]:
    """Return all that ``queue_name`` needs, in the order in which it must be declared."""
    return [
        *dead_letters_of(queue_name),
        _queue(queue_name, work_queue_arguments(queue_name, queue_type, max_priority=max_priority)),
        # How messages come back from the ladder: they keep the queue's name as their routing key.
        _bind(queue_name, DELIVERY_EXCHANGE, queue_name),
    ]


def dead_letters_of(queue_name: str) -> list[Declaration]:
    """Return the part of ``topology_for`` that keeps the dead letters."""
    dlq = dead_letter_queue(queue_name)
    return [*_shared(), _queue(dlq, _quorum()), _bind(dlq, DEAD_LETTER_EXCHANGE, queue_name)]


def ladder() -> list[Declaration]:
    """Return the whole delay ladder. A worker declares it at its start, and not when a step is first needed.

    A quorum queue that is younger than about two seconds when RabbitMQ is killed comes back without a leader: confirmed
    messages in it are gone and publishes to it hang (seen on 3.10 and 4.0; on 4.3 it comes back empty).
    """
    return [*_shared(), *(one for step_ms in STEPS_MS for one in _step(step_ms))]


def delay_step(step_ms: int) -> list[Declaration]:
    """Return one step of the ladder, for a process that sends before any worker has run."""
    return [*_shared(), *_step(step_ms)]


def _step(step_ms: int) -> list[Declaration]:
    name = step_name(step_ms)
    arguments = {
        **_quorum(),
        "x-message-ttl": step_ms,
        "x-dead-letter-exchange": DELIVERY_EXCHANGE,
        # Confirmed hand-over from this queue to the next. Without reject-publish RabbitMQ falls back to
        # at-most-once, and only its log says so.
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
    return [
        Declaration("exchange_declare", {"exchange": name, "exchange_type": "fanout", "durable": True}),
        _queue(name, arguments),
        _bind(name, name, ""),
    ]


def work_queue_arguments(
    queue_name: str, queue_type: str, *, max_priority: int | None = None
) -> dict[str, Any]:
    """Return the arguments of a work queue. ``classic`` is exactly what stock Dramatiq declares."""
    if queue_type == "classic":
        arguments: dict[str, Any] = {
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": xq_name(queue_name),
        }
        if max_priority is not None:
            arguments["x-max-priority"] = max_priority
        return arguments
    # Workers publish dead letters themselves, confirmed. This route is for who rejects a message by hand in the UI.
    return {
        **_quorum(),
        "x-dead-letter-exchange": DEAD_LETTER_EXCHANGE,
        "x-dead-letter-routing-key": queue_name,
    }


def apply(declarations: list[Declaration], channel: Any) -> None:
    """Carry out ``declarations`` on a blocking channel, one by one."""
    for declaration in declarations:
        getattr(channel, declaration.method)(**declaration.arguments)


def explain_refusal(queue_name: str, queue_type: str, answer: str) -> str:
    """Say what to do when RabbitMQ refuses to declare what a queue needs."""
    if answer.startswith("403"):
        return (
            f"queue {queue_name!r} cannot be declared, a permission is missing: RabbitMQ answers: {answer};"
            " let its user configure, write and read the app's queues and safeops.* (rabbitmqctl set_permissions)"
        )
    dlq = dead_letter_queue(queue_name)
    if f"'{dlq}'" in answer:
        return (
            f"the dead-letter queue {dlq!r} exists with other arguments, RabbitMQ answers: {answer};"
            " delete it once its messages are looked after, and it is declared anew"
        )
    ways = "use RabbitmqBroker(queue_type='classic'), which fits what stock Dramatiq declared"
    if queue_type == "classic":
        ways = "use the queue_type and max_priority that it was declared with"
    return (
        f"queue {queue_name!r} cannot be declared as a {queue_type} queue, RabbitMQ answers: {answer};"
        f" {ways}, or give the actor another queue_name, or delete the queue once it is empty"
    )


def _shared() -> list[Declaration]:
    """What all queues share. ``safeops.unroutable`` comes first: a dead letter without a route would hang for minutes."""
    return [
        Declaration("exchange_declare", {"exchange": UNROUTABLE, "exchange_type": "fanout", "durable": True}),
        _queue(UNROUTABLE, _quorum()),
        _bind(UNROUTABLE, UNROUTABLE, ""),
        *(
            Declaration(
                "exchange_declare",
                {
                    "exchange": name,
                    "exchange_type": "direct",
                    "durable": True,
                    "arguments": {"alternate-exchange": UNROUTABLE},
                },
            )
            for name in (DEAD_LETTER_EXCHANGE, DELIVERY_EXCHANGE)
        ),
    ]


def _quorum() -> dict[str, Any]:
    return {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT}


def _queue(name: str, arguments: dict[str, Any]) -> Declaration:
    return Declaration("queue_declare", {"queue": name, "durable": True, "arguments": arguments})


def _bind(queue: str, exchange: str, routing_key: str) -> Declaration:
    return Declaration("queue_bind", {"queue": queue, "exchange": exchange, "routing_key": routing_key})
