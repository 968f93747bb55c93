"""The thread that runs the coroutines of async actors, and that gives up on none of them.

Runs in: worker; one daemon thread per process, started with the first coroutine. Needs: nothing.

A worker thread hands its coroutine over and waits until it has ended, however long that takes: Dramatiq's own gives up a
second after an interrupt, and the message is tried again beside the coroutine that still runs. An interrupt cancels the
coroutine at once, and what it ends with is what counts:

* a value: it has caught the cancellation, and the value stands, as with an actor that catches ``TimeLimitExceeded``;
* ``CancelledError``: what interrupted it is raised in its stead;
* any other exception: that one.

A coroutine that was interrupted before its first step does not begin, also where the loop is blocked.

Emits:
    event ``event_loop.broken`` (ERROR), when something has thrown the loop out of its turn; it goes on.
    event ``event_loop.left`` (WARNING), when the loop could not be stopped, because a coroutine blocks it or does not end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import dramatiq.asyncio
from dramatiq.asyncio import get_event_loop_thread, set_event_loop_thread
from dramatiq.middleware import Shutdown

from .interrupter import INTERRUPTER
from .watch import Place, Watch, line_of

logger = logging.getLogger(__name__)

R = TypeVar("R")

#: An interrupt of ours wakes the waiting thread by itself. This often it looks for what others have raised into it, which
#: CPython cannot deliver to a thread that waits for a lock.
LOOK_EVERY_S = 0.25

#: How long the loop may take for one turn before it is taken for blocked.
TURN_S = 0.2

#: How long coroutines that are still there when the last worker stops may take to end.
STOP_PATIENCE_S = 2.0

#: Frames from here say nothing about who waits.
_ASYNCIO = os.path.dirname(asyncio.__file__)


class EventLoop(dramatiq.asyncio.EventLoopThread):
    """Dramatiq's ``EventLoopThread``, as a daemon that starts with its first coroutine. Thread-safe."""

    def __init__(self) -> None:
        # Not super().__init__(): it makes the event loop, which an app without async actors never needs.
        threading.Thread.__init__(self, name="safeops-event-loop", daemon=True)
        self.logger = logger
        self._lock = threading.Lock()
        self._running: set[_Running] = set()
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
            turns = threading.Event()
            real.call_soon(turns.set)
            self._real = real
            threading.Thread.start(self)
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
        watch = INTERRUPTER.here()
        running = _Running(self, coro, watch)
        error: BaseException | None = None
        try:
            running.go()
            error, running.error = running.error, None
            if running.returned:
                return running.value  # type: ignore[no-any-return]
            if running.cancelled and (error is None or _only_cancelled(error)):
                raise running.take_reason() from error
            if error is None or isinstance(error, asyncio.CancelledError):
                raise concurrent.futures.CancelledError(
                    "the actor's coroutine was cancelled, and not by its worker"
                ) from error
            raise error
        finally:
            # An exception refers to this frame; were it to refer back, only the garbage collector would free the two,
            # with all that the actor's locals hold.
            del running, error

    def stop(self) -> None:
        """Interrupt what still runs, cancel what actors have left behind, and stop. Takes a few seconds at most.

        A coroutine that does not end is never continued, so that its message can be returned. One that blocks the loop
        cannot be stopped: its message stays un-acked, and its thread does not keep the process alive.
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
        with suppress(RuntimeError):  # closed: it has been stopped before
            real.call_soon_threadsafe(self._start_winding_up)
        self.join(STOP_PATIENCE_S)
        if self.is_alive() and self.blocked_at() is None:
            self.join(STOP_PATIENCE_S)  # for the generators, and what is slow
        if not self.is_alive():
            for running in list(self._running):
                running.abandon()
        if not real.is_closed():
            frame = self.blocked_at() if self.is_alive() else None
            logger.warning(
                "The event loop is left behind: %s.",
                "coroutines that were cancelled do not end"
                if frame is None
                else f"blocked at {line_of(frame)}",
                extra={"event": "event_loop.left"},
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
        real = self._real
        if real is None or threading.get_ident() == self.ident:
            return None
        turn = self._turn
        if turn is None:
            turn = self._turn = threading.Event()
            try:
                real.call_soon_threadsafe(self._turned, turn)
            except RuntimeError:
                return None
            turn.wait(TURN_S)
        return None if turn.is_set() else sys._current_frames().get(self.ident or 0)

    def _turned(self, turn: threading.Event) -> None:
        self._turn = None
        turn.set()


class _Running:
    """One coroutine on the loop and the thread that waits for it. What an interrupt of its body strikes."""

    def __init__(self, thread: EventLoop, coro: Awaitable[Any], watch: Watch | None) -> None:
        self._thread = thread
        self._coro = coro
        self._first: dict[str, object] = {}
        self._over = threading.Lock()
        self._over.acquire()
        self._reason: BaseException | type[BaseException] | None = None
        self._submitted = False
        self.watch = watch
        self.over = False
        #: The cancellation was thrown into the coroutine, or came before its first step.
        self.cancelled = False
        self.returned = False
        self.task: asyncio.Task[None] | None = None
        self.value: Any = None
        self.error: BaseException | None = None

    # -- in the thread that waits

    def go(self) -> None:
        """Run the coroutine to its end. Raises an interrupt that came before, or (``Watch.aim_at``) too late for it."""
        watch = self.watch
        try:
            if watch is None:
                self._see_through()
                return
            before = watch.aim_at(self)
            try:
                self._see_through()
            finally:
                if self.cancelled and watch.raised is not None:
                    watch.struck = True
                watch.aim_at(before)
        except BaseException:
            self._withdraw()
            raise

    def take_reason(self) -> BaseException | type[BaseException]:
        """Return why it was cancelled."""
        reason, self._reason = self._reason, None
        if reason is None and self.watch is not None:
            reason = self.watch.raised
        return Shutdown if reason is None else reason

    def _see_through(self) -> None:
        """Start it and wait until it is over, whatever is raised into this thread."""
        struck = False
        while True:
            try:
                if not self._submitted:
                    self._submit()
                while not self.over:
                    self._over.acquire(timeout=LOOK_EVERY_S)
                return
            except BaseException as error:
                # Not the interrupter, which strikes the coroutine: Ctrl-C, or an extension of Dramatiq's that aborts
                # messages. It may land at any point in here.
                if not self._submitted or (struck and isinstance(error, KeyboardInterrupt)):
                    raise
                struck = True
                self.strike(error)

    def _submit(self) -> None:
        """Start the coroutine soon, in a copy of this thread's context."""
        thread = self._thread
        if threading.get_ident() == thread.ident:
            raise RuntimeError(
                "an async actor cannot be called from a coroutine, which would wait for itself: send it a message, or"
                " await the function that it was made of"
            )
        thread.start()
        with thread._lock:
            if thread._stopping or thread._real is None:
                raise RuntimeError("Event loop is not running.")
            self._submitted = True
            thread._running.add(self)
            if self.over:  # struck already
                thread._running.discard(self)
            else:
                thread._real.call_soon_threadsafe(self._start)

    def _withdraw(self) -> None:
        """Nobody waits for it: forget it unless it has begun, without a warning that it was never awaited."""
        if self._is_first():
            _close(self._coro)
            self._thread._running.discard(self)

    # -- in any thread

    def strike(self, reason: BaseException | type[BaseException] | None = None) -> None:
        """Cancel the coroutine, or see to it that it does not begin. ``reason``, unless it is what the watch raises."""
        if self._reason is None:
            self._reason = reason
        if self._is_first():
            _close(self._coro)
            self.cancelled = True
            self._end()
            return
        assert self._thread._real is not None
        with suppress(RuntimeError):  # the loop is closed, so it has ended
            self._thread._real.call_soon_threadsafe(self._cancel)

    def abandon(self) -> None:
        """The loop has stopped for good in the midst of the coroutine: that is its end."""
        if not self.over:
            self.cancelled = True
            self._end()

    def place(self) -> Place | None:
        """Say where the coroutine is, or who keeps it from going on."""
        task = self.task
        if self.over or task is None:
            return None
        blocking = self._thread.blocked_at()
        if blocking is not None:
            return Place(
                line_of(blocking),
                "That line blocks the event loop, so no coroutine of this process gets on, whichever of them it belongs"
                " to; what blocks must be awaited, if need be by asyncio.to_thread().",
            )
        frame = _innermost(task.get_coro())
        if frame is None:
            return None
        return Place(
            line_of(frame),
            "Its coroutine was cancelled there, and has caught that or takes long to clean up.",
        )

    def _is_first(self) -> bool:
        """Decide for the caller whether the coroutine begins, unless that is decided already. One step, see ``Watch``."""
        mine = object()
        return self._first.setdefault("is", mine) is mine

    def _end(self) -> None:
        self.over = True
        self._thread._running.discard(self)
        self._over.release()

    # -- on the loop

    def _start(self) -> None:
        if not self._is_first():
            return
        try:
            assert self._thread._real is not None
            self.task = self._thread._real.create_task(self._run())
        except BaseException as error:  # a task factory of the user's
            _close(self._coro)
            self.error = error
            self._end()
            return
        self.task.add_done_callback(self._ended)

    async def _run(self) -> None:
        # Not by way of the task: it would let SystemExit through to the loop, which ends it.
        try:
            self.value = await self._coro
            self.returned = True
        except BaseException as error:
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        self._end()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not self.over:  # it was cancelled before its first step
            _close(self._coro)
            self._end()

    def _cancel(self) -> None:
        if self.task is not None and not self.cancelled:
            self.cancelled = self.task.cancel()


def _close(coro: Awaitable[Any]) -> None:
    if isinstance(coro, Coroutine):
        coro.close()


def _only_cancelled(error: BaseException | None) -> bool:
    """Tell whether ``error`` is a cancellation, or a group of nothing else."""
    inner = getattr(error, "exceptions", None)
    if isinstance(inner, tuple) and inner:  # a BaseExceptionGroup, which Python 3.10 does not know
        return all(map(_only_cancelled, inner))
    return isinstance(error, asyncio.CancelledError)


def _innermost(coro: Any) -> FrameType | None:
    """Return the innermost frame of a suspended coroutine, if possible outside of asyncio."""
    found = None
    while coro is not None:
        frame = _first_of(coro, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None and (found is None or not frame.f_code.co_filename.startswith(_ASYNCIO)):
            found = frame
        coro = _first_of(coro, "cr_await", "gi_yieldfrom", "ag_await")
    return found


def _first_of(thing: Any, *names: str) -> Any:
    return next((getattr(thing, name) for name in names if hasattr(thing, name)), None)


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
