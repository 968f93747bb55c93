"""What connections do to messages: lost, held, cut, too many, and deliveries that must know their channel.

Real workers and producers on a real RabbitMQ. A ``test_stock_...`` shows the fault on Dramatiq's own broker.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from dramatiq_safeops.testing import RabbitmqServer, TcpProxy
from tests.harness import counts, queues
from tests.harness.vhosts import virtual_host
from tests.harness.worker import App, wait_until

NUMBERED = """
@dramatiq.actor(time_limit=60_000)
def work(number):
    note("ran", number=number)
"""


def ran(app: App) -> list[int]:
    """Return the numbers of what has run, in order."""
    return [one["number"] for one in app.notes("ran")]


def worse_than(level: str, text: str) -> list[str]:
    """Return the lines of a log that are at ``level`` or worse."""
    levels = ("WARNING", "ERROR", "CRITICAL")
    return [
        line for line in text.splitlines() if any(f"[{one}]" in line for one in levels[levels.index(level) :])
    ]


# -- a delivery belongs to its channel

#: Messages 1-3 end on the first connection, 4 is held over its loss, the worker is killed while 7 runs.
HELD_OVER_A_RECONNECT = """
@dramatiq.actor(time_limit=60_000)
def work(number):
    note("started", number=number)
    while number in (4, 7) and not os.path.exists(f"release-{number}"):
        time.sleep(0.01)
    note("ran", number=number)
"""


def lost_over_a_reconnect(app: App, rabbit: RabbitmqServer) -> set[int]:
    """Let a worker's connection break while message 4 runs, kill it at 7; return what neither ran nor is in RabbitMQ."""

    def started(number: int) -> bool:
        return number in [one["number"] for one in app.notes("started")]

    def left() -> int:
        count = counts.queue_counts(rabbit, app.url)["default"]
        return count.ready + count.unacked

    with app.worker(threads=1) as worker:
        app.send("for number in range(1, 13): work.send(number)")
        wait_until(lambda: started(4), what="message 4 to start")
        # Three have run and eight are prefetched.
        wait_until(lambda: counts.attached(app.url, "default") == (1, 1), what="8 messages to be prefetched")
        before = worker.text.count("Consuming queue")
        counts.close_connections(rabbit, app.url)
        if app.broker == "stock":
            wait_until(
                lambda: counts.attached(app.url, "default") == (9, 0), what="the connections to be gone"
            )
        else:
            wait_until(
                lambda: worker.text.count("Consuming queue") > before, what="the worker to consume again"
            )
        wait_until(
            lambda: counts.attached(app.url, "default") == (1, 1), what="8 messages to be prefetched again"
        )

        # Message 4 had come as tag 4 of the first channel. On the second one that is message 7.
        (app.folder / "release-4").touch()
        wait_until(lambda: started(7), what="message 7 to start")
        # Six messages have run by now, so six acks are on their way: the right ones, or the wrong ones.
        wait_until(lambda: left() == 6, what="six acks to arrive")
        worker.kill()
    wait_until(
        lambda: counts.attached(app.url, "default")[1] == 0, what="RabbitMQ to notice the death of the worker"
    )
    waiting = {one.message["args"][0] for one in queues.look(app.url, "default")}
    return set(range(1, 13)) - set(ran(app)) - waiting


