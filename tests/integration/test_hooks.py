"""The whole sequence of hooks for every way a message can end, on a real RabbitMQ with Dramatiq's own Worker.

Dramatiq lets an actor run whose guard broke, swallows what an after-hook raises, and lets a skipped message overwrite a
stored result. Middlewares of users, Results and Callbacks hang on this sequence, so it is written down here hook by hook.
"""

from __future__ import annotations

import json
import struct
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pika
import pytest
from dramatiq import Message
from dramatiq.middleware import Middleware, SkipMessage
from dramatiq.results import ResultFailure, ResultMissing, Results
from dramatiq.results.backends import StubBackend

from dramatiq_safeops import Guard, PermanentError, RabbitmqBroker, safe_stack
from dramatiq_safeops.rabbitmq import waiting
from dramatiq_safeops.testing import RabbitmqServer
from tests.harness import queues
from tests.harness.vhosts import virtual_host
from tests.harness.worker import wait_until

QUEUE = "jobs"
#: Where follow-ups go. No worker consumes it, so that they can be read there.
FOLLOW_UPS = "follow-ups"
PATIENCE_S = 30


class Recorder(Middleware):
    """Writes down which of its hooks is called, and what is known then."""

    def __init__(self, name: str, log: Log) -> None:
        self.name = name
        self.log = log

    def note(self, hook: str, message: Any, **facts: Any) -> None:
        decision = getattr(message, "decision", None)
        self.log.add(
            message.message_id, f"{self.name}.{hook}", None if decision is None else decision.outcome.value
        )

    def before_process_message(self, broker: Any, message: Any) -> None:
        self.note("before_process", message)

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        self.note("after_process" if exception is None else "after_process!", message)

    def after_skip_message(self, broker: Any, message: Any) -> None:
        self.note("after_skip", message)

    def before_ack(self, broker: Any, message: Any) -> None:
        self.note("before_ack", message)

    def after_ack(self, broker: Any, message: Any) -> None:
        self.note("after_ack", message)

    def before_nack(self, broker: Any, message: Any) -> None:
        self.note("before_nack", message)

    def after_nack(self, broker: Any, message: Any) -> None:
        self.note("after_nack", message)


class Log:
    """The hooks of each message, in order, with the outcome as it was known in each."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[str]] = defaultdict(list)
        self.outcomes: dict[str, list[str | None]] = defaultdict(list)

    def add(self, message_id: str, hook: str, outcome: str | None) -> None:
        self.hooks[message_id].append(hook)
        self.outcomes[message_id].append(outcome)


class Switchboard(Middleware):
    """A middleware of a user's own, in the middle of the list, that does what the test wants with each message."""

    def __init__(self) -> None:
        self.skips: set[str] = set()
        self.fails_and_skips: set[str] = set()
        self.fails_afterwards: set[str] = set()
        self.dawdles_s: dict[str, float] = {}

    def before_process_message(self, broker: Any, message: Any) -> None:
        if message.message_id in self.fails_and_skips:
            message.fail()
            raise SkipMessage("not this one, and never again")
        if message.message_id in self.skips:
            raise SkipMessage("not this one")

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        if message.message_id in self.fails_afterwards:
            message.fail()

    def after_nack(self, broker: Any, message: Any) -> None:
        time.sleep(self.dawdles_s.get(message.message_id, 0))


class Fragile(Guard):
    """A guard that breaks on the messages that the test names, as often as the test says."""

    def __init__(self) -> None:
        self.breaks: dict[str, int] = {}

    def before_process_message(self, broker: Any, message: Any) -> None:
        if self.breaks.get(message.message_id, 0) > 0:
            self.breaks[message.message_id] -= 1
            raise ConnectionError("the database of the guard is away")


class Audit(Middleware):
    """A middleware of a user's own that sends something after each message."""

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        if message.options.get("audited"):
            broker.get_actor("follow_up").send("audit", message.message_id)


