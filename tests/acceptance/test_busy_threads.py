"""Actors that only compute, in many threads: the thread that talks to RabbitMQ must still get its turn.

A real worker on a real RabbitMQ.
"""

from __future__ import annotations

from pathlib import Path

from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import counts
from tests.harness.worker import App, wait_until

COMPUTES = """
@dramatiq.actor(time_limit=600_000)
def compute(number, seconds):
    note("started", number=number)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))
    note("ran", number=number)
"""

#: Long enough for RabbitMQ to miss several heartbeats of 5 seconds.
BUSY_S = 25
THREADS = 40


def test_threads_that_only_compute_do_not_cost_the_connection(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """RabbitMQ gives up a client that misses two heartbeats, and delivers all that it holds to somebody else."""
    # Given a worker whose threads all compute
    app = App(tmp_path, COMPUTES, f"{amqp_url}?heartbeat=5")
    with app.worker(threads=THREADS) as worker:
        app.send(f"for number in range({THREADS}): compute.send(number, {BUSY_S})")
        wait_until(lambda: len(app.notes("started")) == THREADS, 60, "all threads to be busy")
        before = {one.port for one in counts.connections(rabbit, amqp_url)}

        # When they have done so for several heartbeats
        wait_until(lambda: len(app.notes("ran")) == THREADS, BUSY_S * 5, "all threads to be done")

        # Then the connections are the same, and nothing has run twice
        after = {one.port for one in counts.connections(rabbit, amqp_url)}
        assert before <= after
        assert "No connection" not in worker.text
        wait_until(lambda: counts.attached(amqp_url, "default") == (0, 1), what="the queue to be empty")
    assert len(app.notes("started")) == THREADS
