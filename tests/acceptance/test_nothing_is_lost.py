"""A message that was accepted ends in a recorded outcome, whatever RabbitMQ refuses and whoever is killed on the way.

The tests named ``test_stock_...`` run the same fault on Dramatiq's own broker and show that the message is gone there.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dramatiq_safeops.rabbitmq.topology import apply, delay_step
from dramatiq_safeops.testing import RabbitmqServer, TcpProxy
from tests.harness.counts import vhost_of
from tests.harness.queues import body_of, channel, depth, look, publish
from tests.harness.vhosts import jam, refusing
from tests.harness.worker import App, wait_until

#: The shortest step of the delay ladder, where the retries of these tests wait.
STEP = "safeops.delay.0.25s"

#: What the log says each time that a publish about a message was refused.
REFUSED = "stays un-acked"

FAILS_UNTIL_TOLD = """
    @dramatiq.actor(max_retries=3, min_backoff=100, max_backoff=100, time_limit=60_000)
    def job():
        note("start")
        if not os.path.exists("succeed"):
            raise RuntimeError("not yet")
        note("done")
"""

NOTES = """
    @dramatiq.actor(time_limit=60_000)
    def job(which):
        note("ran", which=which)
"""

PIPELINE = """
    @dramatiq.actor(time_limit=60_000)
    def first():
        note("first")

    @dramatiq.actor(time_limit=60_000, queue_name="later")
    def second():
        note("second")
"""
SEND_PIPELINE = "(first.message() | second.message_with_options(pipe_ignore=True)).run()"


#: For Dramatiq's own broker: RabbitMQ delivers the second message only when the first is acked.
ONE_BY_ONE = {"dramatiq_queue_prefetch": "1", "dramatiq_delay_queue_prefetch": "1"}


def ids_in(url: str, *queues: str) -> set[str]:
    return {seen.message_id for queue in queues for seen in look(url, queue)}


def declare_step(url: str) -> None:
    with channel(url) as ch:
        apply(delay_step(250), ch)


def times_refused(worker_text: str) -> int:
    return worker_text.count(REFUSED)


# -- the retry cannot be published


def test_a_failed_message_is_kept_while_its_retry_is_refused_and_goes_on_afterwards(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """A full delay queue must cost time, not the message, and not a second run of its actor."""
    app = App(tmp_path / "app", FAILS_UNTIL_TOLD, amqp_url)
    declare_step(amqp_url)
    with app.worker() as worker:
        # Given a delay ladder that takes no more messages
        with refusing(rabbit, amqp_url, r"^safeops\.delay\."):
            jam(amqp_url, STEP)

            # When an actor fails
            publish(amqp_url, "default", body_of("job"))
            wait_until(lambda: times_refused(worker.text) >= 2, what="two refusals of the retry")

            # Then it does not run again meanwhile
            assert len(app.notes("start")) == 1
            (app.folder / "succeed").touch()

        # And once the ladder takes messages again, it does
        wait_until(lambda: app.notes("done"), what="the retry")
        assert len(app.notes("start")) == 2
        assert worker.terminate() == 0
    assert depth(amqp_url, "default") == 0
    assert depth(amqp_url, "default.dlq") == 0


def test_a_worker_killed_while_a_retry_is_refused_loses_nothing(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """A message whose retry is nowhere yet is in nobody's memory alone: RabbitMQ still has it."""
    app = App(tmp_path / "app", FAILS_UNTIL_TOLD, amqp_url)
    declare_step(amqp_url)
    # Given a failed message whose retry is refused
    with refusing(rabbit, amqp_url, r"^safeops\.delay\."):
        jam(amqp_url, STEP)
        with app.worker() as worker:
            body = body_of("job")
            publish(amqp_url, "default", body)
            wait_until(lambda: times_refused(worker.text) >= 1, what="a refusal of the retry")

            # When its worker is killed
            worker.kill()

        # Then it is back in its queue
        wait_until(lambda: depth(amqp_url, "default") == 1, what="the message to be back")
    assert [seen.body for seen in look(amqp_url, "default")] == [body]

    # And the next worker runs it
    (app.folder / "succeed").touch()
    with app.worker():
        wait_until(lambda: app.notes("done"), what="the message to run")


