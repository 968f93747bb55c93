"""Real ``dramatiq`` worker processes, started, killed and read by tests.

An app is a piece of source that a test writes down beside its assertions. It starts with ``from tests.harness.app import
*``, which makes the broker that the test asked for (ours, or Dramatiq's own for a twin that is red there) and gives the
actors ``note``, to leave their effects in a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]

#: The ``dramatiq`` command of this environment.
DRAMATIQ = (sys.executable, "-m", "dramatiq")


def wait_until(condition: Callable[[], Any], timeout: float = 30, what: str = "") -> Any:
    """Return the first true value of ``condition``; fail after ``timeout`` seconds with what was waited for."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout} s in vain for {what or condition}")
        time.sleep(0.02)


@dataclass
class App:
    """One app of a test: its source, its broker, and the file where its actors leave their effects."""

    folder: Path
    source: str
    url: str
    broker: str = "safe"
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.effects = self.folder / "effects.jsonl"
        self.effects.touch()
        header = "from tests.harness.app import *\n"
        (self.folder / "app.py").write_text(header + textwrap.dedent(self.source))

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
            "TEST_AMQP_URL": self.url,
            "TEST_BROKER": self.broker,
            "TEST_EFFECTS": str(self.effects),
            **self.env,
        }

    def notes(self, what: str | None = None) -> list[dict[str, Any]]:
        """Return the effects so far, in order: dicts with ``what``, ``at``, ``pid`` and what the actor gave."""
        lines = self.effects.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [one for one in found if what is None or one["what"] == what]

    def run(self, code: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in a process of its own that has imported the app, as a producer does."""
        return subprocess.run(
            [sys.executable, "-c", "from app import *\n" + textwrap.dedent(code)],
            env=self.environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def send(self, code: str, *, timeout: float = 60) -> str:
        """Run ``code`` as a producer, which must succeed; returns what it printed."""
        done = self.run(code, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def program(self, code: str) -> Iterator[subprocess.Popen[str]]:
        """Run ``code`` as ``run`` does, and talk with it by its pipes as long as the block lasts."""
        process = subprocess.Popen(
            [sys.executable, "-c", "from app import *\n" + textwrap.dedent(code)],
            env=self.environment(),
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    @contextmanager
    def worker(self, **options: Any) -> Iterator[Worker]:
        """Run ``dramatiq app`` as long as the block lasts."""
        worker = self.start_worker(**options)
        try:
            yield worker
        finally:
            worker.destroy()

    def start_worker(
        self,
        *,
        processes: int = 1,
        threads: int = 4,
        arguments: tuple[str, ...] = (),
        wait: bool = True,
        command: tuple[str, ...] = DRAMATIQ,
        broker: str = "app",
    ) -> Worker:
        number = len(list(self.folder.glob("worker-*.log")))
        log = self.folder / f"worker-{number}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                [*command, broker, "-p", str(processes), "-t", str(threads), *arguments],
                env=self.environment(),
                cwd=self.folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        worker = Worker(process, log, processes)
        if wait:
            worker.wait_ready()
        return worker


@dataclass
class Worker:
    """A running ``dramatiq`` command with its worker processes."""

    process: subprocess.Popen[bytes]
    log: Path
    processes: int

    def wait_ready(self, timeout: float = 60) -> None:
        ready = "ready for action"
        wait_until(
            lambda: self.text.count(ready) >= self.processes or self.process.poll() is not None,
            timeout,
            f"the workers to be ready: {self.text}",
        )
        assert self.process.poll() is None, f"the worker has ended: {self.text}"

    @property
    def text(self) -> str:
        """What the worker has logged so far."""
        return self.log.read_text(errors="replace")

    def wait_for_log(self, piece: str, timeout: float = 30) -> None:
        wait_until(lambda: piece in self.text, timeout, f"{piece!r} in the log")

    def pids(self) -> list[int]:
        """The worker processes, without Dramatiq's main process and helpers of multiprocessing."""
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []
        workers = []
        for child in children:
            command = " ".join(_command(child))
            if "multiprocessing.forkserver" in command:
                workers += [one.pid for one in child.children()]  # it forks them, and runs nothing itself
            elif "resource_tracker" not in command:
                workers.append(child.pid)
        return workers

    def kill(self) -> None:
        """SIGKILL the command and all its processes at once."""
        for pid in [*self.pids(), self.process.pid]:
            with_pid(pid, signal.SIGKILL)
        self.process.wait(30)

    def terminate(self, timeout: float = 60) -> int:
        """SIGTERM the command, as a deploy does, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def destroy(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.kill()


def with_pid(pid: int, what: signal.Signals) -> None:
    """Send a signal; a process that is gone already is fine."""
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
