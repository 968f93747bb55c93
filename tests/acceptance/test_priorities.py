"""Priorities of messages with a real worker: what nobody has fetched yet can be overtaken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.counts import attached
from tests.harness.worker import App, wait_until

SOURCE = """
    @dramatiq.actor
    def work(number):
        note("started", number=number)
        while not os.path.exists("go"):
            time.sleep(0.01)
        note("ended", number=number)
"""


@pytest.mark.parametrize("broker", ["safe", "stock"])
@pytest.mark.parametrize(("prefetch", "place"), [("1", 1), ("0", 2)], ids=["prefetch 1", "twice the threads"])
def test_an_urgent_message_runs_next_where_workers_fetch_one_at_a_time(
    amqp_url: str, tmp_path: Path, broker: str, prefetch: str, place: int
) -> None:
    """Hurts users of ``broker_priority``. Twice as many messages as threads are fetched unless ``dramatiq_queue_prefetch``
    says otherwise, and those cannot be overtaken: with one thread the urgent message is the next but one. As on stock."""
    options = {"max_priority": 5, **({"queue_type": "classic"} if broker == "safe" else {})}
    app = App(
        tmp_path / "app",
        SOURCE,
        amqp_url,
        broker=broker,
        env={"dramatiq_queue_prefetch": prefetch, "TEST_BROKER_OPTIONS": json.dumps(options)},
    )
    # Given 20 messages, the first of which runs
    app.send("for number in range(20): work.send(number)")
    with app.worker(threads=1):
        wait_until(lambda: app.notes("started"), what="the first message to start")
        wait_until(
            lambda: attached(amqp_url, "default")[0] == 20 - place, what="the worker to fetch its share"
        )

        # When an urgent one is sent
        app.send("work.send_with_options(args=(99,), broker_priority=5)")
        (app.folder / "go").touch()

        # Then it comes before all that had not been fetched
        wait_until(lambda: len(app.notes("ended")) == 21, what="all messages")
    numbers = [one["number"] for one in app.notes("ended")]
    assert numbers == [*range(place), 99, *range(place, 20)]