@pytest.mark.parametrize("confirms", [False, True], ids=["default", "confirm_delivery"])
def test_stock_loses_a_failed_message_whose_retry_is_refused(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path, confirms: bool
) -> None:
    """The twin: the exception of the re-publish is logged, then the original is acked."""
    options = json.dumps({"confirm_delivery": confirms})
    env = {**ONE_BY_ONE, "TEST_BROKER_OPTIONS": options}
    app = App(tmp_path / "app", FAILS_UNTIL_TOLD, amqp_url, broker="stock", env=env)
    app.send("broker.declare_queue('default', ensure=True)")
    with refusing(rabbit, amqp_url, r"^default\.DQ$"), app.worker(threads=1) as worker:
        publish(amqp_url, "default", body_of("job", message_id="failed"))
        publish(amqp_url, "default", body_of("job", message_id="next"))
        wait_until(lambda: len(app.notes("start")) == 2, what="the next message to start")
        worker.kill()

    assert "failed" not in ids_in(amqp_url, "default", "default.DQ", "default.XQ")


# -- the dead letter cannot be published


def test_a_message_is_kept_while_its_dead_letter_is_refused(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """Somebody limited all queues, those for dead letters too: their messages must not fall between two chairs."""
    app = App(tmp_path / "app", FAILS_UNTIL_TOLD, amqp_url)
    with app.worker() as worker:
        # Given a full dead-letter queue
        with refusing(rabbit, amqp_url, r"^default\.dlq$"):
            publish(amqp_url, "default.dlq", b"filler")

            # When a message is given up
            body = body_of("job", max_retries=0)
            publish(amqp_url, "default", body)
            wait_until(lambda: times_refused(worker.text), what="a refusal of the dead letter")
            assert depth(amqp_url, "default.dlq") == 1

        # Then its dead letter comes when there is room, without another run
        wait_until(lambda: depth(amqp_url, "default.dlq") == 2, what="the dead letter")
        assert len(app.notes("start")) == 1
    assert [seen.body for seen in look(amqp_url, "default.dlq")] == [b"filler", body]


# -- the queue is gone


def test_a_message_sent_after_its_queue_was_deleted_is_there(amqp_url: str, tmp_path: Path) -> None:
    """Somebody tidies up in the RabbitMQ UI; the web process that has been sending for days must not notice."""
    app = App(tmp_path / "app", NOTES, amqp_url)

    app.send("""
        from tests.harness.queues import channel

        job.send("before")
        with channel(os.environ["TEST_AMQP_URL"]) as ch:
            for name in ("default", "default.dlq"):
                ch.queue_delete(name)
        job.send("after")
    """)

    assert [seen.message["args"] for seen in look(amqp_url, "default")] == [["after"]]
    with channel(amqp_url) as ch:
        ch.queue_declare("default.dlq", passive=True)  # raises if there is none


def test_stock_loses_a_message_sent_after_its_queue_was_deleted(amqp_url: str, tmp_path: Path) -> None:
    """The twin: without confirms nobody hears that no queue took it."""
    app = App(tmp_path / "app", NOTES, amqp_url, broker="stock")

    app.send("""
        from tests.harness.queues import channel

        job.send("before")
        with channel(os.environ["TEST_AMQP_URL"]) as ch:
            for name in ("default", "default.DQ", "default.XQ"):
                ch.queue_delete(name)
        job.send("after")
    """)

    assert depth(amqp_url, "default") == 0


def test_a_delayed_message_sent_after_its_step_was_deleted_is_there(amqp_url: str, tmp_path: Path) -> None:
    """The queues of the delay ladder look like rubbish to a tidy operator."""
    app = App(tmp_path / "app", NOTES, amqp_url)

    app.send("""
        from tests.harness.queues import channel

        job.send_with_options(args=("before",), delay=60_000)
        with channel(os.environ["TEST_AMQP_URL"]) as ch:
            ch.queue_delete("safeops.delay.55s")
        job.send_with_options(args=("without queue",), delay=60_000)
        with channel(os.environ["TEST_AMQP_URL"]) as ch:
            ch.exchange_delete("safeops.delay.55s")
        job.send_with_options(args=("without exchange",), delay=60_000)
    """)

    waiting = [seen.message["args"] for seen in look(amqp_url, "safeops.delay.55s")]
    assert waiting == [["without queue"], ["without exchange"]]


def test_a_worker_goes_on_when_its_queue_is_deleted_under_it(amqp_url: str, tmp_path: Path) -> None:
    """The worker makes the queue anew and consumes it, without a restart."""
    app = App(tmp_path / "app", NOTES, amqp_url)
    with app.worker() as worker:
        # Given a worker at work
        publish(amqp_url, "default", body_of("job", "before"))
        wait_until(lambda: app.notes("ran"))

        # When its queue and the dead-letter queue are deleted
        with channel(amqp_url) as ch:
            ch.queue_delete("default")
            ch.queue_delete("default.dlq")

        # Then it consumes the new one, also when nobody sends
        wait_until(
            lambda: worker.text.count("Consuming queue 'default'") == 2, what="the consumer to be back"
        )
        publish(amqp_url, "default", body_of("job", "after"))
        wait_until(lambda: len(app.notes("ran")) == 2, what="the next message")


def test_a_delayed_message_whose_queue_is_gone_when_it_is_due_can_be_found(
    amqp_url: str, tmp_path: Path
) -> None:
    """RabbitMQ drops what it cannot route, unless there is a place for it."""
    app = App(tmp_path / "app", NOTES, amqp_url)

    app.send("""
        from tests.harness.queues import channel

        job.send_with_options(args=("delayed",), delay=1_000)
        with channel(os.environ["TEST_AMQP_URL"]) as ch:
            ch.queue_delete("default")
    """)

    wait_until(lambda: depth(amqp_url, "safeops.unroutable") == 1, what="the message in safeops.unroutable")
    (found,) = look(amqp_url, "safeops.unroutable")
    assert found.message["args"] == ["delayed"]


def test_a_dead_letter_whose_queue_is_gone_can_be_found(amqp_url: str, tmp_path: Path) -> None:
    """Whoever deletes the queue of dead letters deletes those of yesterday, and not those to come."""
    app = App(tmp_path / "app", FAILS_UNTIL_TOLD, amqp_url)
    with app.worker():
        with channel(amqp_url) as ch:
            ch.queue_delete("default.dlq")

        publish(amqp_url, "default", body_of("job", max_retries=0))

        places = ("default.dlq", "safeops.unroutable")
        wait_until(lambda: any(depth(amqp_url, place) for place in places), what="the dead letter")
    (dead,) = [seen for place in places for seen in look(amqp_url, place)]
    assert dead.headers["x-safeops-reason"] == "retries_exhausted"


# -- the way from the delay ladder to the work queue


def test_a_delayed_message_that_its_queue_refuses_arrives_once_there_is_room(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """The last step of a delay is RabbitMQ's own doing: it must be as careful as we are."""
    # RabbitMQ tries again after 3 minutes and counts every 5 s, unless told otherwise before the queue is declared.
    set_env = "[application:set_env(rabbit, K, V) || {{K, V}} <- [{{{}, {}}}, {{{}, {}}}]]."
    hurry = ("dead_letter_worker_publisher_confirm_timeout", 1_000, "quorum_tick_interval", 200)
    usual = ("dead_letter_worker_publisher_confirm_timeout", 180_000, "quorum_tick_interval", 5_000)
    rabbit.eval(set_env.format(*hurry))
    app = App(tmp_path / "app", NOTES, amqp_url)
    with refusing(rabbit, amqp_url, "^default$", ended_by="raise"):
        # Given a queue that is full, and a message that comes due
        app.send("job.send('filler'); job.send_with_options(args=('delayed',), delay=250)")
        rabbit.eval(set_env.format(*usual))
        wait_until(lambda: depth(amqp_url, STEP) == 0, what="the message to come due")

        # When its queue refuses it
        step = f"/api/queues/{vhost_of(amqp_url)}/{STEP}"
        wait_until(
            lambda: rabbit.api("GET", step).get("messages_dlx") == 1, what="a refused message in the step"
        )
        assert depth(amqp_url, "default") == 1

    # Then it arrives as soon as there is room
    wait_until(lambda: depth(amqp_url, "default") == 2, what="the delayed message")
    assert [seen.message["args"] for seen in look(amqp_url, "default")] == [["filler"], ["delayed"]]


def test_stock_loses_a_delayed_message_that_its_queue_refuses(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """The twin: the worker moves the message without a confirm, then acks it."""
    app = App(tmp_path / "app", NOTES, amqp_url, broker="stock", env=ONE_BY_ONE)
    app.send("""
        for which in ("delayed", "next"):
            job.send_with_options(args=(which,), delay=250)
    """)
    with refusing(rabbit, amqp_url, "^default$"), app.worker(threads=1, arguments=("-v",)) as worker:
        moved = "Enqueueing message"
        wait_until(lambda: worker.text.count(moved) == 2, what="the next message to be moved")
        worker.kill()

    delayed = [
        seen.message["args"]
        for name in ("default", "default.DQ", "default.XQ")
        for seen in look(amqp_url, name)
    ]
    assert ["delayed"] not in delayed
    assert not app.notes("ran")


# -- between the end of an actor and what follows from it

KILLER = """
    class Killer(dramatiq.Middleware):
        def {hook}(self, broker, message, **_):
            if message.actor_name == "first" and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    {place}
"""
BELOW_ALL = "broker.add_middleware(Killer())"
ABOVE_ALL = "broker.middleware.insert(0, Killer())"


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("after_process_message", BELOW_ALL),
        ("after_process_message", ABOVE_ALL),
        ("before_ack", ABOVE_ALL),
        ("after_ack", ABOVE_ALL),
    ],
    ids=[
        "before the pipeline's hook",
        "after the pipeline's hook",
        "before the ack",
        "while the next step is sent",
    ],
)
def test_a_worker_killed_between_two_steps_of_a_pipeline_loses_no_step(
    amqp_url: str, tmp_path: Path, hook: str, place: str
) -> None:
    """Without it a pipeline ends in the middle, and nobody is told."""
    app = App(tmp_path / "app", PIPELINE + KILLER.format(hook=hook, place=place), amqp_url)
    # Given a worker that dies when the first step has just run
    with app.worker() as worker:
        app.send(SEND_PIPELINE)
        wait_until(lambda: worker.process.poll() is not None, what="the worker to die")
    assert app.notes("first")

    # When another one comes
    with app.worker():
        # Then the second step runs
        wait_until(lambda: app.notes("second"), what="the second step")


def test_a_worker_killed_while_the_next_step_is_on_its_way_loses_no_step(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """The ack of a step must wait for RabbitMQ's confirm of the next one, and not just for the socket."""
    server = urlsplit(rabbit.url)
    assert server.hostname is not None
    assert server.port is not None
    struck = threading.Event()
    with TcpProxy(server.hostname, server.port) as proxy:

        def strike(direction: str, data: bytes) -> None:
            if direction == "to_server" and b'"actor_name":"second"' in data:
                proxy.hold()
                struck.set()

        # Given a network that gets stuck with the very bytes of the second step
        proxy.on_bytes = strike
        app = App(tmp_path / "app", PIPELINE, proxy.url_for(amqp_url))
        with app.worker() as worker:
            App(tmp_path / "producer", PIPELINE, amqp_url).send(SEND_PIPELINE)
            assert struck.wait(30)

            # When the worker dies
            worker.kill()
            proxy.cut()

    assert depth(amqp_url, "later") == 0
    app = App(tmp_path / "app", PIPELINE, amqp_url)
    # Then the first step runs again, and the second after it
    with app.worker():
        wait_until(lambda: app.notes("second"), what="the second step")
    assert len(app.notes("first")) == 2


def test_a_pipeline_waits_while_its_next_step_is_refused(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """A full queue must hold up a pipeline, and not cut it."""
    app = App(tmp_path / "app", PIPELINE, amqp_url)
    app.send("broker.declare_queue('later', ensure=True)")
    with app.worker(arguments=("-Q", "default")) as worker:
        with refusing(rabbit, amqp_url, "^later$"):
            # Given a full queue for the second step
            publish(amqp_url, "later", body_of("second", queue="later"))

            # When the first step ends
            app.send(SEND_PIPELINE)
            wait_until(lambda: times_refused(worker.text), what="a refusal of the second step")
            assert depth(amqp_url, "later") == 1

        # Then the second step is sent as soon as there is room, without running the first again
        wait_until(lambda: depth(amqp_url, "later") == 2, what="the second step")
        assert len(app.notes("first")) == 1
        assert worker.terminate() == 0
    assert depth(amqp_url, "default") == 0


def test_stock_cuts_a_pipeline_whose_next_step_is_refused(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """The twin: the first step counts as done, the second is nowhere."""
    app = App(tmp_path / "app", PIPELINE, amqp_url, broker="stock", env=ONE_BY_ONE)
    app.send("broker.declare_queue('later', ensure=True)")
    with (
        refusing(rabbit, amqp_url, "^later$"),
        app.worker(threads=1, arguments=("-Q", "default")) as worker,
    ):
        app.send(f"{SEND_PIPELINE}; {SEND_PIPELINE}")
        wait_until(lambda: len(app.notes("first")) == 2, what="the first step of the next pipeline")
        worker.kill()

    assert ids_in(amqp_url, "later", "later.DQ", "later.XQ") == set()
    assert len(ids_in(amqp_url, "default", "default.DQ", "default.XQ")) <= 1  # of the second pipeline
