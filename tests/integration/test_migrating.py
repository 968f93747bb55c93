"""``safeops queues migrate`` without load: what it says, what it refuses, what it leaves alone, and what RabbitMQ does behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pika
import pika.exceptions
import pytest
from click.testing import CliRunner
from dramatiq import Message

from dramatiq_safeops import RabbitmqBroker
from dramatiq_safeops.cli.exit_codes import EXIT_FINDINGS, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE
from dramatiq_safeops.cli.root import safeops
from dramatiq_safeops.rabbitmq import admin, topology
from dramatiq_safeops.rabbitmq.holding import Hold
from dramatiq_safeops.rabbitmq.moving import digests_in
from dramatiq_safeops.testing import RabbitmqServer
from dramatiq_safeops.testing.processes import free_ports
from tests.harness import queues
from tests.harness.counts import attached
from tests.harness.vhosts import refusing
from tests.harness.worker import ROOT, App, wait_until

SOURCE = """
@dramatiq.actor(queue_name="orders", time_limit=60_000)
def work(key, takes=0.0):
    note("began", key=key)
    time.sleep(takes)
    note("ran", key=key)
"""
CLASSIC = {"TEST_BROKER_OPTIONS": json.dumps({"queue_type": "classic"})}
DEATH = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.XQ"}


def run(url: str, *arguments: str) -> Any:
    return CliRunner().invoke(safeops, ["queues", "migrate", *arguments], env={"SAFEOPS_AMQP_URL": url})


def report(url: str, *arguments: str, code: int = EXIT_OK) -> dict[str, Any]:
    result = run(url, "--json", *arguments)
    assert result.exit_code == code, result.output
    [one] = json.loads(result.stdout)["queues"]
    return one  # type: ignore[no-any-return]


def declare(url: str, name: str = "orders", **arguments: Any) -> None:
    with queues.channel(url) as channel:
        channel.queue_declare(name, durable=True, arguments={**DEATH, **arguments})


def body(key: str, queue: str = "orders", **options: Any) -> bytes:
    return queues.body_of("work", key, queue=queue, message_id=key, **options)


def kind_now(url: str, queue: str = "orders") -> str:
    """Say which arguments a queue has now, by asking for them."""
    for kind in ("quorum", "classic"):
        with queues.channel(url) as channel:
            arguments = topology.work_queue_arguments(queue, kind)
            try:
                channel.queue_declare(queue, durable=True, arguments=arguments)
            except pika.exceptions.ChannelClosedByBroker:
                continue
            return kind
    return "other"


def exists(url: str, queue: str) -> bool:
    with queues.channel(url) as channel:
        try:
            channel.queue_declare(queue, passive=True)
        except pika.exceptions.ChannelClosedByBroker:
            return False
        return True


def is_over(url: str) -> bool:
    return not any(queues.depth(url, name) for name in ("orders.migrating", "safeops.migrations"))


# -- why it is done as it is done


def test_rabbitmq_confirms_what_it_loses_while_a_queue_is_deleted(amqp_url: str) -> None:
    """The reason for the pause of all publishers: an atomic "delete if empty and unused" is not enough."""
    # Given producers that count what was confirmed, one message at a time
    stop, confirmed = threading.Event(), [[], [], [], []]  # type: ignore[var-annotated]

    def produce(number: int) -> None:
        with queues.channel(amqp_url) as channel:
            channel.confirm_delivery()
            for count in range(1_000_000):
                if stop.is_set():
                    return
                time.sleep(0.003)  # the queue must be empty now and then
                key = f"{number}-{count}"
                try:
                    channel.basic_publish("", "orders", key.encode(), mandatory=True)
                except pika.exceptions.UnroutableError:
                    continue
                confirmed[number].append(key)

    declare(amqp_url)
    threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()

    # When the queue is deleted, each time after it was emptied, and declared again
    found: set[str] = set()
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    deadline = time.monotonic() + 60
    lost: set[str] = set()
    try:
        while not lost and time.monotonic() < deadline:
            until = time.monotonic() + 3
            while time.monotonic() < until:
                channel = connection.channel()
                try:
                    while (got := channel.basic_get("orders", auto_ack=True))[0] is not None:
                        found.add(got[2].decode())
                    channel.queue_delete("orders", if_unused=True, if_empty=True)
                    channel.queue_declare("orders", durable=True, arguments=DEATH)
                except pika.exceptions.ChannelClosedByBroker:
                    pass
            # What was sent last is still on its way.
            sent = {key for keys in confirmed for key in keys[:-100]}
            lost = sent - found - {one.body.decode() for one in queues.look(amqp_url, "orders")}
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        connection.close()

    # Then some of it is nowhere
    assert lost


# -- what it says


def test_a_dry_run_says_what_is_there_and_changes_nothing(amqp_url: str) -> None:
    """Hurts whoever wants to know first."""
    declare(amqp_url)
    declare(amqp_url, "orders.DQ")
    queues.publish_many(amqp_url, "orders", [b"1", b"2", b"3"])

    result = run(amqp_url, "--dry-run", "orders")

    assert result.exit_code == EXIT_FINDINGS  # there is something to do
    assert "classic, as stock Dramatiq declares it" in result.stdout
    assert "move 3 messages of 'orders' to 'orders.migrating'" in result.stdout
    assert "Disturbed: workers of these queues stand back" in result.stdout
    assert kind_now(amqp_url) == "classic"
    assert queues.depth(amqp_url, "orders") == 3
    assert not exists(amqp_url, "orders.migrating")


def test_a_queue_that_has_its_arguments_already_is_left_alone(amqp_url: str) -> None:
    """Hurts deploy scripts that run it each time."""
    with admin.connected([pika.URLParameters(amqp_url)]) as connection:
        admin.declare(connection, topology.topology_for("orders"))
    queues.publish(amqp_url, "orders", b"1")

    assert report(amqp_url, "--dry-run", "orders")["status"] == "nothing to do"
    assert report(amqp_url, "orders")["status"] == "nothing to do"
    assert queues.depth(amqp_url, "orders") == 1


def test_a_queue_that_does_not_exist_is_said_to_be_missing(amqp_url: str) -> None:
    """Hurts whoever mistypes its name, or the vhost: it must not be declared by that."""
    assert report(amqp_url, "ordres", code=EXIT_FINDINGS)["status"] == "missing"
    assert not exists(amqp_url, "ordres")


@pytest.mark.parametrize(
    "name", ["orders.DQ", "orders.XQ", "orders.dlq", "orders.migrating", "safeops.unroutable", ""]
)
def test_what_belongs_to_a_work_queue_is_not_taken_for_one(amqp_url: str, name: str) -> None:
    """Hurts whoever lists all queues and gives each."""
    assert run(amqp_url, name).exit_code == EXIT_USAGE


def test_a_rabbitmq_that_is_not_there_is_said_to_be_away() -> None:
    """Hurts scripts: that is another thing than a queue that cannot be migrated."""
    url = f"amqp://guest:secret-word@127.0.0.1:{free_ports(1)[0]}/"

    result = run(url, "orders")

    assert result.exit_code == EXIT_UNREACHABLE
    assert "nothing listens" in result.output
    assert "secret-word" not in result.output


def test_without_a_url_it_takes_none_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hurts whoever forgets it: pika would take whatever listens on this machine."""
    monkeypatch.delenv("SAFEOPS_AMQP_URL", raising=False)

    assert CliRunner().invoke(safeops, ["queues", "migrate", "orders"]).exit_code == EXIT_USAGE


