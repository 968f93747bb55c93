"""Where RabbitMQ's and PostgreSQL's programs are.

Runs in: the process that starts servers. Needs: nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dramatiq_safeops.testing.rabbitmq_root import chosen_root, inside, version_in


@dataclass(frozen=True)
class RabbitmqBinaries:
    """RabbitMQ's scripts, never the wrappers in /usr/sbin: those change the user or refuse to run."""

    server: Path
    ctl: Path
    epmd: Path
    #: The folder to which these paths belong (see ``rabbitmq_root``); None for this machine.
    root: Path | None = None

    def command(self, program: Path, *arguments: str, folder: Path) -> list[str]:
        """Return how to run one of the programs with ``folder`` as its working directory."""
        before = [] if self.root is None else inside(self.root, folder)
        return [*before, str(program), *arguments]


@dataclass(frozen=True)
class PostgresBinaries:
    """PostgreSQL's programs, all of one version."""

    initdb: Path
    postgres: Path
    psql: Path


def find_rabbitmq() -> RabbitmqBinaries | None:
    """Return RabbitMQ's programs, or None if this machine has none; those that SAFEOPS_RABBITMQ names, if it is set."""
    root = chosen_root()
    if root is not None:
        return None if version_in(root) is None else _in_root(root)
    folders = [Path("/usr/lib/rabbitmq/bin")]
    folders += newest_first(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin"))
    folders += [Path("/opt/rabbitmq/sbin")]
    in_path = shutil.which("rabbitmq-server")
    if in_path is not None:
        # Where packages put a wrapper it is a script of its own; elsewhere (brew, tar) a link to the real one.
        resolved = Path(in_path).resolve()
        if (resolved.parent / "rabbitmq-env").exists():
            folders.append(resolved.parent)
    epmd = find_epmd()
    for folder in folders:
        server, ctl = folder / "rabbitmq-server", folder / "rabbitmqctl"
        if epmd is not None and server.exists() and ctl.exists():
            return RabbitmqBinaries(server, ctl, epmd)
    return None


def _in_root(root: Path) -> RabbitmqBinaries:
    folder = Path("/usr/lib/rabbitmq/bin")
    return RabbitmqBinaries(folder / "rabbitmq-server", folder / "rabbitmqctl", Path("/usr/bin/epmd"), root)


def find_epmd() -> Path | None:
    """Return Erlang's port mapper."""
    in_path = shutil.which("epmd")
    if in_path is not None:
        return Path(in_path)
    return next(iter(newest_first(Path("/usr/lib/erlang").glob("erts-*/bin/epmd"))), None)


def find_postgres() -> PostgresBinaries | None:
    """Return PostgreSQL's programs, or None if this machine has none.

    The versioned folders of Debian come first, newest version first: what PATH has may be a wrapper, or the client
    of one version beside the server of another.
    """
    folders = newest_first(Path("/usr/lib/postgresql").glob("*/bin"))
    folders += newest_first(Path("/usr").glob("pgsql-*/bin"))
    told = _ask_pg_config()
    if told is not None:
        folders.append(told)
    in_path = shutil.which("postgres")
    if in_path is not None:
        folders.append(Path(in_path).resolve().parent)
    for folder in folders:
        initdb, postgres, psql = folder / "initdb", folder / "postgres", folder / "psql"
        if initdb.exists() and postgres.exists():
            # Some distributions keep the client apart from the server.
            elsewhere = None if psql.exists() else shutil.which("psql")
            return PostgresBinaries(initdb, postgres, psql if elsewhere is None else Path(elsewhere))
    return None


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort paths by the numbers in them, so that 15 stands before 9."""
    return sorted(
        paths, key=lambda path: [int(number) for number in re.findall(r"\d+", str(path))], reverse=True
    )


def _ask_pg_config() -> Path | None:
    pg_config = shutil.which("pg_config")
    if pg_config is None:
        return None
    answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
    return Path(answer.stdout.strip()) if answer.returncode == 0 and answer.stdout.strip() else None
