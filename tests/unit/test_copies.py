"""What travels with a message from one attempt to the next, and what a stranger's headers can do to it.

A count that is lost on the way retries for ever; a byte of the body that changes breaks whoever checks a signature; and
whatever cannot be published keeps its message un-acked, and with it a place in the worker.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pika
import pika.spec
import pytest
from dramatiq import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from dramatiq_safeops.dead_letter import ExceptionRecord
from dramatiq_safeops.delivery import Delivery
from dramatiq_safeops.encoder import decode
from dramatiq_safeops.options import count_in
from dramatiq_safeops.rabbitmq import copies
from dramatiq_safeops.rabbitmq.publication import Publication

FRAME_MAX = 131_072

#: Spaces, an escape that nobody needs and a key of the producer's own: rebuilt from its meaning it would differ.
BODY = (
    b'{"queue_name": "elsewhere", "actor_name":"build", "args":[1, "\\u00e9"],  "kwargs":{"b":2.50},'
    b' "options":{"eta": 1772000000000, "redis_message_id": "r-1", "tags": ["a"], "note": null},'
    b' "message_id":"m-1", "message_timestamp":1772000000000}'
)


def over_the_wire(properties: pika.BasicProperties) -> pika.BasicProperties:
    """Return ``properties`` as the next worker gets them: encoded and decoded as AMQP."""
    arrived = pika.BasicProperties()
    arrived.decode(b"".join(properties.encode()))
    return arrived


def arrive(
    body: bytes = BODY, *, queue: str = "reports", headers: Any = None, properties: Any = None
) -> Delivery:
    """A delivery as the broker admits it: headers read, and the view shown if there is one."""
    if properties is None:
        properties = pika.BasicProperties(headers=headers)
    delivery = Delivery(
        SimpleNamespace(gone=False, batches=set()),  # type: ignore[arg-type]
        1,
        queue=queue,
        body=body,
        properties=over_the_wire(properties),
        redelivered=False,
    )
    copies.read_headers(delivery)
    delivery.show(copies.view_of(delivery, decode(body, queue)))
    return delivery


def again(publication: Publication) -> Delivery:
    """The delivery that becomes of a copy."""
    return arrive(publication.body, properties=publication.properties)


def retried(delivery: Delivery, *, delay_ms: float = 1_000, traceback: str = "Traceback: 1") -> Publication:
    delivery.failure = ExceptionRecord("ValueError", "no route", traceback)
    changed = copies.changed_options(delivery, decode)
    return copies.retry_copy(delivery, delay_ms, changed_options=changed, frame_max=FRAME_MAX)


def dead(delivery: Delivery) -> Publication:
    return copies.dead_letter(delivery, {"x-safeops-reason": "retries_exhausted", "x-safeops-attempts": 5})


# --- state --------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["retry", "park", "delay"]), max_size=12))
@settings(max_examples=150, deadline=None)
def test_what_is_known_about_a_message_survives_any_way_through_the_ladder(way: list[str]):
    """Hurts everybody: a lost count retries for ever, a wrong one buries a message too early."""
    delivery = arrive(headers={"x-trace": "t-1"})
    first_seen = delivery.first_seen_ms
    retries = parks = waited = 0
    for step in way:
        if step == "retry":
            publication, retries, parks, waited = retried(delivery), retries + 1, 0, 0
        elif step == "park":
            publication, parks, waited = copies.parked_copy(delivery, 1_500), parks + 1, waited + 1_500
        else:
            delivery.headers = {**delivery.headers, copies.DUE: copies.now_ms() + 60_000, copies.LEFT: 60_000}
            publication = copies.delayed_copy(delivery)
        delivery = again(publication)

        assert delivery.body == BODY
        assert delivery.retries == retries
        assert delivery.attempt == retries + 1
        assert count_in(delivery.headers, copies.PARKS) == parks
        assert count_in(delivery.headers, copies.PARKED_MS) == waited
        assert delivery.first_seen_ms == first_seen
        assert delivery.headers["x-trace"] == "t-1"
        assert delivery.message_id == "m-1"
        assert delivery.properties.message_id == "m-1"


def test_the_producers_bytes_are_what_is_published_always():
    """Hurts whoever signs messages, or looks for them by their text in the RabbitMQ UI."""
    delivery = arrive(headers={copies.DUE: 1, copies.LEFT: 0})
    delivery.options["changed"] = True

    publications = [
        retried(delivery),
        copies.parked_copy(delivery, 1_000),
        copies.delayed_copy(delivery),
        dead(delivery),
    ]

    assert [one.body for one in publications] == [BODY] * 4


def test_the_view_belongs_to_the_queue_it_was_read_from_and_has_no_eta():
    """Hurts a message moved by hand: by its body it would go back to where it came from, or wait in a worker's memory."""
    delivery = arrive(queue="reports.big")

    assert delivery.queue_name == "reports.big"
    assert "eta" not in delivery.options
    assert "retries" not in delivery.options
    assert delivery.args == (1, "é")


