"""RabbitMQ may answer no declaration and do everything else, as a cluster of 3.10 does while one of its nodes is frozen.

Needs: RabbitMQ. What is not answered here is not sent: a cluster that really does so is in ``acceptance/test_clusters.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from dramatiq import Message

from dramatiq_safeops import RabbitmqBroker, SendUncertain
from dramatiq_safeops.rabbitmq import declarer, needs
from tests.harness import queues
from tests.harness.worker import wait_until

PATIENCE_S = 60.0


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """No declaration is answered. Each is kept here, to be carried out after all."""
    kept: list[Callable[[], None]] = []

    def keep(*arguments: Any) -> None:
        kept.append(lambda: declarer.declare_on_own_channel(*arguments))

    monkeypatch.setattr(needs, "declare_on_own_channel", keep)
    return kept


def message() -> Message[object]:
    return Message("default", "work", (), {}, {})


def test_a_new_sender_does_not_wait_for_the_declaration_of_what_exists(
    amqp_url: str, unanswered: list[Callable[[], None]]
) -> None:
    """Hurts every process that starts to send while a node is frozen: its queues are there, and their leaders well."""
    with closing(RabbitmqBroker(url=amqp_url, middleware=[])) as broker:
        broker.declare_queue("default", ensure=True)

        sent = [broker.enqueue(message()).message_id for _ in range(3)]

        assert len(unanswered) == 1
    assert [one.message_id for one in queues.look(amqp_url, "default")] == sent


def test_a_message_without_a_queue_waits_for_its_declaration(
    amqp_url: str, unanswered: list[Callable[[], None]]
) -> None:
    """Hurts the first send of a new app: RabbitMQ returns what has no queue, and that must not be the sender's error."""
    with closing(RabbitmqBroker(url=amqp_url, middleware=[], send_timeout=PATIENCE_S * 1000)) as broker:
        sent: list[str] = []
        sending = threading.Thread(target=lambda: sent.append(broker.enqueue(message()).message_id))
        sending.start()
        publisher = broker.client._publisher
        wait_until(lambda: publisher._needs._unanswered and not publisher._needs.idle, PATIENCE_S)
        assert sent == []

        for declare in unanswered:
            broker.client._io.call(declare)
        sending.join(PATIENCE_S)

        assert [one.message_id for one in queues.look(amqp_url, "default")] == sent


def test_a_send_whose_queue_cannot_be_declared_in_time_is_uncertain(
    amqp_url: str, unanswered: list[Callable[[], None]]
) -> None:
    """Hurts whoever handles the error: nobody deleted the queue, so QueueMissing would be a wrong lead."""
    broker = RabbitmqBroker(url=amqp_url, middleware=[], send_timeout=5_000)
    with closing(broker), pytest.raises(SendUncertain):
        broker.enqueue(message())
    assert len(unanswered) == 1