def test_its_help_ends_in_examples_that_work(amqp_url: str) -> None:
    """Examples are what people copy."""
    for name in ("reports", "reports-low"):
        with admin.connected([pika.URLParameters(amqp_url)]) as connection:
            admin.declare(connection, topology.topology_for(name))
    text = CliRunner().invoke(safeops, ["queues", "migrate", "--help"]).stdout
    _, _, examples = text.partition("Examples:\n")
    lines = [line.split() for line in examples.splitlines() if line.strip()]

    for _, *words in lines:
        assert CliRunner().invoke(safeops, words, env={"SAFEOPS_AMQP_URL": amqp_url}).exit_code == EXIT_OK, (
            words
        )
    assert len(lines) == 3


# -- what it moves


def test_everything_moves_as_it_is_and_back(amqp_url: str) -> None:
    """Hurts producers: bytes, ids, priorities and headers are theirs. And whoever wants to go back."""
    declare(amqp_url)
    junk = b"\xff\x00 no json"
    with queues.channel(amqp_url) as channel:
        for content, options in (
            (body("a"), {"message_id": "a", "priority": 3, "timestamp": 1_700_000_000, "type": "work"}),
            (body("b"), {"headers": {"x-mine": "yes", "CC": ["elsewhere"], "x-safeops-retries": 2}}),
            (junk, {}),
            (junk, {"expiration": "3600000"}),
        ):
            channel.basic_publish("", "orders", content, pika.BasicProperties(delivery_mode=2, **options))
        channel.queue_declare("elsewhere")

    for to in ("quorum", "classic"):
        assert report(amqp_url, "--to", to, "orders")["status"] == "migrated"
        assert kind_now(amqp_url) == to

        found = queues.look(amqp_url, "orders")
        assert [one.body for one in found] == [body_of.body for body_of in found]
        assert [one.body for one in found][2:] == [junk, junk]
        first, second = found[0].properties, found[1].headers
        assert (first.message_id, first.priority, first.timestamp, first.type) == (
            "a",
            3,
            1_700_000_000,
            "work",
        )
        assert second["x-mine"] == "yes"
        assert second["x-safeops-retries"] == 2
        assert queues.depth(amqp_url, "elsewhere") == 0
        assert is_over(amqp_url)


