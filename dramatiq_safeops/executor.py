"""The threads behind ``asyncio.to_thread`` in async actors, which know whose work they do.

Runs in: worker; daemon threads, started with the first call. Needs: nothing.

A coroutine that is cancelled leaves the thread behind that it waits for: its message would be tried again beside that
thread. So whoever waits for the coroutine can wait for its threads, too. And Python waits for the threads of its own
executor before a process ends, for as long as they like; these are not waited for.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any, cast

#: How many threads there are at most: as many as Python's own executor has.
MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)


class Call(concurrent.futures.Future[Any]):
    """One call that a thread makes, or is to make."""

    #: The thread that makes it, once one does.
    thread_ident: int | None = None

    def frame(self) -> FrameType | None:
        """Return the innermost Python frame of its thread; None if none makes the call yet."""
        return sys._current_frames().get(self.thread_ident or 0)


class ThreadWork:
    """The calls that one coroutine has left to threads, itself or by its tasks, and that have not ended."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._then: list[Callable[[], None]] = []
        self._closed = False

    def begin(self) -> None:
        """In the coroutine: calls from this context belong here from now on."""
        _WORK.set(self)

    def add(self, call: Call) -> None:
        """Count ``call``, on the loop. What comes after ``end`` is that of tasks for which nobody waits."""
        if not self._closed:
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def end(self, then: Callable[[], None]) -> None:
        """The coroutine has ended. ``then`` is called when the last call has: at once, or in the thread of that one."""
        self._closed = True
        # Leave word first, look after; a call ends first and looks for word after. So one of the two sees the other.
        self._then.append(then)
        self._look()

    def frame(self) -> FrameType | None:
        """Return where one of the threads is; None if none is at work yet."""
        return next((frame for call in list(self._calls) if (frame := call.frame())), None)

    def _ended(self, call: concurrent.futures.Future[Any]) -> None:
        self._calls.discard(cast(Call, call))
        self._look()

    def _look(self) -> None:
        if not self._calls:
            with suppress(IndexError):
                self._then.pop()()  # pop is one step, so that it is called once


_WORK: ContextVar[ThreadWork | None] = ContextVar("safeops_thread_work", default=None)


class Executor(concurrent.futures.ThreadPoolExecutor):
    """What asyncio hands its calls to. Of its base it has the name alone, on which asyncio insists. Thread-safe."""

    def __init__(self) -> None:
        # Not super().__init__(): Python joins the threads of the base, daemons or not, before the process ends.
        self._lock = threading.Lock()
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pool: list[threading.Thread] = []
        self._unfinished: set[Call] = set()
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
        """Let a thread call ``fn``. Raises ``RuntimeError`` after ``shutdown``."""
        call = Call()
        work = _WORK.get()
        with self._lock:
            if self._closed:
                raise RuntimeError("the event loop of async actors has been stopped, and its threads with it")
            if len(self._pool) < min(len(self._unfinished) + 1, MAX_THREADS):
                thread = threading.Thread(target=self._serve, name="safeops-to-thread", daemon=True)
                thread.start()
                self._pool.append(thread)
            self._unfinished.add(call)
            if work is not None:
                work.add(call)
            self._todo.put(partial(self._make, call, partial(fn, *args, **kwargs)))
        return call

    def unfinished(self) -> list[Call]:
        """Return the calls that have not ended."""
        with self._lock:
            return list(self._unfinished)

    def shutdown(self, wait: bool = True, **_: Any) -> None:
        """Take no more calls, and let the threads end when they have made all. Nothing is cancelled."""
        with self._lock:
            self._closed = True
            for _thread in self._pool:
                self._todo.put(None)
        if wait:
            for thread in self._pool:
                thread.join()

    def _serve(self) -> None:
        while True:
            make = self._todo.get()
            if make is None:
                return
            make()
            del make  # with all that it holds, while the thread waits for the next

    def _make(self, call: Call, fn: Callable[[], Any]) -> None:
        call.thread_ident = threading.get_ident()
        value: Any = None
        failure: BaseException | None = None
        if begun := call.set_running_or_notify_cancel():
            try:
                value = fn()
            except BaseException as error:
                failure = error
        # Before anybody is told: a coroutine that makes one call after the other needs one thread.
        with self._lock:
            self._unfinished.discard(call)
        try:
            if begun and failure is None:
                call.set_result(value)
            elif begun:
                call.set_exception(failure)
        finally:
            # The exception refers to this frame; were it to refer back, only the garbage collector would free the two.
            del call, failure
