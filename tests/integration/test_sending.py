"""``send()`` and ``send_many()``: confirmed, within their time budget, and exact about what was not.

In this process, on a real RabbitMQ. What arrived is read back from RabbitMQ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dramatiq
import dramatiq.worker
import pytest
from dramatiq.errors import QueueJoinTimeout, QueueNotFound

from dramatiq_safeops import ConfigError, QueueFull, RabbitmqBroker, SendRefused, SendUncertain
from dramatiq_safeops.testing import RabbitmqServer, TcpProxy
from dramatiq_safeops.testing.tcp_proxy import Direction
from tests.harness import counts, queues
from tests.harness.worker import wait_until

BrokerMaker = Callable[..., RabbitmqBroker]

#: Milliseconds that send() may take where it is meant to run out of them.
BUDGET_MS = 1500


@pytest.fixture
def broker_for() -> Iterator[BrokerMaker]:
    """Make brokers that are closed after the test."""
    made: list[RabbitmqBroker] = []

    def make(url: str, **options: Any) -> RabbitmqBroker:
        made.append(RabbitmqBroker(url=url, **options))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


def actor_of(broker: RabbitmqBroker, fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return an actor named ``work`` of ``broker``."""

    def work(*args: Any) -> None:
        if fn is not None:
            fn(*args)

    return dramatiq.actor(work, broker=broker, time_limit=60_000, **options)


def numbers_in(url: str, queue: str = "default") -> list[int]:
    """Return the first argument of the messages in ``queue``, in order."""
    return [one.message["args"][0] for one in queues.look(url, queue)]


def seconds_until_uncertain(send: Callable[[], object]) -> float:
    """Return after how many seconds ``send`` gives up."""
    start = time.monotonic()
    with pytest.raises(SendUncertain):
        send()
    return time.monotonic() - start


# -- a server in trouble


@pytest.fixture(scope="module")
def mortal() -> Iterator[RabbitmqServer]:
    """A RabbitMQ of this file's own, for alarms and worse. It takes messages of 200 kB at most."""
    with RabbitmqServer.start(plugins=(), config={"max_message_size": 200_000}) as server:
        yield server


def test_send_during_a_memory_alarm_gives_up_in_time_and_works_again_afterwards(
    mortal: RabbitmqServer, broker_for: BrokerMaker
) -> None:
    """A web request must not hang for as long as the server is short of memory."""
    # Given a producer that has sent before
    work = actor_of(broker_for(mortal.url, send_timeout=BUDGET_MS), queue_name="alarm")
    work.send(0)
    try:
        # When RabbitMQ stops reading from publishers
        mortal.memory_alarm(True)
        took = [seconds_until_uncertain(lambda: work.send(1)) for _ in range(2)]
        with pytest.raises(SendUncertain, match="RabbitMQ blocks publishers") as raised:
            work.send(2)
    finally:
        mortal.memory_alarm(False)

    # Then each send has ended in its budget and said why
    assert max(took) < 5 * BUDGET_MS / 1000
    # And the message that it carries can be sent again under its id, once the alarm is over
    again = raised.value.message
    wait_until(lambda: works(lambda: work.broker.enqueue(again)), what="sending to work again")
    sent = queues.look(mortal.url, "alarm")
    assert again.message_id in [one.message_id for one in sent]
    # What was given up before it was written has not been sent behind anybody's back
    assert sorted({one.message["args"][0] for one in sent} - {1}) == [0, 2]


def test_a_producer_whose_first_send_meets_an_alarm_gives_up_in_time(
    mortal: RabbitmqServer, broker_for: BrokerMaker
) -> None:
    """Its connection is new, so that RabbitMQ has not said yet that it blocks."""
    work = actor_of(broker_for(mortal.url, send_timeout=BUDGET_MS), queue_name="alarm_first")
    try:
        mortal.memory_alarm(True)
        took = seconds_until_uncertain(lambda: work.send(1))
    finally:
        mortal.memory_alarm(False)

    assert took < 5 * BUDGET_MS / 1000
    wait_until(lambda: works(lambda: work.send(2)), what="sending to work again")
    assert 2 in numbers_in(mortal.url, "alarm_first")


