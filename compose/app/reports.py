"""From counted flights to a report: a table of rows, its CSV, and files that are whole or not there.

Runs in: worker. Needs: a folder to write to.

The same flights always give the same bytes. That makes it harmless when a message is delivered twice, which
RabbitMQ alone cannot rule out.
"""

from __future__ import annotations

import calendar
import csv
import hashlib
import io
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compose.app.flights import Counts, Tally

#: The columns of a report's CSV. ``period`` is a day in a month's report, a month in a year's.
COLUMNS = (
    "period",
    "carrier",
    "airline",
    "scheduled",
    "on_time",
    "on_time_share",
    "cancelled",
    "diverted",
    "median_delay_min",
)


class UnknownMonth(ValueError):
    """Raised for a month that no flight left in. Trying again cannot help."""


@dataclass(frozen=True)
class Report:
    """On-time counts of one month or one year.

    ``name`` is the stem of its files (``2013-01``, ``2013``); ``by_cell`` has a tally per (period, carrier).
    """

    name: str
    title: str
    by_cell: dict[tuple[str, str], Tally]
    airlines: dict[str, str]

    @property
    def periods(self) -> list[str]:
        return sorted({period for period, _ in self.by_cell})

    @property
    def carriers(self) -> list[str]:
        """The carriers, the one with most flights first."""
        flights = {carrier: tally.scheduled for carrier, tally in self.by_carrier().items()}
        return sorted(flights, key=lambda carrier: (-flights[carrier], carrier))

    def by_period(self) -> dict[str, Tally]:
        return self._merged(lambda cell: cell[0])

    def by_carrier(self) -> dict[str, Tally]:
        return self._merged(lambda cell: cell[1])

    def total(self) -> Tally:
        return self._merged(lambda _cell: "")[""]

    def _merged(self, group: Callable[[tuple[str, str]], str]) -> dict[str, Tally]:
        merged: dict[str, Tally] = {}
        for cell, tally in sorted(self.by_cell.items()):
            merged.setdefault(group(cell), Tally()).merge(tally)
        return merged


def month_report(counts: Counts, month: str) -> Report:
    """Return the report of a month such as ``2013-01``, by day and carrier.

    Raises UnknownMonth when no flight left in that month, or when there is no such month.
    """
    cells = {cell: tally for cell, tally in counts.tallies.items() if cell[0][:7] == month}
    if not cells:
        raise UnknownMonth(f"no flight left in {month!r}, the flights cover {_covered(counts)}")
    year, number = month.split("-")
    return Report(month, f"{calendar.month_name[int(number)]} {year}", cells, counts.airlines)


def year_report(counts: Counts, year: str) -> Report:
    """Return the report of a year such as ``2013``, by month and carrier.

    Raises UnknownMonth when no flight left in that year.
    """
    cells: dict[tuple[str, str], Tally] = {}
    for (date, carrier), tally in counts.tallies.items():
        if date[:4] == year:
            cells.setdefault((date[:7], carrier), Tally()).merge(tally)
    if not cells:
        raise UnknownMonth(f"no flight left in {year!r}, the flights cover {_covered(counts)}")
    return Report(year, f"The year {year}", cells, counts.airlines)


def on_time_share(tally: Tally) -> float:
    """Return the part of scheduled flights that arrived on time, 0 to 1. Cancelled and diverted ones did not."""
    return tally.on_time / tally.scheduled


def to_csv(report: Report) -> bytes:
    """Return the report as CSV, a row per period and carrier, in a fixed order."""
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for (period, carrier), tally in sorted(report.by_cell.items()):
        rows.writerow(
            (
                period,
                carrier,
                report.airlines.get(carrier, carrier),
                tally.scheduled,
                tally.on_time,
                f"{on_time_share(tally):.4f}",
                tally.cancelled,
                tally.diverted,
                # Where nothing landed there is no delay, which is not a delay of 0.
                f"{statistics.median(tally.delays_min):g}" if tally.delays_min else "",
            )
        )
    return text.getvalue().encode()


def write_whole(path: Path, content: bytes) -> str:
    """Write a file that is there whole or not at all, replacing an older one. Return its SHA-256.

    A worker that is killed in between leaves the older file as it was, and at most a hidden temporary one.
    Any number of threads and processes may write the same path at once; one of them wins.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read; a report is for others too.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        # Also for the time limit, which interrupts from outside.
        Path(temporary).unlink(missing_ok=True)
        raise
    return hashlib.sha256(content).hexdigest()


def _covered(counts: Counts) -> str:
    months = sorted({date[:7] for date, _ in counts.tallies})
    return f"{months[0]} to {months[-1]}" if months else "no month at all"
