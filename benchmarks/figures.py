"""What is measured in one run, and where: shared by the parts of the benchmark.

Runs in: the benchmark's own process.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass
class Figures:
    """All that was measured. Each name has one figure per round."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    lateness: dict[str, dict[str, float]] = field(default_factory=dict)

    def rate(self, name: str, per_second: float) -> None:
        """Note how many messages per second ``name`` did in this round."""
        self.rates.setdefault(name, []).append(per_second)
        print(f"{name:<32} {per_second:>9,.0f}/s", flush=True)

    def cpu(self, name: str, microseconds: float) -> None:
        """Note what a message cost the worker's processes."""
        self.cpu_us.setdefault(name, []).append(microseconds)

    def late(self, name: str, milliseconds: list[float]) -> None:
        """Note the lateness of the messages of ``name``."""
        ordered = sorted(milliseconds)
        self.lateness[name] = {
            "messages": len(ordered),
            "min_ms": round(ordered[0], 1),
            "median_ms": round(statistics.median(ordered), 1),
            "p99_ms": round(ordered[int(len(ordered) * 0.99) - 1], 1),
            "max_ms": round(ordered[-1], 1),
        }
        print(f"{name:<32} {self.lateness[name]}", flush=True)


def medians(figures: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return median, minimum and maximum over the rounds."""
    return {
        name: {
            "median": round(statistics.median(all_), 1),
            "min": round(min(all_), 1),
            "max": round(max(all_), 1),
        }
        for name, all_ in figures.items()
    }


def environment(url: str, broker: str) -> dict[str, str]:
    """Return the environment of a process that is measured."""
    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent)])
    return {**os.environ, "BENCH_AMQP_URL": url, "BENCH_BROKER": broker, "PYTHONPATH": path}
