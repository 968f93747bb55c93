"""The I/O thread, and the AMQP connections that live on it and come back by themselves.

Runs in: every process that sends or consumes, one thread per broker and process. Needs: RabbitMQ.

All of pika happens on this thread. Other threads hand it work through ``IOThread.call``, which never blocks.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pika
import pika.exceptions
from pika.adapters.select_connection import IOLoop, SelectConnection

logger = logging.getLogger(__name__)

#: Seconds between two heartbeats unless the URL says otherwise. RabbitMQ and pika give up after two missed ones, so a
#: dead peer is noticed within about 20 s.
HEARTBEAT_S = 10

#: Seconds to wait before the first reconnect, and at most. Each wait is jittered: after a restart of RabbitMQ all
#: workers would come back in the same instant.
RECONNECT_FIRST_S = 0.2
RECONNECT_MOST_S = 5.0

#: Seconds before a loop that pika let fall is started again.
LOOP_PAUSE_S = 0.1


class IOThread:
    """A daemon thread that runs pika's I/O loop.

    ``call`` is thread-safe. All other methods belong to the thread itself, but ``start`` and ``stop``.
    """

    def __init__(self, name: str) -> None:
        self._loop = IOLoop()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def loop(self) -> IOLoop:
        """pika's loop, for its connections."""
        return self._loop

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the loop and wait for the thread, ``timeout`` seconds at most."""
        self.call(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Let the I/O thread call ``function``, soon and in order. Thread-safe, never blocks."""
        self._calls.append((function, arguments))
        # Waking the loop costs a system call, so one wake-up serves all that is waiting. The flag is lowered before
        # the queue is drained, so whoever appends later raises it again.
        if not self._woken:
            self._woken = True
            self._loop.add_callback_threadsafe(self._drain)

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> object:
        """Let the I/O thread call ``function`` after ``seconds``. On the I/O thread only."""
        return self._loop.call_later(seconds, lambda: self.run_safely(function, *arguments))

    def run_safely(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function``. What it raises is logged: an exception must never end this thread."""
        try:
            function(*arguments)
        except Exception:
            logger.critical(
                "Unexpected failure on the I/O thread, it goes on.",
                exc_info=True,
                extra={"event": "io.failure"},
            )

    def safely(self, function: Callable[..., None]) -> Callable[..., None]:
        """Wrap a callback that pika will call."""
        return lambda *arguments: self.run_safely(function, *arguments)

    def _drain(self) -> None:
        self._woken = False
        for _ in range(len(self._calls)):
            function, arguments = self._calls.popleft()
            self.run_safely(function, *arguments)
        if self._calls and not self._woken:
            self._woken = True
            self._loop.add_callback_threadsafe(self._drain)

    def _stop(self) -> None:
        self._stopping = True
        self._loop.stop()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._loop.start()
            except Exception:
                # Only pika's own code can get here. Its connections notice broken sockets by themselves.
                logger.critical(
                    "pika's I/O loop failed, it is started again.", exc_info=True, extra={"event": "io.loop"}
                )
                time.sleep(LOOP_PAUSE_S)  # a fault that stays must not fill the disk with log lines


class Link:
    """One AMQP connection that is opened again whenever it is lost. Lives on the I/O thread.

    ``on_up(connection)`` and ``on_down(code, text)`` are called once for each connection that came up; the code is
    AMQP's, or 0 when the connection was lost without a word.
    """

    def __init__(
        self,
        io: IOThread,
        parameters: Sequence[pika.connection.Parameters],
        purpose: str,
        *,
        on_up: Callable[[SelectConnection], None],
        on_down: Callable[[int, str], None],
    ) -> None:
        self._io = io
        self._parameters = [prepared(one, purpose) for one in parameters]
        self._purpose = purpose
        self._on_up = on_up
        self._on_down = on_down
        self._workflow: Any = None
        self._connection: SelectConnection | None = None
        self._failures = 0
        self._closing = False
        #: Why there is no connection, for people; empty while there is one.
        self.trouble = "it has not been opened yet"

    @property
    def connection(self) -> SelectConnection | None:
        """The open connection, or None."""
        return self._connection

    def open(self) -> None:
        """Open the connection, and keep it open from now on."""
        if self._workflow is not None or self._connection is not None or self._closing:
            return
        self.trouble = f"connecting to {address(self._parameters)}"
        self._workflow = SelectConnection.create_connection(
            self._parameters, on_done=self._io.safely(self._connected), custom_ioloop=self._io.loop
        )

    def close(self) -> None:
        """Close the connection politely and do not open it again."""
        self._closing = True
        if self._connection is not None and self._connection.is_open:
            self._connection.close()
        elif self._workflow is not None:
            self._workflow.abort()

    def drop_socket(self) -> None:
        """Close this process's copy of the socket without a word on the wire: after a fork it is the parent's."""
        transport = getattr(self._connection, "_transport", None)
        sock = getattr(transport, "_sock", None)
        if sock is not None:
            sock.close()

    def _connected(self, result: Any) -> None:
        self._workflow = None
        if isinstance(result, BaseException):
            self._failed(explain(result, self._parameters))
            return
        if self._closing:
            result.close()
            return
        self._failures = 0
        self.trouble = ""
        self._connection = result
        result.add_on_close_callback(self._io.safely(self._closed))
        logger.debug("Connected to RabbitMQ to %s.", self._purpose, extra={"event": "connection.up"})
        self._on_up(result)

    def _closed(self, _connection: Any, reason: BaseException) -> None:
        self._connection = None
        code, text = close_reason(reason)
        self._on_down(code, text)
        if not self._closing:
            self._failed(text)

    def _failed(self, text: str) -> None:
        if self._closing:
            return
        self.trouble = text
        pause = min(RECONNECT_MOST_S, RECONNECT_FIRST_S * 2**self._failures) * random.uniform(0.5, 1)
        self._failures = min(self._failures + 1, 10)
        logger.warning(
            "No connection to RabbitMQ to %s (%s), trying again in %.1f seconds.",
            self._purpose,
            text,
            pause,
            extra={"event": "connection.down", "pause_s": pause},
        )
        self._io.call_later(pause, self.open)


def prepared(parameters: pika.connection.Parameters, purpose: str) -> pika.connection.Parameters:
    """Return a copy of ``parameters`` with a name for the RabbitMQ UI, our heartbeat, and one attempt a time."""
    mine = copy.copy(parameters)
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    mine.client_properties = {
        **(parameters.client_properties or {}),
        "connection_name": f"safeops {purpose}: {program} {os.getpid()}@{socket.gethostname()}",
    }
    if mine.heartbeat is None:
        mine.heartbeat = HEARTBEAT_S
    # pika would wait between attempts by itself, without jitter and without telling us why it failed.
    mine.connection_attempts = 1
    return mine


def address(parameters: Sequence[pika.connection.Parameters]) -> str:
    """Return where ``parameters`` lead, without the password."""
    return ", ".join(f"{one.host}:{one.port}{_vhost(one)}" for one in parameters)


def _vhost(parameters: pika.connection.Parameters) -> str:
    return "" if parameters.virtual_host == "/" else f"/{parameters.virtual_host}"


def close_reason(reason: BaseException) -> tuple[int, str]:
    """Return AMQP's code and text of a closed connection or channel; code 0 where RabbitMQ said nothing."""
    code = getattr(reason, "reply_code", 0)
    text = getattr(reason, "reply_text", "")
    if code:
        return int(code), f"{code} {text}"
    return 0, str(reason) or type(reason).__name__


#: AMQP's code for a refused operation: here always wrong arguments, or a vhost that is not there.
_CLUES = (
    (
        (pika.exceptions.ProbableAuthenticationError, pika.exceptions.AuthenticationError),
        "RabbitMQ at {where} refused the login of user {user!r}: check user and password in the URL",
    ),
    (
        (pika.exceptions.ProbableAccessDeniedError,),
        "RabbitMQ at {where} refused user {user!r} access to the vhost {vhost!r}: create the vhost or grant the permission"
        " (rabbitmqctl add_vhost, rabbitmqctl set_permissions)",
    ),
    (
        (pika.exceptions.IncompatibleProtocolError,),
        "what answers at {where} does not speak AMQP: check host and port (AMQP is usually 5672, 15672 is the UI)",
    ),
    (
        (socket.gaierror,),
        "the host name {host!r} cannot be resolved: check the URL",
    ),
    (
        (ConnectionRefusedError,),
        "nothing listens at {where}: start RabbitMQ, or check host and port in the URL",
    ),
    (
        (TimeoutError, pika.exceptions.AMQPHeartbeatTimeout),
        "no answer from {where} in time: check that RabbitMQ is up and reachable",
    ),
)

#: What no waiting will heal.
FINAL_ERRORS = (
    pika.exceptions.ProbableAuthenticationError,
    pika.exceptions.AuthenticationError,
    pika.exceptions.ProbableAccessDeniedError,
    pika.exceptions.IncompatibleProtocolError,
    socket.gaierror,
)


def explain(error: BaseException, parameters: Sequence[pika.connection.Parameters]) -> str:
    """Say in one sentence why no connection came up, and what to do. Never shows a password."""
    causes = list(_causes(error))
    one = parameters[-1]
    facts = {
        "where": address(parameters),
        "host": one.host,
        "user": getattr(one.credentials, "username", "?"),
        "vhost": one.virtual_host,
    }
    for kinds, sentence in _CLUES:
        if any(isinstance(cause, kinds) for cause in causes):
            return sentence.format(**facts)
    for cause in causes:
        code = getattr(cause, "reply_code", 0)
        if code == 530:
            return (
                f"RabbitMQ at {facts['where']} has no vhost {facts['vhost']!r}: create it (rabbitmqctl add_vhost)"
                " or check the URL"
            )
        if code:
            return f"RabbitMQ at {facts['where']} refused the connection: {code} {getattr(cause, 'reply_text', '')}"
    last = causes[-1]
    return f"no connection to RabbitMQ at {facts['where']}: {type(last).__name__} {last}".rstrip()


def is_final(error: BaseException) -> bool:
    """Tell whether trying again cannot help: wrong login, missing vhost, wrong protocol or host."""
    return any(
        isinstance(cause, FINAL_ERRORS) or getattr(cause, "reply_code", 0) in (403, 530)
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> list[BaseException]:
    """Return ``error`` and all that pika has wrapped into it, outermost first."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if one in found:
            continue
        found.append(one)
        inner = [
            *getattr(one, "exceptions", ()),
            getattr(one, "exception", None),
            one.__cause__,
            one.__context__,
            *one.args,
        ]
        waiting.extend(cause for cause in inner if isinstance(cause, BaseException))
    return found