def test_after_a_retry_the_view_has_what_dramatiqs_middlewares_look_for():
    """Hurts users of middlewares that read ``retries`` and ``traceback`` from the options."""
    before = copies.now_ms()

    delivery = again(retried(again(retried(arrive())), traceback="Traceback: 2"))

    assert delivery.options["retries"] == 2
    assert delivery.options["traceback"] == "Traceback: 2"
    assert before <= delivery.options["requeue_timestamp"] <= copies.now_ms()


def test_a_retry_that_a_stock_worker_has_counted_in_the_body_counts():
    """Hurts a fleet with both kinds of workers: the attempts of one must not start anew with the other."""
    body = BODY.replace(b'"note": null', b'"retries": 3')

    delivery = arrive(body)
    assert delivery.retries == 3
    assert delivery.options["retries"] == 3

    assert again(retried(delivery)).retries == 4


def test_a_retry_forgets_the_parks_before_it():
    """Hurts a message that was parked for an hour before its actor came back: it must be parked anew, not buried."""
    parked = again(copies.parked_copy(arrive(), 5_000))

    delivery = again(retried(parked))

    assert copies.PARKS not in delivery.headers
    assert copies.PARKED_MS not in delivery.headers


# --- options that middleware changed ------------------------------------------------------------


def test_what_middleware_changed_in_the_options_is_there_in_the_next_attempt():
    """Hurts users of middlewares that leave themselves a note: Dramatiq writes the whole message anew, we do not."""
    delivery = arrive()
    delivery.options["tenant"] = {"id": 7, "name": "é"}
    delivery.options["tags"] = ["a", "b"]

    second = again(retried(delivery))
    assert second.options["tenant"] == {"id": 7, "name": "é"}
    assert second.options["tags"] == ["a", "b"]
    assert second.options["redis_message_id"] == "r-1"

    third = again(retried(second))
    assert third.options["tenant"] == {"id": 7, "name": "é"}
    assert again(copies.parked_copy(third, 1_000)).options["tags"] == ["a", "b"]


def test_a_change_that_was_taken_back_does_not_come_back():
    """Hurts users of middlewares that count down: the attempt after the last would start at the first value."""
    delivery = arrive()
    delivery.options["tags"] = ["a", "b"]
    second = again(retried(delivery))

    second.options["tags"] = ["a"]

    assert again(retried(second)).options["tags"] == ["a"]


def test_only_the_changes_travel_and_nothing_that_is_managed_elsewhere():
    """Hurts nobody if it holds: headers have to fit into one frame."""
    delivery = arrive()
    delivery.options.update(tenant=7, retries=9, traceback="long", requeue_timestamp=1, eta=1)

    assert copies.changed_options(delivery, decode) == {"tenant": 7}


def test_options_that_json_does_not_know_stay_behind_and_the_others_travel():
    """Hurts users of middlewares that keep objects in the options: the retry must not fail over them."""
    delivery = arrive()
    delivery.options.update(tenant=7, connection=object(), seen={1, 2})

    assert again(retried(delivery)).options["tenant"] == 7


@pytest.mark.parametrize(("size", "travels"), [(4_000, True), (5_000, False), (10**6, False)])
def test_changed_options_travel_up_to_four_kilobytes(size: int, travels: bool):
    """Hurts a message with a huge option: headers that do not fit one frame close the whole connection."""
    delivery = arrive()
    delivery.options["tenant"] = "x" * size

    publication = retried(delivery)

    assert ("tenant" in again(publication).options) == travels
    assert len(b"".join(publication.properties.encode())) < FRAME_MAX / 2


# --- headers ------------------------------------------------------------------------------------

BROKERS_OWN = {
    "x-death": [{"queue": "safeops.delay.1s", "reason": "expired", "count": 1}],
    "x-first-death-queue": "safeops.delay.1s",
    "x-first-death-reason": "expired",
    "x-first-death-exchange": "safeops.delay.1s",
    "x-last-death-queue": "safeops.delay.1s",
    "x-last-death-reason": "expired",
    "x-last-death-exchange": "safeops.delay.1s",
    "x-delivery-count": 3,
    "x-acquired-count": 4,
}


