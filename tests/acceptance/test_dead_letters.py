"""What becomes of messages that fail: when they run again, when no more, and what their dead letters say.

The tests named ``test_stock_...`` show the fault on Dramatiq's own broker.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from dramatiq_safeops.testing import RabbitmqServer
from tests.harness.counts import vhost_of
from tests.harness.queues import Seen, body_of, channel, depth, look, publish
from tests.harness.vhosts import virtual_host
from tests.harness.worker import App, Worker, wait_until

DLQ = "default.dlq"


def dead_letters(url: str, count: int = 1, *, queue: str = DLQ) -> list[Seen]:
    """Wait until there are ``count`` dead letters, and return them."""
    wait_until(lambda: depth(url, queue) >= count, what=f"{count} dead letters")
    found = look(url, queue)
    assert len(found) == count
    return found


# -- what a dead letter says

FAILS = """
    import dramatiq.middleware

    def connect(attempt):
        raise ConnectionError(f"attempt {attempt}: no answer from postgresql://reports:hunter2@db.example/flights")

    @dramatiq.actor(max_retries=2, min_backoff=50, max_backoff=50, time_limit=60_000)
    def report(month):
        message = dramatiq.middleware.CurrentMessage.get_current_message()
        note("start")
        connect(message.options.get("retries", 0) + 1)
"""


def test_a_dead_letter_says_why_it_died_and_keeps_the_producers_bytes(amqp_url: str, tmp_path: Path) -> None:
    """Whoever is called at night has the RabbitMQ UI, and not our tools."""
    # Given a body that no encoder of ours would write like this
    body = json.dumps(
        json.loads(body_of("report", "März", message_id="report-3")), indent=3, sort_keys=True
    ).encode()
    app = App(tmp_path / "app", FAILS, amqp_url, env={"TEST_STACK_OPTIONS": '{"app_version": "2026.3"}'})
    began = datetime.now(timezone.utc)
    with app.worker() as worker:
        # When it fails as often as it may
        publish(amqp_url, "default", body, headers={"tenant": "acme"})
        (dead,) = dead_letters(amqp_url)
        pids = worker.pids()

    # Then the dead letter is the same bytes
    assert dead.body == body
    # And says why, how often, when and where
    said = {name.removeprefix("x-safeops-"): value for name, value in dead.headers.items()}
    assert said["reason"] == "retries_exhausted"
    assert said["exception-type"] == "ConnectionError"
    assert said["exception-message"].startswith("attempt 3: no answer from postgresql://reports:")
    assert "in connect" in said["traceback"]
    assert "attempt 3" in said["traceback"]
    assert (said["attempts"], said["max-attempts"], said["parks"]) == (3, 3, 0)
    assert (said["queue"], said["actor"], said["message-id"]) == ("default", "report", "report-3")
    assert said["host"] == socket.gethostname()
    assert [said["process"]] == pids
    assert said["app-version"] == "2026.3"
    times = [
        datetime.fromisoformat(said[name].replace("Z", "+00:00")) for name in ("first-seen", "failed-at")
    ]
    assert began - timedelta(seconds=1) <= times[0] < times[1] <= datetime.now(timezone.utc)
    # And keeps what the producer had to say
    assert dead.headers["tenant"] == "acme"
    assert len(app.notes("start")) == 3


def test_a_dead_letter_shows_no_password(amqp_url: str, tmp_path: Path) -> None:
    """Dead letters are read by more people than production's secrets."""
    app = App(tmp_path / "app", FAILS, amqp_url)
    with app.worker():
        publish(amqp_url, "default", body_of("report", "2013-01", max_retries=0))
        (dead,) = dead_letters(amqp_url)

    assert "hunter2" not in repr(dead.headers)
    assert "postgresql://reports:***@db.example/flights" in dead.headers["x-safeops-traceback"]


def test_a_message_that_may_not_be_retried_has_its_traceback_too(amqp_url: str, tmp_path: Path) -> None:
    """The first failure is the last, and all there is to look at."""
    app = App(tmp_path / "app", FAILS, amqp_url)
    with app.worker():
        app.send("report.send_with_options(args=('2013-01',), max_retries=0)")
        (dead,) = dead_letters(amqp_url)

    assert dead.headers["x-safeops-attempts"] == 1
    assert dead.headers["x-safeops-exception-type"] == "ConnectionError"
    assert "attempt 1" in dead.headers["x-safeops-traceback"]


