"""No delivery is settled before its time, whatever the order in which worker threads finish.

An ack of a tag that RabbitMQ does not know closes the channel, and everything on it runs again. An ack with ``multiple``
over a delivery that is still running loses that message if its worker dies now. Both are looked for here in the real
channel logic, against a model of how RabbitMQ keeps its tags.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dramatiq_safeops.delivery import RETURNED, STARTED, Delivery
from dramatiq_safeops.rabbitmq.acks import AckLedger
from dramatiq_safeops.rabbitmq.channel import DeliveryChannel
from dramatiq_safeops.rabbitmq.io_thread import IOThread

PATIENCE_S = 60


class Tags:
    """What RabbitMQ remembers of one channel: the tags that are outstanding. It is unforgiving, and so is this."""

    def __init__(self) -> None:
        self.last = 0
        self.outstanding: set[int] = set()
        self.finished: set[int] = set()  # what the worker side has given free so far
        self.acked: list[int] = []
        self.returned: list[int] = []
        self.frames = 0
        self.faults: list[str] = []

    def deliver(self) -> int:
        self.last += 1
        self.outstanding.add(self.last)
        return self.last

    def ack(self, tag: int, multiple: bool) -> None:
        self.frames += 1
        if tag not in self.outstanding:
            self.faults.append(f"ack of {tag}, which is not outstanding: RabbitMQ closes the channel")
            return
        covered = {one for one in self.outstanding if one <= tag} if multiple else {tag}
        if early := covered - self.finished:
            self.faults.append(
                f"ack of {tag} (multiple={multiple}) settles {sorted(early)} before their time"
            )
        self.outstanding -= covered
        self.acked += sorted(covered)

    def nack(self, tag: int, *, multiple: bool = False, requeue: bool = True) -> None:
        self.frames += 1
        if multiple or not requeue:
            self.faults.append(f"a return of {tag} with multiple={multiple}, requeue={requeue}")
        if tag not in self.outstanding:
            self.faults.append(f"return of {tag}, which is not outstanding: RabbitMQ closes the channel")
            return
        if tag not in self.finished:
            self.faults.append(f"return of {tag} before anybody asked for it")
        self.outstanding.discard(tag)
        self.returned.append(tag)


# --- the ledger alone ---------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_order_of_finishing_settles_every_tag_once_and_in_time(data: st.DataObject):
    """Hurts everybody: this arithmetic stands between a finished message and the one beside it that is still running."""
    tags, ledger = Tags(), AckLedger()
    waiting = [tags.deliver() for _ in range(data.draw(st.integers(1, 40)))]
    settled: list[int] = []
    while waiting:
        if data.draw(st.booleans()):
            waiting.append(tags.deliver())
        count = data.draw(st.integers(1, len(waiting)))
        group = [waiting.pop(data.draw(st.integers(0, len(waiting) - 1))) for _ in range(count)]
        tags.finished.update(group)
        settled += group
        # Also what was settled before may be named again, by a part that did not know.
        again = data.draw(st.lists(st.sampled_from(settled), max_size=2))
        if data.draw(st.booleans()):
            for tag, multiple in ledger.settle([*group, *again]):
                tags.ack(tag, multiple)
        else:
            for tag in ledger.returned([*group, *again]):
                tags.nack(tag)

    assert tags.faults == []
    assert tags.outstanding == set()
    assert sorted(tags.acked + tags.returned) == list(range(1, tags.last + 1))


@given(st.permutations(range(1, 30)), st.sets(st.integers(1, 29)))
def test_returns_go_out_in_the_order_of_delivery(order: list[int], chosen: set[int]):
    """Hurts whoever relies on a rough order: a quorum queue gives returned messages out in the order of the returns."""
    ledger = AckLedger()

    assert ledger.returned(tag for tag in order if tag in chosen) == sorted(chosen)


def test_what_finishes_in_order_needs_one_frame():
    """Hurts speed: single acks cost three times as much."""
    ledger = AckLedger()

    assert ledger.settle(range(1, 101)) == [(100, True)]
    assert ledger.settle([101]) == [(101, False)]
    assert ledger.settle([103, 104]) == [(103, False), (104, False)]
    assert ledger.settle([102, 105]) == [(105, True)]
    assert ledger.settle([]) == []


def test_tags_above_a_running_delivery_are_acked_at_once_and_singly():
    """Hurts a queue with one slow message: held back, the others would keep their prefetch places, and run twice."""
    ledger = AckLedger()

    assert ledger.settle([2]) == [(2, False)]
    assert ledger.settle([4, 3]) == [(3, False), (4, False)]
    assert ledger.settle([1]) == [(1, False)]
    assert ledger.settle([5, 6]) == [(6, True)]


# --- one queue, step by step --------------------------------------------------------------------


class CallsAtOnce:
    """An I/O thread whose work is done when the test says so: every interleaving can be had."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, tuple[Any, ...]]] = []

    def call(self, function: Any, *arguments: Any) -> None:
        self.waiting.append((function, arguments))

    def run_one(self) -> None:
        function, arguments = self.waiting.pop(0)
        function(*arguments)


