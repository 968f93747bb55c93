"""Results, pipelines, callbacks and groups when workers are killed, guards break and backends are away.

Real workers, really killed. Results and barriers live in folders that all processes share. Twins show what the stock broker
does at the same point.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dramatiq import Message
from dramatiq.common import current_millis
from dramatiq.results import ResultFailure, ResultMissing

from dramatiq_safeops.testing import RabbitmqServer
from tests.harness.backends import FileLimits, FileResults
from tests.harness.queues import body_of, depth, look, publish
from tests.harness.vhosts import refusing
from tests.harness.worker import App, wait_until

SET_UP = """
    import json
    from dramatiq.middleware import GroupCallbacks, Middleware
    from dramatiq.results import Results
    from tests.harness.backends import FileLimits, FileResults

    def add_results(backend=FileResults):
        broker.add_middleware(Results(backend=backend("results")))
        broker.add_middleware(GroupCallbacks(FileLimits("limits")))
"""

#: Kills its worker once, when the named hook is called for an actor of that name.
KILLER = """
    class Killer(Middleware):
        def __init__(self, hook, actor, when=lambda message: True):
            self.hook, self.actor, self.when = hook, actor, when

        def strike(self, hook, message):
            if hook == self.hook and message.actor_name == self.actor and self.when(message):
                try:
                    open("killed", "x").close()
                except FileExistsError:
                    return
                os.kill(os.getpid(), signal.SIGKILL)

        def after_process_message(self, broker, message, **_):
            self.strike("after_process_message", message)

        def before_ack(self, broker, message):
            self.strike("before_ack", message)

        def after_ack(self, broker, message):
            self.strike("after_ack", message)

        def before_nack(self, broker, message):
            self.strike("before_nack", message)

        def after_nack(self, broker, message):
            self.strike("after_nack", message)
"""


def app_with(folder: Path, url: str, source: str, **options: Any) -> App:
    return App(folder / "app", SET_UP + KILLER + source, url, **options)


def results_of(app: App) -> FileResults:
    return FileResults(app.folder / "results")


def message_of(app: App, code: str) -> Message[Any]:
    """Send one message and return it."""
    fields = json.loads(app.send(f"import json; print(json.dumps(({code}).asdict()))"))
    return Message(**fields)


def reasons(url: str, queue: str = "default") -> list[str]:
    return [one.headers["x-safeops-reason"] for one in look(url, f"{queue}.dlq")]


def run_until_killed(app: App, code: str) -> Message[Any]:
    """Let a worker run one message to its death; return the message, which RabbitMQ will deliver again."""
    with app.worker() as worker:
        message = message_of(app, code)
        wait_until(lambda: worker.process.poll() is not None, what="the worker to die")
    return message


# -- a result that is stored, and its message is delivered once more


SUCCEEDED = """
    class Doorkeeper({guard}):
        def before_process_message(self, broker, message):
            note("asked", second="SECOND" in os.environ)
            if os.environ.get("SECOND") == "guard":
                raise ConnectionError("the database of the guard is away")

    broker.add_middleware(Doorkeeper(), before=dramatiq.middleware.TimeLimit)
    add_results()
    broker.add_middleware(Killer("before_ack", "build"))

    if os.environ.get("SECOND") == "signature":
        @dramatiq.actor(store_results=True, max_age=600_000)
        def build(*, other):
            note("ran")
    elif os.environ.get("SECOND") != "name":
        @dramatiq.actor(store_results=True, max_retries=1, min_backoff=0, max_age={age})
        def build():
            note("ran", second="SECOND" in os.environ)
            if os.environ.get("SECOND") == "failure" and len(open(os.environ["TEST_EFFECTS"]).readlines()) < 6:
                raise ValueError("the second time")
            return "built again" if "SECOND" in os.environ else "built"

    @dramatiq.actor
    def last():
        note("last")
