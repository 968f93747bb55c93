"""The few things that are simpler one by one on a blocking connection: checks at boot, declaring by hand, tests.

Runs in: every process, in the calling thread, on a connection that is closed again at once. Needs: RabbitMQ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pika
import pika.exceptions
from dramatiq.errors import ConnectionFailed

from .connection import TolerantConnection, hurried, prepared
from .delays import STEPS_MS, step_name
from .topology import Declaration, apply, dead_letter_queue
from .trouble import address, close_reason, explain, is_final

#: Seconds between two tries to reach a RabbitMQ that is not there yet.
_PAUSE_S = 0.2

#: Seconds that RabbitMQ may take for one answer. Without its majority a cluster gives none, nor does one of RabbitMQ 3.10
#: while a node is frozen, and pika would wait for good. A declaration takes some milliseconds, on a busy cluster 0.3 s.
ANSWER_S = 10.0

#: AMQP's code for what went wrong inside RabbitMQ, as when a queue cannot be made without the majority.
INTERNAL_ERROR = 541


class NotConnected(ConnectionFailed):
    """No connection, or it was lost. ``final`` says that trying again cannot help."""

    def __init__(self, sentence: str, *, final: bool) -> None:
        super().__init__(sentence)  # type: ignore[no-untyped-call]  # Dramatiq leaves its constructor bare
        self.final = final


class _NoAnswer(pika.exceptions.AMQPConnectionError):  # type: ignore[misc]  # pika has no types
    """RabbitMQ did not answer in time."""


class RefusedDeclaration(Exception):
    """RabbitMQ refuses a declaration: what is to be declared exists with other arguments, or there is no permission."""

    def __init__(self, answer: str, *, index: int) -> None:
        super().__init__(answer)
        self.index = index


@contextmanager
def connected(
    parameters: Sequence[pika.connection.Parameters], *, patience_s: float = 0
) -> Iterator[pika.BlockingConnection]:
    """Yield a blocking connection. A server that is not there yet is waited for, ``patience_s`` at most.

    Raises:
        NotConnected: no connection; says why in one sentence, without a password.
    """
    deadline = time.monotonic() + patience_s
    mine = [prepared(one, "check") for one in parameters]
    rounds = 0
    while True:
        errors = []
        for one in mine:
            try:
                chosen = hurried(one, rounds) if len(mine) > 1 else one
                connection = pika.BlockingConnection(chosen, _impl_class=TolerantConnection)
            except Exception as error:
                errors.append((error, one))
            else:
                with _closing(connection, one):
                    yield connection
                return
        final = all(is_final(error) for error, _ in errors)
        if final or time.monotonic() >= deadline:
            sentence = "; ".join(explain(error, one, lasting=True) for error, one in errors)
            raise NotConnected(sentence, final=final) from None
        rounds += 1
        time.sleep(_PAUSE_S)


@contextmanager
def _closing(connection: pika.BlockingConnection, parameters: pika.connection.Parameters) -> Iterator[None]:
    try:
        yield
    except _NoAnswer:
        raise NotConnected(_unable(parameters, f"no answer within {ANSWER_S:.0f} s"), final=False) from None
    except (pika.exceptions.AMQPConnectionError, pika.exceptions.ChannelWrongStateError) as error:
        code, text = close_reason(error)
        if code == INTERNAL_ERROR:
            raise NotConnected(_unable(parameters, " ".join(text.split())[:200]), final=False) from None
        raise NotConnected(explain(error, parameters), final=is_final(error)) from None
    finally:
        if connection.is_open:
            with suppress(pika.exceptions.AMQPError), answering(connection):
                connection.close()


def _unable(parameters: pika.connection.Parameters, answer: str) -> str:
    return (
        f"RabbitMQ at {address(parameters)} is up but cannot do what it was asked ({answer}): if it is a cluster, too few of"
        " its nodes are up, or one is frozen: see rabbitmqctl cluster_status, and start the missing ones"
    )


@contextmanager
def answering(connection: pika.BlockingConnection) -> Iterator[None]:
    """Cut the connection when RabbitMQ has not answered a call of the block within ``ANSWER_S``: pika has no limit."""
    # The timer of the connection beneath: BlockingConnection's own fires between calls only.
    impl = connection._impl
    timer = impl._adapter_call_later(ANSWER_S, lambda: impl._terminate_stream(_NoAnswer()))
    try:
        yield
    finally:
        impl._adapter_remove_timeout(timer)


def declare(connection: pika.BlockingConnection, declarations: list[Declaration], *, index: int = 0) -> None:
    """Carry out ``declarations``.

    Raises:
        RefusedDeclaration: with RabbitMQ's answer.
    """
    channel = connection.channel()
    try:
        for declaration in declarations:
            with answering(connection):
                apply([declaration], channel)
    except pika.exceptions.ChannelClosedByBroker as error:
        raise RefusedDeclaration(f"{error.reply_code} {error.reply_text}", index=index) from None
    channel.close()


def declare_all(
    parameters: Sequence[pika.connection.Parameters],
    groups: Sequence[list[Declaration]],
    *,
    patience_s: float,
) -> None:
    """Declare ``groups``, from the beginning again if RabbitMQ goes away meanwhile.

    Raises:
        NotConnected: not within ``patience_s``, or it cannot help to wait.
        RefusedDeclaration: with RabbitMQ's answer; ``index`` says which group.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with connected(parameters, patience_s=max(deadline - time.monotonic(), 0)) as connection:
                # What exists comes first: a start that is refused must not leave new queues of the wrong type behind.
                there = [_exists(connection, declarations) for declarations in groups]
                for index in sorted(range(len(groups)), key=lambda index: not there[index]):
                    declare(connection, groups[index], index=index)
            return
        except NotConnected as error:
            if error.final or time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_S)