@pytest.mark.parametrize("kind", ["retry", "park", "delay", "dead"])
def test_what_rabbitmq_added_on_the_way_is_taken_off_and_the_producers_headers_stay(kind: str):
    """Hurts RabbitMQ: x-death grows with each hop, and one that is sent in by a client confuses its cycle detection."""
    delivery = arrive(headers={**BROKERS_OWN, "x-trace": "t-1", "tenant": 7, copies.DUE: 1, copies.LEFT: 0})
    publication = {
        "retry": retried,
        "park": lambda one: copies.parked_copy(one, 1_000),
        "delay": copies.delayed_copy,
        "dead": dead,
    }[kind](delivery)

    headers = publication.properties.headers
    assert not set(BROKERS_OWN) & set(headers)
    assert (headers["x-trace"], headers["tenant"]) == ("t-1", 7)


def test_a_dead_letter_carries_its_record_and_none_of_the_state():
    """Hurts whoever replays a dead letter: with the old counts it would die at its first failure."""
    delivery = again(copies.parked_copy(again(retried(arrive(headers={"x-trace": "t-1"}))), 1_000))

    publication = dead(delivery)

    assert publication.exchange == "safeops.dlx"
    assert publication.routing_key == "reports"
    assert publication.properties.headers == {
        "x-safeops-reason": "retries_exhausted",
        "x-safeops-attempts": 5,
        "x-trace": "t-1",
    }


@pytest.mark.parametrize("kind", ["retry", "dead"])
def test_a_copy_keeps_the_producers_properties_but_those_that_would_harm_it(kind: str):
    """Hurts a copy with the producer's expiration: it would vanish from the ladder, or from the dead letters."""
    properties = pika.BasicProperties(
        app_id="shop",
        content_encoding="utf-8",
        content_type="application/json",
        correlation_id="c-1",
        delivery_mode=1,
        expiration="1000",
        message_id="m-1",
        priority=3,
        reply_to="answers",
        timestamp=1_772_000_000,
        type="build",
        user_id="guest",
    )
    delivery = arrive(properties=properties)

    copy = (retried(delivery) if kind == "retry" else dead(delivery)).properties

    assert copy.expiration is None
    assert copy.user_id is None  # it must be that of the connection that publishes
    assert copy.delivery_mode == 2
    for name in ("app_id", "content_encoding", "content_type", "correlation_id", "message_id", "priority"):
        assert getattr(copy, name) == getattr(properties, name)
    for name in ("reply_to", "timestamp", "type"):
        assert getattr(copy, name) == getattr(properties, name)


def test_a_new_message_says_what_it_is_to_people_and_tools():
    """Hurts whoever looks at a queue in the RabbitMQ UI."""
    message = Message("reports", "build", (1,), {}, {"broker_priority": 4}, "m-1", 1_772_000_000_000)

    publication = copies.new_message(message, BODY)

    properties = publication.properties
    assert (publication.exchange, publication.routing_key) == ("", "reports")
    assert (properties.message_id, properties.type, properties.priority) == ("m-1", "build", 4)
    assert properties.delivery_mode == 2
    assert properties.content_type == "application/json"
    assert abs(properties.timestamp - time.time()) < 60
    assert properties.headers is None


def test_a_delayed_new_message_waits_in_the_ladder_until_it_is_due():
    """Hurts users of ``send_with_options(delay=)``."""
    message = Message("reports", "build", (1,), {}, {}, "m-1", 1_772_000_000_000)
    before = copies.now_ms()

    publication = copies.new_message(message, BODY, delay_ms=3_000)

    assert publication.exchange.startswith("safeops.delay.")
    assert publication.routing_key == "reports"
    due = publication.properties.headers[copies.DUE]
    assert before + 3_000 <= due <= copies.now_ms() + 3_000
    assert ("queue", "reports") in publication.needs
    early = again(publication)
    assert copies.next_hop_of(early) is not None


@pytest.mark.parametrize("delay_ms", [0, -1, None])
def test_no_delay_goes_straight_to_the_queue(delay_ms: float | None):
    """Hurts users of a backoff of 0: the smallest step would cost a quarter of a second."""
    message = Message("reports", "build", (1,), {}, {}, "m-1", 1_772_000_000_000)
    assert copies.new_message(message, BODY, delay_ms=delay_ms).exchange == ""

    retry = retried(arrive(), delay_ms=delay_ms or 0)

    assert (retry.exchange, retry.routing_key) == ("", "reports")
    assert copies.next_hop_of(again(retry)) is None


