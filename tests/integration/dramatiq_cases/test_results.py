"""Results: what an actor returned or why it failed, kept for whoever asks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware, SkipMessage
from dramatiq.results import ResultFailure, ResultMissing, ResultTimeout

from dramatiq_safeops import PermanentError

if TYPE_CHECKING:
    from .conftest import Stage


@pytest.mark.parametrize(
    "value",
    [42, 0, "", False, None, [], {}, [1, [2, {"three": [None, "vier", 5.5]}]], {"a": {"b": [{}]}}],
    ids=repr,
)
def test_what_an_actor_returns_can_be_read(working: Stage, value: Any):
    """Hurts everybody who waits for an answer, also for an empty one."""
    working.store_results()

    @dramatiq.actor(store_results=True)
    def give() -> Any:
        return value

    message = give.send()

    assert message.get_result(block=True, timeout=30_000) == value


def test_a_result_can_be_read_from_the_backend_or_with_it(working: Stage):
    """Hurts apps with several brokers: they name the backend."""
    backend = working.store_results()

    @dramatiq.actor(store_results=True)
    def give() -> int:
        return 42

    message = give.send()

    assert backend.get_result(message, block=True, timeout=30_000) == 42
    assert message.get_result(backend=backend) == 42
    assert working.broker.get_results_backend() is backend


def test_a_result_that_is_not_there_yet_is_missing_or_waited_for_until_the_timeout(working: Stage):
    """Hurts who polls, and who waits."""
    working.store_results()
    release = threading.Event()

    @dramatiq.actor(store_results=True)
    def give() -> int:
        assert release.wait(30)
        return 42

    message = give.send()

    with pytest.raises(ResultMissing):
        message.get_result()
    with pytest.raises(ResultTimeout):
        message.get_result(block=True, timeout=200)
    release.set()
    assert message.get_result(block=True, timeout=30_000) == 42


def test_without_a_backend_asking_for_a_result_is_an_error(stage: Stage):
    """Hurts nobody for long: the error says that there is none."""

    @dramatiq.actor
    def give() -> int:
        return 42

    with pytest.raises(RuntimeError, match="results backend"):
        give.send().get_result()


# -- whose results are stored


@pytest.mark.parametrize(
    ("of_middleware", "of_actor", "of_message", "stored"),
    [
        (False, None, None, False),
        (True, None, None, True),
        (False, True, None, True),
        (True, False, None, False),
        (False, None, True, True),
        (False, True, False, False),
        (True, None, False, False),
    ],
)
def test_message_before_actor_before_middleware_says_whether_a_result_is_stored(
    working: Stage,
    of_middleware: bool,
    of_actor: bool | None,
    of_message: bool | None,
    stored: bool,
):
    """Hurts who stores everything but one, or one only."""
    working.store_results(store_results=of_middleware)
    ran = threading.Event()

    @dramatiq.actor(**({} if of_actor is None else {"store_results": of_actor}))
    def give() -> int:
        ran.set()
        return 42

    message = give.send_with_options(**({} if of_message is None else {"store_results": of_message}))

    assert ran.wait(30)
    working.settle()
    if stored:
        assert message.get_result() == 42
    else:
        with pytest.raises(ResultMissing):
            message.get_result()


@pytest.mark.parametrize("by", ["middleware", "actor", "message"])
def test_a_result_is_gone_after_its_time_to_live(working: Stage, by: str):
    """Hurts backends that would grow for ever. 999 ms is less than the second that the stub backend counts in."""
    working.store_results(**({"result_ttl": 999} if by == "middleware" else {}))
    ran = threading.Event()

    @dramatiq.actor(store_results=True, **({"result_ttl": 999} if by == "actor" else {}))
    def give() -> int:
        ran.set()
        return 42

    message = give.send_with_options(**({"result_ttl": 999} if by == "message" else {}))

    assert ran.wait(30)
    working.settle()
    with pytest.raises(ResultMissing):
        message.get_result()


# -- failures


def test_reading_the_result_of_a_failed_message_raises_what_its_actor_raised(working: Stage):
    """Hurts who waits for an answer that cannot come: type and text are told, and at once."""
    working.store_results()

    @dramatiq.actor(store_results=True, max_retries=0)
    def give() -> None:
        raise ValueError("no route")

    message = give.send()

    with pytest.raises(ResultFailure, match="actor raised ValueError: no route") as failure:
        message.get_result(block=True, timeout=30_000)
    assert failure.value.orig_exc_type == "ValueError"
    assert failure.value.orig_exc_msg == "no route"


def test_a_failure_is_stored_only_when_no_attempt_is_left(working: Stage):
    """Hurts who takes a hiccup for the end."""
    working.store_results()
    go = threading.Semaphore(0)
    runs: list[int] = []

    @dramatiq.actor(store_results=True, max_retries=2, min_backoff=0)
    def give() -> None:
        runs.append(1)
        assert go.acquire(timeout=30)
        raise ValueError(f"failure {len(runs)}")

    message = give.send()

    for count in (1, 2, 3):
        working.wait(lambda count=count: len(runs) == count)
        with pytest.raises(ResultMissing):
            message.get_result()
        go.release()
    with pytest.raises(ResultFailure, match="failure 3"):
        message.get_result(block=True, timeout=30_000)


def test_a_success_after_failures_is_a_success(working: Stage):
    """Hurts who reads a result after a retry."""
    working.store_results()
    runs: list[int] = []

    @dramatiq.actor(store_results=True, min_backoff=0)
    def give() -> int:
        runs.append(1)
        if len(runs) < 3:
            raise ValueError("no route")
        return len(runs)

    assert give.send().get_result(block=True, timeout=30_000) == 3


@pytest.mark.parametrize("error", [PermanentError("there is no such month"), KeyError("month")], ids=str)
def test_a_failure_that_is_never_retried_is_stored_at_once(working: Stage, error: Exception):
    """Hurts who waits although it is over."""
    working.store_results()

    @dramatiq.actor(store_results=True, throws=(KeyError,))
    def give() -> None:
        raise error

    with pytest.raises(ResultFailure) as failure:
        give.send().get_result(block=True, timeout=30_000)
    assert failure.value.orig_exc_type == type(error).__name__


def test_a_failure_is_not_stored_where_results_are_not(working: Stage):
    """Hurts who keeps the backend small."""
    working.store_results()

    @dramatiq.actor(max_retries=0)
    def give() -> None:
        raise ValueError("no route")

    message = give.send()

    working.wait(working.dead_letters)
    working.settle()
    with pytest.raises(ResultMissing):
        message.get_result()


# -- messages that a middleware turns away


class Gate(Middleware):
    """Turns everything away."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def before_process_message(self, broker: Any, message: Any) -> None:
        if self.fails:
            message.fail()
        raise SkipMessage("not today")


