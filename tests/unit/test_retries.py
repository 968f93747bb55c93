"""How often a failed message runs again, who may say so, and what is checked before a worker starts."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dramatiq
import pika
import pytest
from dramatiq.common import current_millis
from dramatiq.middleware import CurrentMessage, Middleware, SkipMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from dramatiq_safeops import AgeLimit, ConfigError, DeadLetters, RabbitmqBroker, Retries
from dramatiq_safeops.delivery import Delivery
from dramatiq_safeops.encoder import decode
from dramatiq_safeops.outcome import Outcome, Reason, decide
from dramatiq_safeops.rabbitmq import copies

WEEK_MS = 7 * 86_400_000

#: Nothing listens there, and nothing asks: a broker opens its connections when it first sends or consumes.
NOWHERE = "amqp://guest:guest@127.0.0.1:1/"


class UnknownPeriod(Exception):
    """Listed in ``throws``."""


class UnknownYear(UnknownPeriod):
    """Below it."""


def broker_with(*middleware: Middleware) -> RabbitmqBroker:
    return RabbitmqBroker(url=NOWHERE, middleware=list(middleware))


@pytest.fixture
def broker() -> Iterator[RabbitmqBroker]:
    made = broker_with(DeadLetters(), Retries(), AgeLimit())
    yield made
    made._processing.stop_collecting()  # a test may end between a body and its ack


def declare(broker: RabbitmqBroker, **options: Any) -> Any:
    return dramatiq.actor(lambda: None, broker=broker, actor_name="build", queue_name="reports", **options)


def delivery(
    options: dict[str, Any] | None = None, *, retries: int = 0, timestamp: int | None = None
) -> Delivery:
    call = {
        "queue_name": "reports",
        "actor_name": "build",
        "args": [],
        "kwargs": {},
        "options": {} if options is None else options,
        "message_id": "m-1",
        "message_timestamp": current_millis() if timestamp is None else timestamp,
    }
    body = json.dumps(call).encode()
    headers = {copies.RETRIES: retries} if retries else None
    found = Delivery(
        SimpleNamespace(gone=False, batches=set()),  # type: ignore[arg-type]
        1,
        queue="reports",
        body=body,
        properties=pika.BasicProperties(headers=headers),
        redelivered=False,
    )
    copies.read_headers(found)
    found.show(copies.view_of(found, decode(body, "reports")))
    return found


# --- who may say so -----------------------------------------------------------------------------


def test_five_attempts_with_a_base_of_thirty_seconds_unless_told_otherwise(broker: RabbitmqBroker):
    """Hurts whoever relies on the documentation."""
    declare(broker)

    policy = Retries().policy_for(broker, delivery())

    assert (policy.max_retries, policy.min_backoff, policy.max_backoff) == (4, 30_000, WEEK_MS)
    assert policy.throws == ()
    assert policy.retry_when is None


@pytest.mark.parametrize("name", ["max_retries", "min_backoff", "max_backoff"])
@pytest.mark.parametrize(
    ("message", "actor", "guard", "holds"),
    [(1, 2, 3, 1), (None, 2, 3, 2), (None, None, 3, 3), (0, 2, 3, 0), (None, 0, 3, 0), (None, None, 0, 0)],
)
def test_message_before_actor_before_guard_and_zero_is_a_number(
    broker: RabbitmqBroker, name: str, message: int | None, actor: int | None, guard: int, holds: int
):
    """Hurts users who switch retries off with ``max_retries=0``: Dramatiq's ``or`` would switch them on again."""
    declare(broker, **({} if actor is None else {name: actor}))

    policy = Retries(**{name: guard}).policy_for(broker, delivery({} if message is None else {name: message}))

    assert getattr(policy, name) == holds


def test_no_backoff_is_longer_than_a_week(broker: RabbitmqBroker):
    """Hurts users who take Dramatiq's limit for granted."""
    declare(broker)

    policy = Retries(max_backoff=10 * WEEK_MS).policy_for(broker, delivery({"max_backoff": 20 * WEEK_MS}))

    assert policy.max_backoff == WEEK_MS


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**400)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=400, deadline=None)
@given(
    options=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("max_retries", "min_backoff", "max_backoff", "max_age", "retries", "throws", "retry_when"),
            json_values,
        ),
    ),
    retries=st.integers(0, 2**53),
)
def test_whatever_a_message_says_it_gets_an_outcome_that_can_be_carried_out(
    options: dict[str, Any], retries: int
):
    """Hurts the whole worker: a message whose outcome cannot be computed is held un-acked and keeps its place."""
    guard = Retries()
    broker = broker_with(DeadLetters(), guard)
    declare(broker)
    one = delivery(options, retries=retries)

    policy = guard.policy_for(broker, one)
    decision = decide(one, exception=RuntimeError("no route"), policy=policy)
    record = broker.dead_letters_guard.record(broker, one, decision, frame_max=131_072)

    assert decision.outcome in (Outcome.RETRIED, Outcome.DEAD)
    assert 0 <= decision.delay_ms <= WEEK_MS
    letter = copies.dead_letter(one, record)
    assert len(b"".join(letter.properties.encode())) < 131_072
    copies.retry_copy(one, decision.delay_ms, changed_options={}, frame_max=131_072).properties.encode()


