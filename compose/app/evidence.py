"""What became of each message, judged by what is on disk and in RabbitMQ, and never by the product's word.

Runs in: demo. Needs: the folder of the reports.
"""

from __future__ import annotations

import csv
import hashlib
import io
import struct
from dataclasses import dataclass
from pathlib import Path

from compose.app import records
from compose.app.outside import DeadLetter, says_id
from compose.app.plan import DEAD_LETTER, DONE, Planned
from compose.app.records import Record

UNFINISHED = "unfinished"

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Sent:
    """A message on its way. ``junk`` is the body of one that has no id."""

    planned: Planned
    message_id: str
    junk: bytes | None = None


@dataclass(frozen=True)
class Finding:
    """One line of the table: what was expected, what is, and what is wrong with it (empty if nothing is)."""

    label: str
    message_id: str
    expected: str
    actual: str
    expected_reason: str
    expected_attempts: int
    attempts: int
    reason: str
    detail: str
    problem: str

    @property
    def ended(self) -> bool:
        return self.actual != UNFINISHED

    @property
    def right(self) -> bool:
        return not self.problem


def judge(sent: Sent, reports: Path, letters: list[DeadLetter], *, disturbed: bool = False) -> Finding:
    """Return what became of a message. ``letters`` is all that is in the dead letter queue.

    ``disturbed`` says that RabbitMQ was away for a while: then it delivers again what nobody had acked, and actors
    may have started more often than planned, with the same end.
    """
    planned = sent.planned
    record = records.read(records.path_of(reports, sent.message_id))
    own = [letter for letter in letters if letter.is_of(sent.message_id, sent.junk)]
    done, files = _report(planned, record, reports)

    actual, reason, detail = UNFINISHED, "", files
    if done:
        actual = DONE
    if own:
        reason, detail = own[0].reason, own[0].why
        actual = DEAD_LETTER

    problem = ""
    if len(own) > 1:
        problem = f"{len(own)} dead letters for one message"
    elif own and done:
        problem = "both a report and a dead letter"
    elif (actual, reason) != (planned.expected, planned.reason):
        problem = f"expected {_words(planned.expected, planned.reason)}, is {_words(actual, reason)}"
        problem += f" ({detail})" if detail else ""
    elif record.starts < planned.attempts or (record.starts > planned.attempts and not disturbed):
        problem = f"expected {_times(planned.attempts)}, its actor started {_times(record.starts)}"
    elif own:
        problem = _wrong_letter(own[0], sent, record.starts)
    return Finding(
        label=planned.label,
        message_id=sent.message_id,
        expected=planned.expected,
        actual=actual,
        expected_reason=planned.reason,
        expected_attempts=planned.attempts,
        attempts=record.starts,
        reason=reason,
        detail=detail,
        problem=problem,
    )


def _report(planned: Planned, record: Record, reports: Path) -> tuple[bool, str]:
    """Tell whether the report is there and whole; with what it holds, or what is wrong with it."""
    if not planned.files or not set(planned.files) <= set(record.written):
        return False, ""
    for file in planned.files:
        try:
            content = (reports / file).read_bytes()
        except FileNotFoundError:
            return False, f"{file} is not there"
        if hashlib.sha256(content).hexdigest() != record.written[file]:
            return False, f"{file} is not what the actor wrote"
    rows, flights = _csv_counts((reports / planned.files[0]).read_text(encoding="utf-8"))
    if flights != planned.flights:
        return False, f"{planned.files[0]} has {flights:,} flights instead of {planned.flights:,}"
    width, height = _png_size((reports / planned.files[1]).read_bytes())
    if not width or not height:
        return False, f"{planned.files[1]} is not a PNG"
    return True, f"{flights:,} flights, {rows} rows, PNG {width} x {height}"


def _csv_counts(text: str) -> tuple[int, int]:
    rows = list(csv.DictReader(io.StringIO(text)))
    return len(rows), sum(int(row["scheduled"]) for row in rows)


def _png_size(content: bytes) -> tuple[int, int]:
    """Return width and height from a PNG's header, 0 and 0 if it has none."""
    if not content.startswith(PNG_SIGNATURE) or content[12:16] != b"IHDR":
        return 0, 0
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def _wrong_letter(letter: DeadLetter, sent: Sent, starts: int) -> str:
    if sent.junk is None and not says_id(letter, sent.message_id):
        return "the dead letter's body is not the message that was sent"
    if letter.attempts is None:
        return "the dead letter does not say how many attempts there were"
    # Starts that were cut off by a lost connection are not charged, so the letter may speak of fewer.
    if not sent.planned.attempts <= letter.attempts <= starts:
        return f"the dead letter says {_times(letter.attempts)}, its actor started {_times(starts)}"
    return ""


def _words(outcome: str, reason: str) -> str:
    return f"{outcome}: {reason}" if reason else outcome


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
