"""``safeops queues migrate`` when something else goes wrong in the same minute."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pika
import pika.exceptions
import pytest

from dramatiq_safeops import RabbitmqBroker
from dramatiq_safeops.cli.exit_codes import EXIT_FINDINGS, EXIT_UNREACHABLE
from dramatiq_safeops.rabbitmq import admin, topology
from dramatiq_safeops.rabbitmq.holding import Hold
from dramatiq_safeops.rabbitmq.migration import Migration
from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import queues
from tests.integration.test_migrating import body, exists, kind_now, message, report


def test_a_migration_killed_before_the_new_queue_was_bound_binds_it(amqp_url: str) -> None:
    """Hurts every retry after it: what leaves the delay ladder would pile up in safeops.unroutable."""
    # Given what is there when it is killed between the declaration and the binding of the new queue
    *before, bind = topology.topology_for("orders", "quorum")
    assert bind.method == "queue_bind"
    with admin.connected([pika.URLParameters(amqp_url)]) as connection:
        admin.declare(connection, [*before, topology.staging("orders")])

    assert report(amqp_url, "orders")["status"] == "migrated"

    with queues.channel(amqp_url) as channel:
        channel.confirm_delivery()
        channel.basic_publish("safeops.delivery", "orders", body("due"), mandatory=True)
    assert [one.message_id for one in queues.look(amqp_url, "orders")] == ["due"]


_SERVER = """
{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost}">>, queue, <<"{queue}">>)),
ra:{what}(quorum_queues, amqqueue:get_pid(Q)).
"""


def test_a_queue_without_a_leader_is_not_taken_for_an_empty_one(
    rabbit: RabbitmqServer, amqp_url: str
) -> None:
    """Hurts everybody: RabbitMQ says of a quorum queue without a leader that it has no messages, and deletes it with all."""
    vhost, queue = amqp_url.rpartition("/")[2], "orders.migrating"
    with admin.connected([pika.URLParameters(amqp_url)]) as connection:
        admin.declare(connection, [topology.staging("orders"), topology.migrations()])
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue, body("mine"), mandatory=True)

        # When its leader is away in the moment when the migration takes it for empty
        rabbit.eval(_SERVER.format(vhost=vhost, queue=queue, what="stop_server"))
        with pytest.raises(Exception):  # noqa: B017, PT011  # RabbitMQ's answer differs by version
            Migration(connection, [pika.URLParameters(amqp_url)], "orders")._finish()
    rabbit.eval(_SERVER.format(vhost=vhost, queue=queue, what="restart_server"))

    # Then nothing was deleted
    assert [one.message_id for one in queues.look(amqp_url, queue)] == ["mine"]


def test_two_producers_that_start_during_the_pause_both_wait(amqp_url: str) -> None:
    """Hurts a deploy, or cron jobs, in the moment of the change: RabbitMQ confirms what it loses then."""
    with ExitStack() as stack:
        hold = Hold(stack.enter_context(admin.connected([pika.URLParameters(amqp_url)])))
        assert hold.begin()
        # Given one that has just got the hold, and has not returned it yet
        first = stack.enter_context(queues.channel(amqp_url))
        assert first.basic_get(topology.PUBLISHERS)[0] is not None

        # When another one sends
        second = RabbitmqBroker(url=amqp_url)
        stack.callback(second.close)
        sent = threading.Event()
        thread = threading.Thread(target=lambda: (second.enqueue(message("second")), sent.set()))
        thread.start()

        # Then it waits
        assert not sent.wait(1)
        first.close()
        hold.end()
        thread.join(10)
        assert queues.depth(amqp_url, "orders") == 1


def test_publishers_go_on_when_rabbitmq_does_not_answer_in_the_moment_of_the_change(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hurts all of the vhost: a queue without its majority would let every send() wait for as long as the tool does."""
    monkeypatch.setattr(admin, "ANSWER_S", 2.0)
    monkeypatch.setattr(
        Migration,
        "_replace",
        lambda self, *_: self._connection._flush_output(lambda: False),  # an answer that never comes
    )
    broker = RabbitmqBroker(url=amqp_url, queue_type="classic")
    broker.enqueue(message("before"))

    said = report(amqp_url, "orders", code=EXIT_UNREACHABLE)

    assert "no answer" in said["error"]
    broker.enqueue(message("after"))
    broker.close()


def test_a_migration_that_is_interrupted_while_it_waits_for_workers_lets_them_go_on(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hurts whoever presses Ctrl-C since it waits for long: workers that had stood back would do so for ever."""
    broker = RabbitmqBroker(url=amqp_url, queue_type="classic")
    broker.enqueue(message("mine"))
    broker.close()

    def interrupt(self: Migration, **_how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Migration, "_wait_for_workers", interrupt)

    said = report(amqp_url, "orders", code=EXIT_FINDINGS)

    assert "Nothing was moved" in said["error"]
    assert not exists(amqp_url, "orders.migrating")
    assert queues.depth(amqp_url, "safeops.migrations") == 0
    assert kind_now(amqp_url) == "classic"