"""


#: Milliseconds, enough for a worker to start on a message that was just sent.
AGE_MS = 5_000


def wait_until_too_old(message: Message[Any]) -> None:
    wait_until(lambda: current_millis() > message.message_timestamp + AGE_MS, what="its max_age to pass")


def succeeded_app(folder: Path, url: str, *, safe: bool = True, age: int = 600_000, **options: Any) -> App:
    guard = "__import__('dramatiq_safeops').Guard" if safe else "Middleware"
    return app_with(folder, url, SUCCEEDED.format(guard=guard, age=age), **options)


@pytest.mark.parametrize("second", ["guard", "name", "signature"])
def test_a_park_overwrites_no_result(amqp_url: str, tmp_path: Path, second: str) -> None:
    """Hurts whoever reads the result of a message that is done: its redelivery may not run yet, and says nothing about it."""
    # Given a worker that dies when the result is stored, and before the ack
    app = succeeded_app(tmp_path, amqp_url)
    message = run_until_killed(app, "build.send()")
    assert results_of(app).history(message) == ["built"]

    # When it is delivered again to a worker that cannot run it yet, because of a guard or of what it does not know
    app.env["SECOND"] = second
    with app.worker() as worker:
        worker.wait_for_log("is parked")

    # Then what was stored is still there
    assert results_of(app).history(message) == ["built"]
    assert results_of(app).get_result(message) == "built"
    assert reasons(amqp_url) == []


def test_stock_runs_the_actor_of_a_broken_guard_and_overwrites_its_result(
    amqp_url: str, tmp_path: Path
) -> None:
    """The twin: the guard breaks, the actor runs all the same, and a second result replaces the first."""
    app = succeeded_app(tmp_path, amqp_url, safe=False, broker="stock")
    message = run_until_killed(app, "build.send()")

    app.env["SECOND"] = "guard"
    with app.worker():
        wait_until(lambda: len(app.notes("ran")) == 2, what="the second run")
        wait_until(lambda: len(results_of(app).history(message)) == 2, what="the second result")


@pytest.mark.parametrize("second", ["guard", "name", "signature"])
def test_a_message_that_was_parked_too_long_overwrites_no_result(
    amqp_url: str, tmp_path: Path, second: str
) -> None:
    """Hurts whoever reads the result of a message that is done: its redelivery dies without having run, and takes nothing away."""
    options = {"TEST_BROKER_OPTIONS": json.dumps({"park_limit": 300})}
    app = succeeded_app(tmp_path, amqp_url, env=options)
    message = run_until_killed(app, "build.send()")

    app.env["SECOND"] = second
    with app.worker() as worker:
        (reason,) = wait_until(lambda: reasons(amqp_url), what="the dead letter")
        worker.terminate()

    assert (
        reason
        == {
            "guard": "guard_failed",
            "name": "unknown_actor",
            "signature": "arguments_do_not_fit",
        }[second]
    )
    assert results_of(app).history(message) == ["built"]


def test_a_message_that_grew_too_old_after_it_was_done_overwrites_no_result(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts whoever reads the result of a message that is done: the worker was down for longer than its ``max_age``."""
    # Given a worker that dies when the result is stored, and nobody to take over until the message is too old
    app = succeeded_app(tmp_path, amqp_url, age=AGE_MS)
    message = run_until_killed(app, "build.send()")
    assert results_of(app).history(message) == ["built"]
    wait_until_too_old(message)

    with app.worker() as worker:
        assert wait_until(lambda: reasons(amqp_url), what="the dead letter") == ["too_old"]
        worker.terminate()

    assert results_of(app).history(message) == ["built"]
    assert len(app.notes("ran")) == 1


def test_stock_overwrites_the_result_of_a_message_that_grew_too_old_after_it_was_done(
    amqp_url: str, tmp_path: Path
) -> None:
    """The twin: a failure takes the place of the result."""
    app = succeeded_app(tmp_path, amqp_url, safe=False, age=AGE_MS, broker="stock")
    message = run_until_killed(app, "build.send()")
    wait_until_too_old(message)

    with app.worker():
        history = results_of(app).history
        wait_until(lambda: len(history(message)) == 2, what="the failure")

    assert history(message) == ["built", "SkipMessage: Message age limit exceeded"]


