"""What a hook raises after the body, whatever it is, neither ends a worker thread nor changes what becomes of a message."""

from __future__ import annotations

from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware

from dramatiq_safeops import PermanentError, safe_stack
from dramatiq_safeops.testing import StubBroker


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("hook", "fails"),
    [
        ("after_process_message", False),
        ("before_ack", False),
        ("after_ack", False),
        ("before_nack", True),
        ("after_nack", True),
    ],
)
def test_what_a_hook_raises_when_the_body_is_over_changes_nothing(
    hook: str, fails: bool, error: type[BaseException]
) -> None:
    """Hurts everybody: the only thread was dead, its message un-acked for good, and the worker looked alive."""
    # Given a middleware that ends the program, as it believes, when it is told of the first message
    ran: list[int] = []
    raised: list[str] = []

    def raises(*_: Any, **__: Any) -> None:
        if not raised:
            raised.append(hook)
            raise error("bye")

    broker = StubBroker([*safe_stack(), type("Ends", (Middleware,), {hook: raises})()])

    @dramatiq.actor(broker=broker, time_limit=60_000)
    def work(number: int) -> None:
        ran.append(number)
        if fails:
            raise PermanentError("no such month")

    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    try:
        # When two are sent
        sent = [work.send(number).message_id for number in (1, 2)]
        broker.join("default", timeout=10_000, fail_fast=False)
    finally:
        worker.stop(timeout=5_000)

    # Then each has run once, and has become what it would have without that middleware
    assert raised == [hook]
    assert ran == [1, 2]
    outcome = "dead" if fails else "done"
    assert [[one.outcome.value for one in broker.decisions[id]] for id in sent] == [[outcome], [outcome]]


def test_a_hook_that_ends_the_program_before_the_body_charges_no_attempt() -> None:
    """Hurts an actor with one attempt: it was dead without ever having run."""
    ran: list[int] = []

    class Ends(Middleware):
        left = 1

        def before_process_message(self, broker: Any, message: Any) -> None:
            if self.left:
                self.left -= 1
                raise SystemExit("bye")

    broker = StubBroker([*safe_stack(), Ends()], skip_delays=True, park_limit=60_000)

    @dramatiq.actor(broker=broker, time_limit=60_000, max_retries=0)
    def work(number: int) -> None:
        ran.append(number)

    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    try:
        sent = work.send(1).message_id
        broker.join("default", timeout=10_000)
    finally:
        worker.stop(timeout=5_000)

    assert ran == [1]
    assert [one.outcome.value for one in broker.decisions[sent]] == ["parked", "done"]