class Bench:
    """A broker with recorders at top and bottom, its actors, and a running worker."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.log = Log()
        self.ran: list[str] = []
        self.switchboard = Switchboard()
        self.fragile = Fragile()
        self.results = StubBackend()
        self.release = threading.Event()
        stack = safe_stack(max_retries=1, min_backoff=0)
        middle = len(stack) - 1  # above the time limit
        self.broker = RabbitmqBroker(
            url=url,
            middleware=[
                Recorder("top", self.log),
                *stack[:middle],
                self.fragile,
                self.switchboard,
                Audit(),
                *stack[middle:],
                Results(backend=self.results),
                Recorder("bottom", self.log),
            ],
            **options,
        )
        self.declare_actors()
        self.worker = dramatiq.Worker(self.broker, queues={QUEUE}, worker_timeout=100, worker_threads=4)
        self.worker.start()

    def declare_actors(self) -> None:
        def actor(**options: Any) -> Callable[[Callable[..., Any]], Any]:
            return dramatiq.actor(broker=self.broker, queue_name=QUEUE, time_limit=60_000, **options)

        @actor(store_results=True)
        def build(text: str = "") -> str:
            self.ran.append(text)
            return f"built {text}"

        @actor(store_results=True)
        def fail(text: str = "") -> None:
            self.ran.append(text)
            raise RuntimeError("no route")

        @actor(store_results=True)
        def never(text: str = "") -> None:
            self.ran.append(text)
            raise PermanentError("there is no such month")

        @actor(store_results=True)
        def fail_once(text: str = "") -> str:
            self.ran.append(text)
            if self.ran.count(text) == 1:
                raise RuntimeError("no route")
            return f"built {text}"

        @actor()
        def unsendable(text: str = "") -> object:
            self.ran.append(text)
            return object()

        @dramatiq.actor(broker=self.broker, queue_name=FOLLOW_UPS, time_limit=60_000)
        def follow_up(*args: Any) -> None: ...

    def message(self, actor: str, text: str = "", **options: Any) -> Message[Any]:
        message_id = str(uuid.uuid4())
        return Message(QUEUE, actor, (text or message_id,), {}, options, message_id, 1_772_000_000_000)

    def send(self, actor: str, text: str = "", **options: Any) -> str:
        return str(self.broker.enqueue(self.message(actor, text, **options)).message_id)

    def wait_for(self, message_id: str, *last: str) -> list[str]:
        """Wait until the hooks of a message end with ``last``; return all of them."""

        def ended() -> bool:
            return self.log.hooks[message_id][-len(last) :] == list(last)

        wait_until(ended, PATIENCE_S, f"{last}; so far {self.log.hooks[message_id]}")
        return list(self.log.hooks[message_id])

    def wait_settled(self) -> None:
        """Wait until nothing of the worker's queue is anywhere: not there, not un-acked, not in the ladder."""
        self.broker.join(QUEUE, min_successes=3, idle_time=30, timeout=PATIENCE_S * 1000)

    def dead_letters(self) -> dict[str, queues.Seen]:
        return {one.headers["x-safeops-message-id"]: one for one in queues.look(self.url, f"{QUEUE}.dlq")}

    def follow_ups(self) -> list[queues.Seen]:
        return queues.look(self.url, FOLLOW_UPS)

    def result_of(self, message_id: str, actor: str = "build") -> Any:
        """What stands in the result backend: a value, a ResultFailure, or None for nothing."""
        try:
            return self.results.get_result(Message(QUEUE, actor, (), {}, {}, message_id, 0))
        except ResultMissing:
            return None
        except ResultFailure as failure:
            return failure

    def forget(self) -> None:
        self.ran.clear()
        for queue in (QUEUE, f"{QUEUE}.dlq", FOLLOW_UPS):
            queues.take(self.url, queue)

    def close(self) -> None:
        self.worker.stop(timeout=10_000)
        self.broker.close()


@pytest.fixture(scope="module")
def usual_bench(rabbit: RabbitmqServer) -> Iterator[Bench]:
    with virtual_host(rabbit) as url:
        bench = Bench(url)
        yield bench
        bench.close()


