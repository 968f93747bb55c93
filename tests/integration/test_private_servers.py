"""Private servers start anywhere, take every blow, and leave nothing behind.

Needs: RabbitMQ and PostgreSQL on this machine. Nothing here touches servers that run already: what is started by a
process of its own lives in a temporary folder of its own (``world``), where ``down`` may stop everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pika
import pytest

from dramatiq_safeops.testing import PostgresServer, RabbitmqServer, postgres_server, servers
from dramatiq_safeops.testing.binaries import find_postgres, find_rabbitmq
from dramatiq_safeops.testing.install import Machine, ensure_binaries
from dramatiq_safeops.testing.processes import ServerError, descendants_of, free_ports, kill_all, look_at
from dramatiq_safeops.testing.rabbitmq_server import ApiError
from dramatiq_safeops.testing.server import PortTaken
from dramatiq_safeops.testing.shared_memory import segment_of

#: Generous: a machine of two cores that runs something else as well.
PATIENCE_S = 60.0
#: A queue that is younger than this when RabbitMQ is killed may be gone afterwards: that is RabbitMQ's doing.
SETTLING_S = 3.0
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65_534


# RabbitMQ


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[RabbitmqServer]:
    with RabbitmqServer.start() as server:
        yield server


def test_a_killed_rabbitmq_comes_back_with_port_and_messages(rabbitmq: RabbitmqServer) -> None:
    """A crash test is worth something only if the broker after it is the one before it."""
    # Given a confirmed message, and a node that is killed
    url = rabbitmq.url
    with connected(rabbitmq) as connection:
        channel = connection.channel()
        channel.queue_declare("kept", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "kept", b"precious", pika.BasicProperties(delivery_mode=2))
        # RabbitMQ writes declarations to disk a moment later and confirms none of it: there is nothing to wait for.
        time.sleep(SETTLING_S)
        rabbitmq.kill()
        assert not rabbitmq.running
        with pytest.raises(pika.exceptions.AMQPError):
            connection.process_data_events(PATIENCE_S)

    # When it is started again
    rabbitmq.restart()

    # Then the URL still holds, and the message is there
    assert rabbitmq.url == url
    with connected(rabbitmq) as connection:
        _, _, body = connection.channel().basic_get("kept", auto_ack=True)
        assert body == b"precious"


def test_a_paused_rabbitmq_keeps_its_connections_and_answers_nobody(rabbitmq: RabbitmqServer) -> None:
    """A frozen machine is not a dead one: its clients learn nothing."""
    with connected(rabbitmq) as connection:
        rabbitmq.pause()
        assert rabbitmq.running
        with pytest.raises(ServerError, match="did not answer within 1 s"):
            rabbitmq.wait_ready(timeout=1)

        rabbitmq.resume()

        rabbitmq.wait_ready()
        assert connection.channel().is_open


def test_the_memory_alarm_is_on_and_off_when_the_call_returns(rabbitmq: RabbitmqServer) -> None:
    """A test under an alarm that comes a little later tests nothing."""
    rabbitmq.memory_alarm(True)
    with pytest.raises(ApiError) as refused:
        rabbitmq.api("GET", "/api/health/checks/alarms")
    assert refused.value.status == 503

    rabbitmq.memory_alarm(False)
    assert rabbitmq.api("GET", "/api/health/checks/alarms") == {"status": "ok"}


def test_all_connections_are_closed_also_the_newest(rabbitmq: RabbitmqServer) -> None:
    """The management API's list is seconds old; a fault run drops connections that are younger."""
    with connected(rabbitmq) as connection:
        rabbitmq.close_all_connections("maintenance")

        with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="maintenance"):
            connection.process_data_events(PATIENCE_S)


def test_the_api_and_erlang_are_at_hand(rabbitmq: RabbitmqServer) -> None:
    """Tests read RabbitMQ's own word, not the product's counters."""
    assert rabbitmq.api("PUT", "/api/vhosts/another", {}) is None
    assert rabbitmq.api("GET", "/api/vhosts/another")["name"] == "another"
    assert rabbitmq.eval("1 + 1.") == "2"
    with pytest.raises(ServerError, match="rabbitmqctl eval failed"):
        rabbitmq.eval("nonsense")