def test_an_attempt_is_charged_whatever_the_message_claims_about_itself(broker: RabbitmqBroker):
    """Hurts everybody: a producer that says ``retries: -100`` must not get a hundred attempts."""
    declare(broker, max_retries=1)
    one = delivery({"retries": -100, "max_retries": "many"}, retries=1)

    assert (
        decide(one, exception=RuntimeError(), policy=Retries().policy_for(broker, one)).outcome
        is Outcome.DEAD
    )


@pytest.mark.parametrize(
    ("throws", "exception", "permanent"),
    [
        (UnknownPeriod, UnknownPeriod(), True),
        ((UnknownPeriod,), UnknownYear(), True),
        ((KeyError, UnknownPeriod), UnknownYear(), True),
        (UnknownYear, UnknownPeriod(), False),
        ((), UnknownPeriod(), False),
        (None, UnknownPeriod(), False),
    ],
)
def test_what_an_actor_throws_is_never_retried(
    broker: RabbitmqBroker, throws: Any, exception: Exception, permanent: bool
):
    """Hurts users of ``throws``: a month that does not exist will not exist in 30 seconds either."""
    declare(broker, throws=throws)
    one = delivery()

    decision = decide(one, exception=exception, policy=Retries().policy_for(broker, one))

    assert (decision.outcome is Outcome.DEAD) is permanent
    assert (decision.reason == Reason.PERMANENT_ERROR) is permanent


def test_the_actors_retry_when_comes_before_the_guards(broker: RabbitmqBroker):
    """Hurts users with a default predicate and one actor that knows better."""
    declare(broker, retry_when=lambda retries, exception: False)

    policy = Retries(retry_when=lambda retries, exception: True).policy_for(broker, delivery())

    assert policy.retry_when is not None
    assert policy.retry_when(0, RuntimeError()) is False


def test_a_retry_when_that_breaks_means_another_attempt(
    broker: RabbitmqBroker, caplog: pytest.LogCaptureFixture
):
    """Hurts the message: a bug in the predicate must not bury it, and must not stay unseen."""

    def broken(retries: int, exception: BaseException) -> bool:
        raise KeyError("status")

    declare(broker, retry_when=broken)
    one = delivery()

    decision = decide(one, exception=RuntimeError(), policy=Retries().policy_for(broker, one))

    assert decision.outcome is Outcome.RETRIED
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


# --- what is checked ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_retries": None}, "expected max_retries of actor 'build' to be a number, got None"),
        ({"max_retries": -1}, "expected max_retries of actor 'build'"),
        ({"max_retries": "3"}, "expected max_retries of actor 'build'"),
        ({"max_retries": True}, "expected max_retries of actor 'build'"),
        ({"max_retries": math.inf}, "expected max_retries of actor 'build'"),
        ({"min_backoff": -1}, "expected min_backoff of actor 'build'"),
        ({"min_backoff": "1s"}, "expected min_backoff of actor 'build'"),
        ({"max_backoff": -1}, "expected max_backoff of actor 'build'"),
        ({"retry_when": "never"}, "expected retry_when of actor 'build' to be callable"),
        ({"throws": "ValueError"}, "expected throws of actor 'build' to be an exception class"),
        ({"throws": [ValueError]}, "expected throws of actor 'build' to be an exception class"),
        ({"throws": (ValueError, int)}, "expected throws of actor 'build' to be an exception class"),
        ({"max_age": 0}, "expected max_age of actor 'build' to be a number above 0"),
        ({"max_age": "1h"}, "expected max_age of actor 'build' to be a number above 0"),
        ({"max_retry": 3}, "unknown actor option 'max_retry', did you mean 'max_retries'?"),
    ],
)
def test_a_wrong_option_of_an_actor_is_an_error_at_its_declaration(
    broker: RabbitmqBroker, options: dict[str, Any], says: str
):
    """Hurts users at three in the morning otherwise: the first failure would be the first to notice."""
    with pytest.raises(ConfigError) as caught:
        declare(broker, **options)

    assert says in str(caught.value)


def test_a_guard_that_is_added_later_looks_at_the_actors_that_are_there():
    """Hurts users who add middlewares after their actors were imported."""
    broker = broker_with(CurrentMessage())
    broker.actor_options |= {"max_retries"}
    declare(broker, max_retries=None)

    with pytest.raises(ConfigError, match="max_retries of actor 'build'"):
        broker.add_middleware(Retries())


@pytest.mark.parametrize(
    "options",
    [
        {"max_retries": None},
        {"max_retries": -1},
        {"max_retries": math.inf},
        {"max_retries": math.nan},
        {"min_backoff": "30s"},
        {"max_backoff": None},
    ],
)
def test_a_wrong_option_of_the_guard_is_an_error_that_names_it(options: dict[str, Any]):
    """Hurts whoever has two guards with options of the same name."""
    (name,) = options
    with pytest.raises(ConfigError, match=f"Retries.{name}"):
        Retries(**options)