def test_stock_does_not_say_why_a_message_died(amqp_url: str, tmp_path: Path) -> None:
    """The twin: RabbitMQ dead-letters the original, to which nobody added anything."""
    app = App(tmp_path / "app", FAILS, amqp_url, broker="stock")
    with app.worker():
        app.send("report.send_with_options(args=('2013-01',), max_retries=0)")
        (dead,) = dead_letters(amqp_url, queue="default.XQ")

    assert "ConnectionError" not in repr(dead)


def test_a_message_that_gets_too_old_between_its_attempts_keeps_its_last_traceback(
    amqp_url: str, tmp_path: Path
) -> None:
    """It died of old age, but somebody wants to know why it had not succeeded before."""
    source = """
        @dramatiq.actor(max_age=1_000, time_limit=60_000)
        def report(month):
            note("start")
            raise dramatiq.errors.Retry("the server is busy", delay=1_500)
    """
    app = App(tmp_path / "app", source, amqp_url)
    with app.worker():
        publish(amqp_url, "default", body_of("report", "2013-01"))
        (dead,) = dead_letters(amqp_url)

    assert dead.headers["x-safeops-reason"] == "too_old"
    assert dead.headers["x-safeops-attempts"] == len(app.notes("start")) == 1
    assert "the server is busy" in dead.headers["x-safeops-traceback"]


# -- where dead letters wait


