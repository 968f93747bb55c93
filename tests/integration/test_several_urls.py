"""Of several URLs one may lead to a server that takes connections and says nothing, as a frozen node does.

Needs: RabbitMQ.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from dramatiq import Message

from dramatiq_safeops import QueueFull, RabbitmqBroker
from dramatiq_safeops.rabbitmq import client, connection
from dramatiq_safeops.testing import RabbitmqServer, TcpProxy
from tests.harness import queues
from tests.harness.vhosts import refusing
from tests.harness.worker import wait_until

PATIENCE_S = 60.0


@pytest.fixture
def silent_url() -> Iterator[str]:
    """Somebody listens, so that the kernel accepts connections, and nobody ever answers."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as listener:
        yield f"amqp://guest:guest@127.0.0.1:{listener.getsockname()[1]}/%2F"


def message() -> Message[object]:
    return Message("default", "work", (), {}, {})


def test_a_send_gets_past_a_frozen_server_within_its_time_budget(amqp_url: str, silent_url: str) -> None:
    """Hurts a web process that starts while a node is frozen: pika waits 15 s for it, and a send() only 10."""
    broker = RabbitmqBroker(url=[silent_url, amqp_url], middleware=[])
    began = time.monotonic()
    with closing(broker):
        sent = broker.enqueue(message())

    assert time.monotonic() - began < 10
    assert [one.message_id for one in queues.look(amqp_url, "default")] == [sent.message_id]


def test_a_check_gets_past_a_frozen_server(amqp_url: str, silent_url: str) -> None:
    """Hurts a worker that starts while a node is frozen: it has 10 s for all its checks."""
    broker = RabbitmqBroker(url=[silent_url, silent_url, amqp_url], middleware=[])
    began = time.monotonic()

    broker.declare_queue("default", ensure=True)

    assert time.monotonic() - began < 3 * connection.OPENING_FIRST_S + 5
    assert queues.depth(amqp_url, "default") == 0


def test_a_server_that_has_frozen_is_not_tried_first_again(rabbit: RabbitmqServer, amqp_url: str) -> None:
    """Hurts everybody with a cluster: its URL still accepts connections, and each try there is time without a worker."""
    # Given a connection to the second of three URLs, since nothing listens at the first
    parts = urlsplit(amqp_url)
    assert parts.port is not None
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        nobody = f"amqp://guest:guest@127.0.0.1:{gone.getsockname()[1]}/%2F"
    with TcpProxy("127.0.0.1", parts.port) as freezes, TcpProxy("127.0.0.1", parts.port) as third:
        urls = [f"{url}?heartbeat=2" for url in (nobody, freezes.url_for(amqp_url), third.url_for(amqp_url))]
        broker = RabbitmqBroker(url=urls, middleware=[], send_timeout=PATIENCE_S * 1000)
        with closing(broker):
            broker.enqueue(message())
            assert (freezes.connections, third.connections) == (1, 0)
            # Only a connection that has lived for a while counts as good.
            time.sleep(connection.GOOD_AFTER_S + 0.5)

            # When the second falls silent, also for those who connect anew
            freezes.hold()
            opened: list[bool] = []
            freezes.on_bytes = lambda *_: opened.append(True) if freezes.connections > 1 else None
            broker.enqueue(message())

            # Then the third was next
            assert third.connections == 1
            assert opened == []
    assert queues.depth(amqp_url, "default") >= 2


def test_a_moment_of_refusal_is_not_the_senders_business(
    rabbit: RabbitmqServer, amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hurts whoever sends while a node dies: RabbitMQ refuses what is for its queues until there is another leader."""
    # As long as it takes until the limit is gone
    monkeypatch.setattr(client, "REFUSAL_PATIENCE_S", PATIENCE_S)
    broker = RabbitmqBroker(url=amqp_url, middleware=[], send_timeout=PATIENCE_S * 1000)
    with closing(broker):
        broker.enqueue(message())
        ended = threading.Event()
        with refusing(rabbit, amqp_url, "^default$"):
            sent: list[str] = []
            sending = threading.Thread(target=lambda: sent.append(broker.enqueue(message()).message_id))
            sending.start()
            refused_for = 2.0
            assert not ended.wait(refused_for)
        sending.join(PATIENCE_S)

    assert len(sent) == 1
    assert sent[0] in {one.message_id for one in queues.look(amqp_url, "default")}


def test_a_queue_that_is_full_is_told_after_a_few_seconds(rabbit: RabbitmqServer, amqp_url: str) -> None:
    """Hurts whoever uses a length limit as back-pressure: the whole time budget would be too long to learn of it."""
    broker = RabbitmqBroker(url=amqp_url, middleware=[], send_timeout=PATIENCE_S * 1000)
    with closing(broker), refusing(rabbit, amqp_url, "^default$"):

        def send() -> QueueFull | None:
            try:
                broker.enqueue(message())
            except QueueFull as error:
                return error
            return None

        wait_until(send, PATIENCE_S, "a refusal")
        began = time.monotonic()
        error = send()

        assert error is not None
        assert "over its length limit, or too few nodes of its cluster are up" in str(error)
        assert time.monotonic() - began < 5 * client.REFUSAL_PATIENCE_S
