"""A RabbitMQ that is short of memory takes no publishes. What failed then is held, and started no second time.

And when it is over, or after any outage, the retries of what failed together do not come back as one wave.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from dramatiq import Message

from dramatiq_safeops import RabbitmqBroker
from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import queues
from tests.harness.counts import queue_counts
from tests.harness.worker import App, wait_until

QUEUE = "orders"
PATIENCE_S = 60

GATED = """
    GATE = os.path.join(os.path.dirname(os.environ["TEST_EFFECTS"]), "gate")

    def through_the_gate(key):
        note("started", key=key)
        while not os.path.exists(GATE):
            time.sleep(0.02)

    @dramatiq.actor(queue_name="orders", time_limit=120_000)
    def fine(key):
        through_the_gate(key)
        note("done", key=key)

    @dramatiq.actor(queue_name="orders", max_retries=2, min_backoff=100, time_limit=120_000)
    def failing(key):
        through_the_gate(key)
        if len([line for line in open(os.environ["TEST_EFFECTS"]) if f'"key": "{key}"' in line]) == 1:
            raise ConnectionError("the first attempt fails")
        note("done", key=key)
"""


def message(actor: str, key: str, queue: str = QUEUE) -> Message[object]:
    return Message(queue, actor, (key,), {}, {}, key, int(time.time() * 1000))


@pytest.fixture
def counting_rabbit(own_rabbit: RabbitmqServer) -> RabbitmqServer:
    """A RabbitMQ whose quorum queues say every fifth of a second, and not every five, what they hold."""
    own_rabbit.eval("application:set_env(rabbit, quorum_tick_interval, 200).")
    return own_rabbit


@pytest.mark.parametrize(
    "seconds", [pytest.param(6, id="short"), pytest.param(30, id="full", marks=pytest.mark.long)]
)
def test_under_a_memory_alarm_acks_go_on_and_what_failed_starts_no_second_time(
    tmp_path: Path, counting_rabbit: RabbitmqServer, seconds: int
):
    """Hurts everybody in an outage: an actor whose failure cannot be recorded must not run over and over."""
    rabbit = counting_rabbit
    app = App(tmp_path, GATED, rabbit.url)
    fine = [f"fine-{number}" for number in range(30)]
    failing = ["failing-0", "failing-1"]

    def started(key: str) -> int:
        return sum(one["key"] == key for one in app.notes("started"))

    def done() -> set[str]:
        return {one["key"] for one in app.notes("done")}

    with app.worker(threads=4) as worker:
        # Given a worker with four threads that are busy with two messages that will fail and two that will not,
        # more of these behind them, and a RabbitMQ that runs out of memory
        producer = RabbitmqBroker(url=rabbit.url)
        producer.send_many([message("failing", key) for key in failing])
        producer.send_many([message("fine", key) for key in fine])
        producer.close()
        wait_until(lambda: len(app.notes("started")) == 4, PATIENCE_S, "four actors at work")
        rabbit.memory_alarm(True)
        wait_until(
            lambda: queue_counts(rabbit, rabbit.url)[QUEUE].unacked >= 4,
            PATIENCE_S,
            "the counts of the queue",
        )

        # When the actors end
        (tmp_path / "gate").touch()
        wait_until(lambda: done() == set(fine), PATIENCE_S, "the other messages to be done")

        # Then whatever succeeded leaves the queue at once, and what failed is held un-acked
        def only_the_failed_are_left() -> bool:
            now = queue_counts(rabbit, rabbit.url)[QUEUE]
            return (now.ready, now.unacked) == (0, len(failing))

        wait_until(only_the_failed_are_left, PATIENCE_S, "the acks")

        # And it does not run again for as long as the alarm lasts
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            assert [started(key) for key in failing] == [1, 1]
            assert worker.process.poll() is None
            time.sleep(0.1)
        assert only_the_failed_are_left()

        # When the alarm ends, then their retries go on
        rabbit.memory_alarm(False)
        wait_until(lambda: done() == {*fine, *failing}, PATIENCE_S, "the retries")
        assert [started(key) for key in failing] == [2, 2]
        wait_until(lambda: queue_counts(rabbit, rabbit.url)[QUEUE].unacked == 0, PATIENCE_S, "the last acks")

    assert Counter(one["key"] for one in app.notes("done")) == Counter([*fine, *failing])
    assert queues.look(rabbit.url, f"{QUEUE}.dlq") == []


TOGETHER = """
    @dramatiq.actor(queue_name="orders", max_retries=1, min_backoff=4_000, time_limit=60_000)
    def failing(key):
        note("ran", key=key)
        raise ConnectionError("the service behind it is down")
"""


def test_a_thousand_messages_that_failed_together_come_back_spread_out(tmp_path: Path, amqp_url: str):
    """Hurts the service behind the actor: it has just come up, and a thousand at once would bring it down again."""
    count, cap_s, step_s = 1_000, 4.0, 0.5
    app = App(tmp_path, TOGETHER, amqp_url)
    producer = RabbitmqBroker(url=amqp_url)
    producer.send_many([message("failing", f"order-{number}") for number in range(count)])
    producer.close()

    with app.worker(threads=8) as worker:
        wait_until(
            lambda: queues.depth(amqp_url, f"{QUEUE}.dlq") == count, PATIENCE_S, "both attempts of each"
        )
        delays = sorted(int(ms) / 1000 for ms in re.findall(r"Retrying message '.*?' in (\d+) ", worker.text))

    times: dict[str, list[float]] = {}
    for one in app.notes("ran"):
        times.setdefault(one["key"], []).append(one["at"])
    assert Counter(len(both) for both in times.values()) == {2: count}
    waits = sorted(second - first for first, second in times.values())
    assert len(delays) == count
    shares = [
        sum(step * step_s <= delay < (step + 1) * step_s for delay in delays) / count
        for step in range(int(cap_s / step_s))
    ]
    sys.stdout.write(
        f"{count} retries below a cap of {cap_s:g} s: delays {delays[0]:.2f} to {delays[-1]:.2f} s, per"
        f" {step_s:g} s: {', '.join(f'{share:.0%}' for share in shares)}; waits {waits[0]:.2f} to {waits[-1]:.2f} s\n"
    )
    # Evenly from nothing up to the cap. A wave would be all in one or two of these.
    assert max(shares) < 2 / len(shares)
    assert min(shares) > 0.3 / len(shares)
    # And none came back sooner, as far as a retry may be early (a busy machine adds what it likes to a wait).
    assert all(wait > delay - 0.3 for wait, delay in zip(waits, delays, strict=True))