def test_dead_letters_wait_without_expiry_or_limit(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """A dead letter that expires after a week of holidays is a lost message."""
    app = App(tmp_path / "app", FAILS, amqp_url)
    app.send("report.send('2013-01')")

    found = rabbit.api("GET", f"/api/queues/{vhost_of(amqp_url)}/{DLQ}")

    assert found["durable"]
    assert not found["auto_delete"]
    assert not found.get("effective_policy_definition")
    limits = {"x-message-ttl", "x-expires", "x-max-length", "x-max-length-bytes", "x-dead-letter-exchange"}
    assert not limits & set(found["arguments"])


def test_stock_lets_dead_letters_expire(rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path) -> None:
    """The twin: a week, built into the queue."""
    app = App(tmp_path / "app", FAILS, amqp_url, broker="stock")
    app.send("report.send('2013-01')")

    found = rabbit.api("GET", f"/api/queues/{vhost_of(amqp_url)}/default.XQ")

    assert found["arguments"]["x-message-ttl"] == 7 * 86_400_000


@pytest.mark.parametrize("ackmode", ["ack_requeue_true", "reject_requeue_true"])
def test_dead_letters_can_be_looked_at_as_often_as_one_likes(
    ackmode: str, rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """RabbitMQ 4 counts each look in its UI, and destroys what was looked at 20 times unless the queue says otherwise."""
    app = App(tmp_path / "app", FAILS, amqp_url)
    with app.worker():
        app.send("report.send('2013-01')")
        dead_letters(amqp_url)

    look_in_the_ui(rabbit, amqp_url, DLQ, times=60, ackmode=ackmode)

    assert depth(amqp_url, DLQ) == 1


def test_rabbitmq_4_destroys_what_was_looked_at_20_times_where_the_queue_sets_no_limit(
    rabbit: RabbitmqServer, amqp_url: str
) -> None:
    """The twin: a quorum queue as RabbitMQ makes it by default. Up to 3.13 there is no limit."""
    with channel(amqp_url) as ch:
        ch.queue_declare("plain", durable=True, arguments={"x-queue-type": "quorum"})
    publish(amqp_url, "plain", b"looked at")

    look_in_the_ui(rabbit, amqp_url, "plain", times=60, ackmode="reject_requeue_true")

    assert depth(amqp_url, "plain") == (1 if rabbit.version < (4,) else 0)


def look_in_the_ui(rabbit: RabbitmqServer, url: str, queue: str, *, times: int, ackmode: str) -> None:
    for _ in range(times):
        asked_for = {"count": 1, "ackmode": ackmode, "encoding": "auto"}
        rabbit.api("POST", f"/api/queues/{vhost_of(url)}/{queue}/get", asked_for)


# -- messages for which this fleet is not ready

OLD_RELEASE = """
    @dramatiq.actor(time_limit=60_000)
    def known():
        note("known")

    @dramatiq.actor(time_limit=60_000)
    def changed(month):
        note("changed")
"""
NEW_RELEASE = """
    import dramatiq.middleware

    @dramatiq.actor(time_limit=60_000)
    def fresh(month):
        note("fresh", options=dict(dramatiq.middleware.CurrentMessage.get_current_message().options))

    @dramatiq.actor(time_limit=60_000)
    def changed(month, airline):
        note("fresh", options=dict(dramatiq.middleware.CurrentMessage.get_current_message().options))
"""
SENDS = {"unknown_actor": "fresh.send('2013-01')", "arguments_do_not_fit": "changed.send('2013-01', 'UA')"}


@pytest.mark.parametrize("reason", SENDS)
def test_a_message_for_the_next_release_waits_for_it_uncharged(
    amqp_url: str, tmp_path: Path, reason: str
) -> None:
    """In a rolling deploy old workers get messages for new code."""
    old = App(tmp_path / "old", OLD_RELEASE, amqp_url)
    new = App(tmp_path / "new", NEW_RELEASE, amqp_url)
    # Given a worker of the old release that got a message of the new one
    with old.worker() as worker:
        new.send(SENDS[reason])
        wait_until(
            lambda: depth(amqp_url, DLQ) or "is parked" in worker.text, what="the message to be parked"
        )
        # and works on
        publish(amqp_url, "default", body_of("known"))
        wait_until(lambda: old.notes("known"), what="another message")

    # When a worker of the new release comes
    with new.worker():
        # Then the message runs, as its first attempt
        wait_until(lambda: new.notes("fresh"), what="the message to run")
    assert "retries" not in new.notes("fresh")[0]["options"]
    assert depth(amqp_url, DLQ) == 0
    assert not old.notes("changed")


@pytest.mark.parametrize("reason", SENDS)
def test_a_message_that_no_release_can_run_becomes_a_dead_letter(
    amqp_url: str, tmp_path: Path, reason: str
) -> None:
    """Waiting has an end, and the end is not silent."""
    old = App(tmp_path / "old", OLD_RELEASE, amqp_url, env={"TEST_BROKER_OPTIONS": '{"park_limit": 600}'})
    with old.worker():
        App(tmp_path / "new", NEW_RELEASE, amqp_url).send(SENDS[reason])
        (dead,) = dead_letters(amqp_url)

    assert dead.headers["x-safeops-reason"] == reason
    assert dead.headers["x-safeops-parks"] >= 1
    assert dead.headers["x-safeops-attempts"] == 0
    assert dead.message["args"][0] == "2013-01"


def test_stock_rejects_a_message_for_the_next_release_at_once(amqp_url: str, tmp_path: Path) -> None:
    """The twin: it is in the queue where messages expire, before the new release is there."""
    with App(tmp_path / "old", OLD_RELEASE, amqp_url, broker="stock").worker():
        App(tmp_path / "new", NEW_RELEASE, amqp_url, broker="stock").send(SENDS["unknown_actor"])
        dead_letters(amqp_url, queue="default.XQ")


# -- a list of middlewares without ours

OWN_LIST = """
    import dramatiq.brokers.rabbitmq
    import dramatiq.middleware
    import dramatiq_safeops

    made = dramatiq_safeops if os.environ["TEST_BROKER"] == "safe" else dramatiq.brokers.rabbitmq
    dramatiq.set_broker(made.RabbitmqBroker(url=os.environ["TEST_AMQP_URL"], middleware={middleware}))

    @dramatiq.actor
    def fails():
        note("start")
        raise RuntimeError("nobody looks after me")
"""


@pytest.mark.parametrize(
    "middleware",
    ["[]", "[dramatiq.middleware.CurrentMessage()]", "[dramatiq_safeops.DeadLetters()]"],
    ids=["none", "only Dramatiq's", "only DeadLetters"],
)
def test_a_failure_without_a_retry_middleware_is_a_dead_letter(
    amqp_url: str, tmp_path: Path, middleware: str
) -> None:
    """Whoever puts together a list of their own must not be punished with lost messages."""
    app = App(tmp_path / "app", OWN_LIST.format(middleware=middleware), amqp_url)
    with app.worker():
        publish(amqp_url, "default", body_of("fails"))
        (dead,) = dead_letters(amqp_url)

    assert dead.headers["x-safeops-reason"] == "retries_exhausted"
    assert dead.headers["x-safeops-exception-message"] == "nobody looks after me"
    assert len(app.notes("start")) == 1


def test_stock_acks_a_failure_without_a_retry_middleware(amqp_url: str, tmp_path: Path) -> None:
    """The twin: the failure counts as done."""
    one_by_one = {"dramatiq_queue_prefetch": "1"}
    app = App(tmp_path / "app", OWN_LIST.format(middleware="[]"), amqp_url, broker="stock", env=one_by_one)
    app.send("fails.send(); fails.send()")
    with app.worker(threads=1) as worker:
        # The second message is delivered only once the first is acked.
        wait_until(lambda: len(app.notes("start")) == 2)
        worker.kill()

    assert depth(amqp_url, "default") <= 1
    assert depth(amqp_url, "default.XQ") == depth(amqp_url, "default.DQ") == 0


# -- when a failed message runs again, and when no more

POLICIES = """
    import dramatiq.middleware

    class Hopeless(Exception):
        pass

    quick = {"min_backoff": 50, "max_backoff": 50, "time_limit": 60_000}

    def start():
        message = dramatiq.middleware.CurrentMessage.get_current_message()
        note("start", id=message.message_id)
        return message.options.get("retries", 0)

    @dramatiq.actor(throws=Hopeless, **quick)
    def throws():
        start()
        raise Hopeless("there is no such month")

    @dramatiq.actor(**quick)
    def permanent():
        start()
        raise PermanentError("there is no such month")

    @dramatiq.actor(max_retries=1, **quick)
    def retried_once():
        start()
        raise ValueError("again")

    @dramatiq.actor(retry_when=lambda retries, error: retries < 1, **quick)
    def stopped_by_retry_when():
        start()
        raise ValueError("again")

    @dramatiq.actor(retry_when=lambda retries, error: True, max_retries=2, **quick)
    def never_stopped_by_retry_when():
        start()
        raise ValueError("again")

    @dramatiq.actor(max_age=60_000, **quick)
    def ages():
        start()

    @dramatiq.actor(time_limit=60_000)
    def asks_for_a_delay():
        if start() == 0:
            raise dramatiq.errors.Retry("busy", delay=1_500)

    @dramatiq.actor(max_retries=1, on_retry_exhausted="exhausted", **quick)
    def tells_when_exhausted(month):
        start()
        raise ValueError("again")

    @dramatiq.actor(on_retry_exhausted="exhausted", throws=ValueError, **quick)
    def tells_when_permanent(month):
        start()
        raise ValueError("no")

    @dramatiq.actor(time_limit=60_000)
    def exhausted(message_data, retry_info):
        note("exhausted", message=message_data, retries=retry_info)

    @dramatiq.actor(on_success="succeeded", on_failure="failed", max_retries=1, **quick)
    def calls_back(fails):
        start()
        if fails:
            raise ValueError("no")
        return 42

    @dramatiq.actor(time_limit=60_000)
    def succeeded(message_data, result):
        note("succeeded", message=message_data, result=result)

    @dramatiq.actor(time_limit=60_000)
    def failed(message_data, error):
        note("failed", message=message_data, error=error)
"""


@dataclass
class Fleet:
    """One worker that all tests below share; each looks at its own message only."""

    app: App
    worker: Worker

    def run(self, message_id: str, actor: str, *args: Any, **options: Any) -> None:
        publish(self.app.url, "default", body_of(actor, *args, message_id=message_id, **options))

    def starts(self, message_id: str) -> list[float]:
        return [one["at"] for one in self.app.notes("start") if one["id"] == message_id]

    def dead_letter(self, message_id: str) -> Seen:
        def find() -> list[Seen]:
            return [one for one in look(self.app.url, DLQ) if one.message_id == message_id]

        (found,) = wait_until(find, what=f"the dead letter of {message_id}")
        return found

    def told(self, what: str, message_id: str) -> list[dict[str, Any]]:
        return [one for one in self.app.notes(what) if one["message"]["message_id"] == message_id]


@pytest.fixture(scope="module")
def fleet(rabbit: RabbitmqServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with virtual_host(rabbit) as url:
        app = App(tmp_path_factory.mktemp("policies"), POLICIES, url)
        with app.worker() as worker:
            yield Fleet(app, worker)


@pytest.mark.parametrize(
    ("actor", "reason", "attempts"),
    [
        ("throws", "permanent_error", 1),
        ("permanent", "permanent_error", 1),
        ("retried_once", "retries_exhausted", 2),
        ("stopped_by_retry_when", "retries_exhausted", 2),
        ("never_stopped_by_retry_when", "retries_exhausted", 3),
    ],
)
def test_a_failing_actor_runs_as_often_as_it_may(
    fleet: Fleet, actor: str, reason: str, attempts: int
) -> None:
    """Too few attempts lose work that would have succeeded, too many hammer on what is down."""
    fleet.run(actor, actor)

    dead = fleet.dead_letter(actor)

    assert dead.headers["x-safeops-reason"] == reason
    assert dead.headers["x-safeops-attempts"] == attempts
    assert len(fleet.starts(actor)) == attempts


def test_a_message_can_carry_its_own_number_of_retries(fleet: Fleet) -> None:
    """``send_with_options(max_retries=...)`` rules over the actor's."""
    fleet.app.send("retried_once.send_with_options(max_retries=3, on_failure=None)")

    def find() -> list[Seen]:
        return [one for one in look(fleet.app.url, DLQ) if one.message["options"].get("max_retries") == 3]

    (dead,) = wait_until(find, what="the dead letter")

    assert dead.headers["x-safeops-attempts"] == dead.headers["x-safeops-max-attempts"] == 4
    assert len(fleet.starts(dead.message_id)) == 4


def test_an_actor_can_choose_the_delay_of_its_retry(fleet: Fleet) -> None:
    """A server that says "come back in 1.5 seconds" means it; the backoff would be up to 30 seconds."""
    fleet.run("asks", "asks_for_a_delay")

    wait_until(lambda: len(fleet.starts("asks")) == 2, timeout=20, what="the retry")

    first, second = fleet.starts("asks")
    assert 1.2 < second - first < 7.5


def test_a_message_that_is_too_old_does_not_run(fleet: Fleet) -> None:
    """What was to be done yesterday may be wrong today."""
    old = json.loads(body_of("ages", message_id="old"))
    old["message_timestamp"] -= 61_000

    publish(fleet.app.url, "default", json.dumps(old).encode())
    fleet.run("young", "ages")

    dead = fleet.dead_letter("old")
    assert dead.headers["x-safeops-reason"] == "too_old"
    assert dead.headers["x-safeops-attempts"] == 0
    wait_until(lambda: fleet.starts("young"), what="the younger message")
    assert not fleet.starts("old")


def test_an_actor_is_told_when_a_message_has_used_up_its_attempts(fleet: Fleet) -> None:
    """``on_retry_exhausted`` is where users clean up; it must come once, and with the facts."""
    fleet.run("tired", "tells_when_exhausted", "2013-01")

    fleet.dead_letter("tired")
    (told,) = wait_until(lambda: fleet.told("exhausted", "tired"), what="the message to `exhausted`")

    assert told["message"]["args"] == ["2013-01"]
    assert told["retries"] == {"retries": 1, "max_retries": 1}


def test_nobody_is_told_about_used_up_attempts_when_there_was_one_only(fleet: Fleet) -> None:
    """As in Dramatiq, ``throws`` is no exhaustion."""
    fleet.run("thrown", "tells_when_permanent", "2013-01")

    # Follow-ups are confirmed before a message is acked, and so together with its dead letter.
    fleet.dead_letter("thrown")
    fleet.run("later", "tells_when_exhausted", "2013-02")
    wait_until(lambda: fleet.told("exhausted", "later"), what="a message that was sent after it")
    assert not fleet.told("exhausted", "thrown")


def test_callbacks_are_told_about_success_and_about_each_failure(fleet: Fleet) -> None:
    """They are messages themselves, and come with what Dramatiq promises."""
    fleet.run("good", "calls_back", False)
    fleet.run("bad", "calls_back", True)

    (success,) = wait_until(lambda: fleet.told("succeeded", "good"), what="on_success")
    fleet.dead_letter("bad")
    wait_until(lambda: len(fleet.told("failed", "bad")) == 2, what="on_failure for both attempts")

    assert success["result"] == 42
    assert [one["error"] for one in fleet.told("failed", "bad")] == [
        {"type": "ValueError", "message": "no"}
    ] * 2
    assert not fleet.told("failed", "good")
    assert not fleet.told("succeeded", "bad")
