"""Actors, messages and the broker as objects: how they are made, sent, waited for and looked at."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq import Message, QueueJoinTimeout
from dramatiq.errors import ActorNotFound, DecodeError
from dramatiq.message import get_encoder
from dramatiq.middleware import CurrentMessage, Middleware, SkipMessage

from dramatiq_safeops import RabbitmqBroker, safe_stack

if TYPE_CHECKING:
    from .conftest import Stage

#: For a case that is about RabbitMQ, or about what StubBroker has from Dramatiq's.
on_rabbitmq = pytest.mark.parametrize("stage", ["rabbitmq"], indirect=True)


# -- actors


def test_a_function_becomes_an_actor_and_can_still_be_called(stage: Stage):
    """Hurts unit tests of users: ``add(1, 2)`` just runs."""

    @dramatiq.actor
    def add(x: int, y: int) -> int:
        return x + y

    assert isinstance(add, dramatiq.Actor)
    assert add(1, 2) == add(1, y=2) == 3
    assert (add.actor_name, add.queue_name, add.priority) == ("add", "default", 0)
    assert str(add) == "Actor(add)"
    assert repr(add).endswith("queue_name='default', actor_name='add')")
    assert stage.waiting() == []


def test_an_actor_has_the_name_queue_and_options_that_it_was_given(stage: Stage):
    """Hurts everybody who gives options."""

    @dramatiq.actor(actor_name="sum", queue_name="sums", priority=3, max_retries=32)
    def add(x: int, y: int) -> int:
        return x + y

    assert (add.actor_name, add.queue_name, add.priority) == ("sum", "sums", 3)
    assert add.options["max_retries"] == 32
    assert stage.broker.get_actor("sum") is add
    assert "sums" in stage.broker.get_declared_queues()
    assert stage.broker.get_declared_actors() == {"sum"}
    with pytest.raises(ActorNotFound):
        stage.broker.get_actor("add")


@pytest.mark.parametrize(
    "options", [{"no_such_option": 1}, {"queue_name": "$2@!@#"}, {"queue_name": ""}], ids=str
)
def test_an_actor_with_a_senseless_option_is_refused(stage: Stage, options: dict[str, Any]):
    """Hurts nobody for long: a ValueError at import, as Dramatiq's."""
    with pytest.raises(ValueError, match=r"(?i)option|queue names"):
        dramatiq.actor(lambda: None, actor_name="build", **options)


def test_two_actors_of_one_name_are_refused(stage: Stage):
    """Hurts who copies a module."""
    dramatiq.actor(lambda: None, actor_name="build")

    with pytest.raises(ValueError, match="already registered"):
        dramatiq.actor(lambda: None, actor_name="build")


class Counted(dramatiq.Actor):  # type: ignore[type-arg]
    """An actor class of a user's own."""

    def send_twice(self, *args: Any) -> list[Message[Any]]:
        return [self.send(*args), self.send(*args)]


def test_an_actor_may_be_of_a_class_of_the_users_own(working: Stage):
    """Hurts apps that have extended Actor."""
    ran: list[int] = []

    @dramatiq.actor(actor_class=Counted)
    def build(number: int) -> None:
        ran.append(number)

    build.send_twice(7)

    working.wait(lambda: ran == [7, 7])


def test_an_actor_belongs_to_the_broker_that_it_was_given(stage: Stage, cases_url: str):
    """Hurts apps with two brokers: each actor sends to its own."""
    other = RabbitmqBroker(url=cases_url, middleware=safe_stack())

    @dramatiq.actor(broker=other, queue_name="elsewhere")
    def build() -> None: ...

    build.send()

    assert build.broker is other
    assert other.get_queue_message_counts("elsewhere")[0] == 1
    assert stage.broker.get_declared_actors() == set()
    other.flush_all()
    assert other.get_queue_message_counts("elsewhere")[0] == 0
    other.close()


def test_the_global_broker_is_the_one_that_was_set(stage: Stage):
    """Hurts everybody: actors find their broker by it."""
    assert dramatiq.get_broker() is stage.broker