class FakeChannel:
    """What DeliveryChannel uses of pika's channel, on top of the model."""

    def __init__(self, tags: Tags) -> None:
        self.tags = tags
        self.is_open = True

    def basic_ack(self, delivery_tag: int = 0, multiple: bool = False) -> None:
        assert self.is_open, "an ack on a closed channel"
        self.tags.ack(delivery_tag, multiple)

    def basic_nack(self, delivery_tag: int = 0, multiple: bool = False, requeue: bool = True) -> None:
        assert self.is_open, "a return on a closed channel"
        self.tags.nack(delivery_tag, multiple=multiple, requeue=requeue)

    def close(self) -> None:
        assert self.is_open
        self.is_open = False


def delivery_channel(io: Any, amqp: Any, queue: str, admit: Any) -> DeliveryChannel:
    """The real thing, on a channel that is not, with nothing that is being published about its deliveries."""
    settler = SimpleNamespace(frame_max=131_072, forget=lambda batches: None)
    return DeliveryChannel(io, settler, amqp, queue, admit)  # type: ignore[arg-type]


def frame(tag: int) -> tuple[Any, Any, bytes]:
    method = SimpleNamespace(delivery_tag=tag, redelivered=False)
    return method, SimpleNamespace(headers=None, message_id=f"m-{tag}"), b"{}"


class OneQueue(RuleBasedStateMachine):
    """Deliveries, acks, returns and lost channels, in any order and with any delay between the threads."""

    @initialize()
    def open(self) -> None:
        self.io = CallsAtOnce()
        self.running: list[Delivery] = []
        self.open_channel()

    def open_channel(self) -> None:
        self.tags = Tags()
        self.amqp = FakeChannel(self.tags)
        self.channel = delivery_channel(self.io, self.amqp, "q", self.running.append)

    @rule()
    def deliver(self) -> None:
        self.channel.on_message(None, *frame(self.tags.deliver()))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        delivery = self.take_any(data)
        delivery.channel.ack(delivery.tag)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        group = [self.take_any(data) for _ in range(data.draw(st.integers(1, len(self.running))))]
        for channel in {id(one.channel): one.channel for one in group}.values():
            self.io.call(channel.give_back, [one for one in group if one.channel is channel])

    def take_any(self, data: st.DataObject) -> Delivery:
        delivery = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if delivery.channel is self.channel:
            self.tags.finished.add(delivery.tag)
        return delivery

    @precondition(lambda self: self.io.waiting)
    @rule()
    def the_io_thread_has_its_turn(self) -> None:
        self.io.run_one()

    @rule()
    def the_channel_is_lost_and_another_opened(self) -> None:
        self.amqp.is_open = False  # from here on the model refuses whatever is sent over it
        self.channel.lost()
        assert self.channel.deliveries == {}
        self.open_channel()

    @invariant()
    def rabbitmq_has_no_complaint(self) -> None:
        assert self.tags.faults == []

    def teardown(self) -> None:
        while self.io.waiting:
            self.io.run_one()
        assert self.tags.faults == []
        assert self.tags.outstanding == {one.tag for one in self.running if one.channel is self.channel}
        assert set(self.channel.deliveries) == self.tags.outstanding
        assert self.channel.flushed


OneQueue.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestAnyInterleavingOnOneQueue = OneQueue.TestCase


def test_an_ack_for_a_channel_that_is_gone_reaches_no_other():
    """Hurts everybody: stock Dramatiq acks another message with it, which is then lost."""
    io, old, new = CallsAtOnce(), Tags(), Tags()
    before: list[Delivery] = []
    after: list[Delivery] = []
    first = delivery_channel(io, FakeChannel(old), "q", before.append)
    second = delivery_channel(io, FakeChannel(new), "q", after.append)
    for _ in range(3):
        first.on_message(None, *frame(old.deliver()))
    before[0].leave_buffer(STARTED)

    first.lost()
    for _ in range(3):
        second.on_message(None, *frame(new.deliver()))
    before[0].channel.ack(before[0].tag)
    io.call(before[1].channel.give_back, [before[1]])
    while io.waiting:
        io.run_one()

    assert (old.frames, new.frames) == (0, 0)
    assert new.outstanding == {1, 2, 3}
    assert before[1].leave_buffer(STARTED) is False  # what had not started does not start any more
    assert after[1].leave_buffer(STARTED) is True


