"""How a publisher becomes present, on a RabbitMQ that is not as it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pika.exceptions import ChannelClosedByBroker

from dramatiq_safeops.rabbitmq.presence import AGAIN_S, Presence


class Loop:
    """Stands in for the I/O thread: runs at once what is to be run safely, and notes what is to be run later."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def safely(self, function: Callable[..., None]) -> Callable[..., None]:
        return function

    def call_later(self, delay_s: float, function: Callable[..., None], *arguments: Any) -> None:
        self.later.append((delay_s, function, arguments))


class Channel:
    """Refuses to declare: the node of the queue is down."""

    def add_on_close_callback(self, callback: Callable[..., None]) -> None:
        self.closed = callback

    def add_on_cancel_callback(self, callback: Callable[..., None]) -> None:
        pass

    def queue_declare(self, **_how: Any) -> None:
        self.closed(self, ChannelClosedByBroker(404, "home node of durable queue is down"))


class Connection:
    is_open = True

    def channel(self, on_open_callback: Callable[[Any], None]) -> None:
        on_open_callback(Channel())


def test_a_publisher_whose_queue_is_on_a_node_that_is_down_publishes_and_does_not_ask_in_a_tight_loop() -> (
    None
):
    """Hurts the nodes that are left: each process of the app would ask, and be refused, some hundred times a second."""
    loop, freed = Loop(), []
    presence = Presence(
        loop,  # type: ignore[arg-type]
        quiet=lambda: True,
        on_present=lambda: None,
        on_free=freed.append,
    )

    presence.up(Connection())  # type: ignore[arg-type]

    assert freed == [False]
    # the other one is the limit of its patience, which does nothing any more
    assert [delay_s for delay_s, function, _ in loop.later if function == presence._enter] == [AGAIN_S]