# -- actors that are classes


def test_a_class_becomes_an_actor_with_the_options_of_its_meta_class(working: Stage):
    """Hurts users of GenericActor."""
    ran: list[tuple[Any, ...]] = []

    class Build(dramatiq.GenericActor):
        class Meta:
            queue_name = "classes"
            max_retries = 3

        def perform(self, month: str, *, currency: str = "EUR") -> None:
            ran.append((month, currency))

    assert isinstance(Build.__actor__, dramatiq.Actor)
    assert (Build.queue_name, Build.actor_name, Build.options["max_retries"]) == ("classes", "Build", 3)

    Build.send("march")
    Build.send_with_options(args=("april",), kwargs={"currency": "CHF"})

    working.wait(lambda: len(ran) == 2)
    assert sorted(ran) == [("april", "CHF"), ("march", "EUR")]


def test_abstract_classes_are_no_actors_and_pass_their_options_on(working: Stage):
    """Hurts users of GenericActor with a base class of their own."""
    ran: list[str] = []

    class Base(dramatiq.GenericActor):
        class Meta:
            abstract = True
            queue_name = "classes"

        def name(self) -> str:
            raise NotImplementedError

        def perform(self) -> None:
            ran.append(self.name())

    class Foo(Base):
        def name(self) -> str:
            return "foo"

    class Bar(Base):
        def name(self) -> str:
            return "bar"

    assert not isinstance(Base, dramatiq.Actor)
    assert working.broker.get_declared_actors() == {"Foo", "Bar"}
    Foo.send()
    Bar.send()

    working.wait(lambda: sorted(ran) == ["bar", "foo"])


def test_a_class_that_does_not_say_what_to_do_is_a_failure_when_it_runs(stage: Stage):
    """Hurts who forgot ``perform``."""

    class Build(dramatiq.GenericActor):
        pass

    with pytest.raises(NotImplementedError):
        Build()


def test_the_arguments_of_a_class_are_not_looked_at_before_it_runs(working: Stage):
    """Hurts users of GenericActor: Dramatiq calls it with ``*args``, so a wrong number shows when it runs."""

    class Build(dramatiq.GenericActor):
        class Meta:
            max_retries = 0

        def perform(self, month: str) -> None: ...

    Build.send()

    (dead,) = working.wait(working.dead_letters)
    assert (dead.reason, dead.exception, dead.attempts) == ("retries_exhausted", "TypeError", 1)


# -- messages


def test_a_message_is_made_without_being_sent(stage: Stage):
    """Hurts who composes pipelines and groups."""

    @dramatiq.actor
    def build(*args: Any, **kwargs: Any) -> None: ...

    plain = build.message(1, two=2)
    optioned = build.message_with_options(args=(1,), kwargs={"two": 2}, max_retries=5)

    assert (plain.args, plain.kwargs, plain.options) == ((1,), {"two": 2}, {})
    assert (optioned.args, optioned.kwargs, optioned.options) == ((1,), {"two": 2}, {"max_retries": 5})
    assert (plain.queue_name, plain.actor_name) == ("default", "build")
    assert plain.message_id != optioned.message_id
    assert str(plain) == "build(1, two=2)"
    assert stage.waiting() == []


def test_a_copy_of_a_message_has_its_id_and_all_options_of_both(stage: Stage):
    """Hurts who changes messages on their way: options are added, the original stays as it was."""

    @dramatiq.actor
    def build(*args: Any) -> None: ...

    message = build.message_with_options(args=(1,), max_retries=5, max_age=9)

    copy = message.copy(args=(2,), queue_name="others", options={"max_retries": 6, "time_limit": 7})

    assert copy.options == {"max_retries": 6, "max_age": 9, "time_limit": 7}
    assert (copy.args, copy.queue_name, copy.message_id) == ((2,), "others", message.message_id)
    assert (message.args, message.options) == ((1,), {"max_retries": 5, "max_age": 9})