@pytest.mark.parametrize("name", ["m" * 300, "é" * 200, "half a pair \ud800", "", "\x00"])
def test_ids_that_amqp_cannot_carry_are_cut_in_the_property_and_whole_in_the_body(name: str):
    """Hurts the caller of ``send()``: one odd id must not close the connection that all threads share."""
    message = Message("reports", name, (), {}, {}, name, 1_772_000_000_000)

    properties = over_the_wire(copies.new_message(message, BODY).properties)

    assert len((properties.message_id or "").encode()) <= 255
    assert len((properties.type or "").encode()) <= 255


# --- what strangers send ------------------------------------------------------------------------

OURS = [
    copies.RETRIES,
    copies.PARKS,
    copies.PARKED_MS,
    copies.FIRST_SEEN,
    copies.FAILED_AT,
    copies.TRACEBACK,
    copies.OPTIONS,
    copies.DUE,
    copies.LEFT,
    "x-safeops-",
    "x-safeops-replay",
]

amqp_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.text(max_size=50),
        st.binary(max_size=50),
        st.decimals(-1_000, 1_000, places=2),
        st.datetimes(min_value=datetime(1970, 1, 1)),
        st.sampled_from(["1", '{"eta": 1}', "[]", '{"retries": -1}', '{"tags": ', "9" * 5_000, "[" * 4_000]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)

hostile_headers = st.dictionaries(
    st.sampled_from(OURS)
    | st.sampled_from(list(BROKERS_OWN))
    | st.text(max_size=20)
    | st.binary(max_size=20),
    amqp_values,
    max_size=8,
)


@given(headers=hostile_headers)
@settings(max_examples=600, deadline=None)
def test_no_header_of_a_stranger_breaks_a_worker_or_what_it_publishes(headers: dict[Any, Any]):
    """Hurts the whole worker: a message that cannot be settled stays un-acked and holds its place for good."""
    delivery = arrive(headers=headers)

    assert delivery.retries >= 0
    assert delivery.first_seen_ms > 0
    assert "eta" not in delivery.options
    assert delivery.options.get("retries", 0) == delivery.retries
    copies.next_hop_of(delivery)

    publications = [
        retried(delivery, delay_ms=2_000),
        copies.parked_copy(delivery, 2_000),
        dead(delivery),
        *([copies.delayed_copy(delivery)] if copies.DUE in headers else []),
    ]
    for publication in publications:
        assert publication.body == BODY
        assert len(b"".join(publication.properties.encode())) < FRAME_MAX
    first, second, *_ = (again(one) for one in publications)
    assert first.retries == delivery.retries + 1
    assert second.retries == delivery.retries
    assert count_in(second.headers, copies.PARKED_MS) >= 2_000


@pytest.mark.parametrize("value", [-1, True, "3", 2**60, None, [3], 1.5])
@pytest.mark.parametrize("name", [copies.RETRIES, copies.PARKS, copies.PARKED_MS, copies.FIRST_SEEN])
def test_a_count_that_makes_no_sense_counts_as_absent(name: str, value: Any):
    """Hurts everybody: a header anybody may write must not be able to retry for ever, or to bury at once."""
    assert count_in({name: value}, name) == 0
    assert count_in({name: 3}, name) == 3


@pytest.mark.parametrize(
    "changes", ['{"eta": 99999999999999}', '{"eta": null}', '{"retries": 3, "eta": "soon"}']
)
def test_an_eta_that_comes_in_a_header_is_ignored(changes: str):
    """Hurts the worker: Dramatiq would keep the message in its memory until then, un-acked."""
    assert "eta" not in arrive(headers={copies.OPTIONS: changes}).options


@pytest.mark.parametrize("throws", ["ValueError", ["ValueError"], 5, {"a": 1}, True])
@pytest.mark.parametrize("where", ["body", "header"])
def test_a_message_cannot_say_what_its_actor_throws(throws: Any, where: str):
    """Hurts the worker: Dramatiq asks ``isinstance(exception, throws)``, its thread ends, and the message is acked."""
    options = json.dumps({"throws": throws})
    if where == "body":
        delivery = arrive(BODY.replace(b'"note": null', options[1:-1].encode()))
    else:
        delivery = arrive(headers={copies.OPTIONS: options})

    assert "throws" not in delivery.options


def test_headers_that_would_fill_a_frame_by_themselves_do_not_travel_on():
    """Hurts every other message of the worker: RabbitMQ closes the connection over headers that do not fit."""
    delivery = arrive(headers={"x-blob": "x" * 100_000, copies.RETRIES: 2})

    publications = [
        retried(delivery, traceback="é" * 8_000),
        copies.parked_copy(delivery, 1_000),
        dead(delivery),
    ]

    for publication in publications:
        assert len(b"".join(publication.properties.encode())) < FRAME_MAX
    assert again(publications[0]).retries == 3
    assert again(publications[1]).retries == 2
