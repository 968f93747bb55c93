"""The demo's judgement: what it sends, and how it tells what became of a message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compose.app import records
from compose.app.evidence import Sent, judge
from compose.app.flights import Flight, count
from compose.app.outside import DeadLetter
from compose.app.plan import Kind, Planned, parse_months, plan
from compose.app.records import Recorder
from compose.app.reports import month_report, to_csv, write_whole

ROOT = Path(records.__file__).parents[2]

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


# --- what became of each message ------------------------------------------------------------------


TWO_FLIGHTS = to_csv(
    month_report(count((Flight(f"2013-01-0{day}", "UA", False, 0) for day in (1, 2)), {}), "2013-01")
)
A_MONTH = Planned("January", Kind.MONTH, "2013-01", attempts=1, flights=2)
NO_MONTH = Planned("no month", Kind.MONTH, "2013-13", attempts=1, reason="permanent_error")
JUNK = Planned("junk", Kind.JUNK, "", attempts=0, reason="unreadable")


def done(folder: Path, sent: Sent, *, starts: int = 1) -> None:
    """Do what the actor does for ``sent``, a month with two flights."""
    recorder = Recorder(folder, sent.message_id)
    for _ in range(starts):
        recorder.started()
    for file, content in (
        ("2013-01.csv", TWO_FLIGHTS),
        ("2013-01.png", PNG_SIGNATURE + b"\0\0\0\rIHDR\0\0\0\x02\0\0\0\x01"),
    ):
        recorder.wrote(file, write_whole(folder / file, content))


def letter(message_id: str, reason: str, *, attempts: int = 1, body: bytes | None = None) -> DeadLetter:
    if body is None:
        body = json.dumps({"message_id": message_id}).encode()
    return DeadLetter(body, message_id, reason, attempts, "UnknownMonth: no flight left")


def test_a_report_that_is_whole_and_counts_the_right_flights_is_done(tmp_path: Path):
    sent = Sent(A_MONTH, "m1")
    done(tmp_path, sent)

    finding = judge(sent, tmp_path, [])

    assert (finding.actual, finding.problem) == ("done", "")
    assert finding.detail == "2 flights, 2 rows, PNG 2 x 1"


def test_a_report_of_another_message_does_not_count(tmp_path: Path):
    """The folder still holds the reports of the last demo; they must not hide a message that was lost."""
    done(tmp_path, Sent(A_MONTH, "of the last demo"))

    finding = judge(Sent(A_MONTH, "m1"), tmp_path, [letter("m0", "permanent_error")])

    assert not finding.ended
    assert "expected done, is unfinished" in finding.problem


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "2013-01.png").unlink(), "2013-01.png is not there"),
        (
            lambda folder: (folder / "2013-01.csv").write_bytes(b"half"),
            "2013-01.csv is not what the actor wrote",
        ),
    ],
    ids=["missing", "damaged"],
)
def test_a_report_that_is_not_whole_is_not_done(tmp_path: Path, harm: Callable[[Path], object], said: str):
    sent = Sent(A_MONTH, "m1")
    done(tmp_path, sent)
    harm(tmp_path)

    assert said in judge(sent, tmp_path, []).problem


def test_a_report_with_other_flights_than_known_is_wrong(tmp_path: Path):
    """Whole files with wrong numbers are worse than no files."""
    sent = Sent(replace(A_MONTH, flights=3), "m1")
    done(tmp_path, sent)

    assert "2013-01.csv has 2 flights instead of 3" in judge(sent, tmp_path, []).problem


def test_a_message_that_ran_more_often_than_planned_is_wrong(tmp_path: Path):
    """The reports are the same bytes, so only the number of starts tells."""
    sent = Sent(A_MONTH, "m1")
    done(tmp_path, sent, starts=2)

    assert judge(sent, tmp_path, []).problem == "expected once, its actor started 2 times"


def test_a_dead_letter_is_found_by_its_message_id_and_its_reason_is_judged(tmp_path: Path):
    sent = Sent(NO_MONTH, "m1")
    Recorder(tmp_path, "m1").started()
    others = [letter("m0", "unknown_actor"), letter("m2", "unreadable")]

    right = judge(sent, tmp_path, [*others, letter("m1", "permanent_error")])
    wrong = judge(sent, tmp_path, [*others, letter("m1", "retries_exhausted")])

    assert right.problem == ""
    assert right.detail == "UnknownMonth: no flight left"
    assert "expected dead letter: permanent_error, is dead letter: retries_exhausted" in wrong.problem


@pytest.mark.parametrize(
    ("letters", "said"),
    [
        ([letter("m1", "permanent_error")] * 2, "2 dead letters for one message"),
        (
            [letter("m1", "permanent_error", attempts=3)],
            "the dead letter says 3 times, its actor started once",
        ),
        ([letter("m1", "permanent_error", body=b'{"message_id": "m2"}')], "not the message that was sent"),
        ([letter("m1", "permanent_error", body=b"junk")], "not the message that was sent"),
    ],
    ids=["twice", "attempts", "body of another", "body damaged"],
)
def test_a_dead_letter_that_contradicts_the_files_is_wrong(
    tmp_path: Path, letters: list[DeadLetter], said: str
):
    sent = Sent(NO_MONTH, "m1")
    Recorder(tmp_path, "m1").started()

    assert said in judge(sent, tmp_path, letters).problem


def test_a_report_and_a_dead_letter_for_one_message_is_wrong(tmp_path: Path):
    """One outcome per message, not two."""
    sent = Sent(A_MONTH, "m1")
    done(tmp_path, sent)

    assert (
        judge(sent, tmp_path, [letter("m1", "permanent_error")]).problem == "both a report and a dead letter"
    )


def test_junk_is_found_by_its_exact_bytes(tmp_path: Path):
    """It has no message id; other junk, of the last demo, must not stand in for it."""
    sent = Sent(JUNK, "junk-1", junk=b"\x00\xff one")

    theirs = judge(sent, tmp_path, [letter("", "unreadable", attempts=0, body=b"\x00\xff two")])
    ours = judge(sent, tmp_path, [letter("", "unreadable", attempts=0, body=b"\x00\xff one")])

    assert not theirs.ended
    assert ours.right


def test_starts_are_counted_over_processes_and_old_records_are_forgotten(tmp_path: Path):
    """Retries may run in any worker process: a count in memory would begin anew in each."""
    code = (
        "import sys; from pathlib import Path; from compose.app.records import Recorder;"
        "sys.stdout.write(str(Recorder(Path(sys.argv[1]), 'm1').started()))"
    )
    starts = [
        subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, text=True)
        for _ in range(2)
    ]
    os.utime(records.path_of(tmp_path, "m1"), (0, 0))
    Recorder(tmp_path, "m2").started()

    records.forget_old(tmp_path, now=time.time())

    assert starts == ["1", "2"]
    assert [path.name for path in (tmp_path / records.FOLDER).iterdir()] == ["m2.jsonl"]


# --- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "months"),
    [("1-3", [1, 2, 3]), ("12", [12]), (" 2, 7-8,7", [2, 7, 8]), ("1-12", list(range(1, 13)))],
)
def test_months_can_be_named_singly_and_as_ranges(text: str, months: list[int]):
    assert parse_months(text) == months


@pytest.mark.parametrize("text", ["", "0", "13", "3-1", "1-", "-1", "may", "1;2", "1-2-3"])
def test_months_that_make_no_sense_are_refused_with_a_sentence(text: str):
    with pytest.raises(ValueError, match="expected months"):
        parse_months(text)


def test_the_plan_covers_all_flights_and_each_way_to_end():
    planned = plan(list(range(1, 13)))

    assert sum(one.flights for one in planned if one.kind is Kind.MONTH) == 336_776
    assert sorted(one.reason for one in planned if one.reason) == [
        "permanent_error",
        "unknown_actor",
        "unreadable",
    ]
    assert [one.attempts for one in planned if one.kind is Kind.YEAR] == [3]
    assert len(planned) == 16