def test_what_is_sent_is_what_send_returns(stage: Stage):
    """Hurts who looks into the queue, or keeps the message id."""

    @dramatiq.actor
    def build(*args: Any, **kwargs: Any) -> None: ...

    sent = build.send_with_options(args=(1, "zwei"), kwargs={"three": [None, 3.5]}, max_retries=5)

    (waiting,) = stage.waiting()
    assert Message.decode(json.dumps(waiting).encode()) == sent
    assert Message.decode(sent.encode()) == sent
    assert sent.asdict()["kwargs"] == {"three": [None, 3.5]}
    age = dt.datetime.now(dt.timezone.utc) - sent.message_datetime
    assert abs(age) < dt.timedelta(minutes=1)


def test_a_message_can_be_enqueued_by_the_broker(working: Stage):
    """Hurts who keeps messages and sends them later, or again."""
    ran: list[str] = []

    @dramatiq.actor
    def build(month: str) -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        ran.append(message.message_id)

    message = build.message("march")
    assert working.broker.enqueue(message) == message
    working.broker.enqueue(message)

    working.wait(lambda: ran == [message.message_id] * 2)


def test_bytes_that_are_no_message_cannot_be_decoded():
    """Hurts tools that read queues."""
    with pytest.raises(DecodeError):
        Message.decode(b"{")


# -- sending and running


def test_a_hundred_messages_run_each_once(working: Stage):
    """Hurts everybody."""
    ran: dict[str, int] = {}

    @dramatiq.actor
    def put(key: str, value: int) -> None:
        assert key not in ran
        ran[key] = value

    for number in range(100):
        assert put.send(f"key-{number}", number)

    working.wait(lambda: len(ran) == 100)
    working.settle()
    assert ran == {f"key-{number}": number for number in range(100)}
    assert working.dead_letters() == []


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1, 2), {}), ((1,), {"y": 2}), ((), {"x": 1, "y": 2})],
    ids=["args", "both", "kwargs"],
)
def test_arguments_arrive_as_they_were_given(working: Stage, args: tuple[int, ...], kwargs: dict[str, int]):
    """Hurts everybody."""
    ran: list[int] = []

    @dramatiq.actor
    def add(x: int, y: int) -> None:
        ran.append(x + y)

    add.send(*args, **kwargs)

    working.wait(lambda: ran == [3])


@pytest.mark.parametrize("delay", [600, dt.timedelta(milliseconds=600)], ids=["milliseconds", "timedelta"])
def test_a_delayed_message_runs_no_sooner_than_asked_for(working: Stage, delay: Any):
    """Hurts planned work. Dramatiq takes a number of milliseconds or a timedelta."""
    ran: list[float] = []

    @dramatiq.actor
    def build() -> None:
        ran.append(time.monotonic())

    start = time.monotonic()
    build.send_with_options(delay=delay)

    working.wait(lambda: ran)
    assert ran[0] - start >= 0.6


@pytest.mark.parametrize("delay", [0, dt.timedelta(0), dt.timedelta(seconds=-5), -5_000], ids=str)
def test_a_delay_that_is_over_already_is_none(working: Stage, delay: Any):
    """Hurts who computes the delay from an instant that may have passed."""
    ran: list[int] = []

    @dramatiq.actor
    def build() -> None:
        ran.append(1)

    build.send_with_options(delay=delay)

    working.wait(lambda: ran == [1])


def test_delays_do_not_wait_for_each_other(working: Stage):
    """Hurts planned work behind later work: the shorter delay ends first."""
    ran: list[int] = []

    @dramatiq.actor
    def build(number: int) -> None:
        ran.append(number)

    build.send_with_options(args=(1,), delay=2_500)
    build.send_with_options(args=(2,), delay=300)

    working.wait(lambda: len(ran) == 2)
    assert ran == [2, 1]