@pytest.fixture(scope="module")
def impatient_bench(rabbit: RabbitmqServer) -> Iterator[Bench]:
    with virtual_host(rabbit) as url:
        bench = Bench(url, park_limit=1)
        yield bench
        bench.close()


@pytest.fixture
def bench(usual_bench: Bench) -> Bench:
    """A worker that all tests share, with nothing left of the test before."""
    usual_bench.forget()
    return usual_bench


@pytest.fixture
def impatient(impatient_bench: Bench) -> Bench:
    """The same with a worker that parks nothing for longer than a millisecond in all."""
    impatient_bench.forget()
    return impatient_bench


#: What every message sees that runs and comes to an end, with ``!`` where the actor raised.
RUN = ["top.before_process", "bottom.before_process"]
WELL = ["bottom.after_process", "top.after_process"]
RAISED = ["bottom.after_process!", "top.after_process!"]
#: Whoever skips stands between the two: what stands below was not asked before, and is not told afterwards.
SKIP = ["top.after_skip"]
ACK = ["top.before_ack", "bottom.before_ack", "bottom.after_ack", "top.after_ack"]
NACK = ["top.before_nack", "bottom.before_nack", "bottom.after_nack", "top.after_nack"]


# --- the sequences ------------------------------------------------------------------------------


def test_done(bench: Bench):
    """Hurts every user of middlewares if it differs: this is Dramatiq's own sequence."""
    sent = bench.send("build", "march")

    assert bench.wait_for(sent, "top.after_ack") == [*RUN, *WELL, *ACK]
    assert bench.log.outcomes[sent] == [None, None, *["done"] * 6]
    bench.wait_settled()
    assert bench.ran == ["march"]
    assert bench.result_of(sent) == "built march"
    assert bench.dead_letters() == {}


def test_failed_once_and_then_done(bench: Bench):
    """Hurts users who count in after-hooks: an attempt that is charged is told as one, and the last as the end."""
    sent = bench.send("fail_once", "march")

    hooks = bench.wait_for(sent, "bottom.after_process", "top.after_process", *ACK)

    assert hooks == [*RUN, *RAISED, *ACK, *RUN, *WELL, *ACK]
    assert bench.log.outcomes[sent] == [None, None, *["retried"] * 6, None, None, *["done"] * 6]
    bench.wait_settled()
    assert bench.ran == ["march", "march"]
    assert bench.result_of(sent, "fail_once") == "built march"
    assert bench.dead_letters() == {}


def test_given_up(bench: Bench):
    """Hurts users of Results: the exception is stored when it is over, and not before."""
    sent = bench.send("fail", "march")

    assert bench.wait_for(sent, *NACK) == [*RUN, *RAISED, *ACK, *RUN, *RAISED, *NACK]
    assert bench.log.outcomes[sent] == [None, None, *["retried"] * 6, None, None, *["dead"] * 6]
    bench.wait_settled()
    assert bench.ran == ["march", "march"]
    failure = bench.result_of(sent, "fail")
    assert isinstance(failure, ResultFailure)
    assert failure.orig_exc_type == "RuntimeError"
    letter = bench.dead_letters()[sent]
    assert letter.headers["x-safeops-reason"] == "retries_exhausted"
    assert letter.headers["x-safeops-attempts"] == 2


def test_permanent(bench: Bench):
    """Hurts whoever waits for the answer: what can never succeed is over at once."""
    sent = bench.send("never", "march")

    assert bench.wait_for(sent, *NACK) == [*RUN, *RAISED, *NACK]
    bench.wait_settled()
    assert bench.ran == ["march"]
    assert bench.dead_letters()[sent].headers["x-safeops-reason"] == "permanent_error"


