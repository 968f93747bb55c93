"""A middleware that refuses to send: ``before_enqueue`` raises a ``MiddlewareError``, which is Dramatiq's one way to say no.

In this process, on a real RabbitMQ. What was sent is read back from RabbitMQ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq import Message, pipeline
from dramatiq.brokers.rabbitmq import RabbitmqBroker as StockBroker
from dramatiq.middleware import Middleware, MiddlewareError

from dramatiq_safeops import RabbitmqBroker, safe_stack
from tests.harness import queues
from tests.harness.worker import wait_until

QUEUE = "jobs"
#: Where follow-ups go. No worker consumes it, so that they can be read there.
LATER = "later"


class SentAlready(MiddlewareError):
    """What a middleware that sends nothing twice would raise."""


class Once(Middleware):
    """Refuses the messages whose first argument is ``twin``, and breaks at those whose first argument is ``broken``."""

    def __init__(self) -> None:
        self.before: list[Any] = []
        self.after: list[Any] = []

    def before_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
        self.before.append(message.args[0])
        if message.args[0] == "twin":
            raise SentAlready("was sent already")
        if message.args[0] == "broken":
            raise ConnectionError("the register of what was sent is away")

    def after_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
        self.after.append(message.args[0])


class Careful(Middleware):
    """Sends a follow-up for each message, and is content if it was sent already."""

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        if message.options.get("careful"):
            try:
                broker.get_actor("later").send("twin")
            except SentAlready:
                broker.get_actor("later").send("instead")


class Careless(Middleware):
    """The same, but does not expect a no."""

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        if message.options.get("careless"):
            broker.get_actor("later").send("twin")


class House:
    """A broker with that middleware and its actors."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ran: list[Any] = []
        self.once = Once()
        self.broker = RabbitmqBroker(url=url, middleware=[*safe_stack(), self.once, Careful(), Careless()])

        @dramatiq.actor(broker=self.broker, queue_name=QUEUE, max_retries=1, min_backoff=0)
        def work(what: Any, *, send: str = "", catch: bool = False, fail: bool = False) -> None:
            self.ran.append(what)
            if fail and self.ran.count(what) == 1:
                raise RuntimeError("no route")
            if send:
                try:
                    later.send(send)
                except SentAlready:
                    if not catch:
                        raise

        @dramatiq.actor(broker=self.broker, queue_name=LATER)
        def later(*args: Any) -> None: ...

        self.work, self.later = work, later
        self.worker = dramatiq.Worker(self.broker, queues={QUEUE}, worker_timeout=50, worker_threads=2)

    def waiting(self, queue: str) -> list[Any]:
        return [one.message["args"][0] for one in queues.look(self.url, queue)]

    def dead(self) -> list[queues.Seen]:
        return queues.look(self.url, f"{QUEUE}.dlq")

    def settle(self) -> None:
        self.broker.join(QUEUE, min_successes=3, idle_time=20, timeout=30_000)
        self.worker.join()


@pytest.fixture
def house(amqp_url: str) -> Iterator[House]:
    house = House(amqp_url)
    yield house
    if house.worker.workers:
        house.worker.stop(timeout=10_000)
    house.broker.close()


@pytest.fixture
def working(house: House) -> House:
    house.worker.start()
    return house


def test_a_refusal_reaches_who_sends_and_nothing_is_sent(house: House):
    """Hurts who relies on it to send nothing twice: as on stock Dramatiq the caller is told."""
    with pytest.raises(SentAlready):
        house.work.send("twin")
    with pytest.raises(SentAlready):
        house.work.send_with_options(args=("twin",), delay=60_000)
    house.work.send("new")

    assert house.waiting(QUEUE) == ["new"]
    assert house.once.after == ["new"]


def test_a_middleware_that_breaks_refuses_nothing(house: House):
    """Hurts everybody who sends: what is no MiddlewareError is logged, and the message is sent, as on stock Dramatiq."""
    house.work.send("broken")

    assert house.waiting(QUEUE) == ["broken"]
    assert house.once.after == ["broken"]


def test_of_many_messages_with_one_that_is_refused_none_is_sent(house: House):
    """Hurts who sends many: all or nothing is easier to repeat than some."""
    messages = [house.work.message(what) for what in ("first", "second", "twin", "last")]

    with pytest.raises(SentAlready):
        house.broker.send_many(messages)

    assert house.waiting(QUEUE) == []
    assert house.once.before == ["first", "second", "twin"]
    assert house.once.after == []