def test_a_message_that_is_too_old_and_has_never_run_stores_that_it_failed(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts whoever waits for it: no answer will come, and that can be said."""
    app = succeeded_app(tmp_path, amqp_url, age=1)
    message = message_of(app, "build.send()")

    with app.worker():
        wait_until(lambda: results_of(app).history(message), what="the failure")

    with pytest.raises(ResultFailure, match="max_age is 1 ms"):
        results_of(app).get_result(message)
    assert app.notes("ran") == []


def test_a_retry_of_what_was_done_already_overwrites_no_result_until_it_ends(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts whoever reads the result meanwhile. Without a store the message runs again; what its end says is the result then."""
    app = succeeded_app(tmp_path, amqp_url)
    message = run_until_killed(app, "build.send()")

    app.env["SECOND"] = "failure"
    with app.worker() as worker:
        worker.wait_for_log("Retrying message")
        wait_until(lambda: len(results_of(app).history(message)) == 2, what="the second result")
        worker.terminate()

    assert results_of(app).history(message) == ["built", "built again"]
    assert reasons(amqp_url) == []


# -- failures


FAILING = """
    add_results()
    KILL

    @dramatiq.actor(store_results=True, max_retries=2, min_backoff=50)
    def build():
        note("ran")
        raise ValueError(f"failure {len(open(os.environ['TEST_EFFECTS']).readlines())}")
"""


def test_an_exception_is_stored_once_and_it_is_the_real_one_of_the_last_attempt(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts who waits for the answer: three attempts, one end."""
    app = app_with(tmp_path, amqp_url, FAILING.replace("KILL", ""))

    with app.worker() as worker:
        message = message_of(app, "build.send()")
        wait_until(lambda: reasons(amqp_url), what="the dead letter")
        worker.terminate()

    assert results_of(app).history(message) == ["ValueError: failure 3"]


def test_a_worker_killed_before_its_dead_letter_is_sent_stores_the_failure_of_the_repeat(
    amqp_url: str, tmp_path: Path
) -> None:
    """Hurts who waits for the answer: it comes, from the worker that runs the last attempt again."""
    app = app_with(
        tmp_path,
        amqp_url,
        FAILING.replace("KILL", "broker.add_middleware(Killer('before_nack', 'build'))"),
    )
    message = run_until_killed(app, "build.send()")
    assert results_of(app).history(message) == []

    with app.worker() as worker:
        wait_until(lambda: reasons(amqp_url), what="the dead letter")
        worker.terminate()

    assert results_of(app).history(message) == ["ValueError: failure 4"]


SLOW = """
    from tests.harness.queues import depth

    class Slow(FileResults):
        "Takes its time to store a failure, and the first time its worker is killed meanwhile."

        def _store(self, *args):
            if not os.path.exists("killed"):
                until = time.monotonic() + 2
                while time.monotonic() < until and not depth(os.environ["TEST_AMQP_URL"], DEAD):
                    time.sleep(0.02)
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            super()._store(*args)

    add_results(Slow)

    @dramatiq.actor(store_results=True, max_retries=0)
    def build():
        note("ran")
        raise ValueError("no route")
"""


def test_a_worker_killed_while_it_stores_a_failure_has_not_acked_yet(amqp_url: str, tmp_path: Path) -> None:
    """Hurts who waits for the answer: the message would be dead, and nobody left to say so."""
    app = app_with(tmp_path, amqp_url, SLOW.replace("DEAD", "'default.dlq'"))
    message = run_until_killed(app, "build.send()")
    assert results_of(app).history(message) == []

    with app.worker() as worker:
        wait_until(lambda: reasons(amqp_url), what="the dead letter")
        assert worker.terminate() == 0

    assert results_of(app).history(message) == ["ValueError: no route"]
    assert reasons(amqp_url) == ["retries_exhausted"]


def test_stock_loses_the_failure_when_its_worker_is_killed_while_it_stores_it(
    amqp_url: str, tmp_path: Path
) -> None:
    """The twin: the dead letter is there, and the answer never comes."""
    app = app_with(tmp_path, amqp_url, SLOW.replace("DEAD", "'default.XQ'"), broker="stock")
    message = run_until_killed(app, "build.send()")

    assert depth(amqp_url, "default.XQ") == 1
    assert depth(amqp_url, "default") == 0
    assert results_of(app).history(message) == []


# -- between the end of an actor and the ack


CHAIN = """
    add_results()
    KILL

    def at_once(*args, **options):
        return dramatiq.actor(*args, store_results=True, min_backoff=0, **options)

    @at_once
    def first(group=None):
        note("first")
        return "first"

    @at_once
    def second(what):
        note("second")
        return f"{what} second"

    @at_once
    def told(message, what):
        note("told", actor=message["actor_name"])

    @at_once
    def whole():
        note("whole")

    def send():
        from dramatiq import group
        chain = first.message_with_options(on_success="told") | second.message_with_options(on_success="told")
        chains = group([chain])
        chains.add_completion_callback(whole.message())
        chains.run()
        return chain.messages[-1]
"""

BELOW_ALL = "broker.add_middleware(Killer({hook!r}, {actor!r}))"
ABOVE_ALL = "broker.middleware.insert(0, Killer({hook!r}, {actor!r}))"


@pytest.mark.parametrize("actor", ["first", pytest.param("second", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("hook", "place"),
    [
        pytest.param("after_process_message", BELOW_ALL, id="before all after-hooks", marks=pytest.mark.long),
        pytest.param("after_process_message", ABOVE_ALL, id="after all after-hooks"),
        pytest.param("before_ack", ABOVE_ALL, id="before the ack", marks=pytest.mark.long),
        pytest.param("after_ack", ABOVE_ALL, id="while it is settled"),
    ],
)
def test_a_worker_killed_between_body_and_ack_loses_no_step_no_callback_and_no_result(
    amqp_url: str, tmp_path: Path, hook: str, place: str, actor: str
) -> None:
    """Hurts everybody with a chain: it would end without a word."""
    app = app_with(tmp_path, amqp_url, CHAIN.replace("KILL", place.format(hook=hook, actor=actor)))
    # Given a worker that dies between the end of a step and its ack
    last = run_until_killed(app, "send()")

    # When another one comes
    with app.worker() as worker:
        # Then the chain goes on to its end, and everybody is told
        wait_until(lambda: app.notes("whole"), what="the callback of the group")
        told = ("first", "second")
        wait_until(lambda: {one["actor"] for one in app.notes("told")} >= set(told), what="the callbacks")
        wait_until(lambda: results_of(app).history(last), what="the result")
        assert worker.terminate() == 0

    assert results_of(app).get_result(last) == "first second"
    assert reasons(amqp_url) == []
    for queue in ("default", "default.dlq"):
        assert depth(amqp_url, queue) == 0


# -- groups


GROUP = """
    add_results()
    KILL

    @dramatiq.actor(min_backoff=0)
    def part(number):
        while number in json.loads(os.environ.get("WAIT_FOR_GO", "[]")) and not os.path.exists("go"):
            time.sleep(0.02)
        note("part", number=number)

    @dramatiq.actor(queue_name="later")
    def whole():
        note("whole")

    def send(size):
        from dramatiq import group
        parts = group(part.message(number) for number in range(size))
        parts.add_completion_callback(whole.message())
        parts.run()
"""


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        pytest.param("after_process_message", "broker.middleware.insert(0, {})", id="when it was counted"),
        pytest.param("before_ack", "broker.add_middleware({})", id="before the ack", marks=pytest.mark.long),
        pytest.param(
            "after_ack", "broker.add_middleware({})", id="while it is settled", marks=pytest.mark.long
        ),
    ],
)
@pytest.mark.parametrize("victim", [7, "the last one"])
def test_a_group_of_twenty_tells_that_it_is_done_although_a_worker_is_killed_in_the_middle(
    amqp_url: str, tmp_path: Path, hook: str, place: str, victim: int | str
) -> None:
    """Hurts who builds something of all parts: without the callback it is never built."""
    when = (
        f"lambda message: message.args[0] == {victim}"
        if isinstance(victim, int)
        else "lambda message: len(open(os.environ['TEST_EFFECTS']).readlines()) >= 20"
    )
    app = app_with(
        tmp_path,
        amqp_url,
        GROUP.replace("KILL", place.format(f"Killer({hook!r}, 'part', {when})")),
    )
    with app.worker() as worker:
        app.send("send(20)")
        wait_until(lambda: worker.process.poll() is not None, what="the worker to die")

    with app.worker() as worker:
        wait_until(lambda: app.notes("whole"), what="the callback")
        wait_until(lambda: depth(amqp_url, "default") == depth(amqp_url, "later") == 0, what="the end")
        assert worker.terminate() == 0

    assert {one["number"] for one in app.notes("part")} == set(range(20))
    assert reasons(amqp_url) == reasons(amqp_url, "later") == []


def test_a_member_that_is_repeated_is_counted_twice_by_dramatiqs_barrier(
    amqp_url: str, tmp_path: Path
) -> None:
    """What GroupCallbacks of Dramatiq cannot know: its barrier counts calls. The callback may be early, and come again."""
    app = app_with(
        tmp_path,
        amqp_url,
        GROUP.replace(
            "KILL",
            "broker.add_middleware(Killer('before_ack', 'part', lambda message: message.args[0] == 0))",
        ),
        env={"WAIT_FOR_GO": "[2]"},
    )
    # Given a group of three whose first member is repeated, since its worker died before the ack
    with app.worker() as worker:
        app.send("send(3)")
        wait_until(lambda: worker.process.poll() is not None, what="the worker to die")

    with app.worker() as worker:
        # Then the callback comes when three were counted, although the third member is not done
        wait_until(lambda: app.notes("whole"), what="the callback")
        assert {one["number"] for one in app.notes("part")} == {0, 1}

        # And once more when it is
        (app.folder / "go").touch()
        wait_until(lambda: len(app.notes("whole")) == 2, what="the callback once more")
        assert worker.terminate() == 0
    assert {one["number"] for one in app.notes("part")} == {0, 1, 2}


def test_a_group_callback_waits_while_its_queue_refuses_it(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """Hurts who builds something of all parts: a full queue must hold it up, and not lose it."""
    app = app_with(tmp_path, amqp_url, GROUP.replace("KILL", ""))
    app.send("broker.declare_queue('later', ensure=True)")
    with app.worker(arguments=("-Q", "default")) as worker:
        with refusing(rabbit, amqp_url, "^later$"):
            publish(amqp_url, "later", body_of("whole", queue="later"))
            app.send("send(3)")
            worker.wait_for_log("stays un-acked")
            assert depth(amqp_url, "later") == 1

        wait_until(lambda: depth(amqp_url, "later") == 2, what="the callback")
        assert worker.terminate() == 0
    assert len(app.notes("part")) == 3


def test_stock_loses_a_group_callback_whose_queue_refuses_it(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """The twin: all parts are done and acked, and the callback is nowhere."""
    app = app_with(tmp_path, amqp_url, GROUP.replace("KILL", ""), broker="stock")
    app.send("broker.declare_queue('later', ensure=True)")
    with app.worker(arguments=("-Q", "default")) as worker, refusing(rabbit, amqp_url, "^later$"):
        app.send("send(3)")
        limits = FileLimits(app.folder / "limits")
        wait_until(lambda: set(limits.values().values()) == {1}, what="all three to be counted")
        wait_until(lambda: depth(amqp_url, "default") == 0, what="all three to be fetched")
        worker.terminate()

    assert len(app.notes("part")) == 3
    for queue in ("default", "default.DQ", "default.XQ", "later", "later.DQ", "later.XQ"):
        assert depth(amqp_url, queue) == 0


# -- a result backend that is away


AWAY = """
    class Away(FileResults):
        def _store(self, *args):
            note("store")
            raise ConnectionError("the result backend is away")

    add_results(Away)

    @dramatiq.actor(store_results=True)
    def build():
        note("ran")
        return "built"

    @dramatiq.actor(store_results=True, max_retries=0)
    def fail():
        raise ValueError("no route")

    @dramatiq.actor
    def after(what):
        note("after")
"""


@pytest.mark.parametrize("broker", ["safe", "stock"])
def test_what_a_result_backend_that_is_away_cannot_store_is_in_the_log_and_the_outcome_stands(
    amqp_url: str, tmp_path: Path, broker: str
) -> None:
    """Hurts who waits for the result: it does not come. The work is done once, what follows from it too; as on stock."""
    app = app_with(tmp_path, amqp_url, AWAY, broker=broker)
    with app.worker() as worker:
        message = message_of(app, "(build.message() | after.message()).run().messages[0]")
        failed = message_of(app, "fail.send()")
        wait_until(lambda: app.notes("after"), what="what follows")
        wait_until(lambda: len(app.notes("store")) == 2, what="two tries to store")
        dead = "default.dlq" if broker == "safe" else "default.XQ"
        wait_until(lambda: depth(amqp_url, dead) == 1, what="the dead letter")
        assert worker.terminate() == 0

        assert worker.text.count("ConnectionError: the result backend is away") == 2
        assert "Unexpected failure in after_process_message of" in worker.text
        assert "Unexpected failure in after_nack of" in worker.text
    assert len(app.notes("ran")) == 1
    for one in (message, failed):
        with pytest.raises(ResultMissing):
            results_of(app).get_result(one)
    assert depth(amqp_url, "default") == 0


# -- a next step that is impossible


IMPOSSIBLE = """
    add_results()

    @dramatiq.actor(store_results=True)
    def build():
        note("ran")
        return "built"

"""


def test_a_result_stays_although_what_follows_from_it_cannot_be_sent(amqp_url: str, tmp_path: Path) -> None:
    """Hurts who reads it: the step is done, that is true. That the chain ends here stands in its dead letter."""
    app = app_with(tmp_path, amqp_url, IMPOSSIBLE)
    with app.worker() as worker:
        message = message_of(app, "build.send_with_options(on_success='renamed')")
        assert wait_until(lambda: reasons(amqp_url), what="the dead letter") == ["follow_up_failed"]
        assert worker.terminate() == 0

    assert results_of(app).history(message) == ["built"]
    assert len(app.notes("ran")) == 1