def test_skipped_by_a_foreign_middleware(bench: Bench):
    """Hurts users of middlewares that skip: the message is done with, as on stock Dramatiq."""
    message = bench.message("build", "march")
    bench.switchboard.skips.add(message.message_id)

    bench.broker.enqueue(message)

    assert bench.wait_for(message.message_id, *ACK) == ["top.before_process", *SKIP, *ACK]
    assert bench.log.outcomes[message.message_id] == [None, *["skipped"] * 5]
    bench.wait_settled()
    assert bench.ran == []
    assert bench.dead_letters() == {}


def test_failed_and_skipped_by_a_foreign_middleware(bench: Bench):
    """Hurts users of middlewares that reject: the message is a dead letter, and its result a failure."""
    message = bench.message("build", "march")
    bench.switchboard.fails_and_skips.add(message.message_id)

    bench.broker.enqueue(message)

    assert bench.wait_for(message.message_id, *NACK) == ["top.before_process", *SKIP, *NACK]
    assert bench.log.outcomes[message.message_id] == [None, *["dead"] * 5]
    bench.wait_settled()
    assert bench.ran == []
    assert isinstance(bench.result_of(message.message_id), ResultFailure)
    letter = bench.dead_letters()[message.message_id]
    assert letter.headers["x-safeops-reason"] == "rejected"
    assert letter.headers["x-safeops-attempts"] == 0


def test_failed_by_an_after_hook(bench: Bench):
    """Hurts users of middlewares that look at the result: their no comes after the decision, and counts."""
    message = bench.message("build", "march")
    bench.switchboard.fails_afterwards.add(message.message_id)

    bench.broker.enqueue(message)

    assert bench.wait_for(message.message_id, *NACK) == [*RUN, *WELL, *NACK]
    bench.wait_settled()
    assert bench.ran == ["march"]
    assert bench.dead_letters()[message.message_id].headers["x-safeops-reason"] == "rejected"


def test_guard_broken(bench: Bench):
    """Hurts everybody behind a guard: on stock Dramatiq the actor runs although the guard could not say yes."""
    message = bench.message("build", "march")
    bench.fragile.breaks[message.message_id] = 2

    bench.broker.enqueue(message)

    parked = ["top.before_process", *SKIP]
    hooks = bench.wait_for(message.message_id, *WELL, *ACK)
    assert hooks == [*parked, *parked, *RUN, *WELL, *ACK]  # a park is no end: nobody hears of an ack
    parked_outcomes = [None, "parked"]
    assert bench.log.outcomes[message.message_id] == [
        *parked_outcomes,
        *parked_outcomes,
        None,
        None,
        *["done"] * 6,
    ]
    bench.wait_settled()
    assert bench.ran == ["march"]
    assert bench.result_of(message.message_id) == "built march"
    assert bench.dead_letters() == {}


def test_guard_broken_for_good(impatient: Bench):
    """Hurts whoever is on call: a guard that never works again must not park for ever."""
    bench = impatient
    message = bench.message("build", "march")
    bench.fragile.breaks[message.message_id] = 99

    bench.broker.enqueue(message)

    parked = ["top.before_process", *SKIP]
    assert bench.wait_for(message.message_id, *NACK) == [*parked, *parked, *NACK]
    bench.wait_settled()
    assert bench.ran == []
    letter = bench.dead_letters()[message.message_id]
    assert letter.headers["x-safeops-reason"] == "guard_failed"
    assert letter.headers["x-safeops-exception-type"] == "ConnectionError"
    assert letter.headers["x-safeops-attempts"] == 0


def test_parked_on_arrival(impatient: Bench):
    """Hurts users of Results: what is parked has not come to its end, so no hook may see it; of its death all are told."""
    bench = impatient

    sent = bench.send("from_the_next_version", "march")
    other = bench.broker.enqueue(Message(QUEUE, "build", (1, 2, 3), {}, {}, str(uuid.uuid4()), 0)).message_id
    letters = wait_until(lambda: len(bench.dead_letters()) == 2 and bench.dead_letters(), PATIENCE_S)

    assert letters[sent].headers["x-safeops-reason"] == "unknown_actor"
    assert letters[other].headers["x-safeops-reason"] == "arguments_do_not_fit"
    for message_id in (sent, other):
        assert letters[message_id].headers["x-safeops-attempts"] == 0
        assert bench.wait_for(message_id, *NACK) == NACK
    assert bench.ran == []
    wait_until(lambda: isinstance(bench.result_of(other), ResultFailure), PATIENCE_S)