@pytest.mark.parametrize("last", ["ack", "give_back"])
def test_a_channel_that_nobody_consumes_over_is_closed_with_its_last_delivery(last: str):
    """Hurts a process whose workers come and go: RabbitMQ allows 2,047 channels on a connection."""
    io, tags = CallsAtOnce(), Tags()
    running: list[Delivery] = []
    amqp = FakeChannel(tags)
    channel = delivery_channel(io, amqp, "q", running.append)
    for _ in range(2):
        channel.on_message(None, *frame(tags.deliver()))
    channel.retiring = True
    tags.finished.update({1, 2})

    channel.ack(1)
    io.run_one()
    assert amqp.is_open
    if last == "ack":
        channel.ack(2)
    else:
        io.call(channel.give_back, [running[1]])
    while io.waiting:
        io.run_one()

    assert tags.faults == []
    assert tags.outstanding == set()
    assert not amqp.is_open


# --- many threads -------------------------------------------------------------------------------


@pytest.fixture
def io_thread() -> Iterator[IOThread]:
    io = IOThread("test-io")
    io.start()
    yield io
    io.stop(10)


class BusyQueue:
    """A queue with a prefetch window: as soon as something is settled, RabbitMQ delivers the next."""

    def __init__(self, io: IOThread, total: int, prefetch: int) -> None:
        self.tags = Tags()
        self.total = total
        self.prefetch = prefetch
        self.all_settled = threading.Event()
        self.deliveries: list[Delivery] = []
        self.something = threading.Condition()
        self.io = io
        self.amqp = WindowedChannel(self)
        self.channel = delivery_channel(io, self.amqp, "q", self.admit)

    def admit(self, delivery: Delivery) -> None:
        with self.something:
            self.deliveries.append(delivery)
            self.something.notify()

    def refill(self) -> None:
        while len(self.tags.outstanding) < self.prefetch and self.tags.last < self.total:
            self.channel.on_message(None, *frame(self.tags.deliver()))
        if not self.tags.outstanding and self.tags.last == self.total:
            self.all_settled.set()

    def take(self, draw: random.Random, most: int) -> list[Delivery]:
        """Any deliveries, not the oldest: threads finish in any order."""
        with self.something:
            if not self.deliveries:
                self.something.wait(0.01)
            taken = []
            for _ in range(min(draw.randint(1, most), len(self.deliveries))):
                taken.append(self.deliveries.pop(draw.randrange(len(self.deliveries))))
            return taken


class WindowedChannel(FakeChannel):
    def __init__(self, queue: BusyQueue) -> None:
        super().__init__(queue.tags)
        self.queue = queue

    def basic_ack(self, delivery_tag: int = 0, multiple: bool = False) -> None:
        super().basic_ack(delivery_tag, multiple)
        self.queue.io.call(self.queue.refill)

    def basic_nack(self, delivery_tag: int = 0, multiple: bool = False, requeue: bool = True) -> None:
        super().basic_nack(delivery_tag, multiple, requeue)
        self.queue.io.call(self.queue.refill)


@pytest.mark.parametrize(("threads", "prefetch"), [(2, 4), (8, 16), (16, 250)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_over_many_threads_no_tag_is_settled_before_its_delivery_is(
    io_thread: IOThread, threads: int, prefetch: int, seed: int
):
    """Hurts everybody: the same as above with real threads and the real I/O thread between them."""
    busy = BusyQueue(io_thread, total=10_000, prefetch=prefetch)
    stop = threading.Event()

    def work(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        while not stop.is_set():
            for delivery in busy.take(draw, most=5):
                if draw.random() < 0.1:
                    assert delivery.leave_buffer(RETURNED)
                    busy.tags.finished.add(delivery.tag)
                    io_thread.call(delivery.channel.give_back, [delivery])
                else:
                    assert delivery.leave_buffer(STARTED)
                    busy.tags.finished.add(delivery.tag)
                    delivery.channel.ack(delivery.tag)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    io_thread.call(busy.refill)
    settled = busy.all_settled.wait(PATIENCE_S)
    stop.set()
    for worker in workers:
        worker.join(10)

    assert busy.tags.faults == []
    assert settled, f"{sorted(busy.tags.outstanding)[:20]} are still outstanding"
    assert sorted(busy.tags.acked + busy.tags.returned) == list(range(1, busy.total + 1))
    assert busy.tags.returned  # both ways were taken
    assert busy.channel.deliveries == {}
