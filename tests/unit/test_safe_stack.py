"""The list of middlewares: complete, in the one right order, and checked before a worker starts."""

from __future__ import annotations

import logging
import math
from typing import Any

import dramatiq
import dramatiq.brokers.rabbitmq
import dramatiq.middleware
import pytest
from dramatiq.middleware import Callbacks, CurrentMessage, Middleware, Pipelines

from dramatiq_safeops import (
    AgeLimit,
    ConfigError,
    DeadLetters,
    Drain,
    Guard,
    RabbitmqBroker,
    Retries,
    TimeLimit,
    safe_stack,
)
from dramatiq_safeops.boot import known_options
from dramatiq_safeops.middleware import ORDER, STOCK_TWINS, check_stack

NOWHERE = "amqp://guest:guest@127.0.0.1:1/"


class Tracing(Middleware):
    """A middleware of somebody else's."""


class PatientRetries(Retries):
    """A user's subclass of one of ours."""


class OnWeekdays(Guard):
    """A guard of a user's own, which has no place in our order."""


def names(middleware: list[Middleware]) -> list[str]:
    return [type(one).__name__ for one in middleware]


def test_the_stack_has_its_guards_and_dramatiqs_own_in_the_one_right_order():
    """Hurts everybody: the order decides what a guard sees, and a time limit above a guard could interrupt it."""
    ours = [name for name in names(safe_stack()) if name in {kind.__name__ for kind in ORDER}]
    theirs = [name for name in names(safe_stack()) if name not in ours]

    assert ours == ["AsyncIO", "DeadLetters", "Retries", "Drain", "AgeLimit", "TimeLimit"]
    assert {"Callbacks", "Pipelines", "CurrentMessage"} <= set(theirs)
    assert names(safe_stack())[-1] == "TimeLimit"


def test_nothing_in_the_stack_is_a_stock_middleware_that_decides_by_itself():
    """Hurts everybody: a stock Retries beside ours would enqueue every retry a second time."""
    for one in safe_stack():
        for stock, ours in STOCK_TWINS.items():
            assert not isinstance(one, stock) or isinstance(one, ours)
    check_stack(safe_stack())


def test_what_dramatiq_has_by_default_is_there_or_replaced():
    """Hurts whoever moves over: an option that was known must not become an unknown one."""
    stock = dramatiq.brokers.rabbitmq.RabbitmqBroker(url=NOWHERE)
    ours = RabbitmqBroker(url=NOWHERE)

    assert {"max_retries", "time_limit", "max_age", "on_success", "pipe_ignore"} <= stock.actor_options
    assert set(stock.actor_options) <= set(ours.actor_options)


def test_each_call_makes_its_own():
    """Hurts programs with two brokers: guards that they share would mix their actors."""
    first, second = safe_stack(), safe_stack()

    assert not {id(one) for one in first} & {id(one) for one in second}


def test_a_broker_without_a_list_gets_the_whole_stack():
    """Hurts everybody who changes one import and nothing else."""
    assert names(RabbitmqBroker(url=NOWHERE).middleware) == names(safe_stack())


def test_options_reach_the_guard_they_are_meant_for():
    """Hurts users of ``safe_stack(max_retries=2)``."""
    stack = safe_stack(
        app_version="shop-7",
        max_retries=2,
        min_backoff=0,
        max_backoff=5_000,
        retry_when=lambda retries, exception: True,
        notify_shutdown=True,
        max_age=60_000,
        time_limit=1_000,
        strict=True,
    )
    found = {type(one): one for one in stack}

    assert found[DeadLetters].app_version == "shop-7"
    retries = found[Retries]
    assert (retries.max_retries, retries.min_backoff, retries.max_backoff) == (2, 0, 5_000)
    assert retries.retry_when(0, RuntimeError()) is True
    assert found[Drain].notify_shutdown is True
    assert found[AgeLimit].max_age == 60_000
    assert (found[TimeLimit].time_limit, found[TimeLimit].strict) == (1_000, True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_retry": 2}, "unknown option 'max_retry' for safe_stack(), did you mean 'max_retries'?"),
        ({"zebra": 2}, "unknown option 'zebra' for safe_stack(); known options: app_version"),
        ({"max_retries": None}, "Retries.max_retries"),
        ({"max_retries": "2"}, "Retries.max_retries"),
        ({"min_backoff": -1}, "Retries.min_backoff"),
        ({"max_backoff": math.nan}, "Retries.max_backoff"),
        ({"max_age": 0}, "AgeLimit.max_age"),
        ({"time_limit": 0}, "TimeLimit.time_limit"),
        ({"time_limit": None}, "TimeLimit.time_limit"),
        ({"notify_shutdown": 1}, "Drain.notify_shutdown"),
        ({"app_version": 7}, "DeadLetters.app_version"),
        ({"retry_when": "never"}, "Retries.retry_when"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(options: dict[str, Any], says: str):
    """Hurts whoever mistypes: without it the default would hold, and nobody would know."""
    with pytest.raises(ConfigError) as caught:
        safe_stack(**options)

    assert says in str(caught.value)


# --- checks before a worker starts --------------------------------------------------------------


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (dramatiq.middleware.Retries, "Retries"),
        (dramatiq.middleware.AgeLimit, "AgeLimit"),
        (dramatiq.middleware.TimeLimit, "TimeLimit"),
        (dramatiq.middleware.ShutdownNotifications, "Drain"),
        (dramatiq.middleware.AsyncIO, "AsyncIO"),
    ],
)
def test_a_stock_middleware_that_decides_by_itself_is_refused(stock: type[Middleware], ours: str):
    """Hurts whoever adds one out of habit: two would decide about one message."""
    with pytest.raises(ConfigError) as caught:
        check_stack([*safe_stack(), stock()])

    assert f"dramatiq.middleware.{stock.__name__} cannot be used" in str(caught.value)
    assert f"remove it, dramatiq_safeops.{ours} is there" in str(caught.value)
    with pytest.raises(ConfigError, match=f"use dramatiq_safeops.{ours} in its place"):
        check_stack([stock()])


