"""Raise an exception into a running body, and never into anything else.

Runs in: worker; one daemon thread per process, started with the first body. Needs: CPython.

CPython can make another thread raise (``PyThreadState_SetAsyncExc``), but not at a place of our choosing: the exception
waits until that thread next checks for one, which may be after the body has ended, in a guard's I/O or in Dramatiq's
own loop, where it loses the message or kills the thread. So each run of a body gets a ``Watch``, and two rules hold:

* Whether a run is interrupted or ends by itself is decided once, by one atomic step. Whoever is second does nothing.
* A body that lost this race does not leave before the exception was raised, and then takes back what has not landed.

A thread that waits in C cannot be struck at all. One that waits for a coroutine therefore aims its watch at that
coroutine, and an interrupt cancels it instead, see ``Watch.aim_at``.

What this cannot do: end a call into C; and an exception that lands in a finalizer (``__del__``, a weak reference's
callback) is swallowed by Python. A body that goes on for either reason is reported.

No lock is ever held by the thread that may be struck, for a lock taken there could stay taken.

Emits:
    event ``time_limit.exceeded`` (WARNING), when a body is interrupted at its deadline.
    event ``time_limit.stuck`` (ERROR), when an interrupted body still runs; again each minute.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from .watch import CAN_INTERRUPT, IN_C, Place, Watch, _set_pending, line_of

logger = logging.getLogger(__name__)

#: How long an interrupted body may take for its own clean-up before it is reported as stuck.
REPORT_AFTER_S = 5.0

#: A stuck body occupies a worker thread until somebody acts, so it is reported again and again.
REPEAT_AFTER_S = 60.0

#: The platform refuses to wait for more than some hundred years at once; deadlines may lie beyond.
LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True)
class StuckBody:
    """A body that was interrupted and still runs, occupying a worker thread."""

    actor_name: str
    message_id: str
    exception: str
    #: Seconds since it was interrupted; for a time limit this is how long it is past its limit.
    overdue_s: float
    #: See ``Place``.
    where: str
    why: str


class Interrupter:
    """Interrupts bodies: by itself at their deadlines, or when told to (``interrupt``).

    One per process, ``INTERRUPTER``; more only in tests. Every method may be called from any thread.
    """

    def __init__(
        self,
        *,
        report_after: float = REPORT_AFTER_S,
        repeat_after: float = REPEAT_AFTER_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report_after = report_after
        self._repeat_after = repeat_after
        self.now = now
        self._reset()

    def _reset(self) -> None:
        self._armed: dict[int, Watch] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        # A SimpleQueue and not a Condition: its put() is one step in C, so that a body that is struck while it wakes
        # the thread leaves no lock behind.
        self._wake_ups: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._wakes_at = math.inf

    def watch(
        self,
        *,
        limit_s: float,
        exception: type[BaseException],
        actor_name: str,
        message_id: str,
    ) -> Watch:
        """Prepare one run of a body in the calling thread. Nothing can strike before ``arm``.

        Without a limit (``math.inf``) the body can still be interrupted by ``interrupt``.
        """
        if not CAN_INTERRUPT:
            limit_s = math.inf
        elif self._thread is None:
            self._start()
        return Watch(self, limit_s, exception, actor_name, message_id)

    def running(self) -> list[Watch]:
        """Return the bodies that run right now."""
        return list(self._armed.values())

    def runs_here(self) -> bool:
        """Tell whether the calling thread is inside a body."""
        return threading.get_ident() in self._armed

    def here(self) -> Watch | None:
        """Return the watch of the body that the calling thread is in, if it is in one."""
        return self._armed.get(threading.get_ident())

    def interrupt(self, watch: Watch, exception: type[BaseException]) -> bool:
        """Raise ``exception`` into the body of ``watch``; False if it does not run (any more), or was interrupted before.

        A coroutine is cancelled, and ``exception`` raised when it has ended. The body may catch it. If it lands after the body has returned it is dropped.
        """
        if not CAN_INTERRUPT or self._armed.get(watch.thread_ident) is not watch:
            return False
        me = object()
        try:
            if not watch._decided_for(me):
                return False
            watch.raised = exception
            target = watch._target
            if target is None:
                _set_pending(watch.thread_ident, exception)
            else:
                target.strike()
        finally:
            # Whatever happens, here too (a signal handler may raise in the main thread): the body waits for this.
            if watch._verdict.get("for") is me:
                now = self.now()
                watch._report_at = now + self._report_after
                watch.interrupted_at = now
        self._wake_before(watch._report_at)
        return True

    def stuck(self) -> list[StuckBody]:
        """Return the bodies that go on running although they were interrupted ``report_after`` ago."""
        now = self.now()
        overdue = [
            w
            for w in self.running()
            if w.interrupted_at is not None and now >= w.interrupted_at + self._report_after
        ]
        frames = sys._current_frames() if overdue else {}
        found = []
        for watch in overdue:
            frame = frames.get(watch.thread_ident)
            target = watch._target
            place = None if target is None else target.place()
            # It may have ended since; then the frame shows something else.
            if frame is None or self._armed.get(watch.thread_ident) is not watch:
                continue
            if place is None:
                place = Place(line_of(frame), IN_C)
            found.append(
                StuckBody(
                    actor_name=watch.actor_name,
                    message_id=watch.message_id,
                    exception=_name_of(watch.raised),
                    overdue_s=now - (watch.interrupted_at or now),
                    where=place.where,
                    why=place.why,
                )
            )
        return found

    def check(self) -> float:
        """Interrupt what is past its deadline, report what is stuck; return when to look again."""
        now = self.now()
        again_at = math.inf
        exceeded = []
        report = set()
        for watch in self.running():
            if watch.interrupted_at is None:
                if now < watch.deadline:
                    again_at = min(again_at, watch.deadline)
                    continue
                if self.interrupt(watch, watch.exception):
                    exceeded.append(watch)
            if now >= watch._report_at:
                report.add(watch.message_id)
                watch._report_at = now + self._repeat_after
            again_at = min(again_at, watch._report_at)
        # Only now, when all who had to be are interrupted: a log handler may block.
        for watch in exceeded:
            logger.warning(
                "Actor %r ran longer than its limit of %.0f ms: raised %s into it (message %r).",
                watch.actor_name,
                watch.limit_s * 1000,
                watch.exception.__name__,
                watch.message_id,
                extra={
                    "event": "time_limit.exceeded",
                    "actor_name": watch.actor_name,
                    "message_id": watch.message_id,
                    "limit_ms": watch.limit_s * 1000,
                },
            )
        if report:
            self._report([body for body in self.stuck() if body.message_id in report])
        return again_at

    def _report(self, bodies: list[StuckBody]) -> None:
        for body in bodies:
            logger.error(
                "Actor %r still runs %.1f s after %s was raised into it, and occupies a worker thread (message %r). "
                "It is at %s. %s If it never ends, restart this worker: the message will be delivered again.",
                body.actor_name,
                body.overdue_s,
                body.exception,
                body.message_id,
                body.where,
                body.why,
                extra={
                    "event": "time_limit.stuck",
                    "actor_name": body.actor_name,
                    "message_id": body.message_id,
                    "overdue_s": body.overdue_s,
                    "where": body.where,
                },
            )

    def _wake_before(self, at: float) -> None:
        # With the usual limit of minutes the thread plans to wake up long before a new deadline, and this is all.
        if at < self._wakes_at:
            self._wake_ups.put(at)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="safeops-interrupter", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        asked_for = math.inf
        while True:
            # Whatever is armed from here on wakes us, until the next plan is made. See Watch.arm.
            self._wakes_at = math.inf
            try:
                again_at = self.check()
            except Exception:
                logger.exception(
                    "The interrupter failed and will try again in a second; time limits may strike late.",
                    extra={"event": "time_limit.failed"},
                )
                again_at = self.now() + 1
            # The body that woke us has often ended by now. Its deadline stays our plan all the same: with none, each
            # short body would wake us anew.
            self._wakes_at = min(again_at, asked_for)
            asked_for = self._wait_until(self._wakes_at)

    def _wait_until(self, at: float) -> float:
        """Wait until ``at`` or until somebody asks for an earlier look; return for when."""
        asked_for = math.inf
        with suppress(queue.Empty):
            asked_for = self._wake_ups.get(timeout=min(max(at - self.now(), 0), LONGEST_WAIT_S))
            while True:  # one look answers all who have asked meanwhile
                asked_for = min(asked_for, self._wake_ups.get_nowait())
        return asked_for

    def _after_fork_in_child(self) -> None:
        """Forget the parent's threads, with the locks that they may hold."""
        mine = self._armed.get(threading.get_ident())
        self._reset()
        if mine is not None:
            mine._abandon()


def _name_of(exception: type[BaseException] | None) -> str:
    return "nothing" if exception is None else exception.__name__


#: The one of this process.
INTERRUPTER = Interrupter()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=INTERRUPTER._after_fork_in_child)
