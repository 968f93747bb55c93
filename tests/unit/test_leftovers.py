"""When a message that stock Dramatiq has delayed is due, and what can be known of one that it has given up."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pika
import pytest

from dramatiq_safeops.rabbitmq import copies
from dramatiq_safeops.rabbitmq.delays import LONGEST_MS
from dramatiq_safeops.rabbitmq.leftovers import due_headers, eta_of
from dramatiq_safeops.rabbitmq.moving import dead_letter_record, digest, from_staging, to_staging
from dramatiq_safeops.rabbitmq.topology import DEAD_LETTER_EXCHANGE

NOW = 1_800_000_000_000


def body_of(**options: Any) -> bytes:
    fields = {
        "queue_name": "q.DQ",
        "actor_name": "work",
        "args": [],
        "kwargs": {},
        "options": options,
        "message_id": "m1",
        "message_timestamp": NOW - 1000,
    }
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("eta", "left"),
    [
        (NOW + 5_000, 5_000),
        (NOW + 0.5, 1),  # late rather than early
        (NOW - 5_000, 0),
        (None, 0),
        ("soon", 0),
        (True, 0),
        (float("nan"), 0),
        (float("-inf"), 0),
        (-(10**400), 0),
        (10**400, LONGEST_MS),
        (float("inf"), LONGEST_MS),
        (1e300, LONGEST_MS),
    ],
)
def test_a_delay_ends_at_its_eta_and_what_is_none_is_over(eta: object, left: int) -> None:
    """Hurts the whole queue if an odd number breaks something: it is read on the thread that reads all messages."""
    assert due_headers(eta_of(body_of(eta=eta)), now_ms=NOW)[copies.LEFT] == left


@pytest.mark.parametrize("body", [b"", b"junk", b"[]", b'{"options": null}'])
def test_what_is_no_message_has_no_eta(body: bytes) -> None:
    """Junk is a dead letter, for which another part looks."""
    assert eta_of(body) is None


def staged(body: bytes, origin: str, **headers: Any) -> pika.BasicProperties:
    return to_staging("q.migrating", origin)(None, pika.BasicProperties(headers=headers), body).properties  # type: ignore[union-attr]


def test_a_message_out_of_the_staging_queue_goes_to_where_its_kind_is_kept() -> None:
    """Hurts delayed and dead messages: in the work queue they would run at once."""
    copy_of = from_staging("q", "q.DQ", "q.XQ")
    far = body_of(eta=copies.now_ms() + 60_000)

    delayed = copy_of(None, staged(far, "q.DQ"), far)
    dead = copy_of(None, staged(far, "q.XQ"), far)

    assert delayed is not None
    assert dead is not None
    assert (delayed.exchange, delayed.routing_key) == ("", "q")
    assert delayed.properties.headers[copies.DUE] > copies.now_ms()
    assert (dead.exchange, dead.routing_key) == (DEAD_LETTER_EXCHANGE, "q")
    assert "x-safeops-migrated-from" not in {**delayed.properties.headers, **dead.properties.headers}
    assert delayed.body == dead.body == far


def test_a_dead_letter_of_stock_dramatiq_says_what_can_be_known() -> None:
    """Hurts whoever looks at it in the RabbitMQ UI, where x-death is a nested table."""
    death = {
        "reason": "rejected",
        "queue": "q",
        "count": 1,
        "exchange": "",
        "time": datetime(2026, 10, 1, 12, tzinfo=timezone.utc),
    }
    body = body_of(retries=20, traceback="Traceback: boom")

    record = dead_letter_record("q", pika.BasicProperties(headers={"x-death": [death]}), body)

    assert record["x-safeops-reason"] == "dead_lettered_by_stock"
    assert record["x-safeops-failed-at"] == "2026-10-01T12:00:00.000Z"
    assert record["x-safeops-attempts"] == 21
    assert record["x-safeops-traceback"] == "Traceback: boom"
    assert record["x-safeops-actor"] == "work"
    assert record["x-safeops-stock-death-reason"] == "rejected"
    assert "rejected from queue 'q'" in record["x-safeops-detail"]


@pytest.mark.parametrize("headers", [None, {"x-death": "no"}, {"x-death": [1]}, {"x-death": [{"time": 3}]}])
@pytest.mark.parametrize("body", [b"junk", b"[]", b'{"options": [], "actor_name": 3, "message_id": {}}'])
def test_a_dead_letter_that_is_junk_is_one_all_the_same(body: bytes, headers: Any) -> None:
    """Hurts the migration: it must not stop at it."""
    record = dead_letter_record("q", pika.BasicProperties(headers=headers), body)

    assert record["x-safeops-reason"] == "dead_lettered_by_stock"


def test_a_copy_is_known_again_and_others_are_not_taken_for_it() -> None:
    """Hurts whoever goes on with a migration that was cut off: the one would double messages, the other lose them."""
    body = body_of()
    plain = pika.BasicProperties(headers={"x-mine": 1, "x-delivery-count": 3})
    copied = to_staging("q.migrating", "q.DQ")(None, plain, body)
    assert copied is not None

    assert digest(copied.properties, body, dead=False) == digest(plain, body, dead=False)
    # a later attempt, a dead letter that was sent again, another message
    retried = pika.BasicProperties(headers={copies.RETRIES: 1})
    assert digest(retried, body, dead=False) != digest(plain, body, dead=False)
    assert digest(plain, body, dead=True) != digest(plain, body, dead=False)
    assert digest(plain, body_of(retries=1), dead=False) != digest(plain, body, dead=False)
    # what has no id may be there twice
    assert digest(pika.BasicProperties(), b"junk", dead=False) is None