def test_what_dies_before_it_reaches_a_thread_dies_once(impatient: Bench, monkeypatch: pytest.MonkeyPatch):
    """Hurts who counts dead letters: with a slow result backend, or RabbitMQ short of memory, one message left several."""
    bench = impatient
    # Given an actor that nobody knows any more, a hook that is slow, and a worker that gives back what waits too long
    message = bench.message("nobody", "march")
    bench.switchboard.dawdles_s[message.message_id] = 1
    monkeypatch.setattr(waiting, "LOOK_S", 0.02)

    # When Dramatiq rejects the message by itself, without a worker thread
    bench.broker.enqueue(message)
    hooks = bench.wait_for(message.message_id, *NACK)
    bench.wait_settled()

    # Then it has come to its end once
    assert (hooks, bench.log.hooks[message.message_id]) == (NACK, NACK)
    assert len(queues.look(bench.url, f"{QUEUE}.dlq")) == 1


# --- follow-ups ---------------------------------------------------------------------------------


def test_a_pipeline_and_a_callback_follow_what_is_done(bench: Bench):
    """Hurts users of pipelines and callbacks: both hang on these hooks."""
    target = Message(FOLLOW_UPS, "follow_up", ("next",), {}, {}, "the-next-step", 0)

    sent = bench.send("build", "march", pipe_target=target.asdict(), on_success="follow_up", audited=True)

    bench.wait_for(sent, *ACK)
    bench.wait_settled()
    found = {tuple(map(str, one.message["args"]))[:1]: one for one in bench.follow_ups()}
    assert len(found) == 3
    assert found[("next",)].message_id == "the-next-step"
    assert found[("next",)].message["args"] == ["next", "built march"]
    assert found[("audit",)].message["args"] == ["audit", sent]


def test_a_failure_callback_is_sent_for_each_failed_attempt_under_an_id_of_its_own(bench: Bench):
    """Hurts users of ``on_failure``: as on stock Dramatiq it tells of each failure, and two are two messages."""
    sent = bench.send("fail", "march", on_failure="follow_up")

    bench.wait_for(sent, *NACK)
    bench.wait_settled()
    found = bench.follow_ups()
    assert [one.message["args"][1] for one in found] == [{"type": "RuntimeError", "message": "no route"}] * 2
    assert len({one.message_id for one in found}) == 2


def test_nothing_follows_what_is_only_parked(bench: Bench):
    """Hurts users of callbacks: a message that has not run has neither succeeded nor failed."""
    message = bench.message("build", "march", on_success="follow_up", on_failure="follow_up")
    bench.fragile.breaks[message.message_id] = 1

    bench.broker.enqueue(message)

    bench.wait_for(message.message_id, *ACK)
    bench.wait_settled()
    (only,) = bench.follow_ups()
    assert only.message["args"][1] == "built march"


def test_a_follow_up_that_cannot_be_written_makes_a_dead_letter_of_its_parent(bench: Bench):
    """Hurts users of pipelines: on stock Dramatiq the chain just ends, and the message counts as done."""
    target = Message(FOLLOW_UPS, "follow_up", (), {}, {}, "the-next-step", 0)

    sent = bench.send("unsendable", "march", pipe_target=target.asdict())

    letter = wait_until(lambda: bench.dead_letters().get(sent), PATIENCE_S, "the dead letter")
    assert letter.headers["x-safeops-reason"] == "follow_up_failed"
    assert letter.headers["x-safeops-exception-type"] == "TypeError"
    assert letter.headers["x-safeops-attempts"] == 1
    assert letter.message["options"]["pipe_target"]["message_id"] == "the-next-step"
    bench.wait_settled()
    assert bench.log.hooks[sent][:4] == [*RUN, *WELL]
    assert bench.ran == ["march"]
    assert bench.follow_ups() == []


