"""Pipelines: the result of one actor is an argument of the next."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import dramatiq
import pytest
from dramatiq import group, pipeline
from dramatiq.middleware import Middleware, SkipMessage
from dramatiq.results import ResultFailure, ResultMissing, ResultTimeout

if TYPE_CHECKING:
    from .conftest import Stage


def declare_add(**options: Any) -> Any:
    """Declare an actor that adds."""

    @dramatiq.actor(**options)
    def add(x: int, y: int) -> int:
        return x + y

    return add


# -- as objects


def test_messages_can_be_piped(stage: Stage):
    """Hurts everybody who writes pipelines: each message carries the next."""
    add = declare_add()

    pipe = add.message(1, 2) | add.message(3) | add.message(4)

    assert isinstance(pipe, pipeline)
    first, second, third = pipe.messages
    assert first.options["pipe_target"] == second.asdict()
    assert second.options["pipe_target"] == third.asdict()
    assert "pipe_target" not in third.options


def test_a_pipeline_in_a_pipeline_is_one_pipeline(stage: Stage):
    """Hurts who composes pipelines of parts."""
    add = declare_add()

    pipe = pipeline([add.message(1, 2), add.message(3) | add.message(4), add.message(5)])

    assert [message.args for message in pipe.messages] == [(1, 2), (3,), (4,), (5,)]
    assert len(pipe) == 4


def test_messages_are_not_changed_by_the_pipelines_that_they_are_part_of(stage: Stage):
    """Hurts who uses one message in two pipelines."""
    add = declare_add()
    first, second = add.message(1, 2), add.message(3)

    assert len(first | second) == len(first | second | second) - 1
    assert first.options == second.options == {}


# -- run


def test_each_step_gets_the_result_of_the_one_before_as_its_last_argument(working: Stage):
    """Hurts everybody: it is what a pipeline is. It needs no Results."""
    got: list[Any] = []
    add = declare_add()

    @dramatiq.actor
    def keep(name: str, total: int, *, unit: str) -> None:
        got.append((name, total, unit))

    last = keep.message_with_options(args=("sum",), kwargs={"unit": "EUR"})
    (add.message(1, 2) | add.message(10) | last).run()

    working.wait(lambda: got)
    working.settle()
    assert got == [("sum", 13, "EUR")]


def test_the_results_of_a_pipeline_can_be_read(working: Stage):
    """Hurts whoever waits for the end of a pipeline."""
    working.store_results()
    add = declare_add(store_results=True)
    pipe = add.message(1, 2) | (add.message(3) | add.message(4))

    assert pipe.run() is pipe

    assert pipe.get_result(block=True, timeout=30_000) == 10
    assert list(pipe.get_results()) == [3, 6, 10]


def test_waiting_for_the_results_of_a_pipeline_ends_at_the_timeout(working: Stage):
    """Hurts a web request that waits. The timeout is one for all steps together."""
    working.store_results()
    release = threading.Event()

    @dramatiq.actor(store_results=True)
    def step(number: int = 0) -> int:
        assert release.wait(30)
        return number + 1

    pipe = step.message(1) | step.message() | step.message()
    pipe.run()
    start = time.monotonic()

    with pytest.raises(ResultTimeout):
        list(pipe.get_results(block=True, timeout=300))
    with pytest.raises(ResultTimeout):
        pipe.get_result(block=True, timeout=300)

    assert time.monotonic() - start < 10
    release.set()
    assert pipe.get_result(block=True, timeout=30_000) == 4


def test_a_pipeline_says_how_far_it_is(working: Stage):
    """Hurts progress bars."""
    working.store_results()
    go = threading.Semaphore(0)

    @dramatiq.actor(store_results=True)
    def step(number: int) -> int:
        assert go.acquire(timeout=30)
        return number

    pipe = step.message(1) | step.message() | step.message()
    assert pipe.completed_count == 0
    pipe.run()

    for count in (1, 2, 3):
        assert not pipe.completed
        go.release()
        working.wait(lambda count=count: pipe.completed_count == count)
    assert pipe.completed


def test_a_pipeline_that_nobody_runs_is_not_completed(stage: Stage):
    """Hurts whoever polls while the workers are down."""
    stage.store_results()

    @dramatiq.actor(store_results=True)
    def step() -> None: ...

    pipe = step.message() | step.message_with_options(pipe_ignore=True)
    pipe.run()

    assert not pipe.completed
    with pytest.raises(ResultMissing):
        pipe.get_result()


def test_without_a_result_backend_a_pipeline_cannot_be_asked(stage: Stage):
    """Hurts nobody for long: the error says that there is none."""
    add = declare_add()
    pipe = (add.message(1, 2) | add.message(3)).run()

    with pytest.raises(RuntimeError, match="results backend"):
        _ = pipe.completed


@pytest.mark.parametrize("by", ["message", "actor"])
def test_a_step_may_ignore_the_result_of_the_one_before(working: Stage, by: str):
    """Hurts steps with arguments of their own only. The actor's option is that of the step whose result is ignored."""
    got: list[tuple[int, ...]] = []
    add = declare_add(**({"pipe_ignore": True} if by == "actor" else {}))

    @dramatiq.actor
    def keep(*args: int) -> None:
        got.append(args)

    options = {"pipe_ignore": True} if by == "message" else {}
    (add.message(1, 2) | keep.message_with_options(args=(7,), **options)).run()

    working.wait(lambda: got)
    assert got == [(7,)]