def test_the_result_of_a_skipped_message_is_none(working: Stage):
    """Hurts who waits for a message that a middleware of theirs has skipped. The middleware stands below Results."""
    working.store_results()
    working.broker.add_middleware(Gate(fails=False))

    @dramatiq.actor(store_results=True)
    def give() -> int:
        return 42

    assert give.send().get_result(block=True, timeout=30_000) is None


def test_the_result_of_a_skipped_message_is_none_also_if_results_stands_below(working: Stage):
    """Hurts users of middlewares that skip, added before Results: nothing else would ever be stored."""
    working.broker.add_middleware(Gate(fails=False))
    working.store_results()

    @dramatiq.actor(store_results=True)
    def give() -> int:
        return 42

    assert give.send().get_result(block=True, timeout=30_000) is None


def test_the_result_of_a_message_that_is_failed_and_skipped_is_a_failure(working: Stage):
    """Hurts who waits for a message that a middleware of theirs has rejected."""
    working.store_results()
    working.broker.add_middleware(Gate(fails=True))

    @dramatiq.actor(store_results=True)
    def give() -> int:
        return 42

    with pytest.raises(ResultFailure, match="not today"):
        give.send().get_result(block=True, timeout=30_000)


def test_the_result_of_a_message_that_is_too_old_is_a_failure(stage: Stage):
    """Hurts who waits for it."""
    stage.store_results()

    @dramatiq.actor(store_results=True, max_age=1)
    def give() -> int:
        return 42

    message = give.send_with_options(delay=50)
    stage.start_worker()

    with pytest.raises(ResultFailure, match="max_age"):
        message.get_result(block=True, timeout=30_000)
