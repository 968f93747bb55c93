"""PURE: what the demo sends, and what must become of each message.

Runs in: demo. Needs: nothing.
"""

from __future__ import annotations

import calendar
from dataclasses import dataclass
from enum import Enum

DONE = "done"
DEAD_LETTER = "dead letter"

YEAR = "2013"

#: Flights that left New York in each month, as the data's authors publish them. The reports are checked against
#: these and not against another count by our own code.
FLIGHTS_BY_MONTH = (
    27004, 24951, 28834, 28330, 28796, 28243, 29425, 29327, 27574, 28889, 27268, 28135,
)  # fmt: skip


class Kind(str, Enum):
    """How a message is made."""

    MONTH = "month"
    YEAR = "year"
    NO_SUCH_ACTOR = "no such actor"
    JUNK = "junk"


@dataclass(frozen=True)
class Planned:
    """One message and its expected end.

    ``reason`` is that of the dead letter, empty for a message that must succeed; ``attempts`` is how often an actor
    starts; ``flights`` is what the report must count.
    """

    label: str
    kind: Kind
    argument: str
    attempts: int
    reason: str = ""
    flights: int = 0

    @property
    def expected(self) -> str:
        """The expected outcome in the words of the table."""
        return DEAD_LETTER if self.reason else DONE

    @property
    def files(self) -> tuple[str, ...]:
        """The files that must exist afterwards."""
        return () if self.reason else (f"{self.argument}.csv", f"{self.argument}.png")


def plan(months: list[int]) -> list[Planned]:
    """Return the messages for these months (1 to 12), and then the four that make trouble."""
    return [
        *(
            Planned(
                calendar.month_name[month],
                Kind.MONTH,
                f"{YEAR}-{month:02}",
                attempts=1,
                flights=FLIGHTS_BY_MONTH[month - 1],
            )
            for month in months
        ),
        Planned("year, fails twice", Kind.YEAR, YEAR, attempts=3, flights=sum(FLIGHTS_BY_MONTH)),
        Planned(f"month {YEAR}-13", Kind.MONTH, f"{YEAR}-13", attempts=1, reason="permanent_error"),
        Planned("actor nobody has", Kind.NO_SUCH_ACTOR, "build_decade", attempts=0, reason="unknown_actor"),
        Planned("junk bytes", Kind.JUNK, "", attempts=0, reason="unreadable"),
    ]


def parse_months(text: str) -> list[int]:
    """Return the months named by a text such as ``1-3`` or ``2,7-8``, in order and once each.

    Raises ValueError with a sentence for people.
    """
    months: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            raise ValueError(f"expected months such as 1-3 or 2,7-8, got {text!r}") from None
        if not 1 <= low <= high <= 12:
            raise ValueError(f"expected months from 1 to 12, the lower one first, got {part.strip()!r}")
        months.update(range(low, high + 1))
    return sorted(months)