def test_the_end_of_a_message_never_acks_another_one_after_a_reconnect(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """Delivery tags start again at 1 on every channel: an old tag on a new channel is somebody else's message."""
    app = App(tmp_path, HELD_OVER_A_RECONNECT, amqp_url, env={"dramatiq_queue_prefetch": "8"})

    assert lost_over_a_reconnect(app, rabbit) == set()


def test_stock_acks_another_message_after_a_reconnect(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """The twin: messages that never ran are gone."""
    app = App(tmp_path, HELD_OVER_A_RECONNECT, amqp_url, broker="stock", env={"dramatiq_queue_prefetch": "8"})

    assert lost_over_a_reconnect(app, rabbit) != set()


# -- what a delivery shows

LOOKED_AT = """
from dramatiq.middleware import Middleware

class Looks(Middleware):
    def before_process_message(self, broker, message):
        headers = dict(message.headers) if hasattr(message, "headers") else None
        note("seen", redelivered=message.redelivered, count=getattr(message, "delivery_count", None), headers=headers)

broker.add_middleware(Looks())

@dramatiq.actor(time_limit=60_000)
def work(number):
    if len(notes()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    note("ran", number=number)

def notes():
    return open(os.environ["TEST_EFFECTS"]).readlines()
"""


def sight_of_two_deliveries(app: App, tmp_path: Path) -> list[dict[str, Any]]:
    """Publish a message with a header of the producer's; return what a middleware saw at its two deliveries."""
    body = {
        "queue_name": "default",
        "actor_name": "work",
        "args": [1],
        "kwargs": {},
        "options": {},
        "message_id": "looked-at",
        "message_timestamp": 1,
    }
    with app.worker() as worker:
        # A stock worker declares its queues a moment after it has said that it is ready.
        wait_until(lambda: counts.attached(app.url, "default")[1] > 0, what="the worker to consume")
        queues.publish(app.url, "default", json.dumps(body).encode(), headers={"traceparent": "00-abc-01"})
        worker.process.wait(60)
    with app.worker():
        wait_until(lambda: ran(app) == [1], what="the message to run")
    return app.notes("seen")


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_middleware_sees_headers_and_redelivery(queue_type: str, amqp_url: str, tmp_path: Path) -> None:
    """Tracing needs the producer's headers, and who has effects outside must know that it may be the second time."""
    app = App(
        tmp_path, LOOKED_AT, amqp_url, env={"TEST_BROKER_OPTIONS": json.dumps({"queue_type": queue_type})}
    )

    first, second = sight_of_two_deliveries(app, tmp_path)

    assert (first["redelivered"], first["count"]) == (False, 0)
    assert (second["redelivered"], second["count"]) == (True, 1)
    assert first["headers"]["traceparent"] == second["headers"]["traceparent"] == "00-abc-01"


def test_stock_hides_the_headers_from_middleware(amqp_url: str, tmp_path: Path) -> None:
    """The twin: the flag is there, the headers and the count are not."""
    app = App(tmp_path, LOOKED_AT, amqp_url, broker="stock")

    first, second = sight_of_two_deliveries(app, tmp_path)

    assert (first["redelivered"], second["redelivered"]) == (False, True)
    assert first["headers"] is second["headers"] is first["count"] is None


# -- order


def test_one_thread_runs_messages_in_the_order_in_which_they_were_sent(amqp_url: str, tmp_path: Path) -> None:
    """Whoever runs one worker with one thread counts on it."""
    app = App(tmp_path, NUMBERED, amqp_url, env={"dramatiq_queue_prefetch": "10"})
    app.send("for number in range(50): work.send(number)")

    with app.worker(threads=1):
        wait_until(lambda: len(ran(app)) >= 50, what="50 messages to run")

    assert ran(app) == list(range(50))


# -- how many

MANY_QUEUES = """
for index in range(20):
    @dramatiq.actor(actor_name=f"work_{index}", queue_name=f"queue_{index}", time_limit=60_000)
    def work(number):
        note("ran", number=number)
        if number < 1000:
            broker.get_actor(f"work_{number % 20}").send(number + 1000)
"""


def test_a_worker_of_many_queues_has_two_connections(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """Forty per process would exhaust the server's limits when the fleet grows."""
    # Given two processes that consume 20 queues, and both of them publish, too
    app = App(tmp_path, MANY_QUEUES, amqp_url)
    with app.worker(processes=2) as worker:
        wait_until(
            lambda: worker.text.count("Consuming queue") == 40, what="both processes to consume everything"
        )
        app.send("for n in range(200): broker.get_actor(f'work_{n % 20}').send(n)")
        wait_until(lambda: len(ran(app)) >= 400, what="400 messages to run")
        assert len({one["pid"] for one in app.notes("ran")}) == 2

        open_now = counts.connections(rabbit, amqp_url)

        assert len(open_now) == 4, open_now
        # And each says in the UI what it is for, and whose it is
        for pid in worker.pids():
            mine = sorted(one.name.split(":")[0] for one in open_now if f" {pid}@" in one.name)
            assert mine == ["safeops consume", "safeops publish"]


def test_stock_opens_two_connections_per_queue_and_process(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """The twin: 20 queues are 80 connections."""
    app = App(tmp_path, MANY_QUEUES, amqp_url, broker="stock")
    with app.worker(processes=2):
        wait_until(lambda: len(counts.connections(rabbit, amqp_url)) >= 80, what="80 connections")


SHORT_THREADS = """
import itertools

def send_from_threads(count):
    numbers = iter(range(count))
    while batch := [threading.Thread(target=work.send, args=(n,)) for n in itertools.islice(numbers, 50)]:
        for thread in batch:
            thread.start()
        for thread in batch:
            thread.join()

work.send(-1)
threads_before, files_before = threading.active_count(), len(os.listdir("/proc/self/fd"))
send_from_threads({count})
print(threading.active_count() - threads_before, len(os.listdir("/proc/self/fd")) - files_before, flush=True)
input()
"""


def test_a_thousand_short_lived_threads_that_send_leak_nothing(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """A web server with a thread per request."""
    app = App(tmp_path, NUMBERED, amqp_url)
    with app.program(SHORT_THREADS.format(count=1000)) as producer:
        assert producer.stdout is not None
        said = producer.stdout.readline()
        assert said == "0 0\n", producer.communicate("\n")

        assert len(counts.connections(rabbit, amqp_url)) == 1

    assert queues.depth(amqp_url, "default") == 1001


def test_stock_leaks_a_connection_per_short_lived_thread(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """The twin, with a tenth of the threads."""
    app = App(tmp_path, NUMBERED, amqp_url, broker="stock")
    with app.program(SHORT_THREADS.format(count=100)) as producer:
        assert producer.stdout is not None
        assert producer.stdout.readline()

        assert len(counts.connections(rabbit, amqp_url)) > 50


# -- idle producers

IDLE_PRODUCER = """
import logging
logging.basicConfig(level=logging.WARNING, format="[%(levelname)s] %(name)s %(message)s")
work.send(1)
time.sleep(11)  # this is what is tested: nothing happens for longer than five heartbeats
work.send(2)
"""


@pytest.fixture(scope="module", autouse=True)
def idle(
    rabbit: RabbitmqServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Producers that are idle while other tests run."""
    folder = tmp_path_factory.mktemp("idle")
    with ExitStack() as stack:
        programs = {}
        for broker in ("safe", "stock"):
            url = stack.enter_context(virtual_host(rabbit)) + "?heartbeat=2"
            app = App(folder / broker, NUMBERED, url, broker=broker)
            programs[broker] = stack.enter_context(app.program(IDLE_PRODUCER))
        yield programs


def test_an_idle_producer_sends_again_without_an_error(idle: dict[str, subprocess.Popen[str]]) -> None:
    """A scheduler that sends every ninety seconds must not lose its connection in between."""
    _, log = idle["safe"].communicate(timeout=60)

    assert (idle["safe"].returncode, log) == (0, "")


def test_stock_loses_the_connection_of_an_idle_producer(idle: dict[str, subprocess.Popen[str]]) -> None:
    """The twin: it sends at its second attempt, after a page of errors."""
    _, log = idle["stock"].communicate(timeout=60)

    assert idle["stock"].returncode == 0
    assert "[ERROR] pika" in log


# -- guards that break

BROKEN_GUARD = """
from dramatiq_safeops import Guard

class NeedsDatabase(Guard):
    def before_process_message(self, broker, message):
        note("guard")
        if not os.path.exists("database"):
            raise RuntimeError("the database is away")

broker.add_middleware(NeedsDatabase())

@dramatiq.actor(time_limit=60_000)
def work(number):
    note("ran", number=number)
"""


def test_a_guard_that_breaks_keeps_the_actor_from_running_until_it_is_well(
    amqp_url: str, tmp_path: Path
) -> None:
    """A check that cannot be made has not been passed."""
    # Given a guard whose database is away
    app = App(tmp_path, BROKEN_GUARD, amqp_url)
    with app.worker() as worker:
        # When a message comes
        app.send("work.send(1)")

        # Then it is parked, looked at again, and does not run
        wait_until(lambda: len(app.notes("guard")) >= 2, what="the guard to be asked again")
        assert "is parked (NeedsDatabase failed with RuntimeError)" in worker.text
        assert ran(app) == []

        # And it runs once the database is back, nothing charged
        (tmp_path / "database").touch()
        wait_until(lambda: ran(app) == [1], what="the message to run")
    assert queues.depth(amqp_url, "default.dlq") == 0


def test_stock_runs_the_actor_although_a_guard_breaks(amqp_url: str, tmp_path: Path) -> None:
    """The twin, with a middleware as people write them: the failure is logged, and the actor runs unguarded."""
    source = BROKEN_GUARD.replace("(Guard)", "(dramatiq.Middleware)")
    app = App(tmp_path, source, amqp_url, broker="stock")
    with app.worker():
        app.send("work.send(1)")

        wait_until(lambda: ran(app) == [1], what="the message to run")
    assert not (tmp_path / "database").exists()


COUNTED = """
from dramatiq.middleware import Middleware, SkipMessage

class Blocks(Middleware):
    def before_process_message(self, broker, message):
        if message.args[0] % 2:
            raise SkipMessage("not this one")

class Counts(Middleware):
    running = 0
    lock = threading.Lock()

    def count(self, change):
        with self.lock:
            self.running += change
            note("gauge", value=self.running)

    def before_process_message(self, broker, message):
        self.count(1)

    def after_process_message(self, broker, message, *, result=None, exception=None):
        self.count(-1)

    def after_skip_message(self, broker, message):
        self.count(-1)

class Sees(Middleware):
    def after_skip_message(self, broker, message):
        note("skipped", number=message.args[0])

broker.add_middleware(Blocks())
broker.add_middleware(Counts())
broker.add_middleware(Sees())

@dramatiq.actor(time_limit=60_000, max_retries=0)
def work(number):
    note("ran", number=number)
    if number == 4:
        raise ValueError(number)
"""


def gauge_after_skips(app: App) -> list[int]:
    """Run ten messages of which every second is blocked; return what the gauge below the blocker has shown."""
    with app.worker():
        app.send("for number in range(10): work.send(number)")
        wait_until(lambda: sorted(ran(app)) == [0, 2, 4, 6, 8], what="the even ones to run")
        # Also who has no before-hook hears of a skip: Results and the like live on it
        wait_until(lambda: len(app.notes("skipped")) == 5, what="the odd ones to be skipped")
        wait_until(lambda: len(app.notes("gauge")) >= 10, what="the gauge to fall again")
    return [one["value"] for one in app.notes("gauge")]


def test_an_after_hook_does_not_run_where_its_before_hook_did_not(amqp_url: str, tmp_path: Path) -> None:
    """A lock would be released that was never taken, a gauge would fall below zero."""
    values = gauge_after_skips(App(tmp_path, COUNTED, amqp_url))

    assert min(values) == 0, values
    assert values[-1] == 0


def test_stock_runs_after_hooks_whose_before_hook_never_ran(amqp_url: str, tmp_path: Path) -> None:
    """The twin: five skips leave the gauge at minus five."""
    values = gauge_after_skips(App(tmp_path, COUNTED, amqp_url, broker="stock"))

    assert min(values) < 0, values


# -- a server that goes away


@pytest.fixture(scope="module")
def mortal() -> Iterator[RabbitmqServer]:
    """A RabbitMQ of this file's own, to be shut down and started again. Without plugins that takes half the time."""
    with RabbitmqServer.start(plugins=()) as server:
        yield server


def test_a_worker_lives_through_a_restart_of_rabbitmq(mortal: RabbitmqServer, tmp_path: Path) -> None:
    """An upgrade of the server must not need a deploy of all workers."""
    # Given a worker with messages before it, one of them running
    source = """
    @dramatiq.actor(time_limit=60_000)
    def work(number):
        note("started", number=number)
        while number == 5 and not os.path.exists("release"):
            time.sleep(0.01)
        note("ran", number=number)
    """
    app = App(tmp_path, source, mortal.url)
    with app.worker(threads=2) as worker:
        app.send("broker.send_many([work.message(number) for number in range(200)])")
        wait_until(lambda: 5 in [one["number"] for one in app.notes("started")], what="message 5 to start")

        # When RabbitMQ is shut down and started again
        mortal.terminate()
        worker.wait_for_log("No connection to RabbitMQ to consume")
        mortal.restart()
        (tmp_path / "release").touch()

        # Then the worker consumes again by itself, says so, and nothing is lost
        wait_until(
            lambda: worker.text.count("Consuming queue 'default'") == 2, what="the worker to consume again"
        )
        wait_until(lambda: set(ran(app)) == set(range(200)), what="all messages to run")
        assert "guest:guest" not in worker.text
        # And every ack has arrived
        assert worker.terminate() == 0
    assert queues.look(app.url, "default") == []


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_queue_that_is_deleted_under_a_worker_is_declared_and_consumed_again(
    queue_type: str, amqp_url: str, tmp_path: Path
) -> None:
    """Somebody cleans up in the RabbitMQ UI. The worker looks alive afterwards, so it had better be."""
    # Given a worker that consumes a queue
    app = App(
        tmp_path, NUMBERED, amqp_url, env={"TEST_BROKER_OPTIONS": json.dumps({"queue_type": queue_type})}
    )
    with app.worker() as worker:
        worker.wait_for_log("Consuming queue 'default'")

        # When the queue is deleted
        with queues.channel(amqp_url) as channel:
            channel.queue_delete("default")

        # Then the worker says so, and goes on with a new one
        worker.wait_for_log("RabbitMQ cancelled the consumer of queue 'default'")
        wait_until(
            lambda: worker.text.count("Consuming queue 'default'") == 2, what="the worker to consume again"
        )
        app.send("work.send(1)")
        wait_until(lambda: ran(app) == [1], what="the message to run")


# -- a network that goes away


@pytest.fixture
def proxy(rabbit: RabbitmqServer) -> Iterator[TcpProxy]:
    """A network between the workers and RabbitMQ."""
    with TcpProxy("127.0.0.1", port_of(rabbit)) as standing:
        yield standing


def port_of(rabbit: RabbitmqServer) -> int:
    port = urlsplit(rabbit.url).port
    assert port is not None
    return port


def test_a_second_url_takes_over_when_the_first_server_is_gone(
    rabbit: RabbitmqServer, amqp_url: str, proxy: TcpProxy, tmp_path: Path
) -> None:
    """Dramatiq's way to name the nodes of a cluster: several URLs separated by semicolons."""
    with TcpProxy("127.0.0.1", port_of(rabbit)) as second:
        # Given a worker that is connected to the first of two nodes
        app = App(tmp_path, NUMBERED, f"{proxy.url_for(amqp_url)};{second.url_for(amqp_url)}")
        with app.worker() as worker:
            app.send("work.send(1)")
            wait_until(lambda: ran(app) == [1], what="the first message to run")
            assert second.connections == 0

            # When that one is gone
            proxy.refuse()
            proxy.cut()

            # Then worker and producer use the other one
            wait_until(lambda: worker.text.count("Consuming queue") == 2, what="the worker to consume again")
            app.send("work.send(2)")
            wait_until(lambda: ran(app) == [1, 2], what="the second message to run")
            assert second.connections == 1


def test_acks_that_never_arrive_repeat_their_messages_and_lose_none(
    amqp_url: str, proxy: TcpProxy, tmp_path: Path
) -> None:
    """A network that swallows what a worker says, and then breaks."""
    app = App(tmp_path, NUMBERED, proxy.url_for(amqp_url), env={"dramatiq_queue_prefetch": "4"})
    with app.worker(threads=1) as worker:
        # Given a network that lets deliveries through, and no acks
        worker.wait_for_log("Consuming queue")
        proxy.hold("to_server")
        direct = App(tmp_path / "producer", NUMBERED, amqp_url)
        direct.send("for number in range(10): work.send(number)")
        wait_until(lambda: len(ran(app)) == 4, what="what was prefetched to run")

        # When it breaks
        proxy.cut()
        proxy.release()

        # Then everything runs, and only what had run before runs twice
        wait_until(lambda: set(ran(app)) == set(range(10)), what="all messages to run")
        assert worker.terminate() == 0
    assert sorted(ran(app)) == sorted([*range(10), *range(4)])
    assert queues.look(amqp_url, "default") == []


def test_connections_that_are_cut_again_and_again_lose_nothing(
    amqp_url: str, proxy: TcpProxy, tmp_path: Path
) -> None:
    """A worker that retries, publishes and acks while its network flaps."""
    # Given messages of which every third fails at first, so that copies are published, too
    source = """
    @dramatiq.actor(time_limit=60_000, min_backoff=1)
    def work(number):
        note("started", number=number)
        if number % 3 == 0 and dramatiq.middleware.CurrentMessage.get_current_message().options.get("retries", 0) == 0:
            raise ValueError(number)
        note("ran", number=number)
    """
    app = App(tmp_path, source, proxy.url_for(amqp_url))
    App(tmp_path / "producer", source, amqp_url).send(
        "broker.send_many([work.message(number) for number in range(300)])"
    )

    # When the connections are cut at every 60 messages
    with app.worker(threads=2):
        for seen in range(50, 300, 60):
            wait_until(lambda seen=seen: len(app.notes("started")) >= seen, what=f"{seen} messages to start")
            proxy.cut()

        # Then every message has run
        wait_until(lambda: set(ran(app)) == set(range(300)), timeout=60, what="all messages to run")
    assert queues.depth(amqp_url, "default.dlq") == 0


@pytest.mark.long  # pika looks for heartbeats every 6 s at best
def test_a_partitioned_worker_notices_by_itself(amqp_url: str, proxy: TcpProxy, tmp_path: Path) -> None:
    """Packets that vanish without a reset, as behind a firewall: only heartbeats can tell."""
    app = App(tmp_path, NUMBERED, proxy.url_for(amqp_url) + "?heartbeat=1")
    with app.worker() as worker:
        worker.wait_for_log("Consuming queue")
        # When nothing comes through any more
        proxy.hold()

        # Then the worker gives the connection up, and consumes again once the network is back
        worker.wait_for_log("No connection to RabbitMQ to consume")
        proxy.cut()
        proxy.release()
        App(tmp_path / "producer", NUMBERED, amqp_url).send("work.send(1)")
        wait_until(lambda: ran(app) == [1], timeout=60, what="the message to run")


# -- fork

FORKED = """
work.send(0)
print("sent", flush=True)
input()
child = os.fork()
if child == 0:
    work.send(1)
    print("child", flush=True)
    {child_ends}
os.waitpid(child, 0)
work.send(2)
print("parent", flush=True)
input()
"""


@pytest.mark.parametrize("child_ends", ["os._exit(0)", "raise SystemExit(0)", "broker.close(); os._exit(0)"])
def test_a_forked_child_sends_on_a_connection_of_its_own_and_leaves_the_parents_alone(
    child_ends: str, rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """Two processes that write to one socket destroy each other's frames."""
    app = App(tmp_path, NUMBERED, amqp_url)
    with app.program(FORKED.format(child_ends=child_ends)) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        # Given the connection of a parent that has sent
        assert parent.stdout.readline() == "sent\n"
        [before] = counts.connections(rabbit, amqp_url)

        # When it forks, both send, and the child ends
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert [parent.stdout.readline() for _ in range(2)] == ["child\n", "parent\n"]

        # Then all has arrived, and the parent is still on the connection that it had
        assert sorted(one.message["args"][0] for one in queues.look(amqp_url, "default")) == [0, 1, 2]
        assert counts.connections(rabbit, amqp_url) == [before]


FORKS_AND_WAITS = """
work.send(0)
child = os.fork()
if child == 0:
    for pipe in (0, 1, 2):
        os.close(pipe)
    threading.Event().wait()
print(child, flush=True)
input()
"""


def test_the_death_of_a_producer_is_noticed_although_its_child_lives(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """A connection that nobody serves would stay in RabbitMQ until its heartbeats are missed, and longer without them."""
    app = App(tmp_path, NUMBERED, f"{amqp_url}?heartbeat=0")
    with app.program(FORKS_AND_WAITS) as parent, ExitStack() as stack:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        stack.callback(child.kill)
        assert len(counts.connections(rabbit, amqp_url)) == 1

        parent.kill()

        wait_until(lambda: not counts.connections(rabbit, amqp_url), what="RabbitMQ to notice")
        assert child.is_running()


def test_the_death_of_a_worker_is_noticed_although_a_child_of_its_actor_lives(
    amqp_url: str, tmp_path: Path
) -> None:
    """A child that kept its parent's socket open would keep the parent's messages from being delivered again."""
    # Given a worker whose actor has forked a child that lives on
    source = """
    @dramatiq.actor(time_limit=60_000)
    def work(number):
        if not os.path.exists("forked"):
            child = os.fork()
            if child == 0:
                while True:
                    time.sleep(1)
            open("forked", "w").write(str(child))
            time.sleep(60)
        note("ran", number=number)
    """
    app = App(tmp_path, source, f"{amqp_url}?heartbeat=0")
    child = 0
    try:
        with app.worker() as worker:
            app.send("work.send(1)")
            child = int(
                wait_until(lambda: (tmp_path / "forked").exists() and (tmp_path / "forked").read_text())
            )

            # When the worker is killed
            worker.kill()
            assert psutil.pid_exists(child)

            # Then RabbitMQ has its message back at once, and another worker runs it
            with app.worker():
                wait_until(lambda: ran(app) == [1], what="the message to run elsewhere")
            assert psutil.pid_exists(child)
    finally:
        if child:
            psutil.Process(child).kill()
