"""One coroutine of an async actor, and the worker thread that waits until it has ended.

Runs in: worker; its methods say in which thread. Needs: an ``EventLoop`` that runs it.

The thread waits however long that takes. What the coroutine ends with is what counts:

* a value: it stands, also where the coroutine was cancelled and has caught that, as with an actor that catches
  ``TimeLimitExceeded``;
* ``CancelledError`` after an interrupt: what interrupted it is raised in its stead;
* any other exception: that one.

One that was interrupted before its first step does not begin, also where the loop is blocked. One that has failed has
ended only when the threads have, too, to which it gave work by ``asyncio.to_thread``, see ``executor``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any

from dramatiq.middleware import Shutdown

from .executor import ThreadWork
from .watch import Place, Watch, line_of

if TYPE_CHECKING:
    from .event_loop import EventLoop

#: An interrupt of ours wakes the waiting thread by itself. This often it looks for what others have raised into it, which
#: CPython cannot deliver to a thread that waits for a lock.
LOOK_EVERY_S = 0.25

#: Frames from here say nothing about who waits.
_ASYNCIO = os.path.dirname(asyncio.__file__)


class RunningCoroutine:
    """What an interrupt of its body strikes (a ``watch.Target``)."""

    def __init__(self, event_loop: EventLoop, coro: Awaitable[Any], watch: Watch | None) -> None:
        self._event_loop = event_loop
        self._coro = coro
        self._decided: dict[str, object] = {}
        self._wake_up = threading.Lock()
        self._wake_up.acquire()
        self._reason: BaseException | type[BaseException] | None = None
        self._error: BaseException | None = None
        self._thread_work = ThreadWork()
        self._ended = False
        #: The cancellation was thrown into the coroutine, or came before its first step.
        self._cancelled = False
        self.watch = watch
        #: Nobody waits any more.
        self.over = False
        self.returned = False
        #: It is the loop's, and begins unless it is struck.
        self.submitted = False
        self.task: asyncio.Task[None] | None = None
        self.value: Any = None

    # -- in the thread that waits

    def wait(self) -> None:
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
                if self._cancelled and watch.raised is not None:
                    watch.struck = True
                watch.aim_at(before)
        except BaseException:
            self._withdraw()
            raise

    def take_failure(self) -> BaseException:
        """Return what to raise, as it has not returned. Once: an exception that is kept keeps its actor's locals."""
        error, self._error = self._error, None
        failure: BaseException
        if self._cancelled and (error is None or _only_cancelled(error)):
            reason, self._reason = self._reason, None
            if reason is None:
                reason = (self.watch and self.watch.raised) or Shutdown
            failure = reason() if isinstance(reason, type) else reason
        elif error is None or isinstance(error, asyncio.CancelledError):
            failure = concurrent.futures.CancelledError(
                "the actor's coroutine was cancelled, and not by its worker"
            )
        else:
            return error
        failure.__cause__ = error
        return failure

    def _see_through(self) -> None:
        """Start it and wait until it is over, whatever is raised into this thread."""
        struck = False
        while True:
            try:
                if not self.submitted:
                    self._event_loop.submit(self)
                while not self.over:
                    self._wake_up.acquire(timeout=LOOK_EVERY_S)
                return
            except BaseException as error:
                # Not the interrupter, which strikes the coroutine: Ctrl-C, or an extension of Dramatiq's that aborts
                # messages. It may land at any point in here.
                if not self.submitted or (struck and isinstance(error, KeyboardInterrupt)):
                    raise
                struck = True
                self.strike(error)

    def _withdraw(self) -> None:
        """Nobody waits for it: forget it unless it has begun, without a warning that it was never awaited."""
        if self._is_first_to("begin"):
            _close(self._coro)
            self._event_loop.forget(self)

    # -- in any thread

    def strike(self, reason: BaseException | type[BaseException] | None = None) -> None:
        """Cancel the coroutine, or see to it that it does not begin. ``reason``, unless it is what the watch raises."""
        if self._reason is None:
            self._reason = reason
        if self._is_first_to("begin"):
            _close(self._coro)
            self._cancelled = True
            self._end()
        else:
            self._event_loop.call_soon(self._cancel)

    def abandon(self) -> None:
        """The loop has stopped for good in the midst of the coroutine: that is its end."""
        if not self._ended:
            self._ended = self._cancelled = True
            self._thread_work.end(self._end)

    def place(self) -> Place | None:
        """Say where the coroutine is, or who keeps it from going on."""
        task = self.task
        if self.over or task is None:
            return None
        if self._ended:
            thread = self._thread_work.frame()
            return Place(
                "a thread of asyncio.to_thread()" if thread is None else line_of(thread),
                "Its coroutine has ended, and what it gave to a thread (asyncio.to_thread() or run_in_executor()) has not;"
                " no thread can be cancelled, so what runs there needs a timeout of its own.",
            )
        blocking = self._event_loop.blocked_at()
        if blocking is not None:
            return Place(
                line_of(blocking),
                "That line blocks the event loop, so no coroutine of this process gets on, whichever of them it belongs"
                " to; what blocks must be awaited, if need be by asyncio.to_thread(), with a timeout of its own.",
            )
        frame = _innermost(task.get_coro())
        if frame is None:
            return None
        return Place(
            line_of(frame),
            "Its coroutine was cancelled there, and has caught that or takes long to clean up.",
        )

    def _is_first_to(self, what: str) -> bool:
        """Tell whether the caller is the first to ask. One step, see ``Watch``."""
        mine = object()
        return self._decided.setdefault(what, mine) is mine

    def _end(self) -> None:
        if self._is_first_to("end"):
            self.over = True
            self._event_loop.forget(self)
            self._wake_up.release()

    # -- on the loop

    def begin(self) -> None:
        """Make a task of it, unless it was struck before."""
        if not self._is_first_to("begin"):
            return
        try:
            self.task = asyncio.get_running_loop().create_task(self._run())
        except BaseException as error:  # a task factory of the user's
            _close(self._coro)
            self._error = error
            self._end()
            return
        self.task.add_done_callback(self._task_done)

    async def _run(self) -> None:
        self._thread_work.begin()
        # Not by way of the task: it would let SystemExit through to the loop, which ends it.
        try:
            self.value = await self._coro
            self.returned = True
        except BaseException as error:
            self._error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        self._ended = True
        if self.returned:
            self._end()
        else:
            self._thread_work.end(self._end)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not self._ended:  # it was cancelled before its first step
            _close(self._coro)
            self._end()

    def _cancel(self) -> None:
        if self.task is not None and not self._cancelled:
            self._cancelled = self.task.cancel()


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
