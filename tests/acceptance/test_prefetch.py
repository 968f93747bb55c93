"""Who gets a message: no worker sits on one while another is idle.

Real workers on a real RabbitMQ. A ``test_stock_...`` shows the fault on Dramatiq's own broker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import counts
from tests.harness.worker import App, wait_until

JOBS = """
@dramatiq.actor(time_limit=60_000)
def job(number, seconds):
    note("started", number=number)
    time.sleep(seconds)
    note("ran", number=number)
"""

#: Seconds that the long job takes, and that a short one may wait while a worker is idle. The promise is 2.
LONG_S = 9
WAITS_S = 5


def waits_behind_a_long_job(app: App) -> list[float]:
    """Let two workers of one thread get one long job and three short ones; return how long the short ones waited."""
    with app.worker(threads=1), app.worker(threads=1):
        wait_until(lambda: counts.attached(app.url, "default")[1] == 2, what="both workers to consume")
        app.send(f"job.send(0, {LONG_S})")
        wait_until(lambda: app.notes("started"), what="the long job to start")
        app.send(
            "for number in 1, 2, 3:\n    note('sent', number=number)\n    job.send(number, 0.1)\n    time.sleep(0.3)"
        )
        wait_until(lambda: len(app.notes("ran")) == 4, timeout=LONG_S * 3, what="all jobs to run")
    sent = {one["number"]: one["at"] for one in app.notes("sent")}
    started = {one["number"]: one["at"] for one in app.notes("started")}
    return [started[number] - sent[number] for number in (1, 2, 3)]


def test_no_job_waits_behind_a_long_one_while_another_worker_is_idle(amqp_url: str, tmp_path: Path) -> None:
    """An hour's report holds up a mail that would take a second, and half of the fleet looks on."""
    assert max(waits_behind_a_long_job(App(tmp_path, JOBS, amqp_url))) < WAITS_S


def test_stock_lets_a_job_wait_behind_a_long_one_while_another_worker_is_idle(
    amqp_url: str, tmp_path: Path
) -> None:
    """The twin: twice as many messages as threads are taken, and the second half waits for the first."""
    assert max(waits_behind_a_long_job(App(tmp_path, JOBS, amqp_url, broker="stock"))) > WAITS_S


# -- what is set by hand

TWO_QUEUES = """
def wait(number):
    note("started", number=number)
    while not os.path.exists("go on"):
        time.sleep(0.05)

one = dramatiq.actor(queue_name="one", actor_name="one", time_limit=60_000)(wait)
two = dramatiq.actor(queue_name="two", actor_name="two", time_limit=60_000)(wait)
"""


@pytest.mark.parametrize(("env", "held"), [({"dramatiq_queue_prefetch": "3"}, 3), ({}, 4)])
def test_the_places_are_shared_among_the_queues_unless_they_are_set_for_each(
    env: dict[str, str], held: int, amqp_url: str, tmp_path: Path
) -> None:
    """Whoever has tuned it must get what was asked for; who has not must not hold threads times queues."""
    app = App(tmp_path, TWO_QUEUES, amqp_url, env=env)
    app.send("for number in range(10):\n    one.send(number)\n    two.send(number)")
    with app.worker(threads=4):
        for queue in "one", "two":
            wait_until(
                lambda queue=queue: counts.attached(amqp_url, queue) == (10 - held, 1),
                what=f"{held} messages of {queue!r} to be held",
            )
        (tmp_path / "go on").touch()
        wait_until(lambda: len(app.notes("started")) == 20, what="all messages to run")