def test_nobody_outside_this_machine_can_reach_a_private_rabbitmq(rabbitmq: RabbitmqServer) -> None:
    """It has a well-known password, so it must listen on loopback only."""
    processes = {process.pid for process in rabbitmq.instance.processes()}
    listening = listeners_of(processes)

    assert len(listening) >= 5  # AMQP, distribution, management, metrics, port mapper (once per family)
    assert {address for address, _ in listening} <= {"127.0.0.1", "::1"}


@pytest.mark.skipif(
    not os.environ.get("SAFEOPS_RABBITMQ"), reason="the machine's own RabbitMQ needs nothing mounted"
)
def test_what_is_mounted_for_another_rabbitmq_is_seen_by_nobody_else(rabbitmq: RabbitmqServer) -> None:
    """A mount that stays keeps its folder from being removed, and one that is seen confuses backups."""
    programs = find_rabbitmq()
    assert programs is not None

    for process in rabbitmq.instance.processes():
        assert str(programs.root) in Path(f"/proc/{process.pid}/mountinfo").read_text()
    assert str(programs.root) not in Path("/proc/self/mountinfo").read_text()


def test_an_orderly_restart_works_and_stop_leaves_no_trace(rabbitmq: RabbitmqServer) -> None:
    """The last test of this server: an upgrade of RabbitMQ, then the end of the test run."""
    processes = rabbitmq.instance.processes()
    rabbitmq.terminate()
    rabbitmq.restart()
    processes += rabbitmq.instance.processes()
    rabbitmq.pause()

    rabbitmq.stop()
    rabbitmq.stop()

    assert not any(process.alive() for process in processes)
    assert not rabbitmq.folder.exists()


# PostgreSQL


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer.start() as server:
        yield server


def test_a_killed_postgres_comes_back_with_port_and_rows(postgres: PostgresServer) -> None:
    """What was committed before the crash is there after it, although nothing was synced to the disk."""
    # Given a committed row
    url = postgres.url
    postgres.psql("CREATE TABLE kept (word text); INSERT INTO kept VALUES ('precious')")
    segment = segment_of(postgres.folder / "data")
    assert segment in shared_memory()

    # When the server crashes
    postgres.kill()

    # Then it is gone with all it had, for it leaves memory in the kernel that test runs would pile up
    assert not postgres.running
    assert segment not in shared_memory()

    # And it comes back as it was, from a shutdown in order as well
    for end in (lambda: None, postgres.terminate):
        end()
        postgres.restart()
        assert postgres.url == url
        assert postgres.psql("SELECT word FROM kept") == "precious"


def test_a_paused_postgres_answers_nobody(postgres: PostgresServer) -> None:
    """A frozen database is not a dead one: its clients wait."""
    postgres.pause()
    assert postgres.running
    with pytest.raises(ServerError, match="did not answer within 1 s"):
        postgres.wait_ready(timeout=1)

    postgres.resume()

    postgres.wait_ready()
    assert postgres.psql("SELECT 1") == "1"


def test_the_data_in_a_folder_of_the_users_outlives_the_server(world: World) -> None:
    """Somebody who names a folder wants to look into it afterwards, or go on with it."""
    folder = world.folder / "data-of-mine"
    with PostgresServer.start(folder) as postgres:
        postgres.psql("CREATE TABLE kept (word text); INSERT INTO kept VALUES ('precious')")
    with PostgresServer.start(folder, settings={"max_connections": 7}) as postgres:
        assert postgres.psql("SELECT word FROM kept") == "precious"
        assert postgres.psql("SHOW max_connections") == "7"


def test_a_private_postgres_lets_nobody_in_without_its_password(postgres: PostgresServer) -> None:
    """Its role may run programs: other users of the machine must not."""
    login, _, address = postgres.url.rpartition("@")
    stranger = f"{login.rpartition(':')[0]}:guess@{address}"
    programs = find_postgres()
    assert programs is not None
    refused = subprocess.run(
        [programs.psql, stranger, "-c", "SELECT 1"], capture_output=True, text=True, check=False
    )

    assert refused.returncode != 0
    assert "password authentication failed" in refused.stderr