def test_the_result_none_is_an_argument_like_any_other(working: Stage):
    """Hurts steps behind actors that return nothing."""
    got: list[Any] = []

    @dramatiq.actor
    def nothing() -> None: ...

    @dramatiq.actor
    def keep(*args: Any) -> None:
        got.append(args)

    (nothing.message() | keep.message()).run()

    working.wait(lambda: got)
    assert got == [(None,)]


def test_a_pipeline_goes_on_after_a_step_that_needed_a_second_attempt(working: Stage):
    """Hurts long pipelines: one hiccup must not end them, and the next step starts once."""
    runs: list[str] = []

    @dramatiq.actor(min_backoff=0)
    def first() -> str:
        runs.append("first")
        if len(runs) == 1:
            raise RuntimeError("no route")
        return "built"

    @dramatiq.actor
    def second(what: str) -> None:
        runs.append(f"second {what}")

    (first.message() | second.message()).run()

    working.wait(lambda: len(runs) == 3)
    working.settle()
    assert runs == ["first", "first", "second built"]


def test_a_pipeline_ends_with_a_step_that_failed_for_good(working: Stage):
    """Hurts whoever counts on order: nothing runs behind a failure, and the failure can be read."""
    working.store_results()
    runs: list[str] = []

    @dramatiq.actor(max_retries=1, min_backoff=0, store_results=True)
    def first() -> None:
        runs.append("first")
        raise RuntimeError("no route")

    @dramatiq.actor(store_results=True)
    def second(what: str) -> None:
        runs.append("second")

    pipe = (first.message() | second.message()).run()

    (dead,) = working.wait(working.dead_letters)
    working.settle()
    assert dead.actor == "first"
    assert runs == ["first", "first"]
    with pytest.raises(ResultFailure, match="no route"):
        list(pipe.get_results(block=True, timeout=30_000))
    with pytest.raises(ResultMissing):
        pipe.get_result()


