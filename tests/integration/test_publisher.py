"""Publishing goes on for everybody else when one message is poison, a queue is gone, or the connection breaks.

All threads of a process share one connection for what they send. Whatever RabbitMQ answers to one message, the others
must be confirmed, and whoever sent the one must be told so, exactly.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pika
import pytest
from dramatiq import Message
from dramatiq.errors import QueueNotFound
from pika.adapters.utils import io_services_utils

from dramatiq_safeops import ConfigError, QueueFull, RabbitmqBroker, SendRefused, SendUncertain
from dramatiq_safeops.rabbitmq import client as client_module
from dramatiq_safeops.rabbitmq.publication import Publication
from dramatiq_safeops.testing import RabbitmqServer, TcpProxy
from dramatiq_safeops.testing.binaries import find_rabbitmq
from tests.conftest import need
from tests.harness import queues
from tests.harness.vhosts import virtual_host
from tests.harness.worker import wait_until

QUEUE = "orders"
NOWHERE = "amqp://guest:guest@127.0.0.1:1/"

#: Bytes: RabbitMQ takes no message above it, and closes the channel over one.
MOST_BYTES = 60_000

#: Seconds: far above what any of this takes, so that a hang is seen as one.
PATIENCE_S = 60


def message(text: str = "", *, queue: str = QUEUE) -> Message[Any]:
    return Message(queue, "build", (text,), {}, {}, str(uuid.uuid4()), 1_772_000_000_000)


def poison() -> Message[Any]:
    return message("x" * (MOST_BYTES + 1))


def ids(messages: Sequence[Message[Any]]) -> set[str]:
    return {one.message_id for one in messages}


def arrived(url: str, queue: str = QUEUE) -> Counter[str]:
    """How often each message id is in the queue."""
    return Counter(one.message_id for one in queues.take(url, queue))


@pytest.fixture
def broker_at() -> Iterator[Callable[..., RabbitmqBroker]]:
    """Make brokers; they are closed afterwards."""
    made: list[RabbitmqBroker] = []

    def make(url: str, **options: Any) -> RabbitmqBroker:
        made.append(RabbitmqBroker(url=url, **options))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


@pytest.fixture(scope="module")
def picky_rabbit() -> Iterator[RabbitmqServer]:
    """A RabbitMQ that takes no large messages."""
    need("RabbitMQ", find_rabbitmq())
    with RabbitmqServer.start(config={"max_message_size": MOST_BYTES}) as server:
        yield server


@pytest.fixture
def picky_url(picky_rabbit: RabbitmqServer) -> Iterator[str]:
    with virtual_host(picky_rabbit) as url:
        yield url


def in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    """Run all jobs at the same time, each in a thread of its own, and wait for them."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        start.wait(PATIENCE_S)
        job()

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a send() hangs"


# --- poison -------------------------------------------------------------------------------------


