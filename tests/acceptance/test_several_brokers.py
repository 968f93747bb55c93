"""Several brokers in one process: what one does, the other does not notice.

Real processes, two virtual hosts of a real RabbitMQ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import counts, queues
from tests.harness.vhosts import virtual_host
from tests.harness.worker import App, wait_until


@pytest.fixture
def other_url(rabbit: RabbitmqServer) -> Iterator[str]:
    """The URL of a second virtual host."""
    with virtual_host(rabbit) as url:
        yield url


#: Two actors of the same name, on a queue of the same name, with different options.
TWO_BROKERS = """
from dramatiq_safeops import RabbitmqBroker

other = RabbitmqBroker(url=os.environ["OTHER_URL"])

def work(number, seconds=0):
    note("started", number=number, side="first")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)
    if number == 7:
        raise PermanentError("seven")
    note("ran", number=number, side="first", thread=threading.get_ident())

def work_of_other(number, seconds=0):
    note("started", number=number, side="other")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)
    note("ran", number=number, side="other", thread=threading.get_ident())

first_work = dramatiq.actor(actor_name="work", time_limit=1000, max_retries=0)(work)
other_work = dramatiq.actor(broker=other, actor_name="work", time_limit=60_000)(work_of_other)

@dramatiq.actor(time_limit=60_000)
def crossing(number):
    # the actor of the other broker as a plain function, and as a message
    other_work(number, 2)
    other_work.send(number)
    note("crossed", number=number)
"""


def numbers(app: App, side: str) -> list[int]:
    """Return the numbers of what has run on ``side``, sorted."""
    return sorted(one["number"] for one in app.notes("ran") if one["side"] == side)


def test_two_brokers_in_one_process_do_not_notice_each_other(
    rabbit: RabbitmqServer, amqp_url: str, other_url: str, tmp_path: Path
) -> None:
    """An app that bridges two systems: names may clash, and the limits of one actor must not strike the other."""
    app = App(tmp_path, TWO_BROKERS, amqp_url, env={"OTHER_URL": other_url})
    code = """
        workers = [dramatiq.Worker(one, worker_threads=2) for one in (broker, other)]
        for worker in workers:
            worker.start()
        # Given actors of one name on both
        for number in range(10):
            first_work.send(number)
            other_work.send(100 + number)
        # one body of each that is longer than the first's limit, at the same time
        first_work.send(50, 30)
        other_work.send(150, 3)
        crossing.send(60)
        print("sent", flush=True)
        input()

        # When one is closed
        workers[0].stop()
        broker.close()
        print("closed", flush=True)
        input()
        other_work.send(200)
        print("sent", flush=True)
        input()
        workers[1].stop()
        other.close()
    """
    with app.program(code) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def go_on() -> None:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

        assert process.stdout.readline() == "sent\n"
        # Then each has run what is its own, the limit has struck one body, and the crossing one has run to its end
        expected = [60, *(100 + n for n in range(10)), 150]
        wait_until(lambda: numbers(app, "first") == [n for n in range(10) if n != 7], what="the first's")
        wait_until(lambda: sorted([60, *expected]) == numbers(app, "other"), what="the other's")
        wait_until(lambda: app.notes("crossed"), what="the actor that crosses over")
        wait_until(lambda: queues.depth(amqp_url, "default.dlq") == 2, what="two dead letters")
        dead = {
            one.message["args"][0]: one.headers["x-safeops-reason"]
            for one in queues.look(amqp_url, "default.dlq")
        }
        assert set(dead) == {7, 50}
        assert not queues.depth(other_url, "default.dlq")

        go_on()
        assert process.stdout.readline() == "closed\n"
        assert not counts.connections(rabbit, amqp_url)
        assert len(counts.connections(rabbit, other_url)) == 2
        go_on()
        assert process.stdout.readline() == "sent\n"
        wait_until(lambda: 200 in numbers(app, "other"), what="the other to go on")
        go_on()
        assert process.wait(30) == 0


def test_the_command_runs_the_broker_that_it_is_told(amqp_url: str, other_url: str, tmp_path: Path) -> None:
    """``dramatiq app:other``: the messages of the global broker are none of its business."""
    app = App(tmp_path, TWO_BROKERS, amqp_url, env={"OTHER_URL": other_url})
    app.send("first_work.send(1); other_work.send(2)")

    with app.worker(broker="app:other") as worker:
        wait_until(lambda: numbers(app, "other") == [2], what="the other's message")
        assert worker.terminate(30) == 0

    assert not numbers(app, "first")
    assert queues.depth(amqp_url, "default") == 1
