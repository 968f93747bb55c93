"""The demo as people run it: a command, its exit code, what it prints, what is on disk and in RabbitMQ afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import psutil
import pytest

from dramatiq_safeops.rabbitmq.delays import STEPS_MS
from dramatiq_safeops.rabbitmq.topology import apply, delay_step, topology_for

if TYPE_CHECKING:
    from dramatiq_safeops.testing import RabbitmqServer

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, str(ROOT / "compose" / "app" / "demo.py")]

#: A short demo takes about 10 s here; a loaded machine may take many times that.
PATIENCE_S = 120.0


class Demo:
    """A running demo, and every process that it has started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._family: set[psutil.Process] = set()

    def wait_for(self, words: str) -> None:
        """Read its output up to a line with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                break
        else:
            pytest.fail(f"the demo ended before it said {words!r}")
        self._family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def workers(self) -> list[psutil.Process]:
        """Wait until the worker processes are up and return them, the first one being their parent."""

        def of_dramatiq() -> list[psutil.Process]:
            found = []
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    words = process.cmdline()
                    if "dramatiq" in words and not any(word.endswith("leash.py") for word in words):
                        found.append(process)
            return found

        assert until(lambda: len(of_dramatiq()) >= 3)
        self._family |= set(of_dramatiq())
        return of_dramatiq()

    def left(self) -> list[psutil.Process]:
        """Return the processes that outlive it."""
        return [one for one in self._family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def until(condition: Callable[[], bool], timeout: float = PATIENCE_S) -> bool:
    """Ask until ``condition`` holds; False if it never does."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def environment(amqp_url: str) -> dict[str, str]:
    return {**os.environ, "SAFEOPS_AMQP_URL": amqp_url}


def run_demo(amqp_url: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a demo to its end."""
    command = [*DEMO, "--out", str(out), *options]
    return subprocess.run(
        command, env=environment(amqp_url), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@contextlib.contextmanager
def started_demo(amqp_url: str, out: Path, *options: str) -> Iterator[Demo]:
    """Start a demo; whatever is left of it in the end is killed."""
    command = [*DEMO, "--out", str(out), *options]
    with subprocess.Popen(
        command, env=environment(amqp_url), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        demo = Demo(process)
        try:
            yield demo
        finally:
            process.kill()
            for left in demo.left():
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()


def table_of(finished: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the lines of the table by message."""
    return {line["label"]: line for line in json.loads(finished.stdout)["messages"]}


def take_all(amqp_url: str, queue: str) -> list[tuple[dict[str, Any], bytes]]:
    """Take every message off a queue: its headers and its body."""
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    channel = connection.channel()
    taken = []
    while True:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            break
        taken.append((properties.headers, body))
    connection.close()
    return taken


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("2013*")}


def test_every_message_of_the_demo_ends_as_expected_again_and_again(amqp_url: str, tmp_path: Path):
    """It is the first thing that people run, and they run it twice."""
    # Given a demo that has run
    first = run_demo(amqp_url, tmp_path, "--months", "1-2", "--json")
    reports = digests(tmp_path)

    # When it runs again, over the dead letters and reports of the first
    second = run_demo(amqp_url, tmp_path, "--months", "1-2", "--json")

    # Then both are right
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    for table in (table_of(first), table_of(second)):
        ends = {label: (line["actual"], line["reason"], line["attempts"]) for label, line in table.items()}
        assert ends == {
            "January": ("done", "", 1),
            "February": ("done", "", 1),
            "year, fails twice": ("done", "", 3),
            "month 2013-13": ("dead letter", "permanent_error", 1),
            "actor nobody has": ("dead letter", "unknown_actor", 0),
            "junk bytes": ("dead letter", "unreadable", 0),
        }
    # And the reports are the same bytes, nothing else beside them
    assert set(reports) == {
        f"{name}.{kind}" for name in ("2013", "2013-01", "2013-02") for kind in ("csv", "png")
    }
    assert digests(tmp_path) == reports
    assert {path.name for path in tmp_path.iterdir()} == set(reports) | {".messages"}
    # And the dead letters of both are still there for people, with the words that the table showed
    letters = take_all(amqp_url, "reports.dlq")
    reasons = sorted(headers["x-safeops-reason"] for headers, _ in letters)
    assert reasons == ["permanent_error"] * 2 + ["unknown_actor"] * 2 + ["unreadable"] * 2
    assert take_all(amqp_url, "reports") == []


