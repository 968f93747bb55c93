"""The one wrapper around an actor's function: only in here can a worker thread be interrupted.

Runs in: worker (applies the limit), every other process (just calls the function). Needs: nothing.

``wrap`` is put around ``actor.fn`` when an actor is declared. Before each delivery ``begin`` tells the wrapper, in the
same thread, which body comes next and for how long it may run; ``end`` takes this back if it never came. Calls that no
delivery announced are plain calls: ``actor(1)`` in a test or in a web process, and one actor calling another.

The function of an async actor is Dramatiq's wrapper, whose thread does nothing but wait for the coroutine. That thread
is never struck, only the coroutine is: see ``event_loop``.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import dramatiq.asyncio
from dramatiq.middleware import TimeLimitExceeded

from .event_loop import is_ours
from .interrupter import INTERRUPTER
from .watch import NOTHING, Watch

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: Where a wrapper carries its actor's name. Decorators that use functools.wraps take it along.
_WRAPPED = "__safeops_body_of__"

#: The key of a returned value, see ``run``.
_RETURNED = "returned"


async def _no_actor() -> None:
    """For its wrapper only."""


#: The code of what Dramatiq makes of an ``async def``. A user's decorator around one may be anything, this is known.
_ASYNC_TO_SYNC = dramatiq.asyncio.async_to_sync(_no_actor).__code__


class _Here(threading.local):
    """What the next body in this thread is, and its limit."""

    actor_name: str | None = None
    message_id: str = ""
    limit_s: float = math.inf


_here = _Here()


def begin(limit_ms: float | None, *, actor_name: str, message_id: str) -> None:
    """Announce the body that this thread runs next. It counts from its own start, not from this call.

    Parameters:
        limit_ms: how long it may run, in milliseconds; ``None`` and ``inf``: as long as it likes.
    """
    here = _here
    here.limit_s = math.inf if limit_ms is None else limit_ms / 1000
    here.message_id = message_id
    here.actor_name = actor_name


def end() -> None:
    """The delivery is over in this thread: a body that was announced and did not run is not expected any more."""
    _here.actor_name = None


def wrap(fn: Callable[P, R], *, actor_name: str) -> Callable[P, R]:
    """Return ``fn`` with the limits of ``actor_name``'s deliveries applied. Wrapping twice wraps once."""
    if getattr(fn, _WRAPPED, None) == actor_name:
        return fn
    is_async = getattr(fn, "__code__", None) is _ASYNC_TO_SYNC
    plain = _aimed_at_nothing(fn) if is_async else fn

    @functools.wraps(fn)
    def body(*args: P.args, **kwargs: P.kwargs) -> R:
        here = _here
        # The name, and not just "something was announced": a hook between begin() and the body may call another
        # actor's function, and would then be interrupted in the body's stead.
        if here.actor_name != actor_name:
            return plain(*args, **kwargs)
        here.actor_name = None
        if INTERRUPTER.runs_here():
            # A broker that processes messages inside send() has announced a body inside a body. The limit of the
            # outer one covers both; a second one in the same thread could not say whom it strikes.
            return plain(*args, **kwargs)
        watch = INTERRUPTER.watch(
            limit_s=here.limit_s,
            exception=TimeLimitExceeded,
            actor_name=actor_name,
            message_id=here.message_id,
        )
        if is_async and is_ours():
            watch.aim_at(NOTHING)
        return run(watch, functools.partial(fn, *args, **kwargs))

    setattr(body, _WRAPPED, actor_name)
    return body


def _aimed_at_nothing(fn: Callable[P, R]) -> Callable[P, R]:
    """Let nothing strike between the making of a coroutine and its start, where it would be lost without having run."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        watch = INTERRUPTER.here()
        if watch is None or not is_ours():
            return fn(*args, **kwargs)
        before = watch.aim_at(NOTHING)
        try:
            return fn(*args, **kwargs)
        finally:
            watch.aim_at(before)

    return call


def run(watch: Watch, call: Callable[[], R]) -> R:
    """Call ``call`` where ``watch`` may interrupt it, and leave this thread with nothing pending.

    What the body did stands: when it has returned, an interrupt that comes in the same moment is dropped and the
    value kept; when it has raised, its own exception is kept. Never both, never neither.
    """
    # Python code cannot tell whether the body returned: between the return of a call and the next instruction there is
    # a point where an interrupt may land, and the value is gone. C code can: a defaultdict calls its factory and
    # stores what it returns without such a point in between, so the key is there exactly if the body has returned.
    box: defaultdict[str, Any] = defaultdict(call)
    failure: BaseException | None = None
    try:
        try:
            watch.arm()
            _ = box[_RETURNED]  # the look-up is the call
        except BaseException as error:
            # Python 3.12 comes here a second time if the interrupt lands when it leaves this block.
            if failure is None:
                failure = error
        watch.disarm()
    except BaseException as late:
        # It landed between the end of the body and the end of disarm(). There is only one per watch, so this time
        # nothing can come between.
        watch.disarm()
        if failure is None:
            # Python 3.10: it landed where the block above begins, so what that was about to handle is the context.
            failure = late if late.__context__ is None else late.__context__
    if _RETURNED in box:
        if watch.interrupted_at is not None:
            _tell_dropped(watch)
        del failure  # it refers to this frame, and this frame to it
        return box[_RETURNED]  # type: ignore[no-any-return]
    assert failure is not None
    if type(failure) is watch.raised is watch.exception and not failure.args:
        failure.args = (f"the actor ran longer than its time limit of {watch.limit_s * 1000:.0f} ms",)
    try:
        # The first entry is this frame, and raising adds it once more.
        raise failure.with_traceback(failure.__traceback__ and failure.__traceback__.tb_next)
    finally:
        del failure


def _tell_dropped(watch: Watch) -> None:
    logger.info(
        "Actor %r had returned when %s was about to strike: its result is kept (message %r).",
        watch.actor_name,
        watch.raised and watch.raised.__name__,
        watch.message_id,
        extra={"event": "time_limit.dropped", "actor_name": watch.actor_name, "message_id": watch.message_id},
    )
