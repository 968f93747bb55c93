"""PURE: what is written beside a dead letter, so that it says by itself why it died.

Runs in: worker processes. Needs: nothing. Thread-safe.

The body of a dead letter is the producer's bytes. Everything else stands in headers, readable in
the RabbitMQ UI:

| header                         | type | holds                                                    |
| ------------------------------ | ---- | -------------------------------------------------------- |
| ``x-safeops-reason``           | str  | one word for machines, such as ``retries_exhausted``     |
| ``x-safeops-detail``           | str  | one sentence for people                                  |
| ``x-safeops-exception-type``   | str  | qualified name                                           |
| ``x-safeops-exception-message``| str  | at most 2,000 characters                                 |
| ``x-safeops-traceback``        | str  | its end, at most 16 KiB                                  |
| ``x-safeops-attempts``         | int  | how often it was started and charged                     |
| ``x-safeops-max-attempts``     | int  | how often it might have been                             |
| ``x-safeops-parks``            | int  | how often it waited uncharged                            |
| ``x-safeops-enqueued-at``      | str  | when the producer sent it; this and the next two as      |
|                                |      | ISO 8601 in UTC, ``2026-03-01T02:00:00.000Z``            |
| ``x-safeops-first-seen``       | str  | when a worker first had it                               |
| ``x-safeops-failed-at``        | str  | when it died                                             |
| ``x-safeops-queue``            | str  | the queue it was read from                               |
| ``x-safeops-actor``            | str  |                                                          |
| ``x-safeops-message-id``       | str  |                                                          |
| ``x-safeops-host``             | str  | where it died                                            |
| ``x-safeops-process``          | int  | its pid there                                            |
| ``x-safeops-version``          | str  | of this package                                          |
| ``x-safeops-app-version``      | str  | of the app, when it told us                              |

What is not known has no header. Secrets are masked, and every text is bounded: RabbitMQ closes the
whole connection over headers that do not fit one frame.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from types import TracebackType
from typing import Any

from dramatiq import worker as dramatiq_worker

from .masking import mask

#: Bytes of UTF-8 that a traceback may have: room for some 150 frames.
MOST_TRACEBACK_BYTES = 16 * 1024
#: Characters that the text of an exception, or one line of a traceback, may have.
MOST_TEXT_CHARS = 2_000
#: Bytes that a name (of an actor, a message, a host) may have. AMQP allows the name of a queue no more.
MOST_NAME_BYTES = 255
#: What RabbitMQ and pika agree on unless told otherwise.
DEFAULT_FRAME_MAX = 131_072

# What gives way when the frame is small, in this order. The others are numbers, times and short words.
_GIVE_WAY = (
    "x-safeops-traceback",
    "x-safeops-exception-message",
    "x-safeops-detail",
    "x-safeops-app-version",
    "x-safeops-host",
    "x-safeops-exception-type",
    "x-safeops-message-id",
    "x-safeops-actor",
    "x-safeops-queue",
)
# A text shorter than this says nothing beside the marker of its cut.
_LEAST_BYTES_WORTH_KEEPING = 64

_CUT_BEFORE = re.compile(r"\[(\d{1,12}) characters cut\]\n")

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

# Where a traceback begins in these folders it shows the way to the actor, the same every time.
_FOLDERS_BEFORE_THE_ACTOR = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (dramatiq_worker.__file__, __file__)
)


@dataclass(frozen=True)
class ExceptionRecord:
    """What is kept of an exception. Text only, so that no frame and none of its locals is kept alive."""

    type: str
    message: str
    traceback: str


def describe_exception(exc: BaseException, *, limit: int = MOST_TRACEBACK_BYTES) -> ExceptionRecord:
    """Return the name, the text and the traceback of ``exc``: masked, bounded, fit for UTF-8.

    ``limit`` is in bytes, for the traceback. Of a longer one the end is kept, with the frames
    nearest to the mistake and the exception itself; a line says how many characters are missing.
    Causes, notes and the members of exception groups belong to it. The frames of Dramatiq and of
    this package that lead to the actor do not.

    Never raises, whatever ``exc`` does when it is asked for its text. Safe to call from any thread.
    """
    return ExceptionRecord(
        type=_guarded(_type_of, exc),
        message=_guarded(_message_of, exc),
        traceback=_keep_start(_guarded(lambda exc: _traceback_of(exc, limit), exc), limit),
    )


def dead_letter_headers(
    *,
    reason: str,
    detail: str,
    queue: str,
    failed_at_ms: int,
    exception: ExceptionRecord | None = None,
    actor: str | None = None,
    message_id: str | bytes | None = None,
    attempts: int | None = None,
    max_attempts: int | None = None,
    parks: int | None = None,
    enqueued_at_ms: int | None = None,
    first_seen_ms: int | None = None,
    app_version: str | None = None,
    frame_max: int = DEFAULT_FRAME_MAX,
) -> dict[str, Any]:
    """Return the headers of a dead letter, as in the table above. Times are in ms since 1970.

    Only ``None`` counts as not known. A time that the calendar does not have is left out.

    As an AMQP table the result takes less than half of ``frame_max``, in bytes, so that the other
    headers of the message have the rest. What does not fit is cut, the traceback first. RabbitMQ
    agrees on no ``frame_max`` below 4,096; 0 means unlimited and counts as the default.

    Safe to call from any thread.
    """
    known: dict[str, str | int | None] = {
        "reason": _keep_start(reason, MOST_NAME_BYTES),
        "detail": _shorten(detail, MOST_TEXT_CHARS),
        "exception-type": None,
        "exception-message": None,
        "traceback": None,
        "attempts": attempts,
        "max-attempts": max_attempts,
        "parks": parks,
        "enqueued-at": _instant(enqueued_at_ms),
        "first-seen": _instant(first_seen_ms),
        "failed-at": _instant(failed_at_ms),
        "queue": _keep_start(queue, MOST_NAME_BYTES),
        "actor": _name(actor),
        "message-id": _name(message_id),
        "host": _name(_host()),
        "process": os.getpid(),
        "version": _own_version(),
        "app-version": _name(app_version),
    }
    if exception is not None:
        known["exception-type"] = _name(exception.type)
        known["exception-message"] = _shorten(exception.message, 2 * MOST_TEXT_CHARS)
        known["traceback"] = _clean(exception.traceback)
    headers = {f"x-safeops-{name}": value for name, value in known.items() if value is not None}
    _fit(headers, (DEFAULT_FRAME_MAX if frame_max == 0 else frame_max) // 2 - 1)
    return headers


def _guarded(describe: Callable[[BaseException], str], exc: BaseException) -> str:
    try:
        return describe(exc)
    except BaseException as error:
        # Also what is no Exception: the letter must be written even if str() of an exception exits.
        return f"(cannot be shown: {type(error).__name__} while asking for it)"


def _type_of(exc: BaseException) -> str:
    kind = type(exc)
    if kind.__module__ == "builtins":
        return _keep_start(kind.__qualname__, MOST_NAME_BYTES)
    return _keep_start(f"{kind.__module__}.{kind.__qualname__}", MOST_NAME_BYTES)


def _message_of(exc: BaseException) -> str:
    return _shorten(str(exc), MOST_TEXT_CHARS)


def _traceback_of(exc: BaseException, limit: int) -> str:
    report = traceback.TracebackException(type(exc), exc, _from_the_actor(exc.__traceback__), compact=True)
    whole = "".join(report.format()).removesuffix("\n")
    ending = "".join(report.format_exception_only()).removesuffix("\n")
    # A group ends with its members and not with itself.
    frames = whole.removesuffix(ending)
    ending = whole[len(frames) :]

    # The exception itself first, from its beginning, and at most half of the room: its text may
    # have thousands of lines, and would leave none for the frames.
    lines, missing = _first_lines(ending.split("\n"), 4 * limit)
    ending = _keep_start(mask("\n".join(lines)), limit // 2 if frames else limit, missing=missing)

    lines, missing = _first_lines(frames.split("\n")[::-1], 4 * limit)
    room = limit - len(ending.encode())
    return _keep_end(mask("\n".join(lines[::-1])), room, missing=missing) + ending


def _from_the_actor(first: TracebackType | None) -> TracebackType | None:
    """Return ``first`` or the frame after it that leaves Dramatiq and us; ``first`` if none does."""
    rest = first
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_FOLDERS_BEFORE_THE_ACTOR):
        rest = rest.tb_next
    return first if rest is None else rest


def _first_lines(lines: list[str], most_chars: int) -> tuple[list[str], int]:
    """Return the first lines, each shortened, and how many characters the others have.

    Masking takes time, so only what may be shown is masked. More lines are given than fit in the
    end, as they get shorter by it, and as a private key is recognised by its first line only.
    """
    first: list[str] = []
    for line in lines:
        if most_chars <= 0:
            break
        first.append(_clean(line) if len(line) <= MOST_TEXT_CHARS else _shorten(line, MOST_TEXT_CHARS))
        most_chars -= len(first[-1]) + 1
    return first, sum(len(line) + 1 for line in lines[len(first) :])


def _shorten(text: str, most_chars: int) -> str:
    """Mask ``text`` and keep its beginning, in characters."""
    # Masked before it is cut, as a cut would take the @ from a password, and cut before it is
    # masked, as a hostile text may be long.
    seen = mask(_clean(text[: 4 * most_chars]))
    cut = max(len(text) - 4 * most_chars, 0) + max(len(seen) - most_chars, 0)
    return f"{seen[:most_chars]} [{cut} characters cut]" if cut else seen


def _keep_start(text: str, most_bytes: int, *, missing: int = 0) -> str:
    """Return ``text``, or its beginning and how much is missing, in ``most_bytes`` of UTF-8."""
    text = _clean(text)
    data = text.encode()
    if not missing and len(data) <= most_bytes:
        return text
    room = most_bytes - len(f" [{missing + len(text)} characters cut]")
    if room <= 0:
        return data[: max(most_bytes, 0)].decode(errors="ignore")
    kept = data[:room].decode(errors="ignore")
    return f"{kept} [{missing + len(text) - len(kept)} characters cut]"


def _keep_end(text: str, most_bytes: int, *, missing: int = 0) -> str:
    """Return ``text``, or how much is missing and its end in whole lines, in ``most_bytes`` of UTF-8."""
    data = text.encode()
    if not missing and len(data) <= most_bytes:
        return text
    room = most_bytes - len(f"[{missing + len(text)} characters cut]\n")
    if room <= 0:
        return ""
    kept = data[-room:].decode(errors="ignore")
    if len(kept) < len(text) and not text[: -len(kept)].endswith("\n"):
        kept = kept[kept.find("\n") + 1 :]
    return f"[{missing + len(text) - len(kept)} characters cut]\n{kept}"


def _fit(headers: dict[str, str | int], most_bytes: int) -> None:
    """Cut or drop headers until all of them take ``most_bytes`` at most as an AMQP table."""
    for name in _GIVE_WAY:
        too_much = _size(headers) - most_bytes
        if too_much <= 0:
            return
        text = headers.get(name)
        if not isinstance(text, str):
            continue
        room = len(text.encode()) - too_much
        if room < _LEAST_BYTES_WORTH_KEEPING:
            del headers[name]
        elif name == "x-safeops-traceback":
            cut_before = _CUT_BEFORE.match(text)
            missing, start = (int(cut_before[1]), cut_before.end()) if cut_before else (0, 0)
            headers[name] = _keep_end(text[start:], room, missing=missing)
        else:
            headers[name] = _keep_start(text, room)


def _size(headers: dict[str, str | int]) -> int:
    """Return an upper bound of what pika makes of ``headers``: names with a length byte, typed values."""
    return 4 + sum(
        1 + len(name) + (5 + len(value.encode()) if isinstance(value, str) else 9)
        for name, value in headers.items()
    )


def _clean(text: str) -> str:
    """Return ``text`` with halves of surrogate pairs, which UTF-8 does not have, written out."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def _name(text: str | bytes | None) -> str | None:
    if isinstance(text, bytes):  # what pika makes of an AMQP string that is not UTF-8
        text = text.decode("utf-8", errors="backslashreplace")
    return None if text is None else _keep_start(text, MOST_NAME_BYTES)


def _instant(ms: int | None) -> str | None:
    if ms is None:
        return None
    try:
        instant = _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return None  # the producer's clock is in the body, and a body may hold any number
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@functools.cache
def _host() -> str:
    return socket.gethostname()


@functools.cache
def _own_version() -> str | None:
    import importlib.metadata  # takes longer to import than the rest of the package

    try:
        return importlib.metadata.version("dramatiq-safeops")
    except importlib.metadata.PackageNotFoundError:
        return None  # run from a source tree that was never installed