def test_two_demos_at_a_time_are_both_right(amqp_url: str, tmp_path: Path):
    """Their workers must not take each other's messages, even if they write to one folder."""
    with (
        started_demo(amqp_url, tmp_path, "--months", "1") as one,
        started_demo(amqp_url, tmp_path, "--months", "1") as other,
    ):
        said = [demo.process.communicate(timeout=PATIENCE_S)[0] for demo in (one, other)]
        exit_codes = [demo.process.returncode for demo in (one, other)]

    assert exit_codes == [0, 0], said
    assert sorted("queue 'reports-2'" in text for text in said) == [False, True]


def test_a_killed_demo_leaves_no_process_and_the_next_one_is_right(amqp_url: str, tmp_path: Path):
    """Workers that outlive it would take the next demo's messages, for ever and unseen."""
    # Given a demo that is killed in the middle of its work
    with started_demo(amqp_url, tmp_path, "--months", "1-3") as killed:
        killed.wait_for("messages sent")
        killed.workers()
        killed.process.kill()

        assert until(lambda: killed.left() == [], timeout=30)

    # When the next one finds its messages in the queue
    following = run_demo(amqp_url, tmp_path, "--months", "1", "--json")

    assert following.returncode == 0, following.stderr
    # And what the killed one had sent is not lost
    assert until(lambda: len(list(tmp_path.glob("2013-0[123].png"))) == 3, timeout=1)


def test_a_worker_that_dies_is_said_at_once_with_its_log(amqp_url: str, tmp_path: Path):
    """Waiting for the timeout would hide the one line that explains it."""
    with started_demo(amqp_url, tmp_path, "--months", "1") as demo:
        demo.wait_for("messages sent")
        demo.workers()[0].kill()
        said, _ = demo.process.communicate(timeout=PATIENCE_S)

        assert demo.process.returncode == 1
        assert "WRONG: the worker ended by itself with exit code" in said
        assert "worker-" in said
        assert until(lambda: demo.left() == [], timeout=30)


def test_a_demo_that_runs_out_of_time_names_what_has_not_ended(amqp_url: str, tmp_path: Path):
    """An exit code alone does not say which message is missing."""
    finished = run_demo(amqp_url, tmp_path, "--months", "1", "--timeout", "0.1")

    assert finished.returncode == 1
    # Those that have ended since then, while the worker was stopped, had not ended in time all the same.
    assert re.search(r"WRONG: \d messages had not ended after 0.1 s: .*actor nobody has", finished.stdout)


