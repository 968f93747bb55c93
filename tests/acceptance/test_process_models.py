"""Each way in which people start Dramatiq: fork, spawn, forkserver, auto-reload, and the options of the command.

Real commands on a real RabbitMQ.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import counts, queues
from tests.harness.worker import DRAMATIQ, App, wait_until

ACTOR = """
@dramatiq.actor(time_limit=60_000)
def work(number):
    note("ran", number=number)
"""

#: Python 3.14 starts processes this way on Linux unless told otherwise.
FORKSERVER = (
    sys.executable,
    "-c",
    "import multiprocessing, sys; multiprocessing.set_start_method('forkserver')\n"
    "from dramatiq.cli import main; sys.exit(main())",
)

#: How the command starts its worker processes: the command, and its arguments.
START_METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fork": (DRAMATIQ, ()),
    "spawn": (DRAMATIQ, ("--use-spawn",)),
    "forkserver": (FORKSERVER, ()),
}

start_methods = pytest.mark.parametrize("method", START_METHODS)


def ran(app: App) -> list[int]:
    """Return the numbers of what has run, in order."""
    return [one["number"] for one in app.notes("ran")]


def wait_for_numbers(app: App, *numbers: int, timeout: float = 30) -> None:
    wait_until(lambda: sorted(ran(app)) == sorted(numbers), timeout, f"{numbers} to run")


# -- start methods


@start_methods
def test_however_its_processes_are_started_a_worker_works_and_leaves_in_time(
    method: str, rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """Python 3.14 changes the default: a worker that only lives by fork would fail in an upgrade of Python."""
    # Given three worker processes
    command, arguments = START_METHODS[method]
    app = App(tmp_path, ACTOR, amqp_url)
    with app.worker(processes=3, threads=1, command=command, arguments=arguments) as worker:
        # When there is work
        app.send("for number in range(30): work.send(number)")
        wait_for_numbers(app, *range(30))

        # Then each process has two connections of its own at most
        pids = worker.pids()
        assert len(pids) == 3
        owners = [
            one.name.rpartition(" ")[2].partition("@")[0] for one in counts.connections(rabbit, amqp_url)
        ]
        assert {int(owner) for owner in owners} == set(pids)
        assert all(owners.count(str(pid)) <= 2 for pid in pids)

        # And SIGTERM ends them all, without a complaint of RabbitMQ's
        assert worker.terminate(30) == 0, worker.text
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not counts.connections(rabbit, amqp_url)
    assert not queues.depth(amqp_url, "default")


@start_methods
def test_however_its_processes_are_started_a_wrong_option_ends_the_command_with_one_sentence(
    method: str, amqp_url: str, tmp_path: Path
) -> None:
    """The sentence must not depend on how the process came about that says it."""
    command, arguments = START_METHODS[method]
    app = App(tmp_path, ACTOR, amqp_url, env={"TEST_BROKER_OPTIONS": json.dumps({"queue_typ": "classic"})})
    with app.worker(processes=2, wait=False, command=command, arguments=arguments) as worker:
        assert worker.process.wait(30) == 1, worker.text

    said = {line for line in worker.text.splitlines() if line.startswith("dramatiq-safeops: ")}
    assert len(said) == 1, worker.text
    assert "did you mean 'queue_type'" in said.pop()
    assert "Traceback" not in worker.text


@start_methods
def test_however_its_processes_are_started_a_missing_rabbitmq_has_its_own_exit_code(
    method: str, amqp_url: str, tmp_path: Path
) -> None:
    """Supervisors start it again on 3, and leave it alone on 1."""
    command, arguments = START_METHODS[method]
    app = App(tmp_path, ACTOR, amqp_url.replace("guest:guest", "guest:wrong"))
    with app.worker(processes=1, wait=False, command=command, arguments=arguments) as worker:
        assert worker.process.wait(60) == 3, worker.text

    assert "Traceback" not in worker.text


# -- auto-reload

RELOADED = """
from other import VERSION

@dramatiq.actor(time_limit=60_000)
def work(number):
    note("started", number=number, version=VERSION)
    if number < 4:
        time.sleep(1)
    note("ran", number=number, version=VERSION)
"""


def test_a_reload_after_a_change_of_the_source_loses_no_message_in_hand(
    amqp_url: str, tmp_path: Path
) -> None:
    """``--watch`` restarts the workers with each saved file, in the middle of whatever they do."""
    # Given workers with running messages, and more of them in their hands
    (tmp_path / "app").mkdir()
    other = tmp_path / "app" / "other.py"
    other.write_text("VERSION = 1\n")
    app = App(tmp_path / "app", RELOADED, amqp_url)
    # Dramatiq's own pattern is "**.py", which watchdog 7 does not take for "in any folder" any more.
    arguments = ("--watch", str(app.folder), "--watch-include", "**/*.py")
    # It starts itself anew by the name it was called by; `python -m dramatiq` would look for "python" in PATH.
    command = (str(Path(sys.executable).with_name("dramatiq")),)
    with app.worker(processes=2, threads=2, command=command, arguments=arguments) as worker:
        app.send("for number in range(20): work.send(number)")
        wait_until(lambda: len(app.notes("started")) >= 4, what="messages to run")

        # When a file is saved
        other.write_text("VERSION = 2\n")

        # Then the workers are new ones, and each message has run. (Twice at most: where saving a file makes two events, the
        # second one kills what is still running.)
        wait_until(lambda: worker.text.count("ready for action") >= 4, 60, "the workers to be back")
        app.send("work.send(20)")
        wait_until(lambda: set(ran(app)) == set(range(21)), what="all messages to run")
        assert app.notes("ran")[-1]["version"] == 2
        assert worker.terminate(30) == 0
    assert not queues.depth(amqp_url, "default")


# -- the options of the command

TWO_QUEUES = """
@dramatiq.actor(time_limit=60_000)
def work(number):
    note("ran", number=number)

