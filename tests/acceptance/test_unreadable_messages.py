"""What comes from outside cannot stop a worker: junk of every kind is a dead letter, and the next message runs.

The tests named ``test_stock_...`` show the fault on Dramatiq's own broker.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pika
import pytest

from dramatiq_safeops.testing import RabbitmqServer
from tests.harness.queues import Seen, body_of, channel, depth, publish, publish_many, take
from tests.harness.vhosts import virtual_host
from tests.harness.worker import App, Worker, wait_until

THREADS = 4

#: Seconds within which a message must have its outcome, and good ones must run, whatever came before them.
SOON_S = 5

ACTORS = """
    import glob

    quick = {"max_retries": 1, "min_backoff": 50, "max_backoff": 50, "time_limit": 20_000}

    @dramatiq.actor(**quick)
    def job(*args):
        note("ran")

    @dramatiq.actor(**quick)
    def fails(*args):
        note("failed")
        raise ValueError("as always")

    @dramatiq.actor(**quick)
    def meet(round, number, count):
        open(f"round-{round}-{number}", "w").close()
        while len(glob.glob(f"round-{round}-*")) < count:
            time.sleep(0.01)
        note("met", round=round)
"""


@dataclass
class Crew:
    """A worker whose threads must all be at work after whatever it was sent."""

    app: App
    worker: Worker
    #: False while nobody knows what the last message has done to it.
    sound: bool = True
    rounds: int = 0

    @property
    def url(self) -> str:
        return self.app.url

    def all_threads_work(self) -> None:
        """Send one message per worker thread; each waits for all others, so all must run at the same time."""
        self.rounds += 1
        publish_many(
            self.url,
            "default",
            [body_of("meet", self.rounds, number, THREADS) for number in range(THREADS)],
        )
        wait_until(lambda: self._met() == THREADS, SOON_S, f"{THREADS} threads to work: {self.app.notes()}")
        self.sound = True

    def _met(self) -> int:
        return sum(1 for one in self.app.notes("met") if one["round"] == self.rounds)

    def dead_letters(self, count: int = 1) -> list[Seen]:
        """Wait for ``count`` dead letters, take them away and return them."""
        wait_until(lambda: depth(self.url, "default.dlq") >= count, SOON_S, f"{count} dead letters")
        found = take(self.url, "default.dlq")
        assert len(found) == count
        return found


@contextmanager
def new_crew(rabbit: RabbitmqServer, folder: Path) -> Iterator[Crew]:
    with virtual_host(rabbit) as url:
        app = App(folder, ACTORS, url)
        with app.worker(threads=THREADS) as worker:
            yield Crew(app, worker)


@pytest.fixture(scope="module")
def crews(rabbit: RabbitmqServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Crew]]:
    """Give the crew of the test before, if it is sound: starting one for each of a hundred kinds takes a minute."""
    with ExitStack() as stack:
        made: list[Crew] = []

        def current() -> Crew:
            if not made or not made[-1].sound:
                folder = tmp_path_factory.mktemp("crew") / "app"
                made.append(stack.enter_context(new_crew(rabbit, folder)))
            return made[-1]

        yield current


@pytest.fixture
def crew(crews: Callable[[], Crew]) -> Crew:
    crew = crews()
    crew.sound = False
    crew.app.effects.write_text("")
    return crew


def changed(**fields: Any) -> bytes:
    """Return a good body but for ``fields``; ``...`` leaves a field out."""
    whole = {**json.loads(body_of("job")), **fields}
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


def noise(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return changed(args=["HERE"]).replace(b'"HERE"', opening * depth + b"1" + closing * depth)


JUNK = {
    "nothing at all": b"",
    "random bytes": noise(200),
    "1 MB of random bytes": noise(1_000_000),
    "1 MB of brackets": b"[" * 1_000_000,
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.",
    "half a message": body_of("job", "x" * 100)[:-40],
    "null": b"null",
    "a number": b"42",
    "a list": b"[]",
    "an empty object": b"{}",
    "another encoding": body_of("job").decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + body_of("job"),
    "broken UTF-8 in a text": changed(args=["HERE"]).replace(b"HERE", b"\xff\xfe"),
    "deep lists": nested(b"[", b"]", 50_000),
    "deep objects": nested(b'{"a":', b"}", 50_000),
    "a number of 10,000 digits": changed(args=["HERE"]).replace(b'"HERE"', b"9" * 10_000),
    "no actor": changed(actor_name=...),
    "an actor that is a list": changed(actor_name=[]),
    "an actor that is null": changed(actor_name=None),
    "arguments that are null": changed(args=None),
    "arguments that are a text": changed(args="abc"),
    "keyword arguments that are a list": changed(kwargs=[]),
    "options that are null": changed(options=None),
    "options that are a list": changed(options=[1]),
    "a queue that is a number": changed(queue_name=1),
    "a message id that is a list": changed(message_id=[]),
    "a time that is a text": changed(message_timestamp="yesterday"),
    "a time that is infinite": changed(message_timestamp=float("inf")),
}


@pytest.mark.parametrize("kind", JUNK)
def test_junk_is_a_dead_letter_and_the_next_messages_run(crew: Crew, kind: str) -> None:
    """One bad producer must not stop everybody else's work."""
    publish(crew.url, "default", JUNK[kind])

    (dead,) = crew.dead_letters()
    crew.all_threads_work()

    assert dead.body == JUNK[kind]
    assert dead.headers["x-safeops-reason"] == "unreadable"
    assert not crew.app.notes("ran")


