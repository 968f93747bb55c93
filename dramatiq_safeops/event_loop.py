"""The thread that runs the coroutines of async actors, and the event loop on it.

Runs in: worker; one daemon thread per process, started with the first coroutine. Needs: nothing.

It takes the place of Dramatiq's, which gives up on a coroutine a second after an interrupt: the message is then tried again
beside the coroutine that still runs. What becomes of one coroutine stands in ``coroutine``.

Emits:
    event ``event_loop.broken`` (ERROR), when something has thrown the loop out of its turn; it goes on.
    event ``event_loop.left`` (WARNING), when something of it is left at the end: a coroutine that blocks the loop or does
    not end, or a thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TypeVar

import dramatiq.asyncio
from dramatiq.asyncio import get_event_loop_thread, set_event_loop_thread
from dramatiq.middleware import Shutdown

from .coroutine import RunningCoroutine
from .executor import Executor
from .interrupter import INTERRUPTER
from .watch import line_of

logger = logging.getLogger(__name__)

R = TypeVar("R")

#: How long the loop may take for one turn before it is taken for blocked.
TURN_S = 0.2

#: How long coroutines that are still there when the last worker stops may take to end, and then their threads.
STOP_PATIENCE_S = 2.0


class EventLoop(dramatiq.asyncio.EventLoopThread):
    """Dramatiq's ``EventLoopThread``, as a daemon that starts with its first coroutine. Thread-safe."""

    def __init__(self) -> None:
        # Not super().__init__(): it makes the event loop, which an app without async actors never needs.
        threading.Thread.__init__(self, name="safeops-event-loop", daemon=True)
        self.logger = logger
        self._lock = threading.Lock()
        self._executor = Executor()
        self._running: set[RunningCoroutine] = set()
        self._stopping = False
        self._real: asyncio.AbstractEventLoop | None = None
        self._turn: threading.Event | None = None
        self._winding_up: asyncio.Task[None] | None = None
        self._wound_up = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:  # type: ignore[override]
        """The event loop; asking for it starts it."""
        self.start()
        assert self._real is not None
        return self._real

    def start(self, *, timeout: float | None = None) -> None:
        """Start the thread unless it runs; return when its loop turns.

        Raises:
            RuntimeError: it does not within ``timeout`` seconds, or was stopped before.
        """
        if self._real is not None:
            return
        with self._lock:
            if self._real is not None:
                return
            if self._stopping:
                raise RuntimeError("Event loop is not running.")
            real = asyncio.new_event_loop()
            real.set_default_executor(self._executor)
            turns = threading.Event()
            real.call_soon(turns.set)
            self._real = real
            try:
                threading.Thread.start(self)
            except (
                BaseException
            ):  # no more threads, for now: the next coroutine must not wait for one that never started
                self._real = None
                real.close()
                raise
        if not turns.wait(timeout):
            raise RuntimeError("Event loop failed to start.")

    def run(self) -> None:
        """Turn until stopped, whatever happens."""
        real = self._real
        assert real is not None
        while True:
            try:
                real.run_forever()
            except BaseException:
                # SystemExit in a task that an actor has left behind, for example. Others have their coroutines here.
                logger.exception(
                    "The event loop was thrown out of its turn, and goes on.",
                    extra={"event": "event_loop.broken"},
                )
            if self._wound_up:
                break
        tasks = asyncio.all_tasks(real)
        if tasks:
            _left_behind.append((real, tasks))  # freed, they would go on for a bit, and complain
        else:
            real.close()

    def run_coroutine(self, coro: Awaitable[R]) -> R:
        """Run ``coro`` on the loop and return what it returns. Never returns before it has ended.

        Raises: what the coroutine raised; what interrupted it, if it let itself be cancelled; ``CancelledError`` (that of
        ``concurrent.futures``, an ordinary exception, as with Dramatiq) if it was cancelled by anybody else.
        """
        running = RunningCoroutine(self, coro, INTERRUPTER.here())
        failure: BaseException | None = None
        try:
            running.wait()
            if running.returned:
                return running.value  # type: ignore[no-any-return]
            failure = running.take_failure()
            raise failure
        finally:
            # An exception refers to this frame; were it to refer back, only the garbage collector would free the two,
            # with all that the actor's locals hold.
            del running, failure

    def submit(self, running: RunningCoroutine) -> None:
        """Begin it soon, in a copy of this thread's context."""
        if threading.get_ident() == self.ident:
            raise RuntimeError(
                "an async actor cannot be called from a coroutine, which would wait for itself: send it a message, or"
                " await the function that it was made of"
            )
        self.start()
        with self._lock:
            if self._stopping or self._real is None:
                raise RuntimeError("Event loop is not running.")
            running.submitted = True
            self._running.add(running)
            if running.over:  # struck already
                self.forget(running)
            else:
                self._real.call_soon_threadsafe(running.begin)

    def forget(self, running: RunningCoroutine) -> None:
        """It is over, or will not begin."""
        self._running.discard(running)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Have it called on the loop, unless that is closed, where nothing runs any more."""
        if self._real is not None:
            with suppress(RuntimeError):
                self._real.call_soon_threadsafe(callback)

    def stop(self) -> None:
        """Interrupt what still runs, cancel what actors have left behind, and stop. Takes a few seconds at most.

        A coroutine that does not end is never continued, so that its message can be returned. One that blocks the loop
        cannot be stopped, nor can a thread that does its work: its message stays un-acked, and the thread does not keep
        the process alive.
        """
        with self._lock:
            self._stopping = True
            real = self._real
        if real is None or not self.is_alive():
            return
        for running in list(self._running):
            if running.watch is None:
                running.strike(Shutdown)
            else:
                INTERRUPTER.interrupt(running.watch, Shutdown)
        self.call_soon(self._start_winding_up)
        self.join(STOP_PATIENCE_S)
        if self.is_alive() and self.blocked_at() is None:
            self.join(STOP_PATIENCE_S)  # for the generators, and what is slow
        if not self.is_alive():
            for running in list(self._running):
                running.abandon()
        concurrent.futures.wait(self._executor.unfinished(), STOP_PATIENCE_S)
        left = []
        if not real.is_closed():
            frame = self.blocked_at()
            left.append(
                "coroutines that were cancelled do not end"
                if frame is None
                else f"blocked at {line_of(frame)}"
            )
        left += [
            f"a thread is at {line_of(frame)}"
            for call in self._executor.unfinished()
            if (frame := call.frame())
        ]
        if left:
            logger.warning(
                "The event loop is left behind: %s.", "; ".join(left), extra={"event": "event_loop.left"}
            )

    def _start_winding_up(self) -> None:
        assert self._real is not None
        self._winding_up = self._real.create_task(self._wind_up(self._real))

    async def _wind_up(self, real: asyncio.AbstractEventLoop) -> None:
        try:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks - {running.task for running in self._running}:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=STOP_PATIENCE_S)
            await asyncio.wait_for(real.shutdown_asyncgens(), STOP_PATIENCE_S / 2)
        finally:
            self._wound_up = True
            real.stop()

    def blocked_at(self) -> FrameType | None:
        """Return the frame that keeps the loop from turning; None if it turns."""
        if not self.is_alive() or threading.get_ident() == self.ident:
            return None
        turn = self._turn
        if turn is None:
            turn = self._turn = threading.Event()
            self.call_soon(partial(self._turned, turn))
            turn.wait(TURN_S)
        return None if turn.is_set() else sys._current_frames().get(self.ident or 0)

    def _turned(self, turn: threading.Event) -> None:
        self._turn = None
        turn.set()


def is_ours() -> bool:
    """Tell whether coroutines of this process run here, and not on a thread of Dramatiq's own."""
    return isinstance(get_event_loop_thread(), EventLoop)


# -- the one of this process

_lock = threading.Lock()
_users: list[object] = []

#: Loops that could not be closed. Kept, since a loop that is freed unclosed complains, and one of a parent's must never
#: be closed: the two processes share what it waits with.
_left_behind: list[object] = []


def acquire(user: object) -> EventLoop:
    """Return the event loop of this process, which is also Dramatiq's, for as long as ``user`` (a worker) needs it."""
    with _lock:
        loop = get_event_loop_thread()
        if not isinstance(loop, EventLoop):
            loop = EventLoop()
            set_event_loop_thread(loop)
        _users.append(user)
        return loop


def release(user: object) -> None:
    """``user`` needs it no more; with the last one the loop is stopped."""
    with _lock:
        mine = [one for one in _users if one is user]
        if not mine:
            return
        _users.remove(mine[0])
        loop = get_event_loop_thread()
        if _users or not isinstance(loop, EventLoop):
            return
        set_event_loop_thread(None)
    loop.stop()


def _after_fork_in_child() -> None:
    """The parent's thread does not exist here."""
    global _lock
    _lock = threading.Lock()
    _users.clear()
    loop = get_event_loop_thread()
    if isinstance(loop, EventLoop):
        _left_behind.append(loop)
        set_event_loop_thread(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
