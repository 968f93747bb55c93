"""The demo's worker: a real ``dramatiq`` command that lives no longer than the demo.

Runs in: demo. Needs: RabbitMQ, dramatiq.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]

PROCESSES = 2
#: Charts are drawn one at a time in a process, so more threads would only wait for each other.
THREADS = 2

#: How long a worker that was asked to end may take, in seconds.
STOP_S = 30.0


class Worker:
    """``dramatiq compose.app.actors`` with two processes, on a leash. A context manager that stops it."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "dramatiq", "compose.app.actors", "--path", str(ROOT)]
        command += ["--processes", str(PROCESSES), "--threads", str(THREADS)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("leash.py")), *command],
                # The end of this pipe that we keep is the leash.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                # A Ctrl-C is for the demo, which then stops the worker in order.
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self) -> bool:
        """Ask the worker to end, as a deploy does, and wait. False if it had to be killed. Safe to repeat."""
        in_order = True
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                in_order = False
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        return in_order

    def last_lines(self, count: int = 12) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