def test_junk_among_good_messages_costs_none_of_them(amqp_url: str, tmp_path: Path) -> None:
    """All kinds of junk at once, waiting when the worker comes, each followed by a good message."""
    app = App(tmp_path / "app", ACTORS, amqp_url)
    app.send("broker.declare_queue('default', ensure=True)")
    publish_many(amqp_url, "default", [body for junk in JUNK.values() for body in (junk, body_of("job"))])

    with app.worker(threads=THREADS) as worker:
        wait_until(lambda: len(app.notes("ran")) == len(JUNK), what="the good messages")
        wait_until(lambda: depth(amqp_url, "default.dlq") == len(JUNK), what="the dead letters")
        assert worker.terminate() == 0

    assert depth(amqp_url, "default") == 0
    assert {dead.body for dead in take(amqp_url, "default.dlq")} == set(JUNK.values())


# -- readable, and strange

STRANGE = {
    "another queue's name": changed(queue_name="another"),
    "no queue's name": changed(queue_name=""),
    "a field from the future": changed(trace_id="abc"),
    "a long id": changed(message_id="i" * 300),
    "a long id beyond ASCII": changed(message_id="\N{ROCKET}" * 300),
    "half a character in its id": changed(message_id="\ud83d"),
    "an empty id": changed(message_id=""),
    "no id": changed(message_id=...),
    "no time": changed(message_timestamp=...),
    "a time beyond the calendar": changed(message_timestamp=10**30),
    "an eta that is a text": changed(options={"eta": "soon"}),
    "retries that are a text": changed(options={"retries": "many", "max_retries": "more"}),
    "backoffs that are none": changed(options={"min_backoff": "x", "max_backoff": []}),
    "expected errors that are none": changed(options={"throws": 1}),
    "limits that are none": changed(options={"time_limit": "x", "max_age": {}}),
    "infinite retries": changed(options={"max_retries": float("inf")}),
    "endless backoff": changed(options={"min_backoff": 10**400}),
    "options nested deep": changed(options={"x": "HERE"}).replace(b'"HERE"', b"[" * 700 + b"]" * 700),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_message_runs(crew: Crew, kind: str) -> None:
    """What can be read is run, and as a message of the queue that it came from."""
    publish(crew.url, "default", STRANGE[kind])

    wait_until(lambda: crew.app.notes("ran"), SOON_S, "the message to run")
    crew.all_threads_work()

    assert len(crew.app.notes("ran")) == 1
    assert depth(crew.url, "default.dlq") == 0


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_message_that_fails_is_a_dead_letter_of_its_queue(crew: Crew, kind: str) -> None:
    """The way of a failure is longer than that of a success, and as safe."""
    body = STRANGE[kind].replace(b'"job"', b'"fails"')

    publish(crew.url, "default", body)

    (dead,) = crew.dead_letters()
    crew.all_threads_work()
    assert dead.body == body
    assert dead.headers["x-safeops-reason"] == "retries_exhausted"
    assert dead.headers["x-safeops-exception-message"] == "as always"
    assert dead.headers["x-safeops-attempts"] == len(crew.app.notes("failed")) == 2


def test_strange_messages_are_settled_when_they_have_run(amqp_url: str, tmp_path: Path) -> None:
    """What stays un-acked takes a place in the worker for ever, and runs again after the next deploy."""
    app = App(tmp_path / "app", ACTORS, amqp_url)
    with app.worker(threads=THREADS) as worker:
        publish_many(amqp_url, "default", STRANGE.values())
        wait_until(lambda: len(app.notes("ran")) == len(STRANGE), what="the messages to run")
        assert worker.terminate() == 0

    assert depth(amqp_url, "default") == depth(amqp_url, "default.dlq") == 0
    assert len(app.notes("ran")) == len(STRANGE)


@pytest.mark.parametrize(
    "options", [{"pipe_target": 5}, {"on_success": "nobody"}, {"on_success": {"a": 1}}], ids=json.dumps
)
def test_a_message_whose_follow_up_cannot_be_sent_says_so(crew: Crew, options: dict[str, Any]) -> None:
    """A chain that ends in the middle without a word is a lost message."""
    publish(crew.url, "default", changed(options=options))

    (dead,) = crew.dead_letters()
    crew.all_threads_work()
    assert dead.headers["x-safeops-reason"] == "follow_up_failed"
    assert len(crew.app.notes("ran")) == 1


def test_a_failure_callback_that_cannot_be_sent_takes_no_retry_away(crew: Crew) -> None:
    """In a rolling deploy an old worker may not know the actor that is to be told; the message must live."""
    publish(crew.url, "default", body_of("fails", on_failure="nobody"))

    (dead,) = crew.dead_letters()
    crew.all_threads_work()
    assert dead.headers["x-safeops-reason"] == "retries_exhausted"
    assert dead.headers["x-safeops-exception-message"] == "as always"
    assert len(crew.app.notes("failed")) == 2


# -- headers of foreign producers, which pika would not write


class RawHeaders(pika.BasicProperties):
    """Properties whose header table is given in bytes."""

    def __init__(self, table: bytes) -> None:
        super().__init__()
        self.table = table

    def encode(self) -> list[bytes]:
        return [struct.pack(">HI", self.FLAG_HEADERS, len(self.table)), self.table]


def header(name: bytes, kind: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + kind + value


def long(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def deep_table(depth: int) -> bytes:
    table = b""
    for _ in range(depth):
        table = header(b"t", b"F", long(table))
    return table


HOSTILE_VALUES = {
    "a text": b"S" + long(b"many"),
    "a text that is not UTF-8": b"S" + long(b"\xff\xfe"),
    "bytes": b"x" + long(b"\x00\xff"),
    "true": b"t\x01",
    "a negative number": b"l" + struct.pack(">q", -(2**62)),
    "a huge number": b"l" + struct.pack(">q", 2**62),
    "a fraction": b"d" + struct.pack(">d", 1.5),
    "a decimal": b"D" + struct.pack(">BI", 255, 15),
    "a list": b"A" + long(b"S" + long(b"x")),
    "a table": b"F" + long(b""),
    "a nothing": b"V",
}
STATE = [b"retries", b"parks", b"parked-ms", b"first-seen-ms", b"failed-at-ms", b"traceback", b"options"]
DELAY = [b"due-ms", b"left-ms"]


def ours(value: bytes, names: list[bytes]) -> bytes:
    return b"".join(header(b"x-safeops-" + name, value[:1], value[1:]) for name in names)


HOSTILE_TABLES = {
    **{f"ours with {kind}": ours(value, STATE + DELAY) for kind, value in HOSTILE_VALUES.items()},
    # As a delay it would be one, of 100,000 years.
    "ours with a huge number": ours(HOSTILE_VALUES["a huge number"], STATE),
    "a name that is not UTF-8": header(b"\xff\xfe", b"S", long(b"x")),
    "130 kB of headers": header(b"big", b"S", long(b"x" * 130_000)),
    "10,000 headers": b"".join(header(b"h%d" % number, b"t", b"\x01") for number in range(10_000)),
    "options of ours that Dramatiq trips over": header(
        b"x-safeops-options",
        b"S",
        long(b'{"eta": 9999999999999, "throws": 1, "retries": "x", "time_limit": []}'),
    ),
    "options of ours that are none": header(b"x-safeops-options", b"S", long(b'["a"]')),
    "options of ours that are deep": header(b"x-safeops-options", b"S", long(b"[" * 4_000)),
}

#: What pika raises for: with it alone, RabbitMQ would deliver the message again on each new connection, for ever.
UNDECODABLE_TABLES = {
    "an instant in milliseconds": header(b"sent-at", b"T", struct.pack(">Q", 1_700_000_000_000)),
    "an instant without end": header(b"sent-at", b"T", struct.pack(">Q", 2**63)),
    "a table 2,000 deep": deep_table(2_000),
}


def publish_with_table(url: str, body: bytes, table: bytes) -> None:
    with channel(url) as ch:
        ch.confirm_delivery()
        ch.basic_publish("", "default", body, RawHeaders(table), mandatory=True)


@pytest.mark.parametrize("kind", HOSTILE_TABLES)
def test_hostile_headers_stop_nobody(crew: Crew, kind: str) -> None:
    """A header is data from outside, too: in every case the message has an outcome, and the next ones run."""
    failing, junk = body_of("fails"), noise(50)

    for body in (body_of("job"), failing, junk):
        publish_with_table(crew.url, body, HOSTILE_TABLES[kind])

    wait_until(lambda: crew.app.notes("ran"), SOON_S, "the good message to run")
    dead = {seen.body: seen.headers["x-safeops-reason"] for seen in crew.dead_letters(2)}
    crew.all_threads_work()
    assert dead == {failing: "retries_exhausted", junk: "unreadable"}
    assert len(crew.app.notes("ran")) == 1


@pytest.mark.parametrize("kind", UNDECODABLE_TABLES)
def test_headers_that_cannot_be_decoded_stop_nobody(crew: Crew, kind: str) -> None:
    """A producer that counts in milliseconds must not keep a whole queue from being consumed."""
    bodies = [body_of("job"), body_of("fails"), noise(50)]

    for body in bodies:
        publish_with_table(crew.url, body, UNDECODABLE_TABLES[kind])

    dead = {seen.body: seen.headers["x-safeops-reason"] for seen in crew.dead_letters(3)}
    crew.all_threads_work()
    assert dead == dict.fromkeys(bodies, "unreadable")
    assert not crew.app.notes("ran")


def test_properties_that_are_no_text_stop_nobody(crew: Crew) -> None:
    """AMQP says that they are UTF-8, and nobody checks."""
    for actor in ("job", "fails", "nobody"):
        publish(
            crew.url, "default", body_of(actor), message_id=b"\xff\xfe", type=b"\xff", correlation_id=b"\xff"
        )

    wait_until(lambda: crew.app.notes("ran"), SOON_S, "the good message to run")
    (dead,) = crew.dead_letters()
    crew.all_threads_work()
    assert dead.properties.correlation_id == b"\xff"


def test_the_copies_of_a_message_go_to_its_own_queue_only(amqp_url: str, tmp_path: Path) -> None:
    """RabbitMQ also sends a message to the queues in its CC header. Its retries must not go there again."""
    source = """
        @dramatiq.actor(max_retries=1, min_backoff=50, max_backoff=50, time_limit=20_000)
        def fails():
            raise ValueError("as always")

        @dramatiq.actor(queue_name="audit", time_limit=20_000)
        def audits():
            pass
    """
    app = App(tmp_path / "app", source, amqp_url)
    app.send("broker.declare_queue('audit', ensure=True)")
    with app.worker(arguments=("-Q", "default")):
        publish(amqp_url, "default", body_of("fails"), headers={"CC": ["audit"]})

        wait_until(lambda: depth(amqp_url, "default.dlq") == 1, SOON_S, "a dead letter")

    assert depth(amqp_url, "audit") == 1
    assert depth(amqp_url, "audit.dlq") == 0


# -- the twins


def test_stock_takes_an_unreadable_message_again_and_again(amqp_url: str, tmp_path: Path) -> None:
    """The twin: ``"options": null`` breaks the consumer, which comes back after 3 s and gets it once more."""
    app = App(tmp_path / "app", ACTORS, amqp_url, broker="stock")
    app.send("broker.declare_queue('default', ensure=True)")
    publish(amqp_url, "default", JUNK["options that are null"])
    publish(amqp_url, "default", body_of("job"))
    with app.worker(threads=THREADS) as worker:
        broken = "Consumer encountered an unexpected error"
        wait_until(lambda: worker.text.count(broken) == 2, what="the consumer to break twice")

    assert depth(amqp_url, "default.XQ") == 0
    assert not app.notes("ran")


def test_stock_loses_a_thread_to_a_message_that_names_another_queue(amqp_url: str, tmp_path: Path) -> None:
    """The twin: the thread dies when it has run the actor, and the message will run again."""
    app = App(tmp_path / "app", ACTORS, amqp_url, broker="stock")
    app.send("broker.declare_queue('default', ensure=True)")
    with app.worker(threads=1) as worker:
        publish(amqp_url, "default", STRANGE["another queue's name"])

        worker.wait_for_log("Exception in thread")
        worker.kill()

    assert app.notes("ran")
    wait_until(lambda: depth(amqp_url, "default") == 1, what="the message to be back")