def test_names_may_have_any_letters(amqp_url: str) -> None:
    """Hurts apps whose queues are named in their own language."""
    name = "bestellungen-äöü-注文"
    with queues.channel(amqp_url) as channel:
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}.XQ"}
        channel.queue_declare(name, durable=True, arguments=arguments)
    queues.publish(amqp_url, name, b"1")

    assert report(amqp_url, name)["moved"][name] == 1
    assert queues.depth(amqp_url, name) == 1


def test_a_queue_with_priorities_says_that_they_are_lost_and_keeps_their_order(amqp_url: str) -> None:
    """Hurts whoever relies on them: quorum queues have no such thing."""
    declare(amqp_url, **{"x-max-priority": 10})
    for key, priority in (("low", 1), ("high", 9)):
        queues.publish(amqp_url, "orders", body(key), priority=priority)

    result = run(amqp_url, "orders")

    assert result.exit_code == EXIT_OK, result.output
    assert "priorities are lost" in result.stdout
    assert [one.message_id for one in queues.look(amqp_url, "orders")] == ["high", "low"]
    assert kind_now(amqp_url) == "quorum"


def test_a_limit_on_the_target_stops_it_and_loses_nothing(rabbit: RabbitmqServer, amqp_url: str) -> None:
    """Hurts whoever has a policy for all queues: what does not fit must stay where it was."""
    declare(amqp_url)
    with queues.channel(amqp_url) as channel:
        channel.tx_select()
        for number in range(2_000):
            channel.basic_publish("", "orders", body(f"m{number}"), pika.BasicProperties(delivery_mode=2))
        channel.tx_commit()

    with refusing(rabbit, amqp_url, "migrating$", ended_by="raise"):
        result = run(amqp_url, "orders")
        assert result.exit_code == EXIT_FINDINGS
        assert "nothing is lost" in result.output

    assert report(amqp_url, "orders")["status"] == "migrated"
    assert sorted(one.message_id for one in queues.look(amqp_url, "orders")) == sorted(
        f"m{n}" for n in range(2_000)
    )


def test_what_leaves_the_delay_ladder_in_the_moment_of_the_change_is_taken_back(amqp_url: str) -> None:
    """Hurts delayed messages: they are handed over by RabbitMQ itself, which does not pause."""
    with admin.connected([pika.URLParameters(amqp_url)]) as connection:
        admin.declare(connection, topology.topology_for("orders", "classic"))
        channel = connection.channel()
        # as it is between the unbinding and the new queue, with somebody else's beside it
        channel.basic_publish("safeops.delivery", "other", b"not ours", mandatory=True)
        channel.queue_unbind("orders", "safeops.delivery", "orders")
        channel.basic_publish("safeops.delivery", "orders", body("due"), mandatory=True)
        channel.basic_publish("safeops.dlx", "nowhere", b"a dead letter", mandatory=True)
    wait_until(lambda: queues.depth(amqp_url, "safeops.unroutable") == 3, what="all to be unroutable")

    assert report(amqp_url, "orders")["status"] == "migrated"

    assert [one.message_id for one in queues.look(amqp_url, "orders")] == ["due"]
    wait_until(lambda: queues.depth(amqp_url, "safeops.unroutable") == 2, what="the others to be back")


def test_more_messages_than_fit_into_one_window_are_looked_at(amqp_url: str) -> None:
    """Hurts whoever goes on with a large migration: a quorum queue takes "no limit" for 2000."""
    with queues.channel(amqp_url) as channel:
        topology.apply([topology.staging("orders")], channel)
        channel.tx_select()
        for number in range(5_000):
            channel.basic_publish("", "orders.migrating", body(f"m{number}"))
        channel.tx_commit()

    with admin.connected([pika.URLParameters(amqp_url)]) as connection:
        found = digests_in(connection, "orders.migrating", lambda _properties: False)

    assert len(found) == 5_000
    wait_until(lambda: queues.depth(amqp_url, "orders.migrating") == 5_000, what="them to be back")


# -- who is in its way


