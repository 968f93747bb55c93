"""Install RabbitMQ and PostgreSQL where they are missing, without starting any server of the system.

Runs in: ``python -m dramatiq_safeops.testing up`` and ``install``. Needs: a Debian or Ubuntu, and root or sudo.
Elsewhere the error names the one command to run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dramatiq_safeops.testing.binaries import find_postgres, find_rabbitmq
from dramatiq_safeops.testing.make_root import make_root
from dramatiq_safeops.testing.processes import ServerError
from dramatiq_safeops.testing.rabbitmq_root import RABBITMQ, chosen_root

# One script, run as root, so that its end undoes what its beginning did even if we are killed meanwhile.
#
# Debian's packages start their servers unless /usr/sbin/policy-rc.d says 101 ("forbidden"). That also keeps them from
# stopping or restarting servers that run already. A policy that forbids starts anyway (as in containers) stays; one
# that allows them is put aside and back; one that an earlier, killed run of ours left is taken away.
_SCRIPT = """
policy=$1
shift
saved=$policy.before-safeops
forbids() { [ -x "$policy" ] && { "$policy" rabbitmq-server start; [ $? -eq 101 ]; }; }
ours() { grep -qs 'dramatiq-safeops' "$policy"; }
restore() { rm -f "$policy"; [ ! -e "$saved" ] || mv -f "$saved" "$policy"; }
if ours || ! forbids; then
    trap restore EXIT
    trap 'exit 1' HUP INT TERM
    ours || [ ! -e "$policy" ] || mv -f "$policy" "$saved" || exit 1
    printf '#!/bin/sh\\n# dramatiq-safeops: no server starts while packages are installed\\nexit 101\\n' \\
        >"$policy" || exit 1
    chmod 755 "$policy" || exit 1
fi
# needrestart would restart the services whose libraries were replaced.
export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1
# One source of many may be out of reach; what counts is whether the packages can be installed.
apt-get update
apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" || exit 1
# Nor should they start with the next boot: we only want their programs.
if command -v systemctl >/dev/null; then systemctl disable "$@" >/dev/null 2>&1; fi
exit 0
"""

Run = Callable[[Sequence[str]], int]


def _run(command: Sequence[str]) -> int:
    # Our own output may be JSON that a program reads.
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode


@dataclass(frozen=True)
class Machine:
    """What an install needs to know and to do; tests give another one."""

    run: Run = _run
    which: Callable[[str], str | None] = shutil.which
    has_rabbitmq: Callable[[], bool] = lambda: find_rabbitmq() is not None
    has_postgres: Callable[[], bool] = lambda: find_postgres() is not None
    root: bool = os.getuid() == 0
    policy: Path = Path("/usr/sbin/policy-rc.d")
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command's output


def ensure_binaries(*, rabbitmq: bool = True, postgres: bool = True, machine: Machine | None = None) -> None:
    """Install the programs of RabbitMQ and PostgreSQL that are missing; do nothing where they are there.

    With SAFEOPS_RABBITMQ that version of RabbitMQ is fetched into a folder of its own instead.

    Servers that run already are not touched, and none is started. Raises ``ServerError`` with the command to run
    where we may not or cannot install.
    """
    machine = Machine() if machine is None else machine
    root = chosen_root() if rabbitmq else None
    if root is not None:
        if not machine.has_rabbitmq():
            make_root(root, version=os.environ[RABBITMQ], say=machine.say)
        rabbitmq = False

    def missing() -> list[str]:
        packages = []
        if rabbitmq and not machine.has_rabbitmq():
            packages.append("rabbitmq-server")
        if postgres and not machine.has_postgres():
            packages.append("postgresql")
        return packages

    packages = missing()
    if not packages:
        return
    names = " and ".join(packages)
    rights = _rights(machine)
    if machine.which("apt-get") is None or rights is None:
        raise ServerError(f"the programs of {names} are missing, {_advice(machine, packages)}")
    machine.say(
        f"The programs of {names} are missing, installing the packages (no server of the system is started) ..."
    )
    status = machine.run([*rights, "sh", "-c", _SCRIPT, "sh", str(machine.policy), *packages])
    if status != 0:
        raise ServerError(
            f"installing {names} failed (exit code {status}), its own words stand above; {_advice(machine, packages)}"
        )
    if still := missing():
        raise ServerError(
            f"{' and '.join(still)} was installed but its programs are not where they should be"
        )


def _rights(machine: Machine) -> list[str] | None:
    """Return what to put before a command to run it as root; None if we cannot."""
    if machine.root:
        return []
    if machine.which("sudo") is not None and machine.run(["sudo", "-n", "true"]) == 0:
        return ["sudo", "-n"]
    return None


def _advice(machine: Machine, packages: Sequence[str]) -> str:
    names = " ".join(packages)
    if machine.which("apt-get") is not None:
        return f"run: sudo apt-get update && sudo apt-get install -y --no-install-recommends {names}"
    if machine.which("dnf") is not None:
        return f"run: sudo dnf install -y {names.replace('postgresql', 'postgresql-server')}"
    if machine.which("brew") is not None:
        return f"run: brew install {names.replace('rabbitmq-server', 'rabbitmq')}"
    return (
        "run: docker compose -f compose/compose.yaml up -d, and set SAFEOPS_AMQP_URL and SAFEOPS_DATABASE_URL to its "
        "servers"
    )
