"""Fetch another RabbitMQ than the machine's, with all that it needs, into a folder of its own.

Runs in: ``python -m dramatiq_safeops.testing install`` with SAFEOPS_RABBITMQ. Needs: Debian's ``apt-get``, a mirror of
Debian in its configuration, ``dpkg-deb``; no root.

The packages are unpacked, not installed: none of their scripts runs, nothing on the machine changes, nothing is mounted.
apt works on lists and a status of its own, as if the machine were empty, so it fetches down to the C library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dramatiq_safeops.testing.processes import ServerError
from dramatiq_safeops.testing.rabbitmq_root import RELEASES, inside, version_in

#: Beside RabbitMQ what its scripts take for granted: on a real machine these cannot be missing.
_PACKAGES = ("rabbitmq-server", "coreutils", "dash", "grep", "hostname", "mawk", "sed")

#: Debian's keys, under their old and their new name. Where both are missing it is left to apt which it trusts.
_KEYS = (
    "/usr/share/keyrings/debian-archive-keyring.pgp",
    "/usr/share/keyrings/debian-archive-keyring.gpg",
)

_DEAD_WEIGHT = ("usr/share/doc", "usr/share/locale", "usr/share/man")

_ADVICE = "set SAFEOPS_RABBITMQ to a folder that holds a RabbitMQ 4, or unset it for the machine's own"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command's output


def make_root(root: Path, *, version: str, say: Callable[[str], None] = _say) -> None:
    """Make ``root`` hold RabbitMQ ``version`` of ``RELEASES``; do nothing where it does.

    Takes about 20 s and 200 MB. Who is killed meanwhile leaves no half a root. Raises ``ServerError`` with what is
    missing.
    """
    for tool in ("apt-get", "dpkg-deb", "unshare"):
        if shutil.which(tool) is None:
            raise ServerError(
                f"RabbitMQ {version} comes from Debian's packages, and this machine has no {tool}; {_ADVICE}"
            )
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(root.parent):
            if version_in(root) is None:
                _make(root, version, say)
    except OSError as error:
        raise ServerError(
            f"RabbitMQ {version} cannot be put into {root} ({error.filename}: {error.strerror})"
        ) from error


def _make(root: Path, version: str, say: Callable[[str], None]) -> None:
    release = RELEASES[version]
    mirror = _mirror()
    say(f"RabbitMQ {version} is missing, fetching it from {mirror} (Debian {release}) to {root} ...")
    workshop = Path(tempfile.mkdtemp(prefix=".making-", dir=root.parent))
    try:
        packages = _fetch(workshop, mirror, release)
        say(f"unpacking {len(packages)} packages ...")
        made = workshop / "root"
        made.mkdir(mode=0o755)
        for package in packages:
            _run(["dpkg-deb", "--extract", str(package), str(made)])
        _finish(made)
        found = _check(made)
        shutil.rmtree(root, ignore_errors=True)  # somebody deleted half of it
        made.rename(root)
        moved_on = "" if found.startswith(f"{version}.") else f"; Debian {release} has no {version} any more"
        say(f"RabbitMQ {found} is in {root}{moved_on}.")
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _fetch(workshop: Path, mirror: str, release: str) -> list[Path]:
    apt = workshop / "apt"
    for folder in ("lists/partial", "archives/partial", "parts"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    keys = next((f"[signed-by={file}] " for file in _KEYS if Path(file).exists()), "")
    (apt / "sources.list").write_text(f"deb {keys}{mirror} {release} main\n")
    # On the command line, where they count more than the machine's settings, which (proxies!) hold for the rest.
    settings = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": apt / "parts",
        "Dir::Etc::preferences": apt / "preferences",
        "Dir::Etc::preferencesparts": apt / "parts",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::State::extended_states": apt / "extended_states",
        "Dir::Cache": apt,
        "Dir::Cache::archives": apt / "archives",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",  # the folder is ours alone: apt's own account could not write there
    }
    command = ["apt-get", "-qq", "--yes"]
    for name, value in settings.items():
        command += ["-o", f"{name}={value}"]
    _run([*command, "update"])
    _run([*command, "--download-only", "install", *_PACKAGES])
    return sorted((apt / "archives").glob("*.deb"))


def _finish(made: Path) -> None:
    for folder in _DEAD_WEIGHT:
        shutil.rmtree(made / folder, ignore_errors=True)
    (made / "mnt").mkdir(exist_ok=True)  # where `inside` puts a program's view together
    # awk's name is made by the scripts of the package.
    with contextlib.suppress(FileExistsError):
        (made / "usr/bin/awk").symlink_to("mawk")
    # No program here is to lend anybody the rights of its owner.
    for folder, _, names in os.walk(made):
        for path in (Path(folder, name) for name in names):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                path.chmod(stat.S_IMODE(mode) & ~(stat.S_ISUID | stat.S_ISGID))


def _check(made: Path) -> str:
    """Return the version that is there, after having run something of it."""
    try:
        _run([*inside(made, made.parent), "erl", "+V"])
    except ServerError as error:
        raise ServerError(
            f"{error}; without root this needs a kernel that lets users make namespaces, in a container the right to mount"
        ) from None
    version = version_in(made)
    if version is None:
        raise ServerError(f"Debian's package of RabbitMQ has its programs elsewhere by now; {_ADVICE}")
    return version


def _mirror() -> str:
    """Return where this machine gets Debian's main packages from, as apt itself tells."""
    fields = "$(ORIGIN)|$(RELEASE)|$(REPO_URI)"
    for line in _run(["apt-get", "indextargets", "--format", fields, "Created-By: Packages"]).splitlines():
        origin, release, uri = line.split("|", 2)
        # The origin stays unknown until apt was updated. Updates and security fixes have places of their own, which
        # do not hold all.
        if origin in ("Debian", "$(ORIGIN)") and "-" not in release:
            return uri
    raise ServerError(
        f"apt on this machine names no mirror of Debian (see /etc/apt/sources.list.d); {_ADVICE}"
    )


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-500:]
        raise ServerError(f"{command[0]} failed with {done.returncode}: {said}; {_ADVICE}")
    return done.stdout


@contextlib.contextmanager
def _alone_in(cache: Path) -> Iterator[None]:
    """One at a time; what those left who were killed is removed."""
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache.glob(".making-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