@pytest.mark.parametrize(
    "options",
    [
        {"on_success": "nobody"},
        {"on_success": 5},
        {"pipe_target": "the next one"},
        {"pipe_target": {"actor_name": "follow_up"}},
        {"pipe_target": [1]},
    ],
    ids=str,
)
def test_a_follow_up_that_makes_no_sense_makes_a_dead_letter_of_its_parent(
    bench: Bench, options: dict[str, Any]
):
    """Hurts users of pipelines and callbacks: a name that somebody mistyped must not end a chain without a word."""
    sent = bench.send("build", "march", **options)

    letter = wait_until(lambda: bench.dead_letters().get(sent), PATIENCE_S, "the dead letter")

    assert letter.headers["x-safeops-reason"] == "follow_up_failed"
    bench.wait_settled()
    assert bench.ran == ["march"]


def test_follow_ups_have_the_same_ids_when_their_parent_runs_again(bench: Bench):
    """Hurts everybody whose worker dies between two steps: a repeat must be recognisable as one."""
    target = Message(FOLLOW_UPS, "follow_up", ("next",), {}, {}, "the-next-step", 0)
    message = bench.message(
        "build", "march", pipe_target=target.asdict(), on_success="follow_up", audited=True
    )

    for _ in range(2):
        bench.broker.enqueue(message)
        bench.wait_settled()

    assert bench.ran == ["march", "march"]
    found = bench.follow_ups()
    by_what: dict[str, set[str]] = defaultdict(set)
    for one in found:
        first = one.message["args"][0]
        by_what[first if isinstance(first, str) else "callback"].add(one.message_id)
    assert len(found) == 6
    assert {what: len(ids) for what, ids in by_what.items()} == {"next": 1, "audit": 1, "callback": 1}
    assert len({message_id for ids in by_what.values() for message_id in ids}) == 3


def test_follow_ups_of_two_parents_have_different_ids(bench: Bench):
    """Hurts everybody once ids are looked at: two orders must not share one receipt."""
    for text in ("march", "april"):
        bench.send("build", text, on_success="follow_up", audited=True)
    bench.wait_settled()

    assert len({one.message_id for one in bench.follow_ups()}) == 4


def test_whom_on_retry_exhausted_names_is_told_with_the_dead_letter(bench: Bench):
    """Hurts users of ``on_retry_exhausted``: it is their alarm."""
    sent = bench.send("fail", "march", on_retry_exhausted="follow_up")

    bench.wait_for(sent, *NACK)
    bench.wait_settled()
    (only,) = bench.follow_ups()
    assert only.message["args"][0]["message_id"] == sent
    assert only.message["args"][1] == {"retries": 1, "max_retries": 1}


# --- results ------------------------------------------------------------------------------------


def test_a_stored_result_is_not_overwritten_by_a_park(bench: Bench):
    """Hurts whoever reads the result: a second delivery that may not run yet has nothing to say about it."""
    message = bench.message("build", "march")
    bench.broker.enqueue(message)
    bench.wait_for(message.message_id, *ACK)
    assert bench.result_of(message.message_id) == "built march"
    stored: list[Any] = []

    # Its twin meets a guard that is broken, and is looked at before it runs.
    bench.fragile.breaks[message.message_id] = 1
    bench.broker.enqueue(message)
    bench.wait_for(message.message_id, *SKIP)
    stored.append(bench.result_of(message.message_id))

    bench.wait_for(message.message_id, *RUN, *WELL, *ACK)
    assert stored == ["built march"]