def test_a_port_that_somebody_took_meanwhile_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two test runs at a time choose their ports at the same moment now and then."""
    choices = [[busy_port := free_ports(1)[0]], free_ports(1)]
    monkeypatch.setattr(postgres_server, "free_ports", lambda count: choices.pop(0))
    with socket.create_server(("127.0.0.1", busy_port)), PostgresServer.start() as postgres:
        assert f":{busy_port}/" not in postgres.url
        assert postgres.psql("SELECT 1") == "1"


def test_a_port_that_is_busy_at_a_restart_is_one_clear_sentence(postgres: PostgresServer) -> None:
    """The port is part of the URL that clients know: there is no other one to take."""
    port = int(postgres.url.rpartition(":")[2].split("/")[0])
    postgres.kill()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(PortTaken, match="another program listens on a port that PostgreSQL needs"),
    ):
        postgres.restart()

    postgres.restart()
    assert postgres.psql("SELECT 1") == "1"


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(world: World) -> None:
    """A wrong setting in a test must not cost two minutes, nor leave a server behind."""
    done = world.python(
        "from dramatiq_safeops.testing import PostgresServer; PostgresServer.start(settings={'nonsense': 1})",
        check=False,
    )

    assert (
        'PostgreSQL ended by itself, its log says: FATAL:  unrecognized configuration parameter "nonsense"'
        in (done.stderr)
    )
    world.wait_for_nothing_left()


# Owners and what they leave behind


class World:
    """A temporary folder, and processes that know no other: their ``down`` cannot hit anybody else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if name == "SAFEOPS_RABBITMQ" or not name.startswith("SAFEOPS_")
            },
            "TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *sys.path[1:]]),
        }

    def command(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run ``python -m dramatiq_safeops.testing``."""
        return subprocess.run(
            [sys.executable, "-m", "dramatiq_safeops.testing", *arguments],
            env={**self.environment, **changes},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def python(self, code: str, *, check: bool = True, **changes: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**self.environment, **changes},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done

    @contextlib.contextmanager
    def owner(self, code: str) -> Iterator[subprocess.Popen[str]]:
        """A process that starts something, says so, and waits to be killed."""
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}\nprint('ready', flush=True)\nimport time; time.sleep(600)"],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def processes(self) -> list[int]:
        """Everybody at work in this folder, whoever started them."""
        return [pid for pid in all_pids() if str(self.folder) in read_link(f"/proc/{pid}/cwd")]

    def instances(self) -> list[Path]:
        return [path for state in self.folder.glob("safeops-*") for path in state.iterdir()]

    def wait_for_nothing_left(self) -> None:
        wait_for(lambda: not self.processes() and not self.instances())


@pytest.fixture
def world() -> Iterator[World]:
    # Not pytest's tmp_path: nobody else may enter that, and PostgreSQL is somebody else when we are root.
    made = World(Path(tempfile.mkdtemp(prefix="safeops-test-")))
    made.folder.chmod(0o755)
    yield made
    made.command("down")
    assert made.processes() == []
    shutil.rmtree(made.folder)


def test_a_killed_owner_leaves_no_server_and_no_file(world: World) -> None:
    """kill -9 of a test run or a demo must not leave 200 MB of servers on a developer's machine."""
    both = (
        "from dramatiq_safeops.testing.servers import start_private\n"
        "started = start_private(rabbitmq=True, postgres=True)"
    )
    with world.owner(both) as owner:
        assert len(world.processes()) > 5
        assert len(world.instances()) == 2

        owner.kill()

        world.wait_for_nothing_left()


def test_what_no_watchdog_removed_is_removed_at_the_next_start(world: World) -> None:
    """Somebody kills everything called python or sh: then the next run has to clean up."""
    with world.owner(
        "from dramatiq_safeops.testing import PostgresServer; p = PostgresServer.start()"
    ) as owner:
        watchdogs = [
            pid for pid in all_pids() if (seen := look_at(pid)) is not None and seen.parent == owner.pid
        ]
        for watchdog in watchdogs:
            if b"sweep" in Path(f"/proc/{watchdog}/cmdline").read_bytes():
                os.kill(watchdog, signal.SIGKILL)
        owner.kill()
        owner.wait()
        abandoned = world.instances()
        assert len(abandoned) == 1
        assert world.processes() != []

        world.python("from dramatiq_safeops.testing import PostgresServer; PostgresServer.start().stop()")

        assert world.instances() == []
        assert world.processes() == []


def test_an_owner_killed_in_the_middle_of_a_start_leaves_nothing(world: World) -> None:
    """Between the start of a process and the note of it there is no gap through which one could slip."""
    code = "from dramatiq_safeops.testing import PostgresServer; PostgresServer.start()"
    for seen_so_far in (0, 1, 2):
        starting = subprocess.Popen([sys.executable, "-c", code], env=world.environment)
        wait_for(lambda enough=seen_so_far: len(world.processes()) > enough)
        starting.kill()
        starting.wait()

        world.wait_for_nothing_left()


def test_what_a_server_has_started_dies_with_it_down_to_the_last() -> None:
    """RabbitMQ's helpers have helpers: who looked right after `down` still saw those of a slow machine."""
    server = subprocess.Popen(["sh", "-c", "sh -c 'sleep 600; :'; :"])
    try:
        root = look_at(server.pid)
        assert root is not None
        wait_for(lambda: len(descendants_of(root)) == 2)
        family = descendants_of(root)

        kill_all([root])

        assert not any(process.alive() for process in family)
    finally:
        server.kill()
        server.wait()


def test_a_sweep_spares_living_owners_and_strangers_with_an_old_pid(world: World) -> None:
    """Pids are used again: a record of last week may name today's editor."""
    with world.owner("from dramatiq_safeops.testing import PostgresServer; p = PostgresServer.start()"):
        living = world.instances()
        stranger = subprocess.Popen(["sleep", "600"])
        try:
            dead = shutil.copytree(
                living[0], living[0].with_name("postgres-dead"), ignore=lambda *_: ["data"]
            )
            record = json.loads((dead / "instance.json").read_text())
            record["owner"]["started"] = "long ago"
            (dead / "instance.json").write_text(json.dumps(record))
            stat = Path(f"/proc/{stranger.pid}/stat").read_text()
            started = look_at(stranger.pid)
            assert started is not None
            (dead / "postgres.pid").write_text(stat.replace(f" {started.started} ", " 4711 "))

            assert "1 server of dead owners" in world.command("sweep").stdout

            assert world.instances() == living
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()


# The command


def test_up_down_and_status_for_two_at_a_time(world: World) -> None:
    """The demo finds its servers again, a second one has its own, and `make down` leaves no process and no file."""
    # Given two starts at the same moment
    starting = [
        subprocess.Popen(
            [sys.executable, "-m", "dramatiq_safeops.testing", "up", "--json", "--name", name],
            env=world.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "other")
    ]
    one, other = (json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in starting)

    # Then they have nothing in common, and each is found again
    assert len({*one.values(), *other.values()}) == 6
    assert json.loads(world.command("up", "--json", "--name", "one").stdout) == one
    states = json.loads(world.command("status", "--json").stdout)
    assert {(state["kind"], state["name"], state["owner"], state["running"]) for state in states} == {
        (kind, name, None, True) for kind in ("rabbitmq", "postgres") for name in ("one", "other")
    }
    with contextlib.closing(pika.BlockingConnection(pika.URLParameters(one["amqp_url"]))) as connection:
        assert connection.is_open

    # When a kept one dies, the next up starts another in its place
    killed = next(state for state in states if state["name"] == "one" and state["kind"] == "postgres")
    pid = int((Path(killed["folder"]) / "postgres.pid").read_text().split()[0])
    segment = segment_of(Path(killed["folder"]) / "data")
    os.kill(pid, signal.SIGKILL)
    again = json.loads(world.command("up", "--json", "--name", "one").stdout)
    assert again["amqp_url"] == one["amqp_url"]
    assert again["database_url"] != one["database_url"]
    assert segment not in shared_memory()

    # And down is the end of all of them, as often as one likes
    assert world.command("down").stdout == "4 servers stopped and removed.\n"
    assert world.processes() == []
    assert list(world.folder.iterdir()) == []
    assert world.command("down").stdout == "0 servers stopped and removed.\n"
    assert world.command("status").stdout == "No server of this user.\n"


def test_up_starts_nothing_when_the_environment_names_the_servers(world: World) -> None:
    """Whoever has servers of their own must not get two more."""
    named = {"SAFEOPS_AMQP_URL": "amqp://mine", "SAFEOPS_DATABASE_URL": "postgresql://mine"}

    done = world.command("up", "--json", **named)

    assert json.loads(done.stdout) == {
        "amqp_url": "amqp://mine",
        "database_url": "postgresql://mine",
        "management_url": None,
    }
    assert world.instances() == []


def test_a_run_takes_the_servers_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a test run; an empty variable names nothing."""
    monkeypatch.setenv("SAFEOPS_AMQP_URL", "amqp://mine")
    monkeypatch.setenv("SAFEOPS_DATABASE_URL", "")
    with servers() as running:
        assert (running.amqp_url, running.rabbitmq) == ("amqp://mine", None)
        assert running.postgres is not None
        assert running.database_url == running.postgres.url


@pytest.mark.parametrize("asked_for", ["/proc", "/no/such/folder"])
def test_an_unwritable_folder_is_one_clear_sentence(world: World, asked_for: str) -> None:
    """A traceback does not tell anybody what to do."""
    done = world.command("up", TMPDIR=asked_for)

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("dramatiq-safeops: ")
    assert done.stderr.count("\n") == 1
    assert asked_for in done.stderr


def test_a_state_folder_that_others_can_write_is_refused(world: World) -> None:
    """In a shared /tmp somebody may have made it before us, to have us kill what they like."""
    (world.folder / f"safeops-{os.getuid()}").mkdir()
    (world.folder / f"safeops-{os.getuid()}").chmod(0o777)

    done = world.command("up")

    assert done.returncode == 1
    assert "is not a folder that only you can write" in done.stderr
    (world.folder / f"safeops-{os.getuid()}").chmod(0o711)


@pytest.mark.skipif(os.getuid() != 0, reason="as a normal user the other tests show it")
def test_both_servers_run_for_a_normal_user(world: World) -> None:
    """Root is the exception on developers' machines."""
    os.chown(world.folder, NOBODY, NOBODY)
    # The user is changed after the imports: this Python may stand where only root can read it.
    code = f"""
import encodings.idna, os
from dramatiq_safeops.testing import servers
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
with servers() as running:
    print(running.postgres.psql("SELECT 1"), running.rabbitmq.eval("1 + 1."))
"""
    done = world.python(code, HOME=str(world.folder))

    assert done.stdout == "1 2\n"
    world.wait_for_nothing_left()
    os.chown(world.folder, 0, 0)


def test_the_import_is_light() -> None:
    """The command line must work where neither psycopg nor pytest is installed."""
    code = "import sys, dramatiq_safeops.testing as _; print([m for m in ('psycopg', 'pytest') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE_ROOT
    )

    assert done.stdout == "[]\n"


