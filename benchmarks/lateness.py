"""How late delayed messages are: each delay alone on an idle broker, and a burst that all comes due at once.

Runs in: the benchmark's own process. Arrival is taken when the actor starts in a real worker, so hops and queueing count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from figures import FOLDER, Figures, environment

#: Seconds. From the smallest step to a minute; 0.6, 7 and 50 need more than one hop.
DELAYS = (0.25, 0.6, 1, 2, 5, 7, 10, 30, 50, 60)
PER_DELAY = 20
BURST_DELAY = 5.0


def measure(figures: Figures, url: str, *, burst: int) -> None:
    """Measure all of ``DELAYS`` on an idle broker, then ``burst`` messages that come due together."""
    idle = arrivals(url, [(delay, PER_DELAY) for delay in DELAYS])
    for delay in DELAYS:
        figures.late(f"delay {delay:g} s, idle", idle[delay])
    figures.late(
        f"delay {BURST_DELAY:g} s, burst of {burst}", arrivals(url, [(BURST_DELAY, burst)])[BURST_DELAY]
    )


def arrivals(url: str, plan: list[tuple[float, int]]) -> dict[float, list[float]]:
    """Send what ``plan`` says and return the lateness in ms of each message, by delay."""
    notes = FOLDER / "lateness.log"
    notes.unlink(missing_ok=True)
    env = environment(url, "safe-quorum") | {"BENCH_NOTES": str(notes)}
    total = sum(count for _, count in plan)
    with running(env):
        subprocess.run([sys.executable, "delayed_app.py", json.dumps(plan)], env=env, cwd=FOLDER, check=True)
        limit = time.monotonic() + max(delay for delay, _ in plan) + 120
        while not notes.exists() or notes.read_bytes().count(b"\n") < total:
            if time.monotonic() > limit:
                raise SystemExit(f"not all of {total} delayed messages arrived")
            time.sleep(0.1)
    late: dict[float, list[float]] = {delay: [] for delay, _ in plan}
    for line in notes.read_text().splitlines():
        delay, lateness = line.split()
        late[float(delay)].append(float(lateness))
    notes.unlink()
    return late


@contextmanager
def running(env: dict[str, str]) -> Iterator[None]:
    """Run a worker for the delayed app."""
    command = [sys.executable, "-m", "dramatiq", "delayed_app", "-p", "1", "-t", "8"]
    quiet = subprocess.DEVNULL
    worker = subprocess.Popen(command, env=env, cwd=FOLDER, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        worker.terminate()
        worker.wait()