def test_send_to_a_stopped_server_gives_up_in_time_and_works_again_afterwards(
    mortal: RabbitmqServer, broker_for: BrokerMaker
) -> None:
    """The producers' deploy must not depend on the server's."""
    # Given one producer that has sent before, and one that has not
    old = actor_of(broker_for(mortal.url, send_timeout=BUDGET_MS), queue_name="stopped")
    new = actor_of(broker_for(mortal.url, send_timeout=BUDGET_MS), queue_name="stopped")
    old.send(0)
    mortal.terminate()
    try:
        # When both send to a server that is down
        took = [seconds_until_uncertain(lambda: old.send(1)), seconds_until_uncertain(lambda: new.send(1))]
        with pytest.raises(SendUncertain, match=r"nothing listens at 127\.0\.0\.1") as raised:
            old.send(2)
    finally:
        mortal.restart()

    # Then they have not waited for it, and send when it is back
    assert max(took) < 5 * BUDGET_MS / 1000
    assert "guest:guest" not in str(raised.value)
    # (their budget is shorter than the longest pause between two attempts to connect)
    wait_until(
        lambda: works(lambda: old.broker.enqueue(raised.value.message)), what="the old one to send again"
    )
    wait_until(lambda: works(lambda: new.send(3)), what="the new one to send again")
    assert sorted(set(numbers_in(mortal.url, "stopped")) - {1}) == [0, 2, 3]


def works(send: Callable[[], object]) -> bool:
    with suppress(SendUncertain):
        send()
        return True
    return False


# -- what RabbitMQ refuses


def test_a_message_that_is_too_large_is_refused_and_takes_no_other_with_it(
    mortal: RabbitmqServer, broker_for: BrokerMaker
) -> None:
    """RabbitMQ closes the channel for it, with everything that was on its way there."""
    # Given threads that send small messages, all the time
    broker = broker_for(mortal.url)
    work = actor_of(broker, queue_name="large")
    work.send(-1)
    sent: list[int] = []
    stop = threading.Event()

    def send_small_ones(start: int) -> None:
        for number in range(start, start + 10_000):
            if stop.is_set():
                return
            work.send(number)
            sent.append(number)

    with ThreadPoolExecutor(8) as pool:
        senders = [pool.submit(send_small_ones, n * 10_000) for n in range(8)]
        try:
            # When some of another thread's are too large
            for _ in range(5):
                before = len(sent)
                with pytest.raises(SendRefused, match="larger than configured max size") as raised:
                    work.send(-2, "x" * 300_000)
                assert [one.args[0] for one in raised.value.unconfirmed] == [-2]
                wait_until(lambda before=before: len(sent) > before + 20, what="the others to go on")
        finally:
            stop.set()
        for sender in senders:
            sender.result(30)

    # Then all that was confirmed has arrived, and nothing of what was refused
    arrived = numbers_in(mortal.url, "large")
    assert set(sent) <= set(arrived)
    assert -2 not in arrived


@pytest.mark.parametrize(("queue_type", "count"), [("classic", 40), ("quorum", 3000)])
def test_send_many_reports_exactly_what_is_not_in_rabbitmq(
    queue_type: str, count: int, rabbit: RabbitmqServer, amqp_url: str, broker_for: BrokerMaker
) -> None:
    """Whoever sends the rest again must send neither too little nor too much."""
    # Given a queue that an operator has limited
    vhost = counts.vhost_of(amqp_url)
    limit = {"max-length": 5, "overflow": "reject-publish"}
    rabbit.api(
        "PUT",
        f"/api/policies/{vhost}/limit",
        {"pattern": "^default$", "definition": limit, "apply-to": "queues"},
    )
    broker = broker_for(amqp_url, queue_type=queue_type)
    work = actor_of(broker)
    messages = [work.message(number) for number in range(count)]

    # When more is sent than it takes (a quorum queue notices a little late)
    with pytest.raises(QueueFull, match=f"of {count} messages not sent") as raised:
        broker.send_many(messages)

    # Then the error names what is missing there, and nothing else
    arrived = {one.message_id for one in queues.look(amqp_url, "default")}
    refused = {one.message_id for one in raised.value.unconfirmed}
    assert 5 <= len(arrived) < count
    assert arrived | refused == {one.message_id for one in messages}
    assert not arrived & refused


