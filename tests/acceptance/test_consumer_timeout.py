"""What becomes of a message that its actor holds longer than RabbitMQ's consumer timeout, half an hour by default.

RabbitMQ up to 4.2 closes the channel. From 4.3 on it cancels the consumer of a quorum queue, and lets later acks of what
it took back go by without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import counts
from tests.harness.queues import look
from tests.harness.worker import App, wait_until

#: The first run of "slow" outlives the timeout of 3 s, and ends only when the second has begun.
HELD_TOO_LONG = """
@dramatiq.actor(time_limit=60_000, max_retries=2, min_backoff=200)
def slow(fail):
    first = not os.path.exists("second")
    note("started", first=first)
    if first:
        while not os.path.exists("second-began"):
            time.sleep(0.01)
    else:
        open("second-began", "w").close()
    note("ended", first=first)
    if fail and first:
        raise RuntimeError("too late to be retried: RabbitMQ has the message back")


@dramatiq.actor(time_limit=60_000)
def quick(number):
    note("quick", number=number)
"""


@pytest.fixture(scope="module")
def impatient() -> Iterator[RabbitmqServer]:
    """A RabbitMQ that gives a consumer 3 s, and looks each second whether they are over."""
    with RabbitmqServer.start(plugins=(), config={"consumer_timeout": 3000}) as server:
        server.eval("application:set_env(rabbit, channel_tick_interval, 1000).")
        yield server


@pytest.mark.parametrize("fail", [False, True], ids=["done", "failed"])
def test_what_ends_after_its_consumer_timeout_is_settled_by_its_second_run_alone(
    fail: bool, impatient: RabbitmqServer, tmp_path: Path
) -> None:
    """RabbitMQ has the message back: a retry published about the first run would be a second message."""
    url = impatient.url
    app = App(tmp_path, HELD_TOO_LONG, url)
    with app.worker(threads=3) as worker:
        # Given a message that is held for too long, and the worker that must take it a second time
        app.send(f"slow.send({fail})")
        wait_until(lambda: app.notes("started"), what="the first run")
        (tmp_path / "second").touch()
        wait_until(lambda: len(app.notes("started")) == 2, timeout=60, what="the second run")

        # Then the same worker goes on consuming, also what is new
        app.send("quick.send(1)")
        wait_until(lambda: app.notes("quick"), what="the next message")
        wait_until(lambda: len(app.notes("ended")) == 2, what="both ends")

        # And nothing is left: no retry of the first run, no message that RabbitMQ still counts as held
        wait_until(lambda: left_in(impatient, url) == 0, what="all messages to be settled")
        assert "consuming again in" in worker.text
    assert len(app.notes("started")) == 2
    assert look(url, "default.dlq") == []


def left_in(rabbit: RabbitmqServer, url: str) -> int:
    return sum(count.ready + count.unacked for count in counts.queue_counts(rabbit, url).values())
