"""What a subscription does with its deliveries when RabbitMQ takes them away.

RabbitMQ and pika are stand-ins here: the moment between a cancel and the close that answers it is too short to hit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pika

from dramatiq_safeops.delivery import Delivery
from dramatiq_safeops.rabbitmq.publication import Publication
from dramatiq_safeops.rabbitmq.settler import Settler
from dramatiq_safeops.rabbitmq.subscription import Subscription


class Now:
    """An I/O thread that does at once what it is asked to, and nothing later."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        function(*arguments)

    def call_later(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> None:
        pass

    def safely(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def test_nothing_is_published_about_a_message_that_rabbitmq_took_back_by_a_cancel() -> None:
    """RabbitMQ 4.3 cancels a consumer that holds a message for too long: a retry that follows would be a second message."""
    # Given a message that runs, and a second one whose retry is on its way
    publisher, amqp, arrived = Mock(), Mock(is_open=True), []
    settler = Settler(Now(), publisher, lambda delivery, missing: None)
    subscription = Subscription(
        Now(),
        settler,
        "default",
        8,
        declarations=[],
        admit=lambda delivery, _: arrived.append(delivery),
    )
    subscription._opened(amqp)
    subscription._consume(None)
    on_message = amqp.basic_consume.call_args.kwargs["on_message_callback"]
    for tag in (1, 2):
        on_message(amqp, Mock(delivery_tag=tag, redelivered=False), pika.BasicProperties(), b"{}")
    running, published = arrived
    settle(published)

    # When RabbitMQ cancels the consumer, and the message ends before the channel is closed
    [cancelled] = amqp.add_on_cancel_callback.call_args.args
    cancelled(None)
    settle(running)

    # Then the retry on its way is called back, no other follows, and nothing is acked
    [batch] = [call.args[0] for call in publisher.submit.call_args_list]
    publisher.forget.assert_called_with(batch)
    amqp.close.assert_called_once()
    amqp.basic_ack.assert_not_called()


def settle(delivery: Delivery) -> None:
    copy = Publication("safeops.delay.1s", "default", delivery.body, pika.BasicProperties())
    delivery.channel.settle(delivery, [copy])