@pytest.mark.parametrize("max_age", [0, -5, "1h", math.nan, True])
def test_a_wrong_age_limit_is_an_error_that_names_it(max_age: Any):
    """Hurts users of ``AgeLimit(max_age=0)``, which would turn every message away."""
    with pytest.raises(ConfigError, match=r"AgeLimit\.max_age"):
        AgeLimit(max_age=max_age)


def test_our_guards_can_be_found_as_the_stock_ones_they_replace():
    """Hurts code that says ``add_middleware(x, before=dramatiq.middleware.Retries)``."""
    broker = broker_with(DeadLetters(), Retries(), AgeLimit())
    broker.add_middleware(CurrentMessage(), before=dramatiq.middleware.Retries)
    broker.add_middleware(dramatiq.middleware.Callbacks(), after=dramatiq.middleware.AgeLimit)

    kinds = [type(one).__name__ for one in broker.middleware]
    assert kinds == ["DeadLetters", "CurrentMessage", "Retries", "AgeLimit", "Callbacks"]


# --- what else it does --------------------------------------------------------------------------


@pytest.mark.parametrize(("retries", "told"), [(0, False), (1, True)])
def test_whom_on_retry_exhausted_names_is_told_when_it_is_over_and_not_before(
    broker: RabbitmqBroker, retries: int, told: bool
):
    """Hurts users of ``on_retry_exhausted``: it is their alarm."""
    declare(broker, max_retries=1, on_retry_exhausted="alarm")
    dramatiq.actor(lambda message, numbers: None, broker=broker, actor_name="alarm", queue_name="alarms")
    one = delivery(retries=retries)

    broker.emit_after("process_message", one, exception=RuntimeError("no route"))

    assert [publication.routing_key for publication in one.follow_ups] == (["alarms"] if told else [])
    if told:
        message, numbers = json.loads(one.follow_ups[0].body)["args"]
        assert message["message_id"] == "m-1"
        assert numbers == {"retries": 1, "max_retries": 1}


def test_a_permanent_error_does_not_count_as_exhausted_retries(broker: RabbitmqBroker):
    """Hurts users of ``on_retry_exhausted``: Dramatiq does not tell it of what the actor throws, either."""
    declare(broker, throws=UnknownPeriod, on_retry_exhausted="alarm")
    dramatiq.actor(lambda message, numbers: None, broker=broker, actor_name="alarm", queue_name="alarms")
    one = delivery()

    broker.emit_after("process_message", one, exception=UnknownPeriod("2031-13"))

    assert one.failed
    assert one.follow_ups == []


def test_a_list_without_retries_buries_at_the_first_failure():
    """Hurts users of their own list: a failed message must not be acked as if it were done."""
    broker = broker_with(DeadLetters(), AgeLimit())
    declare(broker)
    one = delivery()
    try:
        broker.emit_after("process_message", one, exception=RuntimeError("no route"))
    finally:
        broker._processing.stop_collecting()

    assert one.decision is not None
    assert one.decision.outcome is Outcome.DEAD


# --- age ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "actor", "guard", "turned_away"),
    [
        (None, None, None, False),
        (None, None, 50_000, True),
        (None, None, 100_000, False),
        (None, 50_000, None, True),
        (None, 100_000, 50_000, False),
        (50_000, 100_000, None, True),
        (100_000, 50_000, None, False),
        (0, None, None, False),
        ("old", 50_000, None, True),
    ],
)
def test_a_message_older_than_its_limit_is_turned_away(
    message: Any, actor: int | None, guard: int | None, turned_away: bool
):
    """Hurts whoever gets the mail about yesterday's offer."""
    limit = AgeLimit(max_age=guard)
    broker = broker_with(DeadLetters(), limit)
    declare(broker, **({} if actor is None else {"max_age": actor}))
    one = delivery({} if message is None else {"max_age": message}, timestamp=current_millis() - 60_000)

    if turned_away:
        with pytest.raises(SkipMessage):
            limit.before_process_message(broker, one)
        assert one.turned_away is not None
        assert (one.turned_away.outcome, one.turned_away.reason) == (Outcome.DEAD, Reason.TOO_OLD)
        assert one.failed
    else:
        limit.before_process_message(broker, one)
        assert one.turned_away is None
        assert not one.failed


@settings(max_examples=200, deadline=None)
@given(max_age=json_values, timestamp=st.integers() | st.integers(10**300, 10**400))
def test_no_age_and_no_clock_of_a_message_break_the_guard(max_age: Any, timestamp: int):
    """Hurts the message: a guard that breaks parks it for an hour, over a number that somebody mistyped."""
    limit = AgeLimit(max_age=WEEK_MS)
    broker = broker_with(DeadLetters(), limit)
    declare(broker)
    one = delivery({"max_age": max_age}, timestamp=timestamp)

    try:
        limit.before_process_message(broker, one)
    except SkipMessage:
        assert one.turned_away is not None
        broker.dead_letters_guard.record(broker, one, one.turned_away, frame_max=131_072)
    else:
        assert one.turned_away is None
