"""One run of one body, and what strikes it: the thread that runs it, or what that thread waits for.

Runs in: worker. Needs: CPython. See ``interrupter`` for the whole.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dramatiq.threading import current_platform, supported_platforms

if TYPE_CHECKING:
    from .interrupter import Interrupter

CAN_INTERRUPT = current_platform in supported_platforms

# Two prototypes of our own for one C function: one takes a class, the other NULL. Dramatiq calls the same function
# without a prototype, so the shared object ``ctypes.pythonapi.PyThreadState_SetAsyncExc`` must stay untouched.
_set_pending: Callable[[int, type[BaseException]], int]
_clear_pending: Callable[[int, None], int]
if CAN_INTERRUPT:
    _function = ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
    _set_pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(_function)
    _clear_pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(_function)


#: Why a body does not react, where nothing better is known.
IN_C = "A call into C cannot be interrupted until it ends; give such calls a timeout of their own."


class Place(NamedTuple):
    """Where a body is that does not react."""

    #: ``file:line function`` of the innermost Python frame. A call into C shows as the line that made the call.
    where: str
    #: A sentence: why it does not react, and what helps.
    why: str


class Target(Protocol):
    """What an interrupt strikes in the stead of the body's own thread, which only waits for it."""

    def strike(self) -> None:
        """Ask it to end. Called from any thread; neither blocks nor raises."""

    def place(self) -> Place | None:
        """Say where it is; None if it is over, so that the thread itself is what to look at. From any thread."""


class _Nothing:
    def strike(self) -> None:
        pass

    def place(self) -> Place | None:
        return None


#: Aimed at where nothing can be struck: an interrupt is kept until the watch is aimed at something else.
NOTHING: Target = _Nothing()


class Watch:
    """One run of one body, from the moment it may be interrupted to the moment it may not.

    Made by ``Interrupter.watch``, used once. ``arm``, ``aim_at`` and ``disarm`` belong to the thread that runs the body.
    """

    __slots__ = (
        "_interrupter",
        "_report_at",
        "_target",
        "_verdict",
        "actor_name",
        "deadline",
        "exception",
        "interrupted_at",
        "limit_s",
        "message_id",
        "raised",
        "struck",
        "thread_ident",
    )

    def __init__(
        self,
        interrupter: Interrupter,
        limit_s: float,
        exception: type[BaseException],
        actor_name: str,
        message_id: str,
    ) -> None:
        self._interrupter = interrupter
        self._report_at = math.inf
        self._target: Target | None = None
        self._verdict: dict[str, object] = {}
        self.actor_name = actor_name
        self.deadline = math.inf
        #: What is raised at the deadline.
        self.exception = exception
        #: When an exception was raised (``time.monotonic``), and which; None: none was.
        self.interrupted_at: float | None = None
        self.raised: type[BaseException] | None = None
        self.limit_s = limit_s
        self.message_id = message_id
        #: Whether the interrupt has arrived: nothing strikes twice. Kept by the body's thread, where it aims elsewhere.
        self.struck = False
        self.thread_ident = threading.get_ident()

    def arm(self) -> None:
        """From here on the calling thread may be struck by one exception, at any point, this call included."""
        interrupter = self._interrupter
        self.deadline = interrupter.now() + self.limit_s
        # Show the watch first, ask for the planned wake-up after; the interrupter does both the other way round. So
        # one of the two sees the other, and no deadline is slept through.
        interrupter._armed[self.thread_ident] = self
        interrupter._wake_before(self.deadline)

    def aim_at(self, target: Target | None) -> Target | None:
        """From the return of this call on an interrupt strikes ``target``; None is the calling thread itself.

        Returns what was aimed at before, to be aimed at again when ``target`` is over. An interrupt that has been
        decided on but has arrived nowhere is raised by this call, and then the thread is aimed at again. Only a body
        that goes back to ``NOTHING`` is spared: what it waited for is over, and what came of that stands.
        """
        before = self._target
        try:
            if before is None and self._is_decided():
                # The interrupter finds nothing but this thread to strike: what it raises has landed, or does so here.
                self._wait_until_raised()
                for _ in range(3):
                    pass
                self.struck = True
            # Aim first, look after; the interrupter decides first and looks at the target after. So one of the two
            # sees the other, and no interrupt gets lost between two targets.
            self._target = target
            if self.struck or (target is NOTHING and before is not None):
                return before
            if not self._is_decided():
                return before
            # Decided meanwhile, and the interrupter may have looked at either target.
            self._wait_until_raised()
            _clear_pending(self.thread_ident, None)
            self.struck = True
            if self.raised is not None:
                raise self.raised
        except BaseException:
            self._target = None
            raise
        return before

    def disarm(self) -> None:
        """From the return of this call on nothing strikes the calling thread, and nothing is pending for it.

        The one exception may still land in here. Then call it a second time, which nothing can disturb.
        """
        self._interrupter._armed.pop(self.thread_ident, None)
        if self._decided_for(self):
            return
        # The interrupter was first. What it has not raised yet cannot be taken back yet.
        self._wait_until_raised()
        _clear_pending(self.thread_ident, None)

    def _decided_for(self, who: object) -> bool:
        """Decide for ``who`` unless it is decided already; tell whether ``who`` it is.

        ``dict.setdefault`` is one step in C that no thread can come between, and asking twice gives the same answer.
        """
        return self._verdict.setdefault("for", who) is who

    def _is_decided(self) -> bool:
        """Tell whether somebody has decided to interrupt this run."""
        return self._verdict.get("for", self) is not self

    def _wait_until_raised(self) -> None:
        while self.interrupted_at is None:
            time.sleep(0)

    def _abandon(self) -> None:
        """In a forked child: the thread that could have interrupted this body does not exist there."""
        if not self._decided_for(self) and self.interrupted_at is None:
            self.interrupted_at = self._interrupter.now()


def line_of(frame: FrameType) -> str:
    """Return where ``frame`` is, as ``Place`` has it."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
