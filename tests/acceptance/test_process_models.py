"""Each way in which people start Dramatiq: fork, spawn, forkserver, auto-reload, and the options of the command.

Real commands on a real RabbitMQ.
"""

from __future__ import annotations

import json
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
