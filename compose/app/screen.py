"""What the demo shows: a line per message that ended, a bar on a terminal, and the table at the end.

Runs in: demo. Needs: rich.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from compose.app.evidence import Finding
from compose.app.plan import DEAD_LETTER, DONE

#: Width of tables and lines where there is no terminal to ask (a pipe, a CI log).
PLAIN_WIDTH = 150

#: Below this width (characters) the table shows no details; ``--json`` has them.
WIDE = 110

_STYLES = {DONE: "green", DEAD_LETTER: "yellow"}


class Screen:
    """Writes for people: with colours and a bar on a terminal, else plain lines."""

    def __init__(self, *, to_stderr: bool = False) -> None:
        self._console = Console(stderr=to_stderr, highlight=False)
        if not self._console.is_terminal:
            self._console = Console(stderr=to_stderr, highlight=False, width=PLAIN_WIDTH)
        self._begin = time.monotonic()

    def say(self, sentence: str, style: str = "") -> None:
        """Write a line."""
        self._console.print(Text(sentence, style=style), soft_wrap=True)

    def step(self, sentence: str) -> None:
        """Write a line with the time since the start."""
        self._console.print(
            Text.assemble((f"{time.monotonic() - self._begin:5.1f} s  ", "dim"), sentence), soft_wrap=True
        )

    @contextmanager
    def waiting(self, sentence: str) -> Iterator[None]:
        """Show that something takes its time."""
        if self._console.is_terminal:
            with self._console.status(sentence):
                yield
        else:
            self.step(sentence)
            yield

    @contextmanager
    def watching(self, messages: int) -> Iterator[Watch]:
        """Show how many of ``messages`` have ended."""
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            # Without a terminal there are only the lines.
            disable=not self._console.is_terminal,
        )
        with progress:
            yield Watch(self, progress, progress.add_task("messages", total=messages))

    def table(self, findings: Sequence[Finding]) -> None:
        """Write the table: what each message should become, and what it became."""
        wide = self._console.width >= WIDE
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for heading in ("message", "expected", "actual"):
            table.add_column(heading, no_wrap=True)
        table.add_column("attempts", justify="right", no_wrap=True)
        table.add_column("reason", overflow="fold")
        if wide:
            table.add_column("on disk, or in the dead letter", overflow="fold")
        table.add_column("", no_wrap=True)
        for finding in findings:
            attempts = str(finding.attempts)
            if finding.attempts != finding.expected_attempts:
                attempts += f", not {finding.expected_attempts}"
            table.add_row(
                Text(finding.label),
                Text(finding.expected),
                Text(finding.actual, style=_STYLES.get(finding.actual, "red")),
                Text(attempts),
                Text(finding.reason),
                *([Text(finding.detail, style="dim")] if wide else []),
                Text("ok", style="bold green") if finding.right else Text("WRONG", style="bold red"),
            )
        self.say("")
        self._console.print(table)
        self.say("")


class Watch:
    """The bar of a running demo."""

    def __init__(self, screen: Screen, progress: Progress, task: TaskID) -> None:
        self._screen = screen
        self._progress = progress
        self._task = task

    def say(self, sentence: str) -> None:
        """Write a line above the bar."""
        self._screen.step(sentence)

    def started(self, label: str, attempt: int) -> None:
        """Say that an actor started anew after a failure."""
        self._screen.step(f"{label}: attempt {attempt}")

    def ended(self, finding: Finding) -> None:
        """Say that a message has come to its end."""
        reason = f", {finding.reason}" if finding.reason else ""
        attempts = f" at attempt {finding.attempts}" if finding.attempts > 1 else ""
        self._screen.step(f"{finding.label}: {finding.actual}{reason}{attempts}")
        self._progress.advance(self._task)