def test_send_many_of_thousands_is_confirmed_and_in_order(amqp_url: str, broker_for: BrokerMaker) -> None:
    """More than may be unconfirmed at a time."""
    broker = broker_for(amqp_url)
    work = actor_of(broker)

    broker.send_many([work.message(number) for number in range(2_500)])

    assert numbers_in(amqp_url) == list(range(2_500))


def test_send_many_of_nothing_is_done_at_once(amqp_url: str, broker_for: BrokerMaker) -> None:
    """A batch job without rows must not wait for a confirm that nobody sends."""
    start = time.monotonic()

    assert broker_for(amqp_url).send_many([]) == []

    assert time.monotonic() - start < 5


def test_a_message_that_amqp_cannot_express_is_refused_and_takes_no_other_with_it(
    amqp_url: str, broker_for: BrokerMaker
) -> None:
    """pika raises in the middle of writing: what follows must not be taken for the rest of it."""
    broker = broker_for(amqp_url)
    work = actor_of(broker)
    messages = [work.message(1), work.message_with_options(args=(2,), broker_priority=300), work.message(3)]

    with pytest.raises(SendRefused) as raised:
        broker.send_many(messages)

    assert raised.value.unconfirmed == [messages[1]]
    assert numbers_in(amqp_url) == [1, 3]


# -- queues that are not there


def test_a_queue_that_was_deleted_is_declared_again(amqp_url: str, broker_for: BrokerMaker) -> None:
    """Without confirms and mandatory, such a message is gone and nobody knows."""
    work = actor_of(broker_for(amqp_url))
    work.send(1)
    delete(amqp_url, "default")

    work.send(2)
    work.send_with_options(args=(3,), delay=300)

    wait_until(lambda: sorted(numbers_in(amqp_url)) == [2, 3], what="both messages to be in the queue")


def delete(url: str, queue: str) -> None:
    with queues.channel(url) as channel:
        channel.queue_delete(queue)


DECLARED, BOUND = b"\x00\x32\x00\x0b\x07default", b"\x00\x32\x00\x15"


@pytest.mark.parametrize("stop_at", [[DECLARED], [DECLARED, BOUND]], ids=["declared", "bound"])
def test_a_queue_that_vanishes_again_is_the_senders_error(
    stop_at: list[bytes], amqp_url: str, proxy: TcpProxy, broker_for: BrokerMaker
) -> None:
    """Once it is declared again by itself. What happens then is not ours to understand."""
    # Given a queue that was deleted
    work = actor_of(broker_for(proxy.url_for(amqp_url)))
    work.send(1)
    delete(amqp_url, "default")

    # When it is deleted a second time while send() declares it again, or right after that
    answers, there = list(stop_at), threading.Event()

    def stop(direction: Direction, data: bytes) -> None:
        if direction == "to_client" and answers and answers[0] in data:
            answers.pop(0)
            if not answers:
                proxy.hold("to_client")
                there.set()

    proxy.on_bytes = stop
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(work.send, 2)
        assert there.wait(10)
        delete(amqp_url, "default")
        proxy.release()

        # Then the sender is told
        with pytest.raises(QueueNotFound, match="'default'"):
            sending.result(30)

    # And the next one is sent like any other
    work.send(3)
    assert numbers_in(amqp_url) == [3]


