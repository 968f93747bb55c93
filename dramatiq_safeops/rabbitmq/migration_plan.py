"""What a migration finds, and what it is going to do about it. Looking changes nothing.

Runs in: the command line, on a blocking connection. Needs: RabbitMQ.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pika
import pika.exceptions
from dramatiq.common import dq_name, xq_name

from . import topology


class MigrationError(Exception):
    """The migration cannot go on: says why, and what to do. Nothing is lost."""


@dataclass(frozen=True)
class Found:
    """A queue as it was found; ``None`` for what a queue that does not exist has not got."""

    name: str
    messages: int | None = None
    consumers: int | None = None

    @property
    def exists(self) -> bool:
        """Whether there is such a queue."""
        return self.messages is not None


@dataclass(frozen=True)
class Plan:
    """What is there, and what there is to do."""

    queue: str
    to: str
    #: ``wanted``: it has the new arguments. ``classic``, ``quorum``: as this package or stock Dramatiq declares one.
    #: ``other``: see ``difference``. ``missing``.
    kind: str
    difference: str
    work: Found
    delayed: Found
    dead: Found
    staging: Found
    steps: list[str] = field(default_factory=list)

    @property
    def found(self) -> list[Found]:
        """All queues that take part."""
        return [self.work, self.delayed, self.dead, self.staging]


def look_at(connection: pika.BlockingConnection, name: str) -> Found:
    """Return what there is of a queue.

    Raises:
        MigrationError: there is no permission to look.
    """
    channel = connection.channel()
    try:
        answer = channel.queue_declare(name, passive=True).method
    except pika.exceptions.ChannelClosedByBroker as error:
        if error.reply_code == 404:
            return Found(name)
        raise MigrationError(f"queue {name!r} cannot be looked at: {error.reply_text}") from None
    channel.close()
    return Found(name, int(answer.message_count), int(answer.consumer_count))


def make_plan(connection: pika.BlockingConnection, queue: str, to: str, max_priority: int | None) -> Plan:
    """Look what is there of ``queue`` and of all that belongs to it, and say what there is to do."""
    work = look_at(connection, queue)
    kind, difference = _kind_of(connection, queue, to, max_priority) if work.exists else ("missing", "")
    plan = Plan(
        queue,
        to,
        kind,
        difference,
        work,
        delayed=look_at(connection, dq_name(queue)),
        dead=look_at(connection, xq_name(queue)),
        staging=look_at(connection, topology.staging_queue(queue)),
    )
    plan.steps.extend(_steps(plan))
    return plan


def _kind_of(
    connection: pika.BlockingConnection, queue: str, to: str, max_priority: int | None
) -> tuple[str, str]:
    """Return what kind of queue it is. AMQP only says whether it has the arguments that one asks for."""
    difference = _differs(connection, queue, to, max_priority)
    if not difference:
        return "wanted", ""
    (other,) = (kind for kind in topology.QUEUE_TYPES if kind != to)
    from_other = _differs(connection, queue, other, None)
    # How it differs from what it was meant to be says more.
    return ("other", from_other) if from_other else (other, difference)


def _differs(
    connection: pika.BlockingConnection, queue: str, queue_type: str, max_priority: int | None
) -> str:
    channel = connection.channel()
    arguments = topology.work_queue_arguments(queue, queue_type, max_priority=max_priority)
    try:
        channel.queue_declare(queue, durable=True, arguments=arguments)
    except pika.exceptions.ChannelClosedByBroker as error:
        return error.reply_text or str(error.reply_code)
    channel.close()
    return ""


def _steps(plan: Plan) -> list[str]:
    staging = plan.staging.name
    steps = []
    switch = plan.kind in ("classic", "quorum", "other")
    legacy = [one for one in (plan.delayed, plan.dead) if one.exists]
    if plan.kind == "missing" and not legacy and not plan.staging.exists:
        return []
    if not (switch or legacy or plan.staging.exists):
        return []
    if plan.staging.exists:
        steps.append(
            f"go on with the migration that has left {plan.staging.messages} messages in {staging!r}"
        )
    steps.append("wait until the workers of these queues have finished what runs and stand back")
    if switch:
        steps.append(f"move {plan.work.messages} messages of {plan.queue!r} to {staging!r}")
    steps += [
        f"move {one.messages} messages of {one.name!r} to {staging!r} and delete {one.name!r}"
        for one in legacy
    ]
    if switch:
        steps.append(
            f"pause all producers of this vhost, delete {plan.queue!r} and declare it as {plan.to}, let them go on"
        )
    elif plan.kind == "missing":
        steps.append(f"declare {plan.queue!r} as {plan.to}")
    steps.append(
        f"move everything to {plan.queue!r} (dead letters to {topology.dead_letter_queue(plan.queue)!r}), delete {staging!r}"
    )
    return steps