@on_rabbitmq
def test_a_message_for_an_unknown_actor_waits_and_is_a_dead_letter_when_nobody_comes(
    stage: Stage, cases_url: str
):
    """Hurts deploys: stock Dramatiq moves it to the dead letters at once, before the new workers are there."""
    broker = RabbitmqBroker(url=cases_url, middleware=safe_stack(), park_limit=300)
    dramatiq.set_broker(broker)
    broker.declare_queue("some-queue")
    message = Message(queue_name="some-queue", actor_name="some-actor", args=(), kwargs={}, options={})
    broker.enqueue(message)
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()

    (dead,) = stage.wait(lambda: stage.dead_letters("some-queue"))
    assert (dead.reason, dead.actor) == ("unknown_actor", "some-actor")
    worker.stop()
    broker.flush("some-queue")
    broker.close()


def test_an_encoder_that_cannot_read_a_message_makes_a_dead_letter_of_it(working: Stage):
    """Hurts apps with an encoder of their own."""
    before = get_encoder()

    class Picky(type(before)):  # type: ignore[misc]
        def decode(self, data: bytes) -> Any:
            if b"xfail" in data:
                raise RuntimeError("xfail")
            return super().decode(data)

    ran: list[str] = []

    @dramatiq.actor
    def build(text: str) -> None:
        ran.append(text)

    dramatiq.set_encoder(Picky())
    try:
        build.send("xfail")
        build.send("good")
        (dead,) = working.wait(working.dead_letters)
        working.wait(lambda: ran == ["good"])
    finally:
        dramatiq.set_encoder(before)
    assert dead.reason == "unreadable"


def test_values_that_json_cannot_hold_are_the_senders_error(stage: Stage):
    """Hurts nobody for long: nothing is sent."""

    @dramatiq.actor
    def build(what: Any) -> None: ...

    with pytest.raises(TypeError):
        build.send(dt.date(2026, 10, 1))
    assert stage.waiting() == []


# -- middlewares of users


def test_a_middleware_that_breaks_stops_no_message(working: Stage):
    """Hurts users of middlewares that are no guards: a broken gauge must not stop work."""

    class Broken(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            raise RuntimeError("before")

        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
        ) -> None:
            raise RuntimeError("after")

    working.broker.add_middleware(Broken())
    ran: list[int] = []

    @dramatiq.actor
    def build() -> None:
        ran.append(1)

    build.send()

    working.wait(lambda: ran)
    working.settle()
    assert ran == [1]
    assert working.dead_letters() == []


