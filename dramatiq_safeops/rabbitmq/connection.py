"""An AMQP connection that comes back by itself.

Runs in: the I/O thread. Needs: RabbitMQ.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pika
import pika.frame
import pika.spec
from pika.adapters.select_connection import SelectConnection

from .io_thread import IOThread
from .trouble import address, close_reason, explain

logger = logging.getLogger(__name__)

#: Seconds between two heartbeats unless the URL says otherwise. RabbitMQ is never silent for longer.
HEARTBEAT_S = 10

#: A connection is given up after so many looks in a row without a byte from RabbitMQ, of ten per heartbeat: after 15 seconds.
#: pika looks every heartbeat plus 5 seconds, so that it would take up to 30. Looks are counted, not seconds: when this
#: process could not run for a while, there may be much to read.
SILENT_LOOKS = 15

#: Seconds that a connection may take to open where there are other URLs to try: doubled after each round of failures, up to
#: what the parameters say (15 with pika). A frozen server accepts connections, its kernel does, and then says nothing.
OPENING_FIRST_S = 3.0

#: Seconds to wait before the first reconnect, and at most. Each wait is jittered: after a restart of RabbitMQ all
#: workers would come back in the same instant.
RECONNECT_FIRST_S = 0.2
RECONNECT_MOST_S = 5.0

#: Seconds that a connection must have lived to count as good: one that is refused right after it opened must not be
#: opened again in a tight loop.
GOOD_AFTER_S = 5.0

#: Stands in for headers that cannot be decoded.
UNDECODABLE = "x-safeops-undecodable"


class TolerantConnection(SelectConnection):  # type: ignore[misc]  # pika has no types
    """pika's connection, but headers that pika cannot decode do not end it.

    pika raises for a timestamp beyond the year 9999 (milliseconds where AMQP wants seconds) and drops the connection. The
    message would come again on the next one, and nothing else ever.
    """

    def _read_frame(self) -> Any:
        try:
            return super()._read_frame()
        except Exception:
            kind, channel, size = struct.unpack_from(">BHL", self._frame_buffer)
            if kind != pika.spec.FRAME_HEADER:
                raise
            (body_size,) = struct.unpack_from(">Q", self._frame_buffer, pika.spec.FRAME_HEADER_SIZE + 4)
            properties = pika.BasicProperties(headers={UNDECODABLE: True})
            taken = pika.spec.FRAME_HEADER_SIZE + size + pika.spec.FRAME_END_SIZE
            return taken, pika.frame.Header(channel, body_size, properties)


class Link:
    """One AMQP connection that is opened again whenever it is lost. Lives on the I/O thread.

    ``on_up(connection)`` and ``on_down(code, text)`` are called once for each connection that came up; the code is
    AMQP's, or 0 when the connection was lost without a word. Of several URLs each is tried in its turn; after a loss
    the next one comes first, since the server that was lost is the least likely to answer.
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
        self._attempt: object = None  # tells the connection we wait for from one we have given up
        self._connection: SelectConnection | None = None
        self._up_since = 0.0
        self._failures = 0
        self._turn = 0
        self._pausing = False
        self._closing = False
        #: Why there is no connection, for people; empty while there is one.
        self.trouble = "it has not been opened yet"
        io.on_failure(self._loop_failed)

    @property
    def connection(self) -> SelectConnection | None:
        """The open connection, or None."""
        return self._connection

    @property
    def closed(self) -> bool:
        """Whether there is no connection, and none on its way."""
        return self._connection is None and self._workflow is None

    def open(self) -> None:
        """Open the connection, and keep it open from now on."""
        if self._workflow is not None or self._connection is not None or self._pausing or self._closing:
            return
        # One URL a time: pika would begin anew with the first one whenever its name cannot be resolved.
        parameters = self._parameters[self._turn % len(self._parameters)]
        if len(self._parameters) > 1:
            parameters = hurried(parameters, self._failures // len(self._parameters))
        self.trouble = f"connecting to {address(parameters)}"
        attempt = self._attempt = object()

        def done(result: Any) -> None:
            if attempt is self._attempt:
                self._connected(result, parameters)
            elif not isinstance(result, BaseException):
                result.close()  # given up meanwhile

        self._workflow = TolerantConnection.create_connection(
            [parameters], on_done=self._io.safely(done), custom_ioloop=self._io.loop
        )

    def close(self) -> None:
        """Close the connection politely and do not open it again."""
        self._closing = True
        if self._connection is not None and self._connection.is_open:
            self._connection.close()
        elif self._workflow is not None:
            self._give_up_connecting()

    def _give_up_connecting(self) -> None:
        workflow, self._workflow, self._attempt = self._workflow, None, None
        # pika cannot abort in the middle of a handshake (an assertion of its own fails), so the socket is closed.
        connecting = getattr(getattr(workflow, "_connector", None), "_amqp_conn", None)
        transport = getattr(connecting, "_transport", None)
        if transport is not None:
            transport.abort()
        else:
            workflow.abort()

    def _loop_failed(self) -> None:
        if self._workflow is not None:
            # pika would notice only when its own time is up, after 15 s.
            self._workflow, self._attempt = None, None
            self._failed("pika failed while it connected")

    def _connected(self, result: Any, parameters: pika.connection.Parameters) -> None:
        self._workflow = None
        if isinstance(result, BaseException):
            self._failed(explain(result, parameters))
            return
        if self._closing:
            result.close()
            return
        self._up_since = time.monotonic()
        self.trouble = ""
        self._connection = result
        result.add_on_close_callback(self._io.safely(self._closed))
        heartbeat = result.params.heartbeat
        if isinstance(heartbeat, (int, float)) and heartbeat > 0:
            self._watch(result, heartbeat / 10, result.bytes_received, 0)
        logger.debug("Connected to RabbitMQ to %s.", self._purpose, extra={"event": "connection.up"})
        self._on_up(result)

    def _watch(self, watched: Any, every_s: float, received: int, silent: int) -> None:
        """Give the connection up when nothing comes any more."""
        connection: Any = self._connection
        if connection is not watched or not connection.is_open:
            return
        silent = silent + 1 if connection.bytes_received == received else 0
        if silent < SILENT_LOOKS:
            self._io.call_later(every_s, self._watch, watched, every_s, connection.bytes_received, silent)
            return
        # As pika does where it notices by itself: a polite close would wait for an answer.
        connection._terminate_stream(pika.exceptions.AMQPHeartbeatTimeout("RabbitMQ has fallen silent"))

    def _closed(self, _connection: Any, reason: BaseException) -> None:
        self._connection = None
        code, text = close_reason(reason)
        self._on_down(code, text)
        if time.monotonic() - self._up_since > GOOD_AFTER_S:
            self._failures = 0
        self._failed(text)

    def _failed(self, text: str) -> None:
        if self._closing:
            return
        self.trouble = text
        pause = min(RECONNECT_MOST_S, RECONNECT_FIRST_S * 2 ** min(self._failures, 10)) * random.uniform(
            0.5, 1
        )
        self._failures += 1
        self._turn += 1
        self._pausing = True
        logger.warning(
            "No connection to RabbitMQ to %s (%s), trying again in %.1f seconds.",
            self._purpose,
            text,
            pause,
            extra={"event": "connection.down", "pause_s": pause},
        )
        self._io.call_later(pause, self._pause_over)

    def _pause_over(self) -> None:
        self._pausing = False
        self.open()


def hurried(parameters: pika.connection.Parameters, rounds: int) -> pika.connection.Parameters:
    """Return a copy of ``parameters`` with less time to open a connection, for where there are other URLs to try.

    ``rounds`` is how often all of them have failed in a row.
    """
    mine = copy.copy(parameters)
    limit = OPENING_FIRST_S * 2 ** min(rounds, 10)
    mine.stack_timeout = limit if mine.stack_timeout is None else min(mine.stack_timeout, limit)
    return mine


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
    # It would cut the connection during a memory alarm. Time budgets are ours, and the alarm ends by itself.
    mine.blocked_connection_timeout = None
    return mine
