"""Who started which private server, and the end of those whose owner is dead.

Runs in: the process that starts servers. Needs: a folder for temporary files.

Every server has a folder ``<temporary folder>/safeops-<uid>/<kind>-<random>/``:

    instance.json   kind, owner (pid and start time; none for a kept one), where its data is, its URLs
    *.pid           one per process, written by that process itself (see ``processes.launch``)
    ...             its data, unless the user named a folder for it

A killed owner (kill -9) must not leave servers behind. Two things see to that:

* a watchdog per owner: an ``sh`` that waits at the end of a pipe whose other end only the owner holds. The kernel
  closes that end however the owner dies; the watchdog then sweeps.
* a sweep at every start and at ``down``, for the case that somebody killed the watchdog too.

Not PR_SET_PDEATHSIG: it fires when the *thread* that started the server ends (a fixture's thread, a thread pool),
it is dropped when the process changes its user, and a signal alone removes no folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dramatiq_safeops.testing.processes import ProcessId, ServerError, kill_all, look_at, parse_record
from dramatiq_safeops.testing.shared_memory import remove_segment

#: A folder without a record younger than this may be one that somebody is just making.
_UNFINISHED_S = 600.0

#: The open end of the pipe to the watchdog of the process with this pid.
_lifelines: dict[int, int] = {}
_lifelines_lock = threading.Lock()


def state_folder(*, create: bool = True) -> Path:
    """Return the folder of all private servers of this user; ``ServerError`` if it cannot be used."""
    # TMPDIR as it stands: tempfile would silently take another folder for one that cannot be written, and a later
    # `down` would not look there.
    asked_for = os.environ.get("TMPDIR")
    folder = Path(asked_for if asked_for else tempfile.gettempdir()).absolute() / f"safeops-{os.getuid()}"
    try:
        if create:
            # Others may pass through (as root, PostgreSQL runs under another account) but not look around.
            folder.mkdir(mode=0o711, exist_ok=True)
        elif not folder.exists():
            return folder
        found = folder.lstat()
    except OSError as error:
        raise ServerError(
            f"cannot make the folder {folder} ({error.strerror}), set TMPDIR to a folder that you may write"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ServerError(
            f"{folder} is not a folder that only you can write, remove it or set TMPDIR to another folder"
        )
    return folder


@dataclass(frozen=True)
class Instance:
    """One private server's folder and what its record says."""

    folder: Path

    @classmethod
    def create(cls, kind: str, *, data: Path | None = None, stop_signal: int | None = None) -> Instance:
        """Make the folder and record of a new server owned by this process.

        ``data`` names a folder of the user's for its data; that one is never removed. ``stop_signal`` is what a sweep
        tries first. Raises ``ServerError`` when the folder cannot be written.
        """
        owner = look_at(os.getpid())
        assert owner is not None  # we are running
        record = {
            "kind": kind,
            "name": None,
            "owner": {"pid": owner.pid, "started": owner.started},
            "world": _world(),
            "data": None if data is None else str(data),
            "stop_signal": stop_signal,
            "urls": {},
        }
        try:
            # A concurrent `down` may remove the empty state folder between the two steps.
            for _ in range(3):
                with contextlib.suppress(FileNotFoundError):
                    unfinished = Path(tempfile.mkdtemp(prefix=".", dir=state_folder()))
                    unfinished.chmod(0o711)
                    (unfinished / "instance.json").write_text(json.dumps(record))
                    # Only now can others see it, and they see it whole.
                    finished = unfinished.with_name(f"{kind}-{unfinished.name.lstrip('.')}")
                    unfinished.rename(finished)
                    return cls(finished)
            raise ServerError(f"the folder {state_folder()} is removed again and again while a server starts")
        except OSError as error:
            raise ServerError(
                f"cannot write to {state_folder()} ({error.strerror}), make room or set TMPDIR to another folder"
            ) from error

    @property
    def record(self) -> dict[str, Any]:
        """What ``instance.json`` says; empty if it is gone or unreadable."""
        try:
            found = json.loads((self.folder / "instance.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, **changes: Any) -> None:
        """Change entries of the record in one step."""
        changed = {**self.record, **changes}
        unfinished = self.folder / ".instance.json"
        unfinished.write_text(json.dumps(changed))
        unfinished.replace(self.folder / "instance.json")

    def keep(self, name: str) -> None:
        """Take the server from its owner: it lives until ``down``, under ``name``."""
        self.write(owner=None, name=name)

    @property
    def elsewhere(self) -> bool:
        """Whether it belongs to another container that shares our temporary folder: its pids mean nothing here."""
        boot, namespace = self.record.get("world", _world())
        return bool(boot == _world()[0] and namespace != _world()[1])

    @property
    def running(self) -> bool:
        """Whether the server itself (not only a helper of it) lives."""
        with contextlib.suppress(OSError):
            process = parse_record((self.folder / f"{self.record.get('kind')}.pid").read_text())
            return process is not None and process.alive()
        return False

    def abandoned(self) -> bool:
        """Tell whether the owner is dead."""
        record = self.record
        owner = record.get("owner")
        if owner is None or self.elsewhere:
            return False
        return record["world"] != _world() or not ProcessId(owner["pid"], 0, owner["started"]).alive()

    def processes(self, *, take: bool = False) -> list[ProcessId]:
        """Return the processes of this server that still run. ``take`` removes their records first."""
        found = []
        for path in sorted(self.folder.glob("*.pid")):
            with contextlib.suppress(FileNotFoundError), path.open() as record:
                if take:
                    path.unlink()  # before reading: see the launcher in processes.py
                process = parse_record(record.read())
                if process is not None and process.alive():
                    found.append(process)
        return found

    def destroy(self) -> None:
        """Kill its processes and remove its folder (not a data folder of the user's). Safe to repeat."""
        record = self.record
        if record.get("world", _world()) == _world():  # else the machine was booted since
            kill_all(self.processes(take=True), first=record.get("stop_signal"))
            if record.get("kind") == "postgres":
                data = record["data"]
                remove_segment((self.folder if data is None else Path(data)) / "data")
        for _ in range(5):  # a dying child may still write
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                return
            time.sleep(0.1)
        raise ServerError(f"cannot remove the folder {self.folder}, remove it by hand")


def all_instances() -> list[Instance]:
    """Return every private server of this user, whoever owns it."""
    folder = state_folder(create=False)
    found = [Instance(path) for path in sorted(folder.glob("[!.]*"))]
    return [instance for instance in found if not instance.elsewhere]


def sweep() -> int:
    """Stop and remove the servers whose owner is dead; return how many."""
    swept = 0
    for instance in all_instances():
        # One that cannot be removed must not keep everybody from starting; `down` complains about it.
        with contextlib.suppress(ServerError):
            if instance.abandoned():
                instance.destroy()
                swept += 1
    for unfinished in _unfinished(_UNFINISHED_S):
        shutil.rmtree(unfinished, ignore_errors=True)
    return swept


def destroy_everything() -> int:
    """Stop and remove every private server of this user and the folder itself; return how many there were.

    Raises ``ServerError`` about the first that could not be removed, after all others were.
    """
    instances = all_instances()
    failed: list[ServerError] = []
    for instance in instances:
        try:
            instance.destroy()
        except ServerError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    for unfinished in _unfinished(0.0):
        shutil.rmtree(unfinished, ignore_errors=True)
    with contextlib.suppress(OSError):  # somebody is just starting another one
        state_folder(create=False).rmdir()
    return len(instances)


def watch_this_process() -> None:
    """See to it that the servers of this process do not outlive it (once per process)."""
    with _lifelines_lock:
        if os.getpid() not in _lifelines:
            _lifelines[os.getpid()] = _start_watchdog()


# When the owner is gone: nothing of it is left (it stopped its servers), or sweep.
_WATCHDOG = """
read -r _
grep -qs "\\"owner\\": {\\"pid\\": $1," "$2"/*/instance.json || exit 0
shift 2
exec "$@"
"""


def _start_watchdog() -> int:
    reading, writing = os.pipe()  # neither end is inherited by programs that we start
    folder = state_folder()
    package_root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    sweeping = [sys.executable, "-m", "dramatiq_safeops.testing", "sweep"]
    watchdog = subprocess.Popen(
        ["sh", "-c", _WATCHDOG, "sh", str(os.getpid()), str(folder), *sweeping],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={**os.environ, "PYTHONPATH": search, "TMPDIR": str(folder.parent)},
        start_new_session=True,
    )
    os.close(reading)
    # It always outlives us, so nobody can wait for it, and Popen should not complain about that.
    watchdog.returncode = 0
    return writing


def _forget_lifelines() -> None:
    global _lifelines_lock
    _lifelines_lock = threading.Lock()  # another thread may have held it at the fork
    # A forked child must not keep its parent's pipe open, nor believe that it has a watchdog.
    for writing in _lifelines.values():
        with contextlib.suppress(OSError):
            os.close(writing)
    _lifelines.clear()


os.register_at_fork(after_in_child=_forget_lifelines)


def _unfinished(age: float) -> Iterator[Path]:
    for path in state_folder(create=False).glob(".*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= age:
                yield path


def _world() -> list[str]:
    """Name the world in which a pid has its meaning: this boot of the machine, this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid")]
    except OSError:
        return ["", ""]