def test_a_stored_result_is_not_overwritten_by_a_message_that_is_too_old(bench: Bench):
    """Hurts whoever reads the result of a message that was done when its worker died, and is too old for its redelivery."""
    message = bench.message("build", "march", max_age=1)
    bench.results.store_result(message, "built march", 60_000)

    bench.broker.enqueue(message)

    assert bench.wait_for(message.message_id, *NACK) == ["top.before_process", *SKIP, *NACK]
    bench.wait_settled()
    assert bench.ran == []
    assert bench.dead_letters()[message.message_id].headers["x-safeops-reason"] == "too_old"
    assert bench.result_of(message.message_id) == "built march"


def test_a_message_that_is_too_old_and_has_no_result_stores_a_failure(bench: Bench):
    """Hurts whoever waits for an answer that cannot come."""
    sent = bench.send("build", "march", max_age=1)

    bench.wait_for(sent, *NACK)

    failure = wait_until(lambda: bench.result_of(sent), PATIENCE_S, "the failure")
    assert isinstance(failure, ResultFailure)
    assert "max_age is 1 ms" in failure.orig_exc_msg


# --- what strangers send ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        '{"throws": "ValueError"}',
        '{"max_retries": Infinity}',
        '{"max_retries": 9223372036854775807}',
        '{"min_backoff": 1e308, "max_retries": 0}',
        '{"max_age": "soon", "time_limit": "long", "priority": {}}',
        '{"retries": "many", "traceback": 5, "eta": "yesterday"}',
    ],
)
def test_no_option_of_a_stranger_ends_a_thread_or_loses_its_message(bench: Bench, options: str):
    """Hurts the whole worker: a thread that ends takes no more messages, and one that is held keeps its place."""
    message_id = str(uuid.uuid4())
    body = json.dumps(bench.message("never", message_id).asdict() | {"message_id": message_id, "options": 1})

    queues.publish(bench.url, QUEUE, body.replace('"options": 1', f'"options": {options}').encode())

    letter = wait_until(lambda: bench.dead_letters().get(message_id), PATIENCE_S, "the dead letter")
    assert letter.headers["x-safeops-reason"] == "permanent_error"
    bench.wait_settled()
    assert bench.ran == [message_id]
    assert all(thread.is_alive() for thread in [*bench.worker.workers, *bench.worker.consumers.values()])
    after = bench.send("build", "march")
    bench.wait_for(after, *ACK)


def field(name: bytes, kind: bytes, value: bytes) -> bytes:
    """One entry of an AMQP table, as it goes over the wire."""
    return bytes([len(name)]) + name + kind + value


def nested(depth: int) -> bytes:
    """A table in a table in a table."""
    table = b""
    for _ in range(depth):
        table = field(b"x", b"F", struct.pack(">I", len(table)) + table)
    return table


class RawHeaders(pika.BasicProperties):
    """Properties whose headers pika itself would not write."""

    def __init__(self, table: bytes) -> None:
        super().__init__()
        self.table = table

    def encode(self) -> list[bytes]:
        flags = self.FLAG_HEADERS | self.FLAG_DELIVERY_MODE
        return [struct.pack(">HI", flags, len(self.table)), self.table, b"\x02"]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (field(b"x-expires-at", b"T", struct.pack(">Q", 2**63)), "unreadable"),
        (nested(2_000), "unreadable"),
        (field(b"x-name-\xff", b"S", struct.pack(">I", 2) + b"\xfe\xff"), "retries_exhausted"),
    ],
    ids=["a date in the year 300,000", "tables nested too deep", "a name that is not UTF-8"],
)
def test_no_header_of_a_stranger_stops_a_worker(bench: Bench, table: bytes, reason: str):
    """Hurts every worker of the fleet: their connections would break over this message, again and again."""
    message = bench.message("fail")
    with queues.channel(bench.url) as channel:
        channel.basic_publish("", QUEUE, message.encode(), RawHeaders(table))

    after = bench.send("build", "march")

    bench.wait_for(after, *ACK)
    (letter,) = wait_until(lambda: queues.look(bench.url, f"{QUEUE}.dlq"), PATIENCE_S, "the dead letter")
    assert letter.headers["x-safeops-reason"] == reason
    assert letter.body == message.encode()
    bench.wait_settled()