@pytest.mark.parametrize("send", ["send", "send_many"])
def test_a_queue_with_other_arguments_is_a_config_error_for_its_own_messages_only(
    send: str, amqp_url: str, broker_for: BrokerMaker
) -> None:
    """Other queues go on."""
    with queues.channel(amqp_url) as channel:
        channel.queue_declare("taken", durable=True, arguments={"x-max-length": 10})
    broker = broker_for(amqp_url)
    work = actor_of(broker, queue_name="taken")

    with pytest.raises(ConfigError, match="queue 'taken' cannot be declared as a quorum queue"):
        work.send(1) if send == "send" else broker.send_many([work.message(1)])
    dramatiq.actor(lambda number: None, broker=broker, actor_name="other", queue_name="free").send(2)

    assert queues.depth(amqp_url, "taken") == 0
    assert numbers_in(amqp_url, "free") == [2]


# -- delay and priority


def test_a_delayed_message_waits_in_one_queue_and_says_when_it_is_due(
    rabbit: RabbitmqServer, amqp_url: str, broker_for: BrokerMaker
) -> None:
    """Somebody asks where it is, and finds it in the RabbitMQ UI."""
    work = actor_of(broker_for(amqp_url))
    before = time.time()

    work.send_with_options(args=(1,), delay=3_600_000)

    names = [one["name"] for one in rabbit.api("GET", f"/api/queues/{counts.vhost_of(amqp_url)}")]
    [(queue, waiting)] = [(name, one) for name in names for one in queues.look(amqp_url, name)]
    assert queue.startswith("safeops.delay.")
    assert waiting.message["options"]["eta"] >= int((before + 3600) * 1000)


def test_an_urgent_message_overtakes_on_classic_queues(amqp_url: str, broker_for: BrokerMaker) -> None:
    """Dramatiq's max_priority and broker_priority, as its users know them."""
    work = actor_of(broker_for(amqp_url, queue_type="classic", max_priority=5))
    for number in range(20):
        work.send(number)

    work.send_with_options(args=(99,), broker_priority=5)

    assert numbers_in(amqp_url) == [99, *range(20)]


# -- the network


@pytest.fixture
def proxy(rabbit: RabbitmqServer) -> Iterator[TcpProxy]:
    """A network between producers and RabbitMQ."""
    port = urlsplit(rabbit.url).port
    assert port is not None
    with TcpProxy("127.0.0.1", port) as standing:
        yield standing


def test_a_confirm_that_does_not_come_is_uncertain_and_the_next_send_works(
    amqp_url: str, proxy: TcpProxy, broker_for: BrokerMaker
) -> None:
    """The message has arrived, but who could know."""
    work = actor_of(broker_for(proxy.url_for(amqp_url), send_timeout=BUDGET_MS))
    work.send(0)

    # When RabbitMQ's answers are held up
    proxy.hold("to_client")
    with pytest.raises(SendUncertain, match="may or may not have arrived") as raised:
        work.send(1)
    proxy.release()

    # Then it has arrived here; sent again it is there twice under one id, and life goes on
    work.broker.enqueue(raised.value.message)
    work.send(2)
    assert numbers_in(amqp_url) == [0, 1, 1, 2]
    assert len({one.message_id for one in queues.look(amqp_url, "default")}) == 3


def test_a_connection_that_breaks_under_a_send_is_repaired_within_it(
    amqp_url: str, proxy: TcpProxy, broker_for: BrokerMaker
) -> None:
    """A reset in the middle is RabbitMQ's restart or a load balancer's whim, not an error of the caller's."""
    work = actor_of(broker_for(proxy.url_for(amqp_url)))
    work.send(0)

    # When the connection is cut with the message in RabbitMQ and its confirm under way
    def cut_the_confirm(direction: Direction, data: bytes) -> None:
        if direction == "to_client":
            proxy.on_bytes = None
            proxy.cut()

    proxy.on_bytes = cut_the_confirm
    work.send(1)

    # Then send() has sent it once more, and returned
    assert sorted(set(numbers_in(amqp_url))) == [0, 1]


