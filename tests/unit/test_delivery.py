"""One delivery, asked for by several threads at once: exactly one of them gets it."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from dramatiq import Message

from dramatiq_safeops.delivery import BUFFERED, RETURNED, STALE, STARTED, Delivery


def delivery(*, headers: Any = None, redelivered: bool = False) -> Delivery:
    return Delivery(
        SimpleNamespace(gone=False, batches=set()),  # type: ignore[arg-type]
        7,
        queue="reports",
        body=b"{}",
        properties=SimpleNamespace(headers=headers, message_id=None),
        redelivered=redelivered,
    )


def race(deliveries: list[Delivery], states: list[str]) -> list[list[bool]]:
    """Let one thread per state ask for each delivery, all in the same moment; return who was told that it won."""
    answers: list[list[bool]] = [[] for _ in states]
    start = threading.Barrier(len(states))

    def ask(place: int) -> None:
        for one in deliveries:
            if one.tag % 50 == 0:
                start.wait(30)
            answers[place].append(one.leave_buffer(states[place]))

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers


@pytest.fixture
def hasty_threads() -> Any:
    """Python gives the next thread its turn as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_of_many_threads_that_ask_for_a_delivery_exactly_one_gets_it():
    """Hurts everybody: two winners would run a message and return it, so that it runs twice."""
    deliveries = [delivery() for _ in range(2_000)]
    for tag, one in enumerate(deliveries):
        one.tag = tag
    states = [STARTED, RETURNED, STALE, STARTED, RETURNED, STALE]

    answers = race(deliveries, states)

    winners = Counter(sum(won) for won in zip(*answers, strict=True))
    assert winners == {1: len(deliveries)}
    for place, one in enumerate(deliveries):
        (winner,) = (state for state, answer in zip(states, answers, strict=True) if answer[place])
        assert one.state == winner


@pytest.mark.parametrize("state", [STARTED, RETURNED, STALE])
def test_who_asks_second_is_told_so_also_when_it_wants_the_same(state: str):
    """Hurts a delivery that two parts of a worker return at the same time: one return is enough."""
    one = delivery()

    assert one.state == BUFFERED
    assert one.leave_buffer(state) is True
    assert one.leave_buffer(state) is False
    assert one.leave_buffer(RETURNED) is False
    assert one.state == state


def test_a_delivery_shows_its_message_to_dramatiq():
    """Hurts every middleware: they read these fields on each message."""
    message = Message("reports", "build", (1,), {"b": 2}, {"retries": 3}, "m-1", 1_772_000_000_000)
    one = delivery()
    assert one.readable is False

    one.show(message)

    assert one.readable is True
    for name in ("queue_name", "actor_name", "args", "kwargs", "options", "message_id", "message_timestamp"):
        assert getattr(one, name) == getattr(message, name)
    assert one.asdict() == message.asdict()
    assert one.failed is False
    one.fail()
    assert one.failed is True


def test_attempts_are_counted_from_one():
    """Hurts whoever reads a dead letter: "attempt 0" is no attempt."""
    one = delivery()
    assert one.attempt == 1

    one.retries = 4

    assert one.attempt == 5


@pytest.mark.parametrize(
    ("headers", "redelivered", "count"),
    [
        (None, False, 0),
        (None, True, 1),
        ({}, True, 1),
        ({"x-delivery-count": 0}, False, 0),
        ({"x-delivery-count": 3}, True, 3),
        ({"x-acquired-count": 2}, True, 2),  # RabbitMQ 4.3: returned twice
        ({"x-acquired-count": 3, "x-delivery-count": 1}, True, 3),  # and then lost with its connection
        ({"x-delivery-count": "many"}, True, 1),
    ],
)
def test_how_often_rabbitmq_delivered_a_message_before_is_read_from_what_it_says(
    headers: Any, redelivered: bool, count: int
):
    """Hurts whoever looks for a message that kills workers."""
    assert delivery(headers=headers, redelivered=redelivered).delivery_count == count


def test_two_deliveries_of_one_message_share_nothing():
    """Hurts a message whose first delivery is still running while the second is there: they must not mix."""
    first, second = delivery(), delivery(redelivered=True)

    first.leave_buffer(STARTED)
    first.follow_ups.append("one")
    first.fail()

    assert second.state == BUFFERED
    assert second.follow_ups == []
    assert second.failed is False