def test_without_a_terminal_the_demo_writes_plain_lines_that_lead_to_the_dead_letters(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
):
    """In a CI log, escape codes and moving bars are noise; a password does not belong there at all."""
    # Given a user with a password worth keeping
    vhost = amqp_url.rpartition("/")[2]
    rabbit.api("PUT", f"/api/users/{vhost}", {"password": "hunter2", "tags": ""})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    rabbit.api("PUT", f"/api/permissions/{vhost}/{vhost}", everything)

    finished = run_demo(amqp_url.replace("guest:guest", f"{vhost}:hunter2"), tmp_path, "--months", "12")

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "\x1b" not in finished.stdout
    assert "All 5 messages ended as expected." in finished.stdout
    assert f":15672/#/queues/{vhost}/reports.dlq" in finished.stdout
    assert str(tmp_path) in finished.stdout
    # And neither the terminal nor the worker's log has seen the password
    logs = "".join(path.read_text() for path in (tmp_path / ".messages").iterdir())
    assert "Worker process is ready" in logs
    assert "hunter2" not in finished.stdout + finished.stderr + logs
    rabbit.api("DELETE", f"/api/users/{vhost}")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda url: url.replace("guest:guest", "guest:hunter2"), "refuses this user name and password"),
        (lambda url: url.rpartition("/")[0] + "/nowhere", "no access to the virtual host"),
        (lambda _url: "amqp://guest:hunter2@127.0.0.1:1/", "no RabbitMQ answers at 127.0.0.1:1/"),
        (lambda _url: "redis://localhost", "expected amqp://user:password@host:5672/vhost"),
        (lambda _url: "amqp://localhost:port/", "expected amqp://user:password@host:5672/vhost"),
    ],
    ids=["password", "vhost", "nothing there", "scheme", "port"],
)
def test_a_rabbitmq_that_cannot_be_used_is_one_sentence(
    amqp_url: str, tmp_path: Path, harm: Callable[[str], str], said: str
):
    """A traceback of pika's tells a newcomer nothing."""
    finished = run_demo(harm(amqp_url), tmp_path, "--months", "1")

    assert finished.returncode == 3
    assert said in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    assert "hunter2" not in finished.stderr + finished.stdout


def test_an_unwritable_folder_is_one_sentence(amqp_url: str, tmp_path: Path):
    (tmp_path / "file").write_text("")

    finished = run_demo(amqp_url, tmp_path / "file" / "reports", "--months", "1")

    assert finished.returncode == 3
    assert "cannot write reports to" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "options", [("--months", "0"), ("--months", "x"), ("--timeout", "-1"), ("--mouths", "1")]
)
def test_a_wrong_option_is_said_before_anything_starts(tmp_path: Path, options: tuple[str, str]):
    finished = run_demo("amqp://127.0.0.1:1/", tmp_path / "out", *options)

    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "out").exists()


def test_help_shows_examples_and_exit_codes():
    finished = subprocess.run([*DEMO, "--help"], capture_output=True, text=True, check=True)

    assert "examples:" in finished.stdout
    assert "exit codes:" in finished.stdout


def test_without_keep_the_demo_brings_its_own_servers_and_removes_them(tmp_path: Path):
    """CI machines and careful people want nothing left behind."""
    # Given no RabbitMQ in the environment, and a place where only this demo's servers can be
    private = {name: value for name, value in os.environ.items() if name != "SAFEOPS_AMQP_URL"}
    private["TMPDIR"] = str(tmp_path)

    finished = subprocess.run(
        [*DEMO, "--no-keep", "--months", "1", "--out", str(tmp_path / "out")],
        env=private,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
    status = [sys.executable, "-m", "dramatiq_safeops.testing", "status", "--json"]
    left = subprocess.run(status, env=private, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(left.stdout) == []


@pytest.mark.long
def test_the_demo_survives_a_rabbitmq_that_is_killed_and_comes_back(
    own_rabbit: RabbitmqServer, tmp_path: Path
):
    """People will try it. Messages may run again then, but each still ends as expected."""
    # Given a RabbitMQ on which messages have waited before. (Killed within 2 s of declaring a quorum queue, RabbitMQ
    # does not know that queue again. This is not the place to test that.)
    connection = pika.BlockingConnection(pika.URLParameters(own_rabbit.url))
    for step_ms in (step for step in STEPS_MS if step <= 6_000):
        apply(delay_step(step_ms), connection.channel())
    apply(topology_for("reports"), connection.channel())
    connection.close()
    time.sleep(3)

    # When it is killed in the middle of a demo
    with started_demo(own_rabbit.url, tmp_path, "--json") as demo:
        demo.wait_for("messages sent")
        assert until(lambda: len(list(tmp_path.glob("2013-*.png"))) >= 2)
        own_rabbit.kill()
        own_rabbit.restart()
        said, _ = demo.process.communicate(timeout=PATIENCE_S)

    assert demo.process.returncode == 0, said
    assert "RabbitMQ is away, waiting for it" in said
