"""What an actor did, written to a file as it happens: one file per message, one line per event.

Runs in: worker (writes), demo (reads). Needs: the folder of the reports.

This is the demo's own evidence. It does not ask the product what became of a message, and it survives a worker
that is killed, which a counter in memory does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

#: Inside the folder of the reports; hidden, so that only reports are seen there.
FOLDER = ".messages"

#: Records of older runs are removed after this long.
KEPT_S = 24 * 3600.0


@dataclass(frozen=True)
class Record:
    """What is known about one message: how often its actor started, and the SHA-256 of each file it wrote."""

    starts: int = 0
    written: dict[str, str] = field(default_factory=dict)


class Recorder:
    """Writes the record of one message. Any number of processes may write to one record at a time."""

    def __init__(self, reports: Path, message_id: str) -> None:
        self._path = path_of(reports, message_id)

    def started(self) -> int:
        """Note a start of the actor and return its number, from 1."""
        self._append({"event": "started", "pid": os.getpid(), "at": time.time()})
        return read(self._path).starts

    def wrote(self, file: str, sha256: str) -> None:
        """Note a file that is on disk now, under its final name."""
        self._append({"event": "wrote", "file": file, "sha256": sha256})

    def _append(self, event: dict[str, object]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One write to a file opened for appending: lines of two processes never mix.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(event) + "\n").encode())
        finally:
            os.close(descriptor)


def path_of(reports: Path, message_id: str) -> Path:
    """Return where the record of a message is kept."""
    return reports / FOLDER / f"{message_id}.jsonl"


def read(path: Path) -> Record:
    """Return what a record says; an empty one if there is none yet."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return Record()
    starts, written = 0, {}
    for line in lines:
        event = json.loads(line)
        if event["event"] == "started":
            starts += 1
        elif event["event"] == "wrote":
            written[event["file"]] = event["sha256"]
    return Record(starts, written)


def forget_old(reports: Path, now: float) -> None:
    """Remove records older than a day, of which nobody asks any more. ``now`` is in seconds since 1970."""
    for path in (reports / FOLDER).glob("*"):
        # Two demos may clean up at the same time.
        with contextlib.suppress(FileNotFoundError):
            if now - path.stat().st_mtime > KEPT_S:
                path.unlink()
