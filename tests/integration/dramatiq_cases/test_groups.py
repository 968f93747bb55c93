"""GroupCallbacks: somebody is told when a whole group is done."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq import group
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import StubBackend as StubLimits

if TYPE_CHECKING:
    from .conftest import Stage


@pytest.fixture
def grouping(working: Stage, limits: StubLimits) -> Stage:
    """A broker with GroupCallbacks, as its documentation says: at the end of the list."""
    working.broker.add_middleware(GroupCallbacks(limits))
    return working


def test_a_group_tells_when_all_of_it_is_done_and_not_before(grouping: Stage):
    """Hurts who builds something of all parts."""
    order: list[str] = []
    go = threading.Event()

    @dramatiq.actor
    def part(number: int) -> None:
        if number == 0:
            assert go.wait(30)
        order.append("part")

    @dramatiq.actor
    def whole() -> None:
        order.append("whole")

    parts = group(part.message(number) for number in range(4))
    parts.add_completion_callback(whole.message())
    parts.run()

    grouping.wait(lambda: len(order) == 3)
    assert order == ["part"] * 3
    go.set()
    grouping.wait(lambda: len(order) == 5)
    grouping.settle()
    assert order == ["part"] * 4 + ["whole"]


def test_a_group_may_tell_several(grouping: Stage):
    """Hurts who has two things to do at the end. Arguments and options are those of the message."""
    told: list[Any] = []

    @dramatiq.actor
    def part() -> None: ...

    @dramatiq.actor
    def whole(what: str, *, how: str) -> None:
        told.append((what, how))

    parts = group([part.message(), part.message()])
    for what in ("mail", "invoice"):
        parts.add_completion_callback(
            whole.message_with_options(args=(what,), kwargs={"how": "fast"}, max_retries=1)
        )
    parts.run()

    grouping.wait(lambda: len(told) == 2)
    grouping.settle()
    assert sorted(told) == [("invoice", "fast"), ("mail", "fast")]


def test_a_pipeline_in_a_group_counts_when_its_last_step_is_done(grouping: Stage):
    """Hurts who groups pipelines."""
    order: list[str] = []
    go = threading.Event()

    @dramatiq.actor
    def first() -> str:
        order.append("first")
        return "built"

    @dramatiq.actor
    def last(what: str) -> None:
        assert go.wait(30)
        order.append("last")

    @dramatiq.actor
    def whole() -> None:
        order.append("whole")

    parts = group([first.message() | last.message(), first.message() | last.message()])
    parts.add_completion_callback(whole.message())
    parts.run()

    grouping.wait(lambda: order == ["first"] * 2)
    go.set()
    grouping.wait(lambda: len(order) == 5)
    assert order == ["first"] * 2 + ["last"] * 2 + ["whole"]


def test_a_member_that_needs_a_second_attempt_is_waited_for_and_counted_once(grouping: Stage):
    """Hurts who counts on all parts: a failure is not done, and done is done once."""
    order: list[str] = []

    @dramatiq.actor(min_backoff=0)
    def part(number: int) -> None:
        if number == 0 and "failed" not in order:
            order.append("failed")
            raise RuntimeError("no route")
        order.append("part")

    @dramatiq.actor
    def whole() -> None:
        order.append("whole")

    parts = group(part.message(number) for number in range(3))
    parts.add_completion_callback(whole.message())
    parts.run()

    grouping.wait(lambda: "whole" in order)
    grouping.settle()
    assert order[-1] == "whole"
    assert sorted(order[:-1]) == ["failed", "part", "part", "part"]


def test_a_group_with_a_member_that_failed_for_good_tells_nobody(grouping: Stage):
    """Hurts who would build something of parts that are not there."""
    told: list[str] = []

    @dramatiq.actor(max_retries=0)
    def part(number: int) -> None:
        if number == 0:
            raise RuntimeError("no route")

    @dramatiq.actor
    def whole() -> None:
        told.append("whole")

    parts = group(part.message(number) for number in range(3))
    parts.add_completion_callback(whole.message())
    parts.run()

    (dead,) = grouping.wait(grouping.dead_letters)
    grouping.settle()
    assert dead.args == [0]
    assert told == []


def test_a_group_that_is_run_twice_tells_twice(grouping: Stage):
    """Hurts who keeps a group and runs it each night: each run counts for itself."""
    told: list[str] = []

    @dramatiq.actor
    def part() -> None: ...

    @dramatiq.actor
    def whole() -> None:
        told.append("whole")

    parts = group([part.message(), part.message()])
    parts.add_completion_callback(whole.message())

    for count in (1, 2):
        parts.run()
        grouping.wait(lambda count=count: len(told) == count)
    grouping.settle()
    assert told == ["whole"] * 2


def test_a_group_in_a_group_with_a_callback_is_refused(grouping: Stage):
    """Hurts nobody by surprise: Dramatiq has no such thing."""

    @dramatiq.actor
    def part() -> None: ...

    parts = group([group([part.message()]), part.message()])
    parts.add_completion_callback(part.message())

    with pytest.raises(NotImplementedError):
        parts.run()


def test_a_callback_without_the_middleware_is_refused_and_nothing_is_sent(stage: Stage):
    """Hurts who forgot it: the error says what is missing."""

    @dramatiq.actor
    def part() -> None: ...

    parts = group([part.message()])
    parts.add_completion_callback(part.message())

    with pytest.raises(RuntimeError, match="GroupCallbacks middleware not found"):
        parts.run()
    assert stage.waiting() == []