@pytest.mark.parametrize(
    ("stack", "says"),
    [
        ([DeadLetters(), Retries(), Retries()], "Retries stands twice"),
        ([Retries(), PatientRetries()], "PatientRetries stands twice"),
        ([Retries(), Tracing(), Retries()], "Retries stands twice"),
        ([Retries(), DeadLetters()], "DeadLetters stands below Retries"),
        ([TimeLimit(), Tracing(), AgeLimit()], "AgeLimit stands below TimeLimit"),
        ([PatientRetries(), DeadLetters()], "DeadLetters stands below PatientRetries"),
        ([DeadLetters(), Retries(), AgeLimit(), Retries()], "Retries stands"),
    ],
)
def test_a_guard_that_stands_twice_or_in_the_wrong_place_is_refused(stack: list[Middleware], says: str):
    """Hurts whoever builds the list by hand: in another order a guard does not see what it must."""
    with pytest.raises(ConfigError) as caught:
        check_stack(stack)

    assert says in str(caught.value)


def test_the_error_about_the_order_shows_the_order():
    """Hurts whoever has to put it right."""
    with pytest.raises(
        ConfigError,
        match=r"AsyncIO, DeadLetters, Retries, Drain, AgeLimit, TimeLimit; safe_stack\(\) returns it",
    ):
        check_stack([TimeLimit(), Retries()])


@pytest.mark.parametrize(
    "stack",
    [
        [],
        [Retries()],
        [Tracing(), DeadLetters(), Tracing(), Retries(), Callbacks(), TimeLimit(), Tracing()],
        [
            DeadLetters(),
            PatientRetries(),
            AgeLimit(),
            OnWeekdays(),
            Pipelines(),
            CurrentMessage(),
            TimeLimit(),
        ],
        [OnWeekdays(), DeadLetters(), OnWeekdays(), Retries()],
    ],
    ids=[
        "none",
        "one alone",
        "others between",
        "a subclass and a guard of one's own",
        "the same guard of one's own",
    ],
)
def test_any_part_of_the_stack_in_its_order_is_fine_with_anything_between(stack: list[Middleware]):
    """Hurts users with middlewares of their own: each guard can be used alone."""
    check_stack(stack)


def test_an_actor_without_a_time_limit_is_an_error_under_strict(caplog: pytest.LogCaptureFixture):
    """Hurts whoever wants to be sure, and finds out in production that one actor was forgotten."""
    strict = RabbitmqBroker(url=NOWHERE, middleware=safe_stack(strict=True))
    dramatiq.actor(lambda: None, broker=strict, actor_name="timed", time_limit=1_000)
    dramatiq.actor(lambda: None, broker=strict, actor_name="forgotten")
    limit = next(one for one in strict.middleware if isinstance(one, TimeLimit))

    with pytest.raises(ConfigError, match="'forgotten'") as caught:
        limit.check_boot(strict)
    assert "'timed'" not in str(caught.value)

    lenient = TimeLimit()
    with caplog.at_level(logging.WARNING):
        lenient.check_boot(strict)
    assert [record.event for record in caplog.records if hasattr(record, "event")] == ["time_limit.unset"]


def test_an_unknown_actor_option_is_an_error_that_knows_the_likely_one():
    """Hurts whoever mistypes: Dramatiq says that some option is undefined, and not which was meant."""
    broker = RabbitmqBroker(url=NOWHERE)

    with pytest.raises(ConfigError) as caught:
        dramatiq.actor(lambda: None, broker=broker, actor_name="build", time_limits=1_000)

    assert "unknown actor option 'time_limits', did you mean 'time_limit'?" in str(caught.value)
    assert "in the broker's list" in str(caught.value)


def test_the_known_options_are_a_set_like_dramatiqs():
    """Hurts middlewares that add to it: Dramatiq does so with ``|=``."""
    known = known_options({"max_age"})

    known |= {"tenant"}

    assert known == {"max_age", "tenant"}
    assert {"max_age", "tenant"} - known == set()
    with pytest.raises(ConfigError, match="'tenants', did you mean 'tenant'"):
        _ = {"tenants"} - known


def test_an_option_of_a_middleware_that_is_added_later_is_known():
    """Hurts users of Results and of middlewares of their own."""

    class Tenants(Middleware):
        @property
        def actor_options(self) -> set[str]:
            return {"tenant"}

    broker = RabbitmqBroker(url=NOWHERE)
    broker.add_middleware(Tenants())

    actor = dramatiq.actor(lambda: None, broker=broker, actor_name="build", tenant=7)

    assert actor.options["tenant"] == 7
    with pytest.raises(ConfigError, match="'tenan', did you mean 'tenant'"):
        dramatiq.actor(lambda: None, broker=broker, actor_name="other", tenan=7)