def test_a_refusal_in_an_actor_is_its_exception_and_may_be_caught(working: House):
    """Hurts actors that send: nobody's message is lost, theirs is retried, or they know what to do."""
    working.work.send_with_options(args=("catches",), kwargs={"send": "twin", "catch": True})
    working.work.send_with_options(args=("raises",), kwargs={"send": "twin"})

    (dead,) = wait_until(working.dead, what="the dead letter")
    working.settle()
    assert dead.message["args"] == ["raises"]
    assert dead.headers["x-safeops-reason"] == "retries_exhausted"
    assert dead.headers["x-safeops-exception-type"].endswith("SentAlready")
    assert sorted(working.ran) == ["catches", "raises", "raises"]


@pytest.mark.parametrize("kind", ["pipeline", "callback"])
def test_a_refused_next_step_makes_a_dead_letter_of_its_parent(working: House, kind: str):
    """Hurts chains: on stock Dramatiq one ends here without a trace but a line in the log. Here its parent says where it ended."""
    if kind == "pipeline":
        target = Message(LATER, "later", ("twin",), {}, {}, "the-next-step", 0)
        pipeline([working.work.message("parent"), target], broker=working.broker).run()
    else:
        # Callbacks send the message itself as the first argument.
        working.once.before_enqueue = lambda broker, message, delay: _refuse_callbacks(message)  # type: ignore[method-assign]
        working.work.send_with_options(args=("parent",), on_success="later")

    (dead,) = wait_until(working.dead, what="the dead letter")
    working.settle()
    assert dead.message["args"] == ["parent"]
    assert dead.headers["x-safeops-reason"] == "follow_up_failed"
    assert dead.headers["x-safeops-exception-type"].endswith("SentAlready")
    assert working.ran == ["parent"]
    assert working.waiting(LATER) == []


def _refuse_callbacks(message: Any) -> None:
    if message.actor_name == "later":
        raise SentAlready("was sent already")


def test_a_middleware_that_expects_the_refusal_of_its_follow_up_can_do_something_else(working: House):
    """Hurts users of middlewares that send: "sent already" is no failure of the message that they look at."""
    working.work.send_with_options(args=("parent",), careful=True)

    wait_until(lambda: working.waiting(LATER), what="what was sent instead")
    working.settle()
    assert working.waiting(LATER) == ["instead"]
    assert working.dead() == []


def test_a_middleware_that_does_not_expect_it_makes_a_dead_letter(working: House):
    """Hurts who loses a follow-up without knowing: the exception left the hook, so nobody has dealt with it."""
    working.work.send_with_options(args=("parent",), careless=True)

    (dead,) = wait_until(working.dead, what="the dead letter")
    assert dead.headers["x-safeops-reason"] == "follow_up_failed"
    assert working.waiting(LATER) == []


def test_a_retry_is_no_send_so_it_cannot_be_refused(working: House):
    """Hurts who would lose a retry: stock Dramatiq sends it like a new message, and a no there acks what has failed."""
    body = queues.body_of("work", "twin", queue=QUEUE, message_id="not-refused-at-its-first-send")
    fields = json.loads(body)
    fields["kwargs"] = {"fail": True}
    queues.publish(working.url, QUEUE, json.dumps(fields).encode())

    wait_until(lambda: working.ran == ["twin", "twin"], what="the second attempt")
    working.settle()
    assert working.dead() == []
    assert working.once.before == []


def test_stock_loses_a_message_whose_retry_is_refused(amqp_url: str):
    """The twin: the message has failed, its retry is refused, and it is acked as if it were done."""
    broker = StockBroker(url=amqp_url)
    once = Once()
    broker.add_middleware(once)
    ran: list[Any] = []

    @dramatiq.actor(broker=broker, queue_name=QUEUE, min_backoff=1)
    def work(what: Any) -> None:
        ran.append(what)
        raise RuntimeError("no route")

    worker = dramatiq.Worker(broker, queues={QUEUE}, worker_timeout=50, worker_threads=1)
    worker.start()
    broker.declare_queue(QUEUE, ensure=True)
    queues.publish(amqp_url, QUEUE, queues.body_of("work", "twin", queue=QUEUE))

    wait_until(lambda: once.before == ["twin"], what="the refusal of the retry")
    worker.stop(timeout=10_000)
    broker.close()
    assert ran == ["twin"]
    for name in (QUEUE, f"{QUEUE}.DQ", f"{QUEUE}.XQ"):
        assert queues.depth(amqp_url, name) == 0