def _exists(connection: pika.BlockingConnection, declarations: list[Declaration]) -> bool:
    """Tell whether the queue that ``declarations`` end in exists already, if only to be refused."""
    queue_name = [one.arguments["queue"] for one in declarations if one.method == "queue_declare"][-1]
    channel = connection.channel()
    try:
        channel.queue_declare(queue_name, passive=True)
    except pika.exceptions.ChannelClosedByBroker as error:
        return bool(error.reply_code != 404)
    channel.close()
    return True


def ready(connection: pika.BlockingConnection, queue_name: str) -> int:
    """Return how many messages of a queue wait for a consumer; 0 if there is no such queue."""
    return _on_queue(connection, lambda channel: _ready(channel, queue_name))


def _ready(channel: Any, queue_name: str) -> int:
    declared = channel.queue_declare(queue_name, passive=True).method
    if declared.message_count or declared.consumer_count:
        return int(declared.message_count)
    # A quorum queue that has lost its leader claims the same. Only asking for a message shows whether it is empty.
    method, _, _ = channel.basic_get(queue_name)
    if method is None:
        return 0
    channel.basic_nack(method.delivery_tag, requeue=True)
    return 1


def purge(connection: pika.BlockingConnection, queue_name: str) -> None:
    """Drop the messages of a queue: those that wait in the delay ladder for it, those in it, and its dead letters."""
    # The ladder first: what leaves it meanwhile is in the queue next.
    for step in STEPS_MS:
        waiting = ready(connection, step_name(step))
        if waiting:
            _drop_from_step(connection, step_name(step), waiting, queue_name)
    for name in (queue_name, dead_letter_queue(queue_name)):
        _on_queue(connection, lambda channel, name=name: _purged(channel, name))  # type: ignore[misc]  # mypy's limit


def _purged(channel: Any, queue_name: str) -> int:
    return int(channel.queue_purge(queue_name).method.message_count)


def _drop_from_step(connection: pika.BlockingConnection, step: str, most: int, queue_name: str) -> None:
    channel = connection.channel()
    for _ in range(most):
        method, _, _ = channel.basic_get(step)
        if method is None:
            break
        if method.routing_key == queue_name:
            channel.basic_ack(method.delivery_tag)
    channel.close()  # what waits for other queues, perhaps of other apps, is back in its place


def counts(connection: pika.BlockingConnection, queue_name: str) -> tuple[int, int, int]:
    """Return the ready messages of a queue, those of all queues that wait in the delay ladder, and the dead letters."""
    delayed = sum(ready(connection, step_name(step)) for step in STEPS_MS)
    return ready(connection, queue_name), delayed, ready(connection, dead_letter_queue(queue_name))


def _on_queue(connection: pika.BlockingConnection, operation: Callable[[Any], int]) -> int:
    channel = connection.channel()
    try:
        with answering(connection):
            count = operation(channel)
    except pika.exceptions.ChannelClosedByBroker as error:
        if error.reply_code == 404:
            return 0  # not declared yet: an empty queue
        raise
    channel.close()
    return count