def test_sends_from_many_threads_survive_cuts(
    amqp_url: str, proxy: TcpProxy, broker_for: BrokerMaker
) -> None:
    """All threads of a process share one connection."""
    work = actor_of(broker_for(proxy.url_for(amqp_url), send_timeout=60_000))
    done = []

    def send(number: int) -> None:
        work.send(number)
        done.append(number)

    with ThreadPoolExecutor(8) as pool:
        sends = [pool.submit(send, number) for number in range(1_000)]
        for seen in range(100, 1_000, 300):
            wait_until(lambda seen=seen: len(done) >= seen, what=f"{seen} messages to be sent")
            proxy.cut()
        for one in sends:
            one.result(60)

    assert set(numbers_in(amqp_url)) == set(range(1_000))


# -- Dramatiq's Worker in the same process, as users' tests do


@pytest.fixture
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dramatiq's consumer threads sleep for 3 s where they begin anew."""
    monkeypatch.setattr(dramatiq.worker, "CONSUMER_RESTART_DELAY_SECS", 0.05)


def test_a_worker_in_the_same_process_runs_what_was_sent_until_join(
    amqp_url: str, broker_for: BrokerMaker
) -> None:
    """The way in which Dramatiq's users test their actors."""
    broker = broker_for(amqp_url)
    ran: list[int] = []
    failed: list[int] = []

    def fn(number: int) -> None:
        if number % 3 == 0 and number not in failed:
            failed.append(number)
            raise ValueError(number)
        ran.append(number)

    work = actor_of(broker, fn, min_backoff=300, max_backoff=300)
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=4)
    worker.start()
    try:
        for number in range(20):
            work.send(number)
        work.send_with_options(args=(100,), delay=700)

        broker.join(work.queue_name, timeout=30_000)
        worker.join()
    finally:
        worker.stop()

    # join() has waited for delayed ones and for retries, too
    assert sorted(ran) == [*range(20), 100]
    assert broker.get_queue_message_counts("default") == (0, 0, 0)


def test_join_gives_up_after_its_timeout(amqp_url: str, broker_for: BrokerMaker) -> None:
    """A test whose message never runs must fail and not hang."""
    broker = broker_for(amqp_url)
    work = actor_of(broker)
    work.send(1)

    with pytest.raises(QueueJoinTimeout):
        broker.join(work.queue_name, timeout=500)


@pytest.mark.usefixtures("quick_pauses")
def test_a_paused_worker_runs_nothing_and_holds_nothing(amqp_url: str, broker_for: BrokerMaker) -> None:
    """Somebody stops the work for a moment; others may do it meanwhile."""
    # Given a worker that has run something
    broker = broker_for(amqp_url)
    ran: list[int] = []
    work = actor_of(broker, ran.append)
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    worker.start()
    try:
        work.send(1)
        wait_until(lambda: ran == [1], what="the first message to run")

        # When it is paused
        worker.pause()
        work.send(2)

        # Then the next message waits in RabbitMQ, for whom it may concern
        wait_until(lambda: counts.attached(amqp_url, "default") == (1, 0), what="the message to be free")
        assert ran == [1]

        # And it runs once the worker goes on
        worker.resume()
        wait_until(lambda: ran == [1, 2], what="the second message to run")
    finally:
        worker.stop()


def test_one_broker_can_be_closed_and_used_again(amqp_url: str, broker_for: BrokerMaker) -> None:
    """Test suites close the broker after each test. Neither threads nor files may stay behind."""
    broker = broker_for(amqp_url)
    work = actor_of(broker)
    work.send(0)
    broker.close()
    files, threads = open_files(), threading.active_count()

    for number in range(1, 6):
        work.send(number)
        broker.close()

    assert numbers_in(amqp_url) == list(range(6))
    assert (open_files(), threading.active_count()) == (files, threads)


def test_a_broker_can_be_closed_while_it_connects(
    amqp_url: str, proxy: TcpProxy, broker_for: BrokerMaker
) -> None:
    """A web process is stopped while RabbitMQ hangs."""
    files = open_files()
    # Given a broker that waits for RabbitMQ's answer
    proxy.hold()
    broker = broker_for(proxy.url_for(amqp_url), send_timeout=500)
    with pytest.raises(SendUncertain):
        actor_of(broker).send(1)
    start = time.monotonic()

    broker.close()

    assert time.monotonic() - start < 10
    proxy.cut()
    assert open_files() == files


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
