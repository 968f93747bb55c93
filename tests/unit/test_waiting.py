"""What has waited in a worker goes back to its queue, but not for nothing.

RabbitMQ is a stand-in here; tests/acceptance/test_prefetch.py has the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pika
import pytest
from dramatiq import Message

from dramatiq_safeops.delivery import STARTED, Delivery
from dramatiq_safeops.rabbitmq import waiting
from dramatiq_safeops.rabbitmq.waiting import MOST_DOUBLINGS, Waiting


class Clock:
    """An I/O thread whose timers go off when the test says so."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], None]] = []

    def call_later(self, _seconds: float, function: Callable[[], None]) -> None:
        self.timers.append(function)

    def safely(self, function: Callable[..., None]) -> Callable[..., None]:
        return function

    def tick(self) -> None:
        timers, self.timers = self.timers, []
        for timer in timers:
            timer()


class Bench:
    """One channel with deliveries, on a queue with a backlog or without."""

    def __init__(self, backlog: int = 0) -> None:
        self.clock = Clock()
        self.returned: list[int] = []
        self.channel = Mock(gone=False, retiring=False, deliveries={})
        self.channel.give_back = lambda ones: self.returned.extend(one.tag for one in ones)
        self.asked = 0
        self.backlog = backlog
        self.answers = True
        self.amqp = Mock(is_open=True, queue_declare=self.declare)
        self.waiting = Waiting(self.clock, self.amqp, self.channel, "reports")

    def declare(self, queue: str, *, passive: bool, callback: Callable[[Any], None]) -> None:
        assert (queue, passive) == ("reports", True)
        self.asked += 1
        if self.answers:
            callback(SimpleNamespace(method=SimpleNamespace(message_count=self.backlog)))

    def deliver(
        self, tag: int, *, returns: int = 0, message_id: str = "m", redelivered: bool = False
    ) -> Delivery:
        headers = {"x-delivery-count": returns} if returns else None
        properties = pika.BasicProperties(headers=headers, message_id=message_id)
        redelivered = redelivered or returns > 0
        delivery = Delivery(
            self.channel, tag, queue="reports", body=b"", properties=properties, redelivered=redelivered
        )
        self.channel.deliveries[tag] = delivery
        return delivery

    def ticks_until_returned(self, tag: int) -> int:
        for ticks in range(1, 1000):
            self.clock.tick()
            if tag in self.returned:
                return ticks
        raise AssertionError("never returned")


def test_what_waits_behind_a_busy_thread_goes_back_after_a_moment() -> None:
    bench = Bench()
    bench.deliver(1).leave_buffer(STARTED)
    bench.deliver(2)

    assert bench.ticks_until_returned(2) == 2
    assert bench.returned == [2]


def test_nothing_goes_back_to_a_queue_with_a_backlog() -> None:
    """Nobody is idle there, and it would come back at once, again and again."""
    bench = Bench(backlog=1)
    bench.deliver(1)

    for _ in range(20):
        bench.clock.tick()

    assert bench.returned == []


def test_rabbitmq_is_not_asked_while_nothing_waits() -> None:
    bench = Bench()
    for tag in range(1, 20):
        bench.deliver(tag).leave_buffer(STARTED)
        bench.clock.tick()

    assert bench.asked == 0


@pytest.mark.parametrize(("returns", "ticks"), [(0, 2), (1, 3), (2, 5), (3, 9), (100, 2**MOST_DOUBLINGS + 1)])
def test_a_message_that_was_returned_before_waits_longer_each_time(returns: int, ticks: int) -> None:
    """Where all workers are busy it would go back and forth, and RabbitMQ counts."""
    bench = Bench()
    bench.deliver(1, returns=returns)

    assert bench.ticks_until_returned(1) == ticks


def test_a_classic_queue_does_not_count_and_its_messages_wait_longer_each_time_all_the_same() -> None:
    """Behind an hour's body a message went back and forth every 1.5 s, and each copy stayed in the worker's memory."""
    bench = Bench()
    ticks = []
    for tag in range(1, 8):
        bench.deliver(tag, message_id="a", redelivered=tag > 1)
        ticks.append(bench.ticks_until_returned(tag))
        del bench.channel.deliveries[tag]

    assert ticks == [2, 3, 5, 9, 17, 33, 65]


def test_rabbitmq_is_not_asked_again_before_it_has_answered() -> None:
    """With a frozen node it answers after a minute, and pika holds up the cancel at shutdown behind every question."""
    bench = Bench()
    bench.answers = False
    bench.deliver(1)

    for _ in range(20):
        bench.clock.tick()

    assert bench.asked == 1


def test_what_was_returned_holds_no_memory() -> None:
    """Dramatiq's work queue keeps it until a thread is free: behind an hour's body a message came and went 60 times."""
    bench = Bench()
    delivery = bench.deliver(1)
    delivery.body = b"x" * 1000
    delivery.show(Message("reports", "build", ("x" * 1000,), {"y": "x" * 1000}, {"z": 1}, "m", 5))

    bench.ticks_until_returned(1)

    assert (delivery.body, delivery.args, delivery.kwargs, delivery.options) == (b"", (), {}, {})
    # What Dramatiq says of it when a thread gets there
    assert (str(delivery), delivery.message_id, delivery.queue_name) == ("build()", "m", "reports")


def test_only_so_many_messages_are_remembered_as_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_REMEMBERED", 3)
    bench = Bench()
    for tag in range(1, 10):
        bench.deliver(tag, message_id=f"message {tag}")
        bench.ticks_until_returned(tag)
        del bench.channel.deliveries[tag]

    assert list(bench.waiting._returns) == ["message 7", "message 8", "message 9"]


def test_it_looks_no_more_when_the_channel_is_gone() -> None:
    bench = Bench()
    bench.deliver(1)
    bench.channel.gone = True

    bench.clock.tick()

    assert (bench.clock.timers, bench.returned) == ([], [])