def test_a_consumer_that_does_not_let_go_ends_it_and_all_goes_on_as_before(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts whoever forgets a worker of stock Dramatiq: what it holds would be gone with the queue."""
    stock = App(tmp_path / "stock", SOURCE, amqp_url, broker="stock")
    safe = App(tmp_path / "safe", SOURCE, amqp_url, env=CLASSIC)
    with stock.worker(), safe.worker() as worker:
        said = run(amqp_url, "--timeout", "7", "orders")
        assert said.exit_code == EXIT_FINDINGS
        assert "there are still consumers" in said.output
        assert "workers of stock Dramatiq" in said.output
        assert "Nothing was moved" in said.output
        assert is_over(amqp_url)

        # and ours, which had stood back, works again
        wait_until(
            lambda: worker.text.count("Consuming queue 'orders',") == 2, what="our worker to come back"
        )
    assert kind_now(amqp_url) == "classic"


def test_two_migrations_do_not_run_at_once(amqp_url: str) -> None:
    """Hurts a team: two people read the same page of the manual."""
    declare(amqp_url)
    with queues.channel(amqp_url) as other:
        other.queue_declare(topology.MIGRATION_LOCK, exclusive=True)

        result = run(amqp_url, "orders")

        assert result.exit_code == EXIT_FINDINGS
        assert "another migration runs in this vhost" in result.output
        assert kind_now(amqp_url) == "classic"

    assert report(amqp_url, "orders")["status"] == "migrated"


# -- the pause of publishers


def message(key: str) -> Message[Any]:
    return Message("orders", "work", (key,), {}, {}, key, int(time.time() * 1000))


def test_publishers_pause_and_go_on(amqp_url: str) -> None:
    """Hurts every message that would be sent while its queue is deleted."""
    with ExitStack() as stack:
        brokers = [RabbitmqBroker(url=amqp_url) for _ in range(3)]
        for broker in brokers:
            stack.callback(broker.close)
            broker.enqueue(message("before"))
        hold = Hold(stack.enter_context(admin.connected([pika.URLParameters(amqp_url)])))

        # When they are to pause
        assert hold.begin()
        sent = threading.Event()
        thread = threading.Thread(target=lambda: (brokers[0].enqueue(message("meanwhile")), sent.set()))
        thread.start()

        # Then a send() waits, also that of a process that comes new
        late = RabbitmqBroker(url=amqp_url)
        stack.callback(late.close)
        other = threading.Thread(target=late.enqueue, args=(message("late"),))
        other.start()
        assert not sent.wait(1)
        assert queues.depth(amqp_url, "orders") == 3

        # and is done when the pause is over
        hold.end()
        thread.join(10)
        other.join(10)
        assert queues.depth(amqp_url, "orders") == 5


HOLDER = """
import sys, time, pika
from dramatiq_safeops.rabbitmq.holding import Hold
print(Hold(pika.BlockingConnection(pika.URLParameters(sys.argv[1]))).begin(), flush=True)
time.sleep(600)
"""


def test_publishers_go_on_when_who_let_them_pause_is_dead(amqp_url: str) -> None:
    """Hurts all of production: kill -9 of a tool must not stop it."""
    broker = RabbitmqBroker(url=amqp_url)
    broker.enqueue(message("before"))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, amqp_url], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"

    holder.kill()
    holder.communicate()

    broker.enqueue(message("after"))
    broker.close()
    assert queues.depth(amqp_url, "orders") == 2
    # and the pause that was left behind stops nobody who comes later
    later = RabbitmqBroker(url=amqp_url)
    later.enqueue(message("later"))
    later.close()
    assert queues.depth(amqp_url, "orders") == 3


def test_a_producer_that_must_not_consume_publishes_all_the_same(
    rabbit: RabbitmqServer, amqp_url: str
) -> None:
    """Hurts locked-down producers: to be pausable is not worth a message."""
    vhost = amqp_url.rpartition("/")[2]
    rabbit.api(
        "PUT",
        f"/api/permissions/{vhost}/guest",
        {"configure": ".*", "write": ".*", "read": r"^(?!safeops\.publishers).*"},
    )
    broker = RabbitmqBroker(url=amqp_url)
    broker.enqueue(message("a"))
    broker.close()
    rabbit.api("PUT", f"/api/permissions/{vhost}/guest", {"configure": ".*", "write": ".*", "read": ".*"})

    assert queues.depth(amqp_url, "orders") == 1


# -- who runs while it happens


def test_workers_finish_what_runs_and_go_on_afterwards_with_one_warning(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts whoever has long jobs: none may be cut off, none run twice, and nobody restarts anything in that night."""
    app = App(tmp_path, SOURCE, amqp_url, env=CLASSIC)
    with (
        app.worker(threads=1) as worker,
        app.program("import sys\nfor line in sys.stdin: work.send(line.strip())") as producer,
    ):
        # Given a message that runs for long, and one that waits behind it in the worker
        app.send("work.send('long', takes=9.0); work.send('behind')")
        assert producer.stdin is not None
        producer.stdin.write("first\n")
        producer.stdin.flush()
        wait_until(lambda: app.notes("began") and attached(amqp_url, "orders")[0] == 1, what="all to be sent")

        # When the queue is migrated
        assert report(amqp_url, "orders")["status"] == "migrated"

        # Then the long one has ended first, and the other runs once, afterwards
        assert [one["key"] for one in app.notes("ran")] == ["long"]
        producer.stdin.write("later\n")
        producer.stdin.flush()
        wait_until(lambda: len(app.notes("ran")) == 4, what="the others to run")
        assert sorted(one["key"] for one in app.notes("began")) == ["behind", "first", "later", "long"]
        warnings = [line for line in worker.text.splitlines() if "[WARNING]" in line and "safeops" in line]
        assert len(warnings) == 1, warnings
        assert "queue_type" in warnings[0]

    # and a worker that starts with the old type is refused, as before
    refused = app.start_worker(wait=False)
    assert refused.process.wait(60) != 0
    assert "cannot be declared as a classic queue" in refused.text


def test_a_worker_that_has_sent_nothing_before_can_retry_after_the_change(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts the first failure of the next morning: the worker knows its queue as classic, and first publishes now."""
    source = (
        SOURCE
        + """
@dramatiq.actor(queue_name="orders", time_limit=60_000, max_retries=1, min_backoff=100)
def failing(key):
    note("tried", key=key)
    raise ConnectionError(key)
"""
    )
    app = App(tmp_path, source, amqp_url, env=CLASSIC)
    with app.worker() as worker:
        assert report(amqp_url, "orders")["status"] == "migrated"
        wait_until(
            lambda: worker.text.count("Consuming queue 'orders',") == 2, what="the worker to come back"
        )
        queues.publish(amqp_url, "orders", queues.body_of("failing", "x", queue="orders"))

        wait_until(lambda: len(app.notes("tried")) == 2, what="the retry")
        wait_until(lambda: queues.depth(amqp_url, "orders.dlq") == 1, what="the dead letter")


def test_a_worker_that_starts_while_a_migration_is_on_waits_until_it_is_over(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts a deploy in the wrong minute: what was copied already would run from both places."""
    # Given a migration that was cut off
    declare(amqp_url)
    queues.publish(amqp_url, "orders", body("waits"))
    with queues.channel(amqp_url) as channel:
        topology.apply([topology.staging("orders"), topology.migrations()], channel)
        channel.basic_publish("", topology.MIGRATIONS, b"orders")

    app = App(tmp_path, SOURCE, amqp_url, env=CLASSIC)
    with app.worker() as worker:
        worker.wait_for_log("Queue 'orders' is being migrated")
        assert attached(amqp_url, "orders") == (1, 0)

        # When somebody goes on with it
        assert report(amqp_url, "orders")["status"] == "migrated"

        wait_until(lambda: app.notes("ran"), what="the message")
    assert len(app.notes("began")) == 1


def test_a_producer_whose_queue_was_migrated_goes_on(amqp_url: str) -> None:
    """Hurts web processes that nobody restarts that night: their queue is what they know, only of another type."""
    broker = RabbitmqBroker(url=amqp_url, queue_type="classic")
    broker.enqueue(message("before"))
    assert report(amqp_url, "orders")["status"] == "migrated"
    broker.enqueue(message("after"))

    # also when it has to look at its queue again
    with queues.channel(amqp_url) as channel:
        channel.queue_delete("orders")
    with admin.connected([pika.URLParameters(amqp_url)]) as connection:
        admin.declare(connection, topology.topology_for("orders"))
    broker.enqueue(message("again"))
    broker.close()

    assert [one.message_id for one in queues.look(amqp_url, "orders")] == ["again"]


def test_the_command_can_be_called_as_a_module(amqp_url: str) -> None:
    """Where scripts are not on the path."""
    done = subprocess.run(
        [sys.executable, "-m", "dramatiq_safeops", "queues", "migrate", "--json", "nothing"],
        env={**os.environ, "SAFEOPS_AMQP_URL": amqp_url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == EXIT_FINDINGS
    assert json.loads(done.stdout)["queues"][0]["status"] == "missing"