@dramatiq.actor(queue_name="other", time_limit=60_000)
def elsewhere(number):
    note("ran", number=number)

def make_broker():
    dramatiq.set_broker(broker)

def report():
    work.send(100)
    note("forked")
    time.sleep(1)
"""


def test_all_that_the_command_can_be_told_works(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """Unit files and manifests use these options, and nobody wants to write them anew."""
    app = App(tmp_path, TWO_QUEUES, amqp_url)
    app.send("for number in 1, 2: work.send(number)\nelsewhere.send(3)")
    arguments = (
        "--queues",
        "default",
        "--pid-file",
        "pid",
        "--log-file",
        "log",
        "--fork-function",
        "app:report",
    )
    with app.worker(processes=1, threads=1, arguments=arguments, broker="app:broker", wait=False) as worker:
        # its own queue, the function that it forks, and nothing else
        wait_for_numbers(app, 1, 2, 100)
        assert int((tmp_path / "pid").read_text()) == worker.process.pid
        assert "ready for action" in (tmp_path / "log").read_text()
        forked = app.notes("forked")[0]["pid"]
        wait_until(
            lambda: not broken_or_open(rabbit, amqp_url, forked), what="the fork's connection to be closed"
        )
        assert worker.terminate(30) == 0
    assert not (tmp_path / "pid").exists()
    assert [one.message["args"] for one in queues.look(amqp_url, "other")] == [[3]]


def broken_or_open(rabbit: RabbitmqServer, url: str, pid: int) -> bool:
    return any(f" {pid}@" in one.name for one in counts.connections(rabbit, url))


def test_a_callable_that_makes_the_broker_and_no_logging_work(amqp_url: str, tmp_path: Path) -> None:
    """``dramatiq app:make_broker --skip-logging``, for apps that set up both by themselves."""
    app = App(tmp_path, TWO_QUEUES, amqp_url)
    app.send("work.send(1)\nelsewhere.send(2)")
    with app.worker(arguments=("--skip-logging",), broker="app:make_broker", wait=False) as worker:
        wait_for_numbers(app, 1, 2)
        assert worker.terminate(30) == 0
        assert "[INFO]" not in worker.text


def test_the_first_process_of_a_container_stops_in_time(amqp_url: str, tmp_path: Path) -> None:
    """As PID 1 it gets no default signal handlers, and inherits whatever its children leave behind."""
    if not can_unshare():
        pytest.skip("making a PID namespace needs root")
    app = App(tmp_path, ACTOR, amqp_url)
    app.send("work.send(1)")
    command = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *DRAMATIQ)
    with app.worker(processes=2, command=command, wait=False) as worker:
        wait_for_numbers(app, 1)
        [first] = psutil.Process(worker.process.pid).children()
        assert "dramatiq" in " ".join(first.cmdline())
        first.terminate()
        assert worker.process.wait(30) == 0
        assert "[PID 1]" in worker.text


def can_unshare() -> bool:
    return subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode == 0


# -- what is refused

GEVENT = (sys.executable, str(Path(sys.executable).with_name("dramatiq-gevent")))


def test_gevent_is_refused_with_one_sentence(amqp_url: str, tmp_path: Path) -> None:
    """Its threads are none: whoever waits for the I/O thread would stop it, and time limits would strike anybody."""
    app = App(tmp_path, ACTOR, amqp_url)
    with app.worker(processes=2, command=GEVENT, wait=False) as worker:
        assert worker.process.wait(30) == 1, worker.text

    said = {line for line in worker.text.splitlines() if line.startswith("dramatiq-safeops: ")}
    assert len(said) == 1, worker.text
    sentence = said.pop()
    assert "gevent" in sentence
    assert "dramatiq" in sentence
    assert "Traceback" not in worker.text


MAKES = """
from dramatiq_safeops import ConfigError, RabbitmqBroker
try:
    broker = RabbitmqBroker(url="amqp://127.0.0.1:1")
except ConfigError as error:
    print(error)
"""
SENDS = """
from dramatiq import Message
try:
    broker.enqueue(Message("default", "work", (), {}, {}))
except ConfigError as error:
    print(error)
"""
PATCHES = {
    "gevent": "import gevent.monkey; gevent.monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}


@pytest.mark.parametrize("library", PATCHES)
@pytest.mark.parametrize("when", ["before the broker is made", "between the broker and the first send"])
def test_a_program_with_green_threads_gets_the_sentence_as_an_error(library: str, when: str) -> None:
    """A web server with gevent workers would hang in its first send(); with --preload it is patched after the import."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    parts = (
        [PATCHES[library], MAKES] if when == "before the broker is made" else [MAKES, PATCHES[library], SENDS]
    )

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(parts)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert f"{library} has patched this process" in done.stdout