def test_of_two_hundred_messages_from_eight_threads_only_the_poison_fails(
    picky_url: str, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts a web process: RabbitMQ closes the channel that all its threads send over, because of one of them."""
    broker = broker_at(picky_url)
    good = [message(str(number)) for number in range(200)]
    bad = [poison() for _ in range(4)]
    refused: list[SendRefused] = []
    confirmed: list[str] = []

    def send(mine: list[Message[Any]]) -> None:
        for one in mine:
            try:
                broker.enqueue(one)
            except SendRefused as error:
                refused.append(error)
            else:
                confirmed.append(one.message_id)

    jobs = [[*good[place::8], *bad[place::8]] for place in range(8)]
    for job in jobs:
        job.sort(key=lambda one: one.message_id)  # the poison stands anywhere
    in_threads([lambda job=job: send(job) for job in jobs])

    assert {error.message.message_id for error in refused} == ids(bad)
    assert {type(error) for error in refused} == {SendRefused}
    assert set(confirmed) == ids(good)
    seen = arrived(picky_url)
    assert set(seen) == ids(good)


def test_send_many_with_poison_in_it_says_exactly_which_it_was(
    picky_url: str, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts a batch import: without the list, all of it would have to be sent again."""
    broker = broker_at(picky_url)
    batch = [message(str(number)) for number in range(200)]
    bad = [poison(), poison(), poison()]
    for place, one in zip((0, 117, 202), bad, strict=True):  # first, in the middle, last
        batch.insert(place, one)

    with pytest.raises(SendRefused) as caught:
        broker.send_many(batch)

    assert ids(caught.value.unconfirmed) == ids(bad)
    assert caught.value.message in bad
    assert "3 of 203 messages not sent" in str(caught.value)
    seen = arrived(picky_url)
    assert set(seen) == ids(batch) - ids(bad)


def test_after_poison_sending_is_as_it_was(picky_url: str, broker_at: Callable[..., RabbitmqBroker]):
    """Hurts everybody who sends afterwards: one by one is for suspects only."""
    broker = broker_at(picky_url)
    with pytest.raises(SendRefused):
        broker.enqueue(poison())

    batch = [message(str(number)) for number in range(300)]
    broker.send_many(batch)

    assert arrived(picky_url) == Counter(ids(batch))  # each of them once


# --- what is gone -------------------------------------------------------------------------------


def test_a_queue_that_was_deleted_is_declared_again(amqp_url: str, broker_at: Callable[..., RabbitmqBroker]):
    """Hurts everybody after somebody tidied up in the RabbitMQ UI: a confirmed message must be in a queue."""
    broker = broker_at(amqp_url)
    broker.enqueue(message())
    for _ in range(3):
        with queues.channel(amqp_url) as channel:
            channel.queue_delete(QUEUE)
        batch = [message(str(number)) for number in range(50)]

        broker.send_many(batch)

        assert arrived(amqp_url) == Counter(ids(batch))


def test_the_way_through_the_ladder_is_made_again_when_it_was_deleted(
    amqp_url: str, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts delayed messages: a missing exchange closes the channel, a missing queue behind it returns the message."""
    broker = broker_at(amqp_url)
    step = "safeops.delay.30s"
    broker.enqueue(message(), delay=30_000)
    sent = []
    for delete in (
        lambda channel: channel.exchange_delete(step),
        lambda channel: channel.queue_delete(step),
        lambda channel: (channel.queue_delete(step), channel.exchange_delete(step)),
    ):
        with queues.channel(amqp_url) as channel:
            delete(channel)
        queues.take(amqp_url, step)
        delayed = [message(str(number)) for number in range(20)]
        at_once = [message(str(number)) for number in range(20)]

        in_threads(
            [
                lambda delayed=delayed: broker.send_many(delayed, delay=30_000),
                lambda at_once=at_once: broker.send_many(at_once),
            ]
        )

        assert set(arrived(amqp_url, step)) == ids(delayed)
        sent += at_once

    assert set(arrived(amqp_url)) == ids(sent)


def test_threads_go_on_sending_while_queues_vanish_under_them(
    amqp_url: str, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts the threads that use the other queues: they must not even notice."""
    broker = broker_at(amqp_url, send_timeout=30_000)
    names = [f"orders.{number}" for number in range(4)]
    for name in names:
        broker.enqueue(message(queue=name))
        queues.take(amqp_url, name)
    sent: dict[str, list[Message[Any]]] = {name: [] for name in names}
    done = threading.Event()

    def delete() -> None:
        with queues.channel(amqp_url) as channel:
            for _ in range(5):
                channel.queue_delete(names[0])
                done.wait(
                    0.2
                )  # with less in between RabbitMQ 3.10 closes the connection of whoever declares it
        done.set()

    def send(name: str) -> None:
        while not done.is_set():
            one = message(queue=name)
            if name == names[0]:
                # Deleted again between its declaration and the message, or with the message in it.
                with contextlib.suppress(QueueNotFound, QueueFull):
                    broker.enqueue(one)
            else:
                sent[name].append(broker.enqueue(one))

    in_threads([delete, *(lambda name=name: send(name) for name in names)])

    for name in names[1:]:
        assert len(sent[name]) > 10
        assert set(arrived(amqp_url, name)) == ids(sent[name])


def test_a_queue_with_other_arguments_is_its_senders_error_and_nobody_elses(
    amqp_url: str, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts whoever moves over from stock Dramatiq with one queue that is classic."""
    with queues.channel(amqp_url) as channel:
        channel.queue_declare("old", durable=True)
    broker = broker_at(amqp_url)
    good = [message(str(number)) for number in range(50)]
    errors: list[Exception] = []

    def send_to_the_old_one() -> None:
        for _ in range(3):
            try:
                broker.enqueue(message(queue="old"))
            except ConfigError as error:
                errors.append(error)

    in_threads([send_to_the_old_one, *(lambda one=one: broker.enqueue(one) for one in good)])

    assert len(errors) == 3
    assert all("'old'" in str(error) and "queue_type='classic'" in str(error) for error in errors)
    assert arrived(amqp_url) == Counter(ids(good))


def test_send_many_says_what_was_not_sent_also_when_a_queue_cannot_be_had(
    amqp_url: str, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts a batch over several queues: the error must tell which of it to send again."""
    with queues.channel(amqp_url) as channel:
        channel.queue_declare("old", durable=True)
    broker = broker_at(amqp_url)
    good = [message(str(number)) for number in range(20)]
    bad = [message(str(number), queue="old") for number in range(2)]

    with pytest.raises(ConfigError) as caught:
        broker.send_many([*good[:10], *bad, *good[10:]])

    assert arrived(amqp_url) == Counter(ids(good))
    assert ids(caught.value.unconfirmed) == ids(bad)  # type: ignore[attr-defined]


# --- full ---------------------------------------------------------------------------------------


def test_what_a_full_queue_refused_is_reported_exactly_and_can_be_sent_later(
    rabbit: RabbitmqServer, amqp_url: str, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts whoever uses a length limit as back-pressure: what was refused is not there, and the rest is."""
    broker = broker_at(amqp_url)
    broker.enqueue(message())
    queues.take(amqp_url, QUEUE)
    _, _, vhost = amqp_url.rpartition("/")
    policy = f"/api/policies/{vhost}/full"
    definition = {"max-length": 10, "overflow": "reject-publish"}
    rabbit.api("PUT", policy, {"pattern": f"^{QUEUE}$", "definition": definition, "apply-to": "queues"})
    others = [message(str(number), queue="others") for number in range(50)]
    batch = [message(str(number)) for number in range(400)]

    def refused() -> QueueFull | None:
        """A quorum queue learns of its limit a little later, and takes some more while it does."""
        try:
            broker.send_many(batch)
        except QueueFull as error:
            return error
        queues.take(amqp_url, QUEUE)
        return None

    error = wait_until(refused, PATIENCE_S, "the queue to be full")
    broker.send_many(others)

    seen = arrived(amqp_url)
    assert set(seen).isdisjoint(ids(error.unconfirmed))
    assert set(seen) | ids(error.unconfirmed) == ids(batch)
    assert error.message in batch
    assert "over its length limit" in str(error)
    assert arrived(amqp_url, "others") == Counter(ids(others))

    rabbit.api("DELETE", policy)

    def accepted() -> bool:
        with contextlib.suppress(QueueFull):
            broker.send_many(error.unconfirmed)
            return True
        return False

    wait_until(accepted, PATIENCE_S, "the limit to be gone")
    assert set(arrived(amqp_url)) == ids(error.unconfirmed)


# --- broken connections -------------------------------------------------------------------------


class Scissors:
    """Cuts all connections each time that so many more bytes have gone through in one direction, a few times."""

    def __init__(self, proxy: TcpProxy, direction: str, *, every: int, times: int) -> None:
        self.proxy, self.direction, self.every, self.left = proxy, direction, every, times
        self.passed = 0
        proxy.on_bytes = self.on_bytes

    def on_bytes(self, direction: str, data: bytes) -> None:
        if direction != self.direction or not self.left:
            return
        self.passed += len(data)
        if self.passed >= self.every:
            self.passed = 0
            self.left -= 1
            self.proxy.cut()


@pytest.fixture
def proxy(rabbit: RabbitmqServer, amqp_url: str) -> Iterator[TcpProxy]:
    parameters = pika.URLParameters(amqp_url)
    with TcpProxy(parameters.host, parameters.port) as made:
        yield made


def test_whatever_was_on_its_way_when_the_connection_broke_is_confirmed_in_the_end(
    amqp_url: str, proxy: TcpProxy, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts everybody: a message that nobody can tell arrived must be sent again, and nobody may be told it failed."""
    broker = broker_at(proxy.url_for(amqp_url))
    broker.enqueue(message())  # what has to be declared is there
    queues.take(amqp_url, QUEUE)
    batches = [[message(str(number)) for number in range(500)] for _ in range(4)]

    # 2,000 messages are about 650 kB to the server.
    scissors = Scissors(proxy, "to_server", every=120_000, times=5)
    in_threads([lambda batch=batch: broker.send_many(batch) for batch in batches])

    assert scissors.left == 0
    seen = arrived(amqp_url)
    assert set(seen) == {one for batch in batches for one in ids(batch)}
    sys.stdout.write(f"{seen.total() - len(seen)} of {len(seen)} messages arrived twice or more often\n")


def test_a_confirm_that_is_lost_costs_a_duplicate_and_never_a_message(
    amqp_url: str, proxy: TcpProxy, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts everybody: RabbitMQ has the messages, and only the sender does not know."""
    broker = broker_at(proxy.url_for(amqp_url))
    broker.enqueue(message())
    queues.take(amqp_url, QUEUE)
    batch = [message(str(number)) for number in range(200)]

    proxy.hold("to_client")
    sending = threading.Thread(target=broker.send_many, args=(batch,), daemon=True)
    sending.start()
    wait_until(lambda: queues.depth(amqp_url, QUEUE) >= len(batch), PATIENCE_S, "the messages to be there")
    assert sending.is_alive()
    proxy.cut()
    proxy.release()
    sending.join(PATIENCE_S)

    assert not sending.is_alive()
    seen = arrived(amqp_url)
    assert set(seen) == ids(batch)
    assert seen.total() > len(batch)  # the same ids a second time


def test_a_send_that_ran_out_of_time_names_every_message_that_nobody_knows_of(
    amqp_url: str, proxy: TcpProxy, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts whoever has to send again: the ids stay, so a message that had arrived becomes a duplicate of itself."""
    broker = broker_at(proxy.url_for(amqp_url), send_timeout=500)
    broker.enqueue(message())
    queues.take(amqp_url, QUEUE)
    batch = [message(str(number)) for number in range(50)]

    proxy.hold("to_client")
    with pytest.raises(SendUncertain) as caught:
        broker.send_many(batch)
    assert ids(caught.value.unconfirmed) == ids(batch)
    assert "may or may not have arrived" in str(caught.value)
    proxy.cut()
    proxy.release()

    for one in caught.value.unconfirmed:
        wait_until(lambda one=one: sent(broker, one), PATIENCE_S, "a connection")
    assert set(arrived(amqp_url)) == ids(batch)


def sent(broker: RabbitmqBroker, one: Message[Any]) -> bool:
    try:
        broker.enqueue(one)
    except SendUncertain:
        return False
    return True


def test_a_connection_that_breaks_in_the_moment_in_which_it_is_made_costs_no_time_budget(
    amqp_url: str, monkeypatch: pytest.MonkeyPatch, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts senders behind a load balancer that hangs up at once: pika forgets to tell of it for 15 seconds."""
    real = io_services_utils._AsyncStreamConnector.__init__
    breaks = iter([True, True])

    def connect(self: Any, *args: Any, **kwargs: Any) -> None:
        if next(breaks, False):
            # What pika raises in its loop when the peer has reset the connection between two of its steps.
            raise ValueError("Expected connected socket, but getpeername() failed")
        real(self, *args, **kwargs)

    monkeypatch.setattr(io_services_utils._AsyncStreamConnector, "__init__", connect)
    broker = broker_at(amqp_url, send_timeout=10_000)

    one = broker.enqueue(message())

    assert next(breaks, None) is None
    assert arrived(amqp_url) == Counter([one.message_id])


# --- the time budget ----------------------------------------------------------------------------


class NeverDone:
    """An event that does not come, and counts how often somebody waited for it."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False

    def is_set(self) -> bool:
        return False

    def set(self) -> None: ...


@pytest.mark.parametrize("count", [1, 2, 200])
def test_the_time_budget_is_spent_once_when_nothing_is_confirmed(
    count: int, monkeypatch: pytest.MonkeyPatch, broker_at: Callable[..., RabbitmqBroker]
):
    """Hurts callers in an outage: a batch must not hang twice as long as one message."""
    never = NeverDone()

    class Batch(client_module.Batch):
        def __init__(self, publications: Sequence[Publication], on_done: Any = None) -> None:
            super().__init__(publications, on_done)
            self.done = never  # type: ignore[assignment]

    monkeypatch.setattr(client_module, "Batch", Batch)
    broker = broker_at(NOWHERE, send_timeout=3_000)

    with pytest.raises(SendUncertain) as caught:
        broker.send_many([message() for _ in range(count)])

    assert never.waits == [3.0]
    assert len(caught.value.unconfirmed) == count
    assert "was not sent" in str(caught.value)


def test_sending_nothing_takes_no_time_and_no_connection(broker_at: Callable[..., RabbitmqBroker]):
    """Hurts programs whose batch may be empty: there is nothing to wait for."""
    broker = broker_at(NOWHERE, send_timeout=600_000)
    answers: list[list[Message[Any]]] = []

    sending = threading.Thread(target=lambda: answers.append(broker.send_many([])), daemon=True)
    sending.start()
    sending.join(10)

    assert answers == [[]]
