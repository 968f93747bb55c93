"""Callbacks: another actor is told when a message has succeeded, or failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware, SkipMessage

if TYPE_CHECKING:
    from .conftest import Stage

#: Ways to say who is to be told.
WAYS = ["message, by actor", "message, by name", "actor, by name"]


class Told:
    """An actor ``tell``, and what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], Any]] = []

        @dramatiq.actor
        def tell(message: dict[str, Any], what: Any) -> None:
            self.calls.append((message, what))

        self.actor = tell

    def options(self, way: str, event: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options for the actor's declaration, and those for the message."""
        if way == "actor, by name":
            return {event: "tell"}, {}
        return {}, {event: self.actor if way == "message, by actor" else "tell"}


@pytest.mark.parametrize("way", WAYS)
def test_on_success_gets_the_message_and_its_result(working: Stage, way: str):
    """Hurts everybody who is told of success: by the actor itself or its name, for one message or for all."""
    told = Told()
    of_actor, of_message = told.options(way, "on_success")

    @dramatiq.actor(**of_actor)
    def add(x: int, y: int) -> int:
        return x + y

    sent = add.send_with_options(args=(1, 2), **of_message)

    working.wait(lambda: told.calls)
    working.settle()
    ((message, result),) = told.calls
    assert result == 3
    assert (message["message_id"], message["actor_name"]) == (sent.message_id, "add")
    assert list(message["args"]) == [1, 2]


@pytest.mark.parametrize("way", WAYS)
def test_on_failure_gets_the_message_and_what_was_raised(working: Stage, way: str):
    """Hurts everybody who is told of failures."""
    told = Told()
    of_actor, of_message = told.options(way, "on_failure")

    @dramatiq.actor(max_retries=0, **of_actor)
    def build(month: str) -> None:
        raise ValueError(f"no route to {month}")

    sent = build.send_with_options(args=("march",), **of_message)

    working.wait(lambda: told.calls)
    working.settle()
    ((message, error),) = told.calls
    assert error == {"type": "ValueError", "message": "no route to march"}
    assert message["message_id"] == sent.message_id


def test_on_failure_is_told_of_each_attempt_that_failed(working: Stage):
    """Hurts who counts: as on stock Dramatiq each failure is told, also the one before a success."""
    told = Told()
    runs: list[int] = []

    @dramatiq.actor(max_retries=3, min_backoff=0)
    def build() -> str:
        runs.append(1)
        if len(runs) < 3:
            raise ValueError(f"failure {len(runs)}")
        return "built"

    build.send_with_options(on_failure=told.actor, on_success=told.actor)

    working.wait(lambda: len(told.calls) == 3)
    working.settle()
    what = [what for _, what in told.calls]
    errors = [{"type": "ValueError", "message": f"failure {number}"} for number in (1, 2)]
    assert sorted(map(str, what)) == sorted(map(str, [*errors, "built"]))


def test_what_the_message_says_comes_before_what_the_actor_says(working: Stage):
    """Hurts callers who want to be told themselves."""
    told = Told()

    @dramatiq.actor
    def nobody(message: Any, what: Any) -> None:
        raise AssertionError("the message named somebody else")

    @dramatiq.actor(on_success="nobody")
    def build() -> str:
        return "built"

    build.send_with_options(on_success=told.actor)

    working.wait(lambda: told.calls)
    working.settle()
    assert len(told.calls) == 1
    assert working.dead_letters() == []


@pytest.mark.parametrize("event", ["on_success", "on_failure"])
def test_a_plain_function_is_no_callback(stage: Stage, event: str):
    """Hurts nobody for long: the caller gets a TypeError."""

    @dramatiq.actor
    def build() -> None: ...

    def plain(*args: Any) -> None: ...

    with pytest.raises(TypeError, match=event):
        build.send_with_options(**{event: plain})
    with pytest.raises(TypeError, match=event):
        build.message_with_options(**{event: plain})
    assert stage.waiting() == []


def test_a_success_callback_that_nobody_knows_makes_a_dead_letter(working: Stage):
    """Hurts who renamed an actor: on stock Dramatiq the message counts as done, and nobody is told."""

    @dramatiq.actor
    def build() -> None: ...

    build.send_with_options(on_success="renamed")

    (dead,) = working.wait(working.dead_letters)
    assert (dead.reason, dead.exception, dead.attempts) == ("follow_up_failed", "ActorNotFound", 1)


def test_a_failure_callback_that_nobody_knows_takes_no_attempt_away(working: Stage):
    """Hurts who renamed an actor: the message is retried all the same, and dies of its own failure."""
    runs: list[int] = []

    @dramatiq.actor(max_retries=1, min_backoff=0)
    def build() -> None:
        runs.append(1)
        raise ValueError("no route")

    build.send_with_options(on_failure="renamed")

    (dead,) = working.wait(working.dead_letters)
    assert (dead.reason, dead.exception, dead.attempts) == ("retries_exhausted", "ValueError", 2)
    assert len(runs) == 2


@pytest.mark.parametrize("how", ["skips", "fails"])
def test_nobody_is_told_of_a_message_that_a_middleware_turned_away(working: Stage, how: str):
    """Hurts users of middlewares that skip: it has neither succeeded nor failed."""
    told = Told()
    seen: list[str] = []

    class Gate(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            if message.actor_name == "build":
                seen.append(message.message_id)
                if how == "fails":
                    message.fail()
                raise SkipMessage("not today")

    working.broker.add_middleware(Gate())

    @dramatiq.actor(on_success="tell", on_failure="tell")
    def build() -> None: ...

    build.send()

    working.wait(lambda: seen)
    working.settle()
    assert told.calls == []


def test_a_callback_may_have_callbacks_of_its_own(working: Stage):
    """Hurts chains of callbacks."""
    told = Told()

    @dramatiq.actor(on_success="tell")
    def middle(message: dict[str, Any], what: int) -> int:
        return what + 1

    @dramatiq.actor(on_success="middle")
    def build() -> int:
        return 1

    build.send()

    working.wait(lambda: told.calls)
    ((message, result),) = told.calls
    assert message["actor_name"] == "middle"
    assert result == 2
