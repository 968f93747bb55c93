"""A TCP proxy that breaks connections on command: cut, hold, delay, refuse.

Runs in: test processes, on one thread of its own per proxy. Needs: nothing.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

from dramatiq_safeops.testing.processes import ServerError, free_ports

Direction = Literal["to_server", "to_client"]
Directions = Literal["to_server", "to_client", "both"]
Result = TypeVar("Result")

_BOTH: tuple[Direction, ...] = ("to_server", "to_client")

# Closing with "linger 0 s" sends RST instead of FIN: the peer sees a connection that broke, not one that ended.
_LINGER_0 = struct.pack("ii", 1, 0)

#: A held direction takes this many pieces (at most 256 kB each) from its sender; then TCP itself stops the sender,
#: as it would before a network that is stuck.
_MAX_WAITING = 16

#: What a pipe carries besides bytes: the sender's orderly end, and the break of its connection.
_END = b""
_BREAK = None


class TcpProxy:
    """Stands between clients and a server and does to their connections what networks do.

    ::

        with TcpProxy("127.0.0.1", 5672) as proxy:
            broker = RabbitmqBroker(url=proxy.url_for(url))
            proxy.hold("to_server")      # the ack never arrives
            proxy.cut()                  # and then the connection is gone

    ``on_bytes``, when set, is called as ``on_bytes(direction, data)`` with every piece of data that comes in, before
    it goes on: what the callback cuts or holds does not get through, so it may strike at the very byte that matters.
    It runs on the proxy's thread (so it must not wait for anything), and a pattern may be torn over two pieces.

    A client of a proxy whose server is down is reset right after it connects. Methods may be called from any thread;
    all but ``close()`` also from ``on_bytes``. What was asked for is in force when they return.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.on_bytes: Callable[[Direction, bytes], None] | None = None
        self.target = (target_host, target_port)
        self.port = free_ports(1)[0]
        # All below is touched by the loop's thread only.
        self._held: set[Direction] = set()
        self._delay_s: dict[Direction, float] = dict.fromkeys(_BOTH, 0.0)
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"tcp-proxy-{self.port}", daemon=True
        )
        self._thread.start()
        try:
            self.accept()
        except BaseException:
            self.close()
            raise

    def url_for(self, url: str) -> str:
        """Return ``url`` with its host and port replaced by the proxy's."""
        parts = urlsplit(url)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{self.port}"))

    @property
    def connections(self) -> int:
        """How many client connections are open."""
        return self._do(lambda: len(self._links))

    def cut(self) -> int:
        """Reset (RST) every present connection on both sides and return how many; new ones are let in."""
        if threading.current_thread() is self._thread:
            return self._reset_links()
        return self._await(self._cut())

    def hold(self, direction: Directions = "both") -> None:
        """Let nothing through, in present and new connections, until ``release()``. Connections stay open."""
        self._do(lambda: self._held.update(_named(direction)))

    def release(self, direction: Directions = "both") -> None:
        """Let what was held flow again: all of it, in order."""
        self._do(lambda: self._held.difference_update(_named(direction)))
        self._do(self._flow)

    def delay(self, seconds: float, direction: Directions = "both") -> None:
        """Pass everything on ``seconds`` after it came (0 ends it). Throughput stays as it is."""
        self._do(lambda: self._delay_s.update(dict.fromkeys(_named(direction), seconds)))
        self._do(self._flow)

    def refuse(self) -> None:
        """Refuse new connections, as a dead server does. Present ones stay. ``accept()`` ends it."""
        self._do(self._stop_listening)

    def accept(self) -> None:
        """Let new connections in again after ``refuse()``. ``ServerError`` if the port was taken meanwhile."""
        if self._do(lambda: self._server is not None):
            return
        try:
            listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        except OSError as error:
            raise ServerError(
                f"the proxy cannot listen on its port {self.port} ({error.strerror})"
            ) from error
        if threading.current_thread() is self._thread:
            self._listening = self._loop.create_task(self._listen(listener))
        else:
            self._await(self._listen(listener))

    def close(self) -> None:
        """Cut everything, stop listening and end the thread. Safe to repeat."""
        if self._loop.is_closed():
            return
        self._do(self._stop_listening)
        self._await(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # On the loop's thread

    async def _listen(self, listener: socket.socket) -> None:
        self._server = await self._loop.create_server(lambda: _ClientEnd(self, _Link()), sock=listener)

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _cut(self) -> int:
        await _turns()  # who is connected for the kernel but not yet taken by us is cut, too
        cut = self._reset_links()
        await _turns()  # the loop closes sockets a turn later
        return cut

    def _reset_links(self) -> int:
        links = list(self._links)
        for link in links:
            self._reset(link)
        return len(links)

    def _reset(self, link: _Link) -> None:
        self._links.discard(link)
        link.open = False
        if link.connecting is not None:
            link.connecting.cancel()
        for end in link.ends.values():
            if not end.is_closing():
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
                end.abort()

    async def _connect(self, link: _Link) -> None:
        try:
            await self._loop.create_connection(lambda: _ServerEnd(self, link), *self.target)
        except OSError:
            link.connecting = None
            self._reset(link)
            return
        link.connecting = None
        # The client may have sent something already, and the pipe had nowhere to put it.
        self._flow()

    def _came(self, link: _Link, direction: Direction, piece: bytes | None) -> None:
        if piece and self.on_bytes is not None:
            self.on_bytes(direction, piece)
        if link.open:
            pipe = link.pipes[direction]
            pipe.waiting.append((self._loop.time(), piece))
            if len(pipe.waiting) == _MAX_WAITING:
                link.ends[direction].pause_reading()
            self._pass_on(link, direction)

    def _flow(self) -> None:
        for link in list(self._links):
            for direction in _BOTH:
                self._pass_on(link, direction)

    def _pass_on(self, link: _Link, direction: Direction) -> None:
        pipe = link.pipes[direction]
        sink = link.ends.get(_opposite(direction))
        while (
            link.open and sink is not None and pipe.waiting and not pipe.stuck and direction not in self._held
        ):
            came_at, piece = pipe.waiting[0]
            wait = came_at + self._delay_s[direction] - self._loop.time()
            if wait > 0:
                pipe.wake_at(self._loop, wait, lambda: self._pass_on(link, direction))
                return
            pipe.waiting.popleft()
            if piece is _BREAK:
                self._reset(link)
            elif piece == _END:
                self._end(link, direction, sink)
            elif not sink.is_closing():
                sink.write(piece)
        source = link.ends.get(direction)
        if source is not None and len(pipe.waiting) < _MAX_WAITING and not source.is_closing():
            source.resume_reading()

    def _end(self, link: _Link, direction: Direction, sink: asyncio.Transport) -> None:
        link.pipes[direction].ended = True
        if not sink.is_closing():
            sink.write_eof()
        if all(pipe.ended for pipe in link.pipes.values()):
            self._links.discard(link)
            link.open = False
            for end in link.ends.values():
                end.close()

    # Between threads

    def _do(self, action: Callable[[], Result]) -> Result:
        if threading.current_thread() is self._thread:
            return action()

        async def act() -> Result:
            return action()

        return self._await(act())

    def _await(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop.is_closed():
            work.close()
            raise ServerError("the proxy is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


class _Pipe:
    """What is under way in one direction of one connection."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[float, bytes | None]] = deque()
        self.stuck = False  # its receiver takes no more
        self.ended = False
        self._timer: asyncio.TimerHandle | None = None

    def wake_at(self, loop: asyncio.AbstractEventLoop, wait: float, action: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(wait, action)


class _Link:
    """One client's connection and the one to the server that goes with it."""

    def __init__(self) -> None:
        self.open = True
        self.connecting: asyncio.Task[None] | None = None
        #: By the direction in which their bytes go: "to_server" is the client's end.
        self.ends: dict[Direction, asyncio.Transport] = {}
        self.pipes = {direction: _Pipe() for direction in _BOTH}


class _End(asyncio.Protocol):
    """One end of a link; tells the proxy what comes out of it."""

    direction: Direction

    def __init__(self, proxy: TcpProxy, link: _Link) -> None:
        self._proxy = proxy
        self._link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._link.ends[self.direction] = transport
        if not self._link.open:
            transport.abort()  # cut while we were connecting

    def data_received(self, data: bytes) -> None:
        self._proxy._came(self._link, self.direction, data)

    def eof_received(self) -> bool:
        self._proxy._came(self._link, self.direction, _END)
        return True  # the other direction may go on

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._proxy._came(self._link, self.direction, _BREAK)

    def pause_writing(self) -> None:
        self._link.pipes[_opposite(self.direction)].stuck = True

    def resume_writing(self) -> None:
        self._link.pipes[_opposite(self.direction)].stuck = False
        self._proxy._pass_on(self._link, _opposite(self.direction))


class _ClientEnd(_End):
    direction: Direction = "to_server"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._proxy._links.add(self._link)
        self._link.connecting = self._proxy._loop.create_task(self._proxy._connect(self._link))


class _ServerEnd(_End):
    direction: Direction = "to_client"


async def _turns(count: int = 5) -> None:
    """Let the loop deal with what is there already."""
    for _ in range(count):
        await asyncio.sleep(0)


def _named(direction: Directions) -> tuple[Direction, ...]:
    return _BOTH if direction == "both" else (direction,)


def _opposite(direction: Direction) -> Direction:
    return "to_client" if direction == "to_server" else "to_server"
