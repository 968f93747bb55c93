"""Start, recognise, pause and kill the processes of a private server, and find free ports for them.

Runs in: the process that starts servers (a test run, the demo, ``python -m dramatiq_safeops.testing``).
Needs: ``sh``, and ``/proc`` (Linux) or ``ps`` (elsewhere).

A process is known by its pid *and* its start time: a pid alone may belong to a stranger by the time we look again.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dramatiq_safeops.errors import SafeOpsError

#: Ports are taken from here. It is below the range from which the kernel hands out source ports (32768.. on Linux): a
#: port of that range would not survive a restart, as a client that reconnects in a loop to a dead server's port sooner
#: or later gets this very port as its source port, is connected to itself, and the server cannot bind it any more.
#: And no well-known server is at home here (RabbitMQ's own distribution port is 25672).
FIRST_PORT = 20_000
LAST_PORT = 25_500

_LINUX = sys.platform.startswith("linux")

# The started process writes its own identity and then *becomes* the server (exec keeps pid and start time), so there
# is no moment at which a server runs that no record knows of, whenever the owner is killed. The record is its stdin.
# A sweep unlinks the record before it reads it: whoever then finds it gone must not go on.
_LAUNCHER = """
{look} >&0 && [ -e "$1" ] || exit 1
shift
exec "$@" </dev/null
""".format(look="cat /proc/$$/stat" if _LINUX else "ps -o pid= -o ppid= -o stat= -o lstart= -p $$")


class ServerError(SafeOpsError):
    """A private server could not be started, reached or stopped. One sentence says what to do."""


@dataclass(frozen=True)
class ProcessId:
    """One process: its pid, its parent's, and when it started (a text to compare, in no particular unit)."""

    pid: int
    parent: int
    started: str

    def alive(self) -> bool:
        """Tell whether this very process still runs. A zombie does not."""
        seen = look_at(self.pid)
        return seen is not None and seen.started == self.started

    def signal(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def look_at(pid: int) -> ProcessId | None:
    """Return who runs under ``pid`` now, or None if nobody does (or only a zombie)."""
    if _LINUX:
        try:
            return parse_record(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            return None
    columns = ["-o", "pid=", "-o", "ppid=", "-o", "stat=", "-o", "lstart="]
    seen = subprocess.run(["ps", *columns, "-p", str(pid)], capture_output=True, text=True, check=False)
    return parse_record(seen.stdout)


def parse_record(text: str) -> ProcessId | None:
    """Read what the launcher or ``/proc`` wrote. None if it is empty or speaks of a zombie."""
    if not text.strip():
        return None
    if _LINUX:
        # The name of the program stands in brackets and may hold blanks and brackets itself.
        before, _, after = text.rpartition(")")
        state, parent, *others = after.split()
        found = ProcessId(int(before.split()[0]), int(parent), others[17])
    else:
        pid, parent, state, started = text.split(maxsplit=3)
        found = ProcessId(int(pid), int(parent), started.strip())
    return None if state[0] in "ZX" else found


def descendants_of(ancestor: ProcessId) -> list[ProcessId]:
    """Return the children of a process, their children, and so on."""
    if _LINUX:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    else:
        listed = subprocess.run(["ps", "-axo", "pid="], capture_output=True, text=True, check=True)
        pids = [int(pid) for pid in listed.stdout.split()]
    children: dict[int, list[ProcessId]] = {}
    for pid in pids:
        seen = look_at(pid)
        if seen is not None:
            children.setdefault(seen.parent, []).append(seen)
    found = children.pop(ancestor.pid, [])
    for one in found:  # it grows meanwhile
        found += children.pop(one.pid, [])
    return found


def launch(
    command: Sequence[str],
    *,
    record: Path,
    log: Path,
    folder: Path,
    environment: Mapping[str, str],
    user: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a server process whose identity is in ``record`` before its first instruction.

    It gets a session of its own, so that a Ctrl-C meant for the tests does not stop the servers under them. ``user``
    (only as root) names the account to run it under.
    """
    with record.open("wb") as identity, log.open("ab") as output:
        return subprocess.Popen(
            ["sh", "-c", _LAUNCHER, "sh", str(record), *command],
            stdin=identity,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            user=user,
            group=None if user is None else pwd.getpwnam(user).pw_gid,
            extra_groups=None if user is None else [],
        )


def wait_until(condition: Callable[[], bool], timeout: float, *, interval: float = 0.02) -> bool:
    """Ask ``condition`` every ``interval`` seconds; True as soon as it holds, False after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(interval)
    return True


def kill_all(processes: Iterable[ProcessId], *, first: int | None = None, patience: float = 5.0) -> None:
    """End processes and all that these have started for good, and wait until they are gone.

    With ``first``, that signal is tried for ``patience`` seconds (PostgreSQL, for one, then removes what it keeps in
    the kernel). Paused processes are continued for it.
    """
    doomed = [process for process in processes if process.alive()]
    family = doomed + [one for process in doomed for one in descendants_of(process)]
    if first is not None:
        for process in family:
            process.signal(signal.SIGCONT)
        for process in doomed:
            process.signal(first)
        if wait_until(lambda: not any(process.alive() for process in family), patience):
            return
    for process in doomed:
        process.signal(signal.SIGSTOP)  # a stopped parent starts no more children while we count them
    family = doomed + [one for process in doomed for one in descendants_of(process)]
    for process in family:
        process.signal(signal.SIGKILL)
    if not wait_until(lambda: not any(process.alive() for process in family), 10.0):
        left = ", ".join(str(process.pid) for process in family if process.alive())
        raise ServerError(f"processes {left} do not die, not even by SIGKILL")


def free_ports(count: int) -> list[int]:
    """Return ``count`` different loopback ports on which nothing listens.

    Between this call and the server's own bind somebody else may take one, so whoever starts a server tries again.
    """
    first, last = FIRST_PORT, min(LAST_PORT, _first_ephemeral_port() - 1)
    found: list[int] = []
    tries = 0
    while len(found) < count:
        tries += 1
        # A machine that hands out everything as a source port, or has nothing free: let the kernel choose.
        port = random.randint(first, last) if last - first > 1000 and tries < 500 else 0
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As servers do: the rest of an old connection (TIME_WAIT) does not make a port busy.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                probe.listen(1)
            except OSError:
                continue
            port = probe.getsockname()[1]
        if port not in found:
            found.append(port)
    return found


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32_768
