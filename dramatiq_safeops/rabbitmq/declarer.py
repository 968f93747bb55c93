"""Declaring on pika's asynchronous channels: one declaration after the other, then exactly one answer.

Runs in: the I/O thread. Needs: RabbitMQ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pika.adapters.select_connection import SelectConnection

from .io_thread import IOThread
from .topology import Declaration
from .trouble import close_reason

#: Called with None when all is declared, or with what RabbitMQ or pika had against it.
OnDone = Callable[[str | None], None]


def declare_on_own_channel(
    io: IOThread, connection: SelectConnection, declarations: Sequence[Declaration], on_done: OnDone
) -> None:
    """Declare on a channel that is opened and closed for it: a refusal closes the channel.

    ``on_done`` is not called when the connection is lost meanwhile: whoever asked asks again on the next one.
    """
    answered = False

    def answer(error: str | None) -> None:
        nonlocal answered
        if not answered:
            answered = True
            on_done(error)

    def opened(channel: Any) -> None:
        channel.add_on_close_callback(io.safely(closed))
        declare_on(io, channel, declarations, lambda error: done(channel, error))

    def done(channel: Any, error: str | None) -> None:
        if channel.is_open:
            channel.close()
        answer(error)

    def closed(_channel: Any, reason: BaseException) -> None:
        if connection.is_open:
            answer(close_reason(reason)[1])

    try:
        connection.channel(on_open_callback=io.safely(opened))
    except Exception as error:
        answer(f"{type(error).__name__}: {error}")


def declare_on(io: IOThread, channel: Any, declarations: Sequence[Declaration], on_done: OnDone) -> None:
    """Declare on ``channel``. A refusal by RabbitMQ closes it, which its owner notices; ``on_done`` is then not called."""
    steps = deque(declarations)

    def step(_frame: Any = None) -> None:
        if not steps:
            on_done(None)
            return
        declaration = steps.popleft()
        try:
            getattr(channel, declaration.method)(**declaration.arguments, callback=io.safely(step))
        except Exception as error:
            on_done(f"{type(error).__name__}: {error}")  # what pika cannot write: a name that is too long

    step()
