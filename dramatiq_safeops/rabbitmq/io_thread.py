"""The one thread of a process that talks to RabbitMQ.

Runs in: every process that sends or consumes, one thread per broker and process. Needs: nothing by itself.

All of pika happens on this thread. Other threads hand it work through ``IOThread.call``, which never blocks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pika.adapters.select_connection import IOLoop

logger = logging.getLogger(__name__)

#: Seconds before a loop that pika let fall is started again.
LOOP_PAUSE_S = 0.1

#: Seconds between two looks at the inbox without a wake-up. Normally nothing is found: it is for a thread that was
#: interrupted (a time limit, a signal handler) in the middle of waking us.
TICK_S = 1.0


class _Loop(IOLoop):  # type: ignore[misc]  # pika has no types
    """pika's loop, which notes the sockets that it watches: from the first step of connecting on they come by here."""

    def add_handler(self, fd: int, handler: Callable[..., None], events: int) -> None:
        _watched[fd] = os.fstat(fd).st_ino
        super().add_handler(fd, handler, events)


#: The sockets of this process that a loop has watched: descriptors, and which socket it was. A descriptor that was closed
#: and given out again is another file.
_watched: dict[int, int] = {}
_watched_by = os.getpid()


def let_go_of_inherited_sockets() -> None:
    """In a forked child: close the child's copies of the parent's sockets, without a word on the wire.

    A child that kept them open would hide the parent's death from RabbitMQ. Elsewhere this does nothing.
    """
    global _watched_by
    if _watched_by == os.getpid():
        return
    _watched_by = os.getpid()
    inherited = dict(_watched)
    _watched.clear()
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd, inode in inherited.items():
        try:
            if os.fstat(fd).st_ino == inode:
                # Not closed: Python's object of the socket would some day close another file of the same number.
                os.dup2(nothing, fd, inheritable=False)
        except OSError:
            continue  # closed before the fork
    os.close(nothing)


os.register_at_fork(after_in_child=let_go_of_inherited_sockets)


class IOThread:
    """A daemon thread that runs pika's I/O loop.

    ``call`` is thread-safe. All other methods belong to the thread itself, but ``start`` and ``stop``.
    """

    def __init__(self, name: str) -> None:
        let_go_of_inherited_sockets()  # not every fork comes about by Python: uWSGI's does not
        self._loop = _Loop()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False
        self._stopping = False
        self._on_failure: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def loop(self) -> IOLoop:
        """pika's loop, for its connections."""
        return self._loop

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        """Start the thread."""
        self.call(self._next_tick)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the loop and wait for the thread, ``timeout`` seconds at most."""
        self.call(self._stop)
        if not self.is_here:
            self._thread.join(timeout)

    def on_failure(self, function: Callable[[], None]) -> None:
        """Let ``function`` be called after pika's own code has raised through the loop: what it was doing is lost."""
        self._on_failure.append(function)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Let the I/O thread call ``function``, soon and in order. Thread-safe, never blocks."""
        self._calls.append((function, arguments))
        # Waking the loop costs a system call, so one wake-up serves all that is waiting. The flag is lowered before
        # the queue is drained, so whoever appends later raises it again.
        if not self._woken:
            self._woken = True
            try:
                self._loop.add_callback_threadsafe(self._drain)
            except BaseException:
                self._woken = False
                raise

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

    def _next_tick(self) -> None:
        self.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._drain()
        self._next_tick()

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
                for function in self._on_failure:
                    self.run_safely(function)
                time.sleep(LOOP_PAUSE_S)  # a fault that stays must not fill the disk with log lines
        self._loop.close()