# Missing programs. That Debian's packages really come back is shown on a machine that may be changed; here the machine
# is a fake, but the script that guards the install is the real one.


@pytest.fixture
def no_other_rabbitmq(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the machine are what these tests are about, whatever RabbitMQ the others run on."""
    monkeypatch.delenv("SAFEOPS_RABBITMQ", raising=False)


class FakeMachine:
    """A machine without RabbitMQ, on which an install may work or not."""

    def __init__(self, folder: Path, *, tools: Sequence[str], apt_works: bool = True) -> None:
        self.policy = folder / "policy-rc.d"
        self.said: list[str] = []
        self.ran: list[str] = []
        self._tools = tools
        self._installed = folder / "installed"
        self._programs = folder / "bin"
        self._programs.mkdir()
        apt = f"""#!/bin/sh
[ "$1" = update ] && exit 0
{self.policy} rabbitmq-server start
echo "$* policy=$?" >> {self._installed}
exit {0 if apt_works else 100}
"""
        self._script("apt-get", apt)
        self._script("systemctl", f'#!/bin/sh\necho "systemctl $*" >> {folder}/systemctl\n')
        self.systemctl = folder / "systemctl"

    def machine(self, *, root: bool) -> Machine:
        return Machine(
            run=self._run,
            which=lambda name: f"/usr/bin/{name}" if name in self._tools else None,
            has_rabbitmq=self._installed.exists,
            has_postgres=lambda: True,
            root=root,
            policy=self.policy,
            say=self.said.append,
        )

    @property
    def apt_calls(self) -> list[str]:
        return self._installed.read_text().splitlines() if self._installed.exists() else []

    def _script(self, name: str, text: str) -> None:
        (self._programs / name).write_text(text)
        (self._programs / name).chmod(0o755)

    def _run(self, command: Sequence[str]) -> int:
        self.ran.append(" ".join(command[:3]))
        if command[0] == "sudo":
            return 1  # it asks for a password
        search = f"{self._programs}:{os.environ['PATH']}"
        return subprocess.run(command, env={"PATH": search}, check=False).returncode


INSTALLED = ["-o DPkg::Lock::Timeout=300 install -y --no-install-recommends rabbitmq-server policy=101"]


@pytest.mark.usefixtures("no_other_rabbitmq")
def test_nothing_is_installed_where_nothing_is_missing(tmp_path: Path) -> None:
    """`make test` asks each time; most of the time there is nothing to do, and nothing to say."""
    fake = FakeMachine(tmp_path, tools=["apt-get"])

    ensure_binaries(rabbitmq=False, machine=fake.machine(root=True))

    assert (fake.ran, fake.said) == ([], [])


@pytest.mark.usefixtures("no_other_rabbitmq")
@pytest.mark.parametrize("apt_works", [True, False])
def test_packages_are_installed_without_starting_their_servers(tmp_path: Path, apt_works: bool) -> None:
    """An install that starts RabbitMQ on its standard port changes the machine more than anybody asked for."""
    fake = FakeMachine(tmp_path, tools=["apt-get"], apt_works=apt_works)

    with (
        contextlib.nullcontext()
        if apt_works
        else pytest.raises(ServerError, match="installing rabbitmq-server failed")
    ):
        ensure_binaries(machine=fake.machine(root=True))

    assert fake.apt_calls == INSTALLED  # 101: no server may be started, stopped or restarted meanwhile
    assert not fake.policy.exists()
    assert "rabbitmq-server are missing" in fake.said[0]
    assert fake.systemctl.exists() is apt_works
    if apt_works:
        assert fake.systemctl.read_text() == "systemctl disable rabbitmq-server\n"


@pytest.mark.usefixtures("no_other_rabbitmq")
@pytest.mark.parametrize("code", [0, 101])
def test_a_policy_of_the_machines_own_is_the_same_afterwards(tmp_path: Path, code: int) -> None:
    """An administrator's file is not ours to lose, whether it allows servers to start or not."""
    fake = FakeMachine(tmp_path, tools=["apt-get"])
    fake.policy.write_text(f"#!/bin/sh\nexit {code}\n")
    fake.policy.chmod(0o755)

    ensure_binaries(machine=fake.machine(root=True))

    assert fake.apt_calls == INSTALLED
    assert fake.policy.read_text() == f"#!/bin/sh\nexit {code}\n"
    assert os.access(fake.policy, os.X_OK)
    assert [path.name for path in tmp_path.glob("policy-rc.d*")] == ["policy-rc.d"]


@pytest.mark.usefixtures("no_other_rabbitmq")
def test_the_policy_of_an_install_that_was_killed_is_taken_away(tmp_path: Path) -> None:
    """Else no package could start its server on that machine ever again."""
    fake = FakeMachine(tmp_path, tools=["apt-get"])
    fake.policy.write_text(
        "#!/bin/sh\n# dramatiq-safeops: no server starts while packages are installed\nexit 101\n"
    )
    fake.policy.chmod(0o755)
    (tmp_path / "policy-rc.d.before-safeops").write_text("the administrator's")

    ensure_binaries(machine=fake.machine(root=True))

    assert fake.policy.read_text() == "the administrator's"


@pytest.mark.usefixtures("no_other_rabbitmq")
@pytest.mark.parametrize(
    ("tools", "advice"),
    [
        (
            ["apt-get", "sudo"],
            "sudo apt-get update && sudo apt-get install -y --no-install-recommends rabbitmq-server",
        ),
        (
            ["apt-get"],
            "sudo apt-get update && sudo apt-get install -y --no-install-recommends rabbitmq-server",
        ),
        (["dnf"], "sudo dnf install -y rabbitmq-server"),
        (["brew"], "brew install rabbitmq"),
        (
            [],
            "docker compose -f compose/compose.yaml up -d, and set SAFEOPS_AMQP_URL and SAFEOPS_DATABASE_URL",
        ),
    ],
)
def test_who_may_not_install_is_told_the_one_command(tmp_path: Path, tools: list[str], advice: str) -> None:
    """A normal user without sudo, or a machine without apt."""
    fake = FakeMachine(tmp_path, tools=tools)

    with pytest.raises(ServerError) as refused:
        ensure_binaries(machine=fake.machine(root=False))

    assert "the programs of rabbitmq-server are missing, run: " + advice in str(refused.value)
    assert fake.apt_calls == []


# What the tests above look at


@contextlib.contextmanager
def connected(server: RabbitmqServer) -> Iterator[Any]:
    connection = pika.BlockingConnection(pika.URLParameters(server.url))
    try:
        yield connection
    finally:
        with contextlib.suppress(pika.exceptions.AMQPError):
            connection.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def read_link(path: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def shared_memory() -> set[str]:
    """The ids of System V segments."""
    return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}


def listeners_of(pids: set[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which these processes listen, as the kernel tells."""
    sockets = {read_link(str(path)) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()}
    found: set[tuple[str, int]] = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                address, port = columns[1].split(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found
