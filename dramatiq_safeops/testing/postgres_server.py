"""A private PostgreSQL server, for tests and the demo.

Runs in: the process that starts servers. Needs: PostgreSQL >= 14 on this machine (see ``binaries``). As root it runs
under the account ``postgres``, or ``nobody`` where there is none, since PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import signal
import socket
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dramatiq_safeops.testing.binaries import find_postgres
from dramatiq_safeops.testing.processes import ServerError, free_ports
from dramatiq_safeops.testing.server import READY_TIMEOUT_S, PrivateServer, clean_environment
from dramatiq_safeops.testing.shared_memory import remove_segment

#: Not PostgreSQL's usual name, so that this URL with another port does not work by accident.
_ROLE = "safeops"
_DATABASE = "postgres"

#: For a server whose data need not survive a power cut. It does survive kill -9: what was written is with the
#: operating system by then, which goes on living.
_SETTINGS: dict[str, object] = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": 200,
    "listen_addresses": "127.0.0.1",
    # Its path would be too long in a deep folder, and as root it would stand in a folder of another account.
    "unix_socket_directories": "",
    # Files in the data folder, where the default leaves segments in /dev/shm after a kill -9.
    "dynamic_shared_memory_type": "mmap",
    "logging_collector": "off",
}


class PostgresServer(PrivateServer):
    """A PostgreSQL server of one's own: start, kill, pause and restart it as a test needs.

    ::

        with PostgresServer.start() as postgres:
            store = PostgresStore(postgres.url)
            ...
            postgres.kill()
            postgres.restart()

    The role in ``url`` is a superuser, with a random password: other users of the machine can reach the port, too.
    """

    kind = "postgres"
    title = "PostgreSQL"
    # "Immediate shutdown": as quick as a kill, but it removes what PostgreSQL keeps in the kernel.
    stop_signal = signal.SIGQUIT

    def __init__(self, folder: Path | None, *, settings: Mapping[str, object]) -> None:
        found = find_postgres()
        if found is None:
            raise ServerError("PostgreSQL is not installed, run: python -m dramatiq_safeops.testing install")
        super().__init__(folder)
        self._binaries = found
        self._settings = {**_SETTINGS, **settings}
        self._user = _account() if os.getuid() == 0 else None
        self._password = ""
        self._port = 0

    @classmethod
    def start(
        cls,
        folder: Path | None = None,
        *,
        settings: Mapping[str, object] | None = None,
        timeout: float = READY_TIMEOUT_S,
    ) -> PostgresServer:
        """Make a database cluster, start its server and return it when clients can connect (1 to 3 s).

        ``folder`` keeps its data after ``stop()`` and may hold data of an earlier server; None means a folder that
        goes with it. ``settings`` are lines for postgresql.conf, say ``{"max_connections": 20}``. Raises
        ``ServerError`` when it is not ready within ``timeout`` seconds, or cannot run at all.
        """
        server = cls(folder, settings={} if settings is None else settings)
        server._boot(timeout)
        return server

    @property
    def url(self) -> str:
        """``postgresql://safeops:PASSWORD@127.0.0.1:PORT/postgres``."""
        return f"postgresql://{_ROLE}:{self._password}@127.0.0.1:{self._port}/{_DATABASE}"

    def psql(self, sql: str, *, database: str = _DATABASE, timeout: float = 60.0) -> str:
        """Run SQL through ``psql`` and return its rows, unaligned and without headings (``a|b``, one per line)."""
        connection = f"host=127.0.0.1 port={self._port} user={_ROLE} dbname={database} connect_timeout=10"
        command = [str(self._binaries.psql), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", connection]
        environment = {**clean_environment(os.environ, "PG"), "PGPASSWORD": self._password}
        try:
            done = subprocess.run(
                command,
                input=sql,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ServerError(f"psql did not end within {timeout:.0f} s") from None
        if done.returncode != 0:
            raise ServerError(f"psql failed with {done.returncode}: {' '.join(done.stderr.split())[-500:]}")
        return done.stdout.strip()

    def kill(self) -> None:
        """SIGKILL to the server and all its processes. Data and port stay; ``restart()`` brings it back."""
        super().kill()
        remove_segment(self._data)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _prepare(self) -> None:
        self._port = free_ports(1)[0]
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            _check_passable(self.folder, self._user)
        password = self.folder / "password"
        if not password.exists():
            password.touch(mode=0o600)
            password.write_text(secrets.token_hex(16))
            self._give(password)
        self._password = password.read_text().strip()
        if not (self._data / "PG_VERSION").exists():
            self._data.mkdir(mode=0o700, exist_ok=True)
            self._give(self._data)
            self._make_cluster(password)

    def _make_cluster(self, password: Path) -> None:
        command = [str(self._binaries.initdb), "-D", str(self._data), "-U", _ROLE, "--pwfile", str(password)]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]
        # Started like the server itself, so that a sweep finds it when we are killed meanwhile.
        making = self._start_process("initdb", command, environment=self._environment(), user=self._user)
        try:
            status = making.wait(READY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ServerError(f"initdb did not end within {READY_TIMEOUT_S:.0f} s") from None
        if status != 0:
            raise ServerError(f"initdb failed with {status}, its log says: {self._complaint()}")

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [str(self._binaries.postgres), "-D", str(self._data), "-c", f"port={self._port}"]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        return self._start_process("postgres", command, environment=self._environment(), user=self._user)

    def _answers(self) -> bool:
        # The eighth line is the postmaster's own word, but a paused one cannot take it back: so it has to talk, too.
        with contextlib.suppress(OSError, IndexError):
            status = (self._data / "postmaster.pid").read_text().splitlines()[7]
            return status.strip() == "ready" and _talks(self._port)
        return False

    def _shutdown_signal(self) -> int:
        return signal.SIGINT  # "fast": clients are disconnected; SIGTERM would wait for them to leave

    def _environment(self) -> dict[str, str]:
        return {**clean_environment(os.environ, "PG", "LC_"), "LANG": "C"}

    def _give(self, path: Path) -> None:
        if self._user is not None:
            account = pwd.getpwnam(self._user)
            os.chown(path, account.pw_uid, account.pw_gid)


def _account() -> str:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ServerError(
        "PostgreSQL refuses to run as root and there is no account 'postgres' or 'nobody', add one"
    )


def _check_passable(folder: Path, user: str) -> None:
    for step in [folder, *folder.parents]:
        if not step.stat().st_mode & stat.S_IXOTH:
            raise ServerError(
                f"PostgreSQL runs as {user!r} here and cannot enter {step}, set TMPDIR to a folder that all may enter"
            )


def _talks(port: int) -> bool:
    """Ask for encryption, the one question that needs no login and is answered by one byte."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"\x00\x00\x00\x08\x04\xd2\x16\x2f")
            return connection.recv(1) in (b"N", b"S")
    except OSError:
        return False