@pytest.mark.parametrize("how", ["skips", "fails"])
def test_a_pipeline_ends_with_a_step_that_a_middleware_turned_away(working: Stage, how: str):
    """Hurts users of middlewares that skip: what did not run has no result to go on with."""
    runs: list[str] = []

    class Gate(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            if message.actor_name == "first":
                runs.append("turned away")
                if how == "fails":
                    message.fail()
                raise SkipMessage("not today")

    working.broker.add_middleware(Gate())

    @dramatiq.actor
    def first() -> None:
        runs.append("first")

    @dramatiq.actor
    def second(what: Any) -> None:
        runs.append("second")

    (first.message() | second.message()).run()

    working.wait(lambda: runs)
    working.settle()
    assert runs == ["turned away"]
    assert len(working.dead_letters()) == (how == "fails")


# -- delayed


def test_a_pipeline_can_be_delayed_as_a_whole(working: Stage):
    """Hurts planned work: no sooner than asked for."""
    ran: list[float] = []

    @dramatiq.actor
    def step(*args: Any) -> None:
        ran.append(time.monotonic())

    start = time.monotonic()
    (step.message() | step.message()).run(delay=600)

    working.wait(lambda: len(ran) == 2)
    assert ran[0] - start >= 0.6


def test_a_step_can_be_delayed(working: Stage):
    """Hurts planned work within a pipeline: ``delay`` as an option of a step waits after the step before."""
    ran: list[float] = []

    @dramatiq.actor
    def step(*args: Any) -> None:
        ran.append(time.monotonic())

    (step.message() | step.message_with_options(delay=600)).run()

    working.wait(lambda: len(ran) == 2)
    assert ran[1] - ran[0] >= 0.6


@pytest.mark.parametrize(("of_run", "of_message"), [(None, 600), (600, 10), (10, 600)])
def test_of_the_delays_of_pipeline_and_first_step_the_larger_one_holds(
    working: Stage, of_run: int | None, of_message: int
):
    """Hurts planned work: both said "not before"."""
    ran: list[float] = []

    @dramatiq.actor
    def step(*args: Any) -> None:
        ran.append(time.monotonic())

    start = time.monotonic()
    (step.message_with_options(delay=of_message) | step.message()).run(delay=of_run)

    working.wait(lambda: len(ran) == 2)
    assert ran[0] - start >= 0.6


# -- groups


def test_the_messages_of_a_group_run_side_by_side(working: Stage):
    """Hurts whoever is in a hurry: five at a time, not one after the other."""
    working.store_results()
    together = threading.Barrier(5)

    @dramatiq.actor(store_results=True)
    def wait() -> None:
        together.wait(30)

    jobs = group([wait.message() for _ in range(5)])
    assert jobs.run() is jobs

    assert list(jobs.get_results(block=True, timeout=30_000)) == [None] * 5
    assert len(jobs) == 5
    assert jobs.completed


def test_a_group_of_groups_gives_lists_of_results(working: Stage):
    """Hurts who composes groups of groups."""
    working.store_results()
    together = threading.Barrier(6)

    @dramatiq.actor(store_results=True)
    def double(number: int) -> int:
        together.wait(30)
        return 2 * number

    jobs = group(group(double.message(10 * i + j) for j in range(2)) for i in range(3)).run()

    assert list(jobs.get_results(block=True, timeout=30_000)) == [[0, 2], [20, 22], [40, 42]]
    assert jobs.completed


def test_a_group_of_pipelines_gives_the_last_result_of_each(working: Stage):
    """Hurts who composes groups of pipelines."""
    working.store_results()
    add = declare_add(store_results=True)

    jobs = group([add.message(1, 2) | add.message(10), add.message(3, 4) | add.message(20)]).run()

    assert list(jobs.get_results(block=True, timeout=30_000)) == [13, 27]
    assert jobs.completed_count == 2


def test_waiting_for_a_group_ends_at_the_timeout(working: Stage):
    """Hurts a web request that waits."""
    working.store_results()
    release = threading.Event()

    @dramatiq.actor(store_results=True)
    def wait() -> None:
        assert release.wait(30)

    jobs = group(wait.message() for _ in range(2)).run()

    with pytest.raises(ResultTimeout):
        jobs.wait(timeout=200)
    assert not jobs.completed
    release.set()
    jobs.wait(timeout=30_000)
    assert jobs.completed


def test_a_group_says_how_far_it_is(working: Stage):
    """Hurts progress bars."""
    working.store_results()
    go = threading.Semaphore(0)

    @dramatiq.actor(store_results=True)
    def step(number: int) -> int:
        assert go.acquire(timeout=30)
        return number

    jobs = group(step.message(number) for number in range(3)).run()

    assert jobs.completed_count == 0
    for count in (1, 2, 3):
        go.release()
        working.wait(lambda count=count: jobs.completed_count == count)
    assert jobs.completed


def test_a_failed_member_of_a_group_raises_when_its_result_is_read(working: Stage):
    """Hurts who takes a failure for an answer."""
    working.store_results()

    @dramatiq.actor(max_retries=0, store_results=True)
    def step(number: int) -> int:
        if number == 1:
            raise RuntimeError("no route")
        return number

    jobs = group(step.message(number) for number in range(2)).run()

    with pytest.raises(ResultFailure, match="no route"):
        list(jobs.get_results(block=True, timeout=30_000))


def test_a_group_can_be_delayed(working: Stage):
    """Hurts planned work."""
    ran: list[float] = []

    @dramatiq.actor
    def step() -> None:
        ran.append(time.monotonic())

    start = time.monotonic()
    group(step.message() for _ in range(3)).run(delay=600)

    working.wait(lambda: len(ran) == 3)
    assert min(ran) - start >= 0.6


# -- results that nobody takes


@pytest.mark.parametrize(
    ("returned", "piped", "stored", "warned"),
    [
        (None, False, False, False),
        (1, False, False, True),
        (1, True, False, False),
        (1, False, True, False),
    ],
)
def test_a_value_that_nobody_takes_is_a_warning(
    working: Stage, caplog: pytest.LogCaptureFixture, returned: Any, piped: bool, stored: bool, warned: bool
):
    """Hurts who forgot Results: and only then may it be said."""
    done = threading.Event()
    if stored:
        working.store_results()

    @dramatiq.actor(**({"store_results": True} if stored else {}))
    def give() -> Any:
        done.set()
        return returned

    @dramatiq.actor
    def take(what: Any) -> None: ...

    with caplog.at_level(logging.WARNING):
        (give.message() | take.message()).run() if piped else give.send()
        assert done.wait(30)
        working.settle()

    assert (
        any("Consider adding the Results middleware" in one.getMessage() for one in caplog.records) == warned
    )
