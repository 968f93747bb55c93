"""Another RabbitMQ than the machine's is fetched once, whole, and with a sentence where that cannot be.

The machine is a fake: ``apt-get``, ``dpkg-deb`` and ``unshare`` are scripts here. That what they fetch runs is shown by
``make test-rabbitmq``, whose tests all run on it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dramatiq_safeops.testing.binaries import find_rabbitmq
from dramatiq_safeops.testing.install import Machine, ensure_binaries
from dramatiq_safeops.testing.processes import ServerError
from dramatiq_safeops.testing.rabbitmq_root import cache_folder, chosen_root, version_in

APT = """#!/bin/sh
echo "$*" >>{folder}/calls
case "$*" in
indextargets*)
    echo "Docker|bookworm|https://docker.example/"
    echo "Debian|bookworm-security|http://mirror.example/debian-security/"
    echo "Debian|bookworm|http://mirror.example/debian/" ;;
*update)
    for word in "$@"; do case $word in Dir::Etc::sourcelist=*) cat "${{word#*=}}" >>{folder}/sources ;; esac; done
    exit {status} ;;
*)
    for word in "$@"; do case $word in Dir::Cache::archives=*) touch "${{word#*=}}/rabbitmq.deb" ;; esac; done ;;
esac
"""

DPKG_DEB = """#!/bin/sh
mkdir -p "$3/usr/bin" "$3/usr/share/doc" "$3/usr/lib/rabbitmq/lib/rabbitmq_server-4.0.5/sbin"
touch "$3/usr/bin/passwd"
chmod 6755 "$3/usr/bin/passwd"
"""


class FakeMachine:
    """A machine whose apt fetches a RabbitMQ of one empty file."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, status: int = 0, asked_for: str = "4.0"
    ) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.root = folder / "cache" / f"rabbitmq-{asked_for}"
        monkeypatch.setenv("SAFEOPS_RABBITMQ", asked_for)
        for module in ("binaries", "install"):
            monkeypatch.setattr(f"dramatiq_safeops.testing.{module}.chosen_root", lambda: self.root)
        programs = folder / "bin"
        programs.mkdir()
        scripts = {
            "apt-get": APT.format(folder=folder, status=status),
            "dpkg-deb": DPKG_DEB,
            "unshare": "#!/bin/sh\n",
        }
        for name, text in scripts.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for name in ("sh", "cat", "chmod", "mkdir", "touch"):
            found = shutil.which(name)
            assert found is not None
            (programs / name).symlink_to(found)
        monkeypatch.setenv("PATH", str(programs))

    def install(self) -> None:
        ensure_binaries(postgres=False, machine=Machine(say=self.said.append))

    @property
    def calls(self) -> int:
        calls = self.folder / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_it_is_fetched_once_from_the_mirror_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test run that fetches 60 MB each time, or from a server that this machine must not reach, is run by nobody."""
    machine = FakeMachine(tmp_path, monkeypatch)

    machine.install()

    assert version_in(machine.root) == "4.0.5"
    found = find_rabbitmq()
    assert found is not None
    assert found.root == machine.root
    source = (tmp_path / "sources").read_text()
    assert source.endswith(" http://mirror.example/debian/ trixie main\n")
    assert "RabbitMQ 4.0 is missing, fetching it from http://mirror.example/debian/" in machine.said[0]
    assert machine.said[-1] == f"RabbitMQ 4.0.5 is in {machine.root}."

    calls, said = machine.calls, len(machine.said)
    machine.install()
    assert (machine.calls, len(machine.said)) == (calls, said)


def test_a_release_of_debian_that_has_moved_on_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of a version that was not the one that ran mislead whoever compares them."""
    machine = FakeMachine(tmp_path, monkeypatch, asked_for="4.3")

    machine.install()

    assert machine.said[-1].startswith("RabbitMQ 4.0.5 is in ")
    assert machine.said[-1].endswith("; Debian sid has no 4.3 any more.")


def test_what_is_unpacked_lends_nobody_the_rights_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old set-uid programs of root, in a folder that everybody can read, wait for somebody to find their hole."""
    machine = FakeMachine(tmp_path, monkeypatch)

    machine.install()

    assert (machine.root / "usr/bin/passwd").stat().st_mode & 0o7777 == 0o755


def test_what_a_killed_fetch_has_left_is_removed_and_fetched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a RabbitMQ would fail in ways that look like faults of the product."""
    machine = FakeMachine(tmp_path, monkeypatch)
    (machine.root.parent / ".making-killed" / "root" / "usr").mkdir(parents=True)
    (machine.root / "usr").mkdir(parents=True)

    machine.install()

    assert version_in(machine.root) == "4.0.5"
    assert not [path for path in machine.root.parent.iterdir() if path.name.startswith(".making")]


def test_a_fetch_that_fails_leaves_nothing_and_says_what_apt_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, or behind a mirror without that release."""
    machine = FakeMachine(tmp_path, monkeypatch, status=100)

    with pytest.raises(ServerError, match="apt-get failed with 100"):
        machine.install()

    assert find_rabbitmq() is None
    assert [path.name for path in machine.root.parent.iterdir()] == [".lock"]


@pytest.mark.parametrize("tool", ["apt-get", "dpkg-deb", "unshare"])
def test_a_machine_without_the_tools_for_it_is_told_which_is_missing(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mac, a Fedora, an Alpine."""
    machine = FakeMachine(tmp_path, monkeypatch)
    (tmp_path / "bin" / tool).unlink()

    with pytest.raises(ServerError, match=f"this machine has no {tool}; set SAFEOPS_RABBITMQ to a folder"):
        machine.install()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("5", "must be 4.0 or 4.3, the path of a folder that holds a RabbitMQ, or unset, but it is '5'"),
        ("/no/such/folder", "names the folder /no/such/folder, which holds no RabbitMQ"),
    ],
)
def test_a_name_of_nothing_is_one_clear_sentence(
    name: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falling back to the machine's RabbitMQ would prove the wrong thing."""
    monkeypatch.setenv("SAFEOPS_RABBITMQ", name)

    with pytest.raises(ServerError, match=f"SAFEOPS_RABBITMQ {sentence}"):
        find_rabbitmq()


def test_without_a_name_it_is_the_machines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable names nothing: that is how make unsets them."""
    monkeypatch.setenv("SAFEOPS_RABBITMQ", "")

    assert chosen_root() is None


@pytest.mark.parametrize(("uid", "folder"), [(0, "/var/cache"), (1000, "/home/mine")])
def test_roots_are_kept_where_caches_are(uid: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where people look for what may be deleted; one that root has made serves all."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/mine")
    monkeypatch.setattr(os, "getuid", lambda: uid)

    assert cache_folder() == Path(folder, "dramatiq-safeops")
