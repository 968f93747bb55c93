"""A worker that cannot start well says so in one sentence, and the whole ``dramatiq`` command ends.

Real commands. What the sentence must name stands beside each case.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from dramatiq_safeops.testing import RabbitmqServer, TcpProxy
from dramatiq_safeops.testing.processes import free_ports
from dramatiq_safeops.testing.tcp_proxy import Direction
from tests.harness import queues
from tests.harness.worker import App, Worker, wait_until

#: Stands in every URL that is wrong somewhere else, and must never be printed.
PASSWORD = "hunter2-and-a-half"

#: A start that fails takes about a second.
ENDS_WITHIN_S = 25

ACTOR = """
@dramatiq.actor(time_limit=60_000)
def work(number):
    note("ran", number=number)
"""


def sentence_of(worker: Worker, *, within: float = ENDS_WITHIN_S) -> str:
    """Return the one sentence with which the command ended, after looking at all the rest of its output."""
    try:
        code = worker.process.wait(within)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the command still runs after {within} s: {worker.text}") from None
    text = worker.text
    assert code != 0, text
    assert "Traceback" not in text, text
    assert PASSWORD not in text, text
    # Every worker process may get as far as to say it.
    said = {line for line in text.splitlines() if line.startswith("dramatiq-safeops: ")}
    assert len(said) == 1, text
    return said.pop().removeprefix("dramatiq-safeops: ")


def refusal(app: App, *, within: float = ENDS_WITHIN_S) -> str:
    """Start a worker and return the sentence with which the command ended."""
    worker = app.start_worker(wait=False)
    try:
        return sentence_of(worker, within=within)
    finally:
        worker.destroy()


def with_place(
    url: str, *, scheme: str = "amqp", login: str = f"guest:{PASSWORD}", place: str = "", path: str = ""
) -> str:
    """Return ``url`` with some of its parts replaced."""
    parts = urlsplit(url)
    where = place or parts.netloc.rpartition("@")[2]
    return urlunsplit((scheme, f"{login}@{where}", path or parts.path, "", ""))


# -- what takes its time: started first, all at once, so that the waiting is done together


@pytest.fixture(scope="module", autouse=True)
def unreachable(
    rabbit: RabbitmqServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Worker]]:
    """Commands that look for a RabbitMQ in vain, already running."""
    folder = tmp_path_factory.mktemp("unreachable")
    port = urlsplit(rabbit.url).port
    assert port is not None
    with TcpProxy("127.0.0.1", port) as silent:
        silent.hold()
        urls = {
            "down": f"amqp://guest:{PASSWORD}@127.0.0.1:{free_ports(1)[0]}/",
            "silent": f"amqp://guest:{PASSWORD}@127.0.0.1:{silent.port}/",
            "no host": f"amqp://guest:{PASSWORD}@no-such-host.invalid:4/",
            "not amqp": f"amqp://guest:{PASSWORD}@127.0.0.1:{urlsplit(rabbit.management_url).port}/",
        }
        workers = {}
        try:
            for name, url in urls.items():
                workers[name] = App(folder / name.replace(" ", "-"), ACTOR, url).start_worker(
                    processes=2, wait=False
                )
            yield workers
        finally:
            for worker in workers.values():
                worker.destroy()


# -- options


WRONG_OPTIONS = {
    "an actor option that nobody knows": (
        ACTOR.replace("time_limit", "max_retrys=3, time_limit"),
        {},
        ["max_retrys", "did you mean 'max_retries'"],
    ),
    "an actor option of the wrong value": (
        ACTOR.replace("60_000", "-5"),
        {},
        ["time_limit of actor 'work'", "above 0", "-5"],
    ),
    "retries without an end": (
        ACTOR.replace("time_limit", "max_retries=None, time_limit"),
        {},
        ["max_retries of actor 'work'", "None", "retried for ever"],
    ),
    "a broker option that nobody knows": (
        ACTOR,
        {"TEST_BROKER_OPTIONS": {"queue_typ": "classic"}},
        ["queue_typ", "did you mean 'queue_type'"],
    ),
    "a broker option of the wrong value": (
        ACTOR,
        {"TEST_BROKER_OPTIONS": {"queue_type": "clasic"}},
        ["RabbitmqBroker.queue_type", "'clasic'", "did you mean 'classic'"],
    ),
    "priorities on quorum queues": (
        ACTOR,
        {"TEST_BROKER_OPTIONS": {"max_priority": 5}},
        ["max_priority", "queue_type='classic'"],
    ),
    "a stack option that nobody knows": (
        ACTOR,
        {"TEST_STACK_OPTIONS": {"max_retry": 3}},
        ["max_retry", "did you mean 'max_retries'"],
    ),
    "a stack option of the wrong value": (
        ACTOR,
        {"TEST_STACK_OPTIONS": {"time_limit": "5m"}},
        ["TimeLimit.time_limit", "above 0", "'5m'"],
    ),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_a_wrong_option_ends_the_start_with_a_sentence_that_names_it(
    case: str, amqp_url: str, tmp_path: Path
) -> None:
    """A typing error in a deploy would otherwise be a page of traceback, or an option that silently does nothing."""
    source, options, names = WRONG_OPTIONS[case]
    env = {name: json.dumps(value) for name, value in options.items()}

    sentence = refusal(App(tmp_path, source, amqp_url, env=env))

    assert all(name in sentence for name in names), sentence


# -- the list of middlewares


WRONG_STACKS = {
    "stock Retries beside ours": (
        """
        from dramatiq.middleware import Retries
        broker.add_middleware(Retries())
        """,
        ["dramatiq.middleware.Retries", "dramatiq_safeops.Retries"],
    ),
    "stock TimeLimit beside ours": (
        """
        from dramatiq.middleware import TimeLimit
        broker.add_middleware(TimeLimit())
        """,
        ["dramatiq.middleware.TimeLimit", "dramatiq_safeops.TimeLimit"],
    ),
    "the same guard twice": (
        """
        from dramatiq_safeops import TimeLimit
        broker.add_middleware(TimeLimit())
        """,
        ["TimeLimit stands twice"],
    ),
    "guards in the wrong order": (
        """
        from dramatiq_safeops import RabbitmqBroker
        broker = RabbitmqBroker(url=os.environ["TEST_AMQP_URL"], middleware=safe_stack()[::-1])
        dramatiq.set_broker(broker)
        """,
        ["AgeLimit stands below TimeLimit", "safe_stack()"],
    ),
}


@pytest.mark.parametrize("case", WRONG_STACKS)
def test_a_list_of_middlewares_that_cannot_work_ends_the_start(
    case: str, amqp_url: str, tmp_path: Path
) -> None:
    """Two Retries would send two copies of each failure, and a guard in the wrong place guards nothing."""
    header, names = WRONG_STACKS[case]

    sentence = refusal(App(tmp_path, with_header(header), amqp_url))

    assert all(name in sentence for name in names), sentence


def test_threads_that_a_middleware_has_started_do_not_keep_a_refused_command_alive(
    amqp_url: str, tmp_path: Path
) -> None:
    """A metrics server started at process boot would leave a pod that looks alive and consumes nothing."""
    # Given a middleware that has started a thread which nobody ends
    header = """
    from dramatiq.middleware import Middleware, Retries

    class Serves(Middleware):
        def after_process_boot(self, broker):
            threading.Thread(target=threading.Event().wait).start()

    broker.add_middleware(Serves())
    broker.add_middleware(Retries())
    """

    # When the boot is refused after that
    sentence = refusal(App(tmp_path, with_header(header), amqp_url))

    # Then the command has ended, in time
    assert "dramatiq.middleware.Retries" in sentence


def with_header(header: str) -> str:
    """Return the source of an app that runs ``header`` before it declares its actor."""
    return textwrap.dedent(header) + ACTOR


# -- the URL


def test_a_url_of_another_scheme_ends_the_start(amqp_url: str, tmp_path: Path) -> None:
    """Somebody has put the database's URL into the broker's variable."""
    sentence = refusal(App(tmp_path, ACTOR, with_place(amqp_url, scheme="postgresql")))

    assert "postgresql" in sentence
    assert "amqp" in sentence


def test_the_url_of_the_ui_is_not_taken_for_one_of_amqp(amqp_url: str, tmp_path: Path) -> None:
    """pika takes http:// for amqp://; then the port decides by chance how it fails, or whether."""
    sentence = refusal(App(tmp_path, ACTOR, with_place(amqp_url, scheme="http")))

    assert "'http'" in sentence
    assert "amqp" in sentence