def test_a_middleware_can_skip_messages(working: Stage):
    """Hurts users of middlewares that skip: nothing runs, the skip is told, and the message is gone."""
    told: list[str] = []

    class Gate(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            raise SkipMessage

        def after_skip_message(self, broker: Any, message: Any) -> None:
            told.append("skipped")

    working.broker.add_middleware(Gate())

    @dramatiq.actor
    def build() -> None:
        told.append("ran")

    build.send()

    working.wait(lambda: told)
    working.settle()
    assert told == ["skipped"]
    assert working.dead_letters() == []


def test_an_actor_knows_its_message_and_nobody_else_does(working: Stage):
    """Hurts actors that log their message id: outside of an actor there is none."""
    seen: list[Any] = []

    @dramatiq.actor
    def build(month: str) -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        seen.append((message.message_id, message.args, message.options.get("colour")))

    sent = build.send_with_options(args=("march",), colour="blue")

    working.wait(lambda: seen)
    assert seen == [(sent.message_id, ("march",), "blue")]
    assert CurrentMessage.get_current_message() is None


def test_a_middleware_can_be_put_before_or_after_one_that_is_known_by_dramatiqs_name(stage: Stage):
    """Hurts existing apps: they name Dramatiq's Retries, which ours stands in for."""

    class Mine(Middleware): ...

    class Other(Middleware): ...

    class Absent(Middleware): ...

    stage.broker.add_middleware(Mine(), before=dramatiq.middleware.Retries)
    stage.broker.add_middleware(Other(), after=dramatiq.middleware.TimeLimit)

    names = [type(one).__name__ for one in stage.broker.middleware]
    assert names.index("Mine") == names.index("Retries") - 1
    assert names.index("Other") == names.index("TimeLimit") + 1
    with pytest.raises(ValueError, match="not found"):
        stage.broker.add_middleware(Mine(), before=Absent)


# -- the broker in tests


def test_join_gives_up_at_its_timeout(working: Stage):
    """Hurts test-suites that would hang."""
    go = threading.Event()

    @dramatiq.actor
    def build() -> None:
        assert go.wait(30)

    build.send()

    with pytest.raises(QueueJoinTimeout):
        working.broker.join(build.queue_name, timeout=300)
    go.set()


@on_rabbitmq
def test_flushed_queues_are_empty(stage: Stage):
    """Hurts test-suites that clean up between their cases."""

    @dramatiq.actor
    def build() -> None: ...

    @dramatiq.actor(queue_name="others")
    def other() -> None: ...

    build.send()
    other.send()
    stage.broker.flush("default")
    assert stage.broker.get_queue_message_counts("default") == (0, 0, 0)
    assert stage.broker.get_queue_message_counts("others") == (1, 0, 0)

    stage.broker.flush_all()

    assert stage.broker.get_queue_message_counts("others") == (0, 0, 0)
    stage.broker.join("others", min_successes=1, timeout=5_000)


@on_rabbitmq
def test_flushing_a_queue_drops_its_delayed_messages_and_no_others(stage: Stage):
    """Hurts test-suites that clean up between their cases, and all others whose messages wait in the same ladder."""

    @dramatiq.actor
    def build() -> None: ...

    @dramatiq.actor(queue_name="others")
    def other() -> None: ...

    for delay in (3_600_000, 3_600_000, 60_000):
        build.send_with_options(delay=delay)
        other.send_with_options(delay=delay)
    assert stage.broker.get_queue_message_counts("default") == (0, 6, 0)

    stage.broker.flush("default")
    assert stage.broker.get_queue_message_counts("default") == (0, 3, 0)
    stage.broker.flush_all()

    assert stage.broker.get_queue_message_counts("default") == (0, 0, 0)


@on_rabbitmq
def test_a_delayed_message_that_was_looked_at_by_a_flush_is_in_time(working: Stage):
    """Hurts whoever shares the ladder with a test-suite."""
    ran: list[float] = []

    @dramatiq.actor(queue_name="others")
    def other() -> None:
        ran.append(time.monotonic())

    start = time.monotonic()
    for _ in range(3):
        other.send_with_options(delay=1_500)
    working.broker.flush("default")

    working.wait(lambda: len(ran) == 3)
    assert 1.5 <= ran[0] - start <= ran[-1] - start <= 7.5


@on_rabbitmq
def test_counts_tell_waiting_delayed_and_dead_messages(stage: Stage):
    """Hurts test-suites and scripts that look at them: three numbers, as Dramatiq's."""

    @dramatiq.actor(max_retries=0)
    def build() -> None:
        raise RuntimeError("no route")

    build.send()
    build.send_with_options(delay=3_600_000)
    assert stage.broker.get_queue_message_counts("default") == (1, 1, 0)

    stage.start_worker()

    stage.wait(lambda: stage.broker.get_queue_message_counts("default") == (0, 1, 1))


@on_rabbitmq
def test_a_paused_worker_runs_nothing_until_it_is_resumed(working: Stage):
    """Hurts test-suites that pause their worker."""
    ran: list[int] = []

    @dramatiq.actor
    def build() -> None:
        ran.append(1)

    worker = working.worker
    assert worker is not None
    worker.pause()
    build.send()
    assert working.broker.get_queue_message_counts("default")[0] == 1
    assert ran == []

    worker.resume()

    working.wait(lambda: ran == [1])


@on_rabbitmq
def test_a_queue_has_one_name(stage: Stage):
    """Hurts scripts that go through ``broker.queues``: no delay queues are among them."""

    @dramatiq.actor
    def build() -> None: ...

    build.send_with_options(delay=1)

    assert set(stage.broker.queues) == {"default"}
    assert stage.broker.get_declared_queues() == {"default"}
    assert stage.broker.get_declared_delay_queues() == set()
