"""What private RabbitMQ and PostgreSQL servers have in common: start, kill, pause, restart, stop.

Runs in: the process that starts servers. Needs: nothing of its own.
"""

from __future__ import annotations

import re
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from dramatiq_safeops.testing.instances import Instance, sweep, watch_this_process
from dramatiq_safeops.testing.processes import (
    ProcessId,
    ServerError,
    descendants_of,
    kill_all,
    launch,
    look_at,
    wait_until,
)

if TYPE_CHECKING:
    from typing_extensions import Self

#: A server that is not ready after this many seconds will not be: a boot takes 2 to 15 s, on a loaded machine more.
READY_TIMEOUT_S = 120.0

_PORT_TAKEN = re.compile("eaddrinuse|dist_port_already_used|address (already )?in use", re.IGNORECASE)
_TELLING = re.compile(
    r"\b(error|fatal|unknown|unrecognized|could not|cannot|denied|no such)\b", re.IGNORECASE
)
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \S+ (\w+ )?\[\w+\]( <[\d.]+>)?")

#: How often a start is tried anew when another program was faster to take one of the ports.
_PORT_TRIES = 4


class PortTaken(ServerError):
    """Somebody else listens on a port that was free a moment ago."""


class PrivateServer(ABC):
    """A throw-away server of this process on free loopback ports, with its data in a folder of its own.

    A context manager that stops the server. Its life is bound to the process that started it (see ``instances``),
    unless it is kept. Methods are for one thread at a time.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    stop_signal: ClassVar[int | None] = None

    def __init__(self, folder: Path | None) -> None:
        watch_this_process()
        sweep()
        self.instance = Instance.create(self.kind, data=folder, stop_signal=self.stop_signal)
        self.folder = self.instance.folder if folder is None else folder
        self._process: subprocess.Popen[bytes] | None = None
        self._paused: list[ProcessId] = []
        self._log_start = 0

    # What a kind of server knows about itself

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect."""

    @property
    def urls(self) -> dict[str, str]:
        """Everything a person or a program may want to open, by name."""
        return {"url": self.url}

    @abstractmethod
    def _prepare(self) -> None:
        """Choose ports and write the configuration. Repeated when a port was taken."""

    @abstractmethod
    def _launch(self) -> subprocess.Popen[bytes]:
        """Start the server process."""

    @abstractmethod
    def _answers(self) -> bool:
        """Tell whether clients are served now. Must not block for more than a second or two."""

    # What users call

    def wait_ready(self, timeout: float = READY_TIMEOUT_S) -> None:
        """Return when the server serves clients; ``ServerError`` after ``timeout`` seconds or if it has ended."""

        def settled() -> bool:
            return self._ended() or self._answers()

        if not wait_until(settled, timeout, interval=0.05):
            raise ServerError(
                f"{self.title} did not answer within {timeout:.0f} s, its log says: {self._complaint()}"
            )
        if self._ended():
            if _PORT_TAKEN.search(self._log_text()):
                raise PortTaken(
                    f"another program listens on a port that {self.title} needs: {self._complaint()}"
                )
            raise ServerError(f"{self.title} ended by itself, its log says: {self._complaint()}")

    def kill(self) -> None:
        """SIGKILL, as a crash does. Data and ports stay; ``restart()`` brings it back."""
        self._paused.clear()
        if self._process is not None:
            kill_all(self._main())
            self._reap()

    def terminate(self, timeout: float = 60.0) -> None:
        """Shut down in order, as an upgrade does, and wait for the end (seconds). ``restart()`` brings it back."""
        self.resume()
        if self._process is not None:
            self._process.send_signal(self._shutdown_signal())
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise ServerError(f"{self.title} did not shut down within {timeout:.0f} s") from None
            self._reap()

    def restart(self, timeout: float = READY_TIMEOUT_S) -> None:
        """Start again with the same ports and data; a server that still runs is terminated first."""
        if self._process is not None:
            if self._ended():
                self._reap()
            else:
                self.terminate()
        self._begin()
        self.wait_ready(timeout)

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing is answered, as on a frozen machine. ``resume()`` ends it."""
        # The parent first, so that it starts no more children while they are looked up.
        for process in self._main():
            process.signal(signal.SIGSTOP)
            self._paused = [process, *descendants_of(process)]
        for process in self._paused:
            process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after ``pause()``; without one it does nothing."""
        for process in reversed(self._paused):
            process.signal(signal.SIGCONT)
        self._paused.clear()

    def stop(self) -> None:
        """End the server at once and remove its folder (not one that the user named). Safe to repeat."""
        self.resume()
        self.instance.destroy()
        if self._process is not None:
            self._reap()

    def keep(self, name: str) -> None:
        """Let the server live on after this process, until ``python -m dramatiq_safeops.testing down``."""
        self.instance.keep(name)
        if self._process is not None:
            # Nobody waits for it any more, and Popen should not complain about that.
            self._process.returncode = 0
            self._process = None

    @property
    def running(self) -> bool:
        """Whether the server's main process lives (a paused one does)."""
        return self._process is not None and not self._ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # For the kinds of servers

    def _boot(self, timeout: float) -> None:
        """Start, with other ports if somebody took one; leave nothing behind if it fails."""
        try:
            for attempt in range(1, _PORT_TRIES + 1):
                try:
                    self._prepare()
                    self._begin()
                    self.wait_ready(timeout)
                except PortTaken:
                    self.kill()
                    if attempt == _PORT_TRIES:
                        raise
                else:
                    break
            self.instance.write(urls=self.urls)
        except OSError as error:
            self.stop()
            raise ServerError(
                f"{self.title} cannot be started in {self.folder} ({error.filename}: {error.strerror})"
            ) from error
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        # What earlier runs wrote to the log is not about this one.
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        self._process = self._launch()

    def _start_process(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str], user: str | None = None
    ) -> subprocess.Popen[bytes]:
        return launch(
            command,
            record=self.instance.folder / f"{name}.pid",
            log=self._log,
            folder=self.folder,
            environment=environment,
            user=user,
        )

    @property
    def _log(self) -> Path:
        return self.instance.folder / "server.log"

    def _shutdown_signal(self) -> int:
        return signal.SIGTERM

    def _main(self) -> list[ProcessId]:
        seen = None if self._process is None else look_at(self._process.pid)
        return [] if seen is None else [seen]

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _reap(self) -> None:
        assert self._process is not None
        self._process.wait(10)
        self._process = None

    def _log_text(self) -> str:
        try:
            return self._log.read_bytes()[self._log_start :].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _complaint(self) -> str:
        """The lines of the log that say what is wrong, in one line."""
        lines = [_LOG_PREFIX.sub("", line).strip() for line in self._log_text().splitlines()]
        telling = [line for line in dict.fromkeys(lines) if _TELLING.search(line)]
        said = telling[:3] if telling else [line for line in lines if line][-3:]
        return " | ".join(said)[:500] if said else "nothing"


def clean_environment(environment: Mapping[str, str], *prefixes: str) -> dict[str, str]:
    """Return a copy without the variables by which a user steers servers and clients of their own."""
    return {name: value for name, value in environment.items() if not name.startswith(prefixes)}