def test_a_user_without_a_password_ends_the_start(amqp_url: str, tmp_path: Path) -> None:
    """pika fails on it with an error about an argument of type NoneType."""
    sentence = refusal(App(tmp_path, ACTOR, with_place(amqp_url, login="somebody")))

    assert "'somebody' without a password" in sentence


def test_a_frame_size_that_is_too_small_for_rabbitmq_4_is_named(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """RabbitMQ 4.3 cuts such a connection without a word, where earlier ones took it."""
    app = App(tmp_path, ACTOR, f"{amqp_url}?frame_max=4096")
    if rabbit.version < (4, 3):
        with app.worker():
            return

    assert "frame_max=4096" in refusal(app)


def test_a_refused_login_ends_the_start(amqp_url: str, tmp_path: Path) -> None:
    """Waiting does not make a wrong password right."""
    sentence = refusal(App(tmp_path, ACTOR, with_place(amqp_url)))

    assert "refused the login of user 'guest'" in sentence
    assert "check user and password" in sentence


def test_a_missing_vhost_ends_the_start(amqp_url: str, tmp_path: Path) -> None:
    """A new environment whose vhost nobody has made yet."""
    url = with_place(amqp_url, login="guest:guest", path="/nowhere")

    sentence = refusal(App(tmp_path, ACTOR, url))

    assert "vhost 'nowhere'" in sentence
    assert "add_vhost" in sentence


def test_missing_permissions_end_the_start_with_the_permission_that_is_missing(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """The advice for a queue with other arguments would send people the wrong way."""
    # Given a user who may not declare anything
    vhost = urlsplit(amqp_url).path[1:]
    rabbit.api("PUT", f"/api/permissions/{vhost}/guest", {"configure": "^$", "write": ".*", "read": ".*"})

    sentence = refusal(App(tmp_path, ACTOR, amqp_url))

    assert "403" in sentence
    assert "permission" in sentence
    assert "classic" not in sentence


# -- queues that exist with other arguments


def declare(url: str, queue: str, **arguments: object) -> None:
    """Declare ``queue`` with ``arguments``, as somebody did before us."""
    with queues.channel(url) as channel:
        channel.queue_declare(
            queue, durable=True, arguments={name.replace("_", "-"): v for name, v in arguments.items()}
        )


def test_a_queue_with_other_arguments_ends_the_start(amqp_url: str, tmp_path: Path) -> None:
    """Stock workers look alive, consume nothing and try again every three seconds for ever."""
    # Given a queue that stock Dramatiq has declared
    stock = App(tmp_path / "stock", ACTOR, amqp_url, broker="stock")
    stock.send("work.send(1)")

    # When a worker starts that wants a quorum queue
    sentence = refusal(App(tmp_path / "safe", ACTOR, amqp_url))

    # Then its one sentence names the queue, the argument and the ways out
    assert "queue 'default'" in sentence
    assert "x-dead-letter-exchange" in sentence
    assert all(
        way in sentence for way in ("queue_type='classic'", "another queue_name", "delete the queue")
    ), sentence


def test_a_refused_start_leaves_no_new_queues_behind(amqp_url: str, tmp_path: Path) -> None:
    """They would be of the type that was refused, and stand in the way of the start with the right one."""
    # Given one queue of stock Dramatiq's, and others that do not exist yet
    stock = App(tmp_path / "stock", ACTOR, amqp_url, broker="stock")
    stock.send("work.send(1)")
    source = ACTOR
    for name in "a", "z":
        source += ACTOR.replace("work", name).replace("time_limit", f"queue_name='{name}', time_limit")

    # When a start is refused
    assert "queue 'default'" in refusal(App(tmp_path / "refused", source, amqp_url))

    # Then the one that it advises works
    options = {"TEST_BROKER_OPTIONS": json.dumps({"queue_type": "classic"})}
    app = App(tmp_path / "safe", source, amqp_url, env=options)
    with app.worker():
        wait_for_numbers(app, 1)


def test_stock_workers_stay_up_without_consuming_a_queue_with_other_arguments(
    amqp_url: str, tmp_path: Path
) -> None:
    """The twin: this is what the sentence above replaces."""
    declare(amqp_url, "default", x_max_length=1000)
    app = App(tmp_path, ACTOR, amqp_url, broker="stock")

    with app.worker() as worker:
        worker.wait_for_log("Restarting consumer")

        assert worker.process.poll() is None
        assert "PRECONDITION_FAILED" in worker.text


def test_a_dead_letter_queue_with_other_arguments_is_named_itself(amqp_url: str, tmp_path: Path) -> None:
    """Advice about the work queue would not help: that one is fine."""
    declare(amqp_url, "default.dlq")

    sentence = refusal(App(tmp_path, ACTOR, amqp_url))

    assert "queue 'default.dlq'" in sentence
    assert "queue_type='classic'" not in sentence


def test_sending_to_a_queue_with_other_arguments_raises_the_same_sentence(
    amqp_url: str, tmp_path: Path
) -> None:
    """A producer must not retry for ever, either."""
    declare(amqp_url, "default", x_max_length=1000)
    app = App(tmp_path, ACTOR, amqp_url)

    said = app.send(
        """
        from dramatiq_safeops import ConfigError
        for number in 1, 2:
            try:
                work.send(number)
            except ConfigError as error:
                print(error)
        """
    ).splitlines()

    assert len(said) == 2
    for sentence in said:
        assert "queue 'default'" in sentence
        assert "queue_type='classic'" in sentence
    assert queues.depth(amqp_url, "default") == 0


def test_classic_queues_that_stock_dramatiq_declared_can_be_taken_over_as_they_are(
    amqp_url: str, tmp_path: Path
) -> None:
    """The way out that the sentence names must lead somewhere: nothing is migrated, nothing is lost."""
    # Given a message of a stock producer
    stock = App(tmp_path / "stock", ACTOR, amqp_url, broker="stock")
    stock.send("work.send(1)")

    # When our worker and producer take its queue
    options = {"TEST_BROKER_OPTIONS": json.dumps({"queue_type": "classic"})}
    app = App(tmp_path / "safe", ACTOR, amqp_url, env=options)
    app.send("work.send(2)")
    with app.worker():
        wait_for_numbers(app, 1, 2)


def wait_for_numbers(app: App, *numbers: int) -> None:
    wait_until(
        lambda: sorted(one["number"] for one in app.notes("ran")) == sorted(numbers), what=f"{numbers} to run"
    )


# -- a first start


def test_the_first_start_in_an_empty_vhost_logs_no_error(amqp_url: str, tmp_path: Path) -> None:
    """An error in the first minute of a new environment costs somebody an hour."""
    # Given several queues, none of which exists
    source = "".join(
        ACTOR.replace("work", f"work_{n}").replace("time_limit", f"queue_name='q{n}', time_limit")
        for n in range(5)
    )
    app = App(tmp_path, source, amqp_url)

    # When two processes start at the same time
    with app.worker(processes=2) as worker:
        app.send("for n in range(5): broker.get_actor(f'work_{n}').send(n)")
        wait_for_numbers(app, *range(5))

        # Then nothing in the log is worse than a notice
        assert not [
            line
            for line in worker.text.splitlines()
            if any(f"[{w}]" in line for w in ("WARNING", "ERROR", "CRITICAL"))
        ]


# -- and the ends of what was started at the top


def test_a_host_that_cannot_be_resolved_ends_the_start(unreachable: dict[str, Worker]) -> None:
    """Waiting does not help against a typing error."""
    sentence = sentence_of(unreachable["no host"])

    assert "'no-such-host.invalid' cannot be resolved" in sentence
    assert "URL" in sentence


def test_a_port_that_speaks_no_amqp_ends_the_start(unreachable: dict[str, Worker]) -> None:
    """The port of the UI, most often."""
    sentence = sentence_of(unreachable["not amqp"])

    assert "does not speak AMQP" in sentence
    assert "check host and port" in sentence


def test_a_server_that_is_down_ends_the_start_after_some_patience(unreachable: dict[str, Worker]) -> None:
    """Ten seconds, as in a deploy all starts at once; then the supervisor must see that it failed."""
    sentence = sentence_of(unreachable["down"], within=60)

    assert "nothing listens at 127.0.0.1" in sentence
    assert "start RabbitMQ" in sentence


def test_a_server_that_says_nothing_ends_the_start_after_some_patience(
    unreachable: dict[str, Worker],
) -> None:
    """A frozen machine, or a firewall that swallows everything."""
    sentence = sentence_of(unreachable["silent"], within=90)

    assert "no answer from 127.0.0.1" in sentence
    assert "check that RabbitMQ is up and reachable" in sentence


def test_a_server_that_comes_up_a_little_later_is_waited_for(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """In a compose file everything starts at once, and the port of a container listens before its server does."""
    # Given a port that resets its clients as soon as they speak, as such a port does
    port = urlsplit(rabbit.url).port
    assert port is not None
    tries: list[bytes] = []
    with TcpProxy("127.0.0.1", port) as proxy:

        def reset(direction: Direction, data: bytes) -> None:
            if len(tries) < 3:
                tries.append(data)
                proxy.cut()

        proxy.on_bytes = reset
        app = App(tmp_path, ACTOR, proxy.url_for(amqp_url))

        # When the server is there at the fourth try
        with app.worker():
            # Then the worker has started
            app.send("work.send(1)")
            wait_for_numbers(app, 1)

    assert len(tries) == 3
