"""What travels: the publications about a message, and the headers that carry its state from one to the next.

Runs in: every process. Needs: nothing. Thread-safe: data in, data out.

The body of a message is the producer's and never changes. What we learn about it (attempts, parks, when it is due)
travels in ``x-safeops-*`` headers, and the view that Dramatiq sees is made from both.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pika
import pika.data

from ..delivery import Delivery
from ..options import count_in
from .delays import Hop, first_hop, next_hop, step_name
from .publication import Need, Publication
from .topology import DEAD_LETTER_EXCHANGE

if TYPE_CHECKING:
    from dramatiq import Message

RETRIES = "x-safeops-retries"
PARKS = "x-safeops-parks"
PARKED_MS = "x-safeops-parked-ms"
FIRST_SEEN = "x-safeops-first-seen-ms"
FAILED_AT = "x-safeops-failed-at-ms"
TRACEBACK = "x-safeops-traceback"
OPTIONS = "x-safeops-options"
DUE = "x-safeops-due-ms"
LEFT = "x-safeops-left-ms"

#: What RabbitMQ adds on the way. 4.x ignores these from clients, 3.10 goes on counting in them: neither helps us.
_BROKER_HEADERS = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")

#: What RabbitMQ itself obeys: a copy would also go to these queues, and each retry again.
_ROUTING_HEADERS = frozenset({"CC", "BCC"})

#: Options of the view that come from headers, not from the body.
_MANAGED_OPTIONS = frozenset({"retries", "traceback", "requeue_timestamp", "eta", "throws"})

#: What other middleware changed in a message's options travels in one header of at most this many bytes.
OPTIONS_LIMIT = 4096

#: The share of a frame (one part in so many) that a traceback may take: it is text of up to 4 bytes a character.
TRACEBACK_SHARE = 16

#: Bytes of a producer's own headers that travel on. RabbitMQ closes the connection over headers that do not fit one
#: frame, and ours come on top.
FOREIGN_LIMIT = 32_768

#: AMQP's short strings (message id, routing key) hold 255 bytes.
_SHORT_STRING = 255


def now_ms() -> int:
    """Return the Unix time in milliseconds."""
    return int(time.time() * 1000)


# -- on arrival


def read_headers(delivery: Delivery) -> None:
    """Take the state that travels in headers. Headers come from outside: what makes no sense counts as absent."""
    headers = delivery.headers
    delivery.retries = count_in(headers, RETRIES)
    first_seen = count_in(headers, FIRST_SEEN)
    delivery.first_seen_ms = first_seen if first_seen > 0 else now_ms()


def view_of(delivery: Delivery, message: Message[Any]) -> Message[Any]:
    """Return ``message`` with the options that Dramatiq's middlewares expect after a retry."""
    headers = delivery.headers
    options = message.options
    # Dramatiq hands it to isinstance() and would lose the worker thread over a string. Ours reads the actor's only.
    options.pop("throws", None)
    changed = headers.get(OPTIONS)
    if isinstance(changed, str) and len(changed) <= OPTIONS_LIMIT:
        try:
            changes = json.loads(changed)
        except (ValueError, RecursionError):
            changes = None
        if isinstance(changes, dict):
            options.update(changes)
            options.pop("throws", None)
            options.pop("eta", None)  # Dramatiq would hold the message in this worker's memory
    if RETRIES not in headers:
        # A stock worker's retry keeps its count in the body.
        delivery.retries = count_in(options, "retries")
    if delivery.retries:
        options["retries"] = delivery.retries
        if failed_at := count_in(headers, FAILED_AT):
            options["requeue_timestamp"] = failed_at
        if isinstance(traceback := headers.get(TRACEBACK), str):
            options["traceback"] = traceback
    else:
        options.pop("retries", None)
    return message


def next_hop_of(delivery: Delivery) -> Hop | None:
    """Return the next hop of a delivery that came out of the delay ladder too early, or None if it is due."""
    if DUE not in delivery.headers:
        return None
    return next_hop(
        due_ms=count_in(delivery.headers, DUE), left_ms=count_in(delivery.headers, LEFT), now_ms=now_ms()
    )


# -- on the way out


def new_message(message: Message[Any], body: bytes, *, delay_ms: float | None = None) -> Publication:
    """Return the publication of a message that is sent for the first time."""
    priority = message.options.get("broker_priority")
    properties = pika.BasicProperties(
        delivery_mode=2,
        priority=priority if isinstance(priority, int) else None,
        message_id=short(message.message_id),
        timestamp=int(time.time()),
        content_type="application/json" if body[:1] == b"{" else None,
        type=short(message.actor_name),
    )
    if delay_ms is None or delay_ms <= 0:
        return _to_queue(message.queue_name, body, properties)
    hop = first_hop(delay_ms, now_ms=now_ms(), exact=True)
    properties.headers = {DUE: hop.due_ms, LEFT: hop.left_ms}
    return _to_step(hop, message.queue_name, body, properties)


def retry_copy(
    delivery: Delivery, delay_ms: float, *, changed_options: Mapping[str, Any], frame_max: int
) -> Publication:
    """Return the copy that runs again as the next attempt, after ``delay_ms``."""
    headers = _state(delivery)
    headers[RETRIES] = delivery.retries + 1
    headers[FAILED_AT] = now_ms()
    headers.pop(PARKS, None)
    headers.pop(PARKED_MS, None)
    headers.pop(OPTIONS, None)
    if delivery.failure is not None:
        headers[TRACEBACK] = delivery.failure.traceback[-frame_max // TRACEBACK_SHARE :]
    if changed_options:
        text = json.dumps(changed_options, separators=(",", ":"))
        if len(text) <= OPTIONS_LIMIT:
            headers[OPTIONS] = text
    return _copy_after(delivery, headers, delay_ms)


def parked_copy(delivery: Delivery, delay_ms: float) -> Publication:
    """Return the copy that is looked at again after ``delay_ms``, with nothing charged."""
    headers = _state(delivery)
    headers[PARKS] = count_in(headers, PARKS) + 1
    # The waits are added up: instants would be compared between the clocks of different machines.
    headers[PARKED_MS] = count_in(headers, PARKED_MS) + math.ceil(delay_ms)
    return _copy_after(delivery, headers, delay_ms)


def delayed_copy(delivery: Delivery) -> Publication:
    """Return the copy that waits on in the ladder; straight to its queue if it has come due in this moment."""
    headers = _state(delivery)
    hop = next_hop_of(delivery)
    if hop is None:
        headers.pop(DUE, None)
        return _to_queue(delivery.queue, delivery.body, _properties(delivery, headers))
    headers[DUE], headers[LEFT] = hop.due_ms, hop.left_ms
    return _to_step(hop, delivery.queue, delivery.body, _properties(delivery, headers))


def dead_letter(delivery: Delivery, record: Mapping[str, Any]) -> Publication:
    """Return the dead letter: the producer's bytes, with ``record`` in the headers."""
    foreign = {name: value for name, value in _state(delivery).items() if not name.startswith("x-safeops-")}
    headers = {**foreign, **record}
    return Publication(
        DEAD_LETTER_EXCHANGE,
        delivery.queue,
        delivery.body,
        _properties(delivery, headers),
        needs=[("queue", delivery.queue)],
    )


def bare_dead_letter(delivery: Delivery, reason: str, detail: str) -> Publication:
    """Return the least that a dead letter can be: the bytes and why. For when the full one cannot be made or published."""
    known = delivery.properties.message_id or delivery.known_id
    properties = pika.BasicProperties(
        delivery_mode=2,
        message_id=short(known) if known else None,
        headers={
            "x-safeops-reason": reason,
            "x-safeops-detail": short(detail),
            "x-safeops-queue": delivery.queue,
        },
    )
    return Publication(
        DEAD_LETTER_EXCHANGE, delivery.queue, delivery.body, properties, needs=[("queue", delivery.queue)]
    )


def is_dead_letter(publication: Publication) -> bool:
    """Whether ``publication`` is a dead letter."""
    return publication.exchange == DEAD_LETTER_EXCHANGE


def changed_options(delivery: Delivery, decode: Callable[[bytes, str], Message[Any]]) -> dict[str, Any]:
    """Return what middleware changed in the options of the view, as far as it can travel."""
    before = decode(delivery.body, delivery.queue).options
    changes = {
        name: value
        for name, value in delivery.options.items()
        if name not in _MANAGED_OPTIONS and (name not in before or before[name] != value)
    }
    return {name: value for name, value in changes.items() if _fits_json(value)}


def short(text: object) -> str:
    """Return ``text`` cut to what fits into an AMQP short string."""
    return str(text).encode(errors="replace")[:_SHORT_STRING].decode(errors="ignore")


def _copy_after(delivery: Delivery, headers: dict[str, Any], delay_ms: float) -> Publication:
    headers.pop(DUE, None)
    headers.pop(LEFT, None)
    if delay_ms <= 0:
        return _to_queue(delivery.queue, delivery.body, _properties(delivery, headers))
    hop = first_hop(delay_ms, now_ms=now_ms(), exact=False)
    if hop.left_ms > 0:
        headers[DUE], headers[LEFT] = hop.due_ms, hop.left_ms
    return _to_step(hop, delivery.queue, delivery.body, _properties(delivery, headers))


def _state(delivery: Delivery) -> dict[str, Any]:
    """Return the headers that go on travelling: the producer's own, and our state."""
    ours: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    for name, value in delivery.headers.items():
        if not isinstance(name, str):
            continue  # bytes that are no UTF-8: pika reads such names but cannot write them
        if name.startswith("x-safeops-"):
            ours[name] = value
        elif not name.startswith(_BROKER_HEADERS) and name not in _ROUTING_HEADERS:
            foreign[name] = value
    if foreign and not _encodable(foreign, FOREIGN_LIMIT):
        foreign = {}
    if not _encodable(ours, FOREIGN_LIMIT):
        ours = {}  # somebody plays with us
    return {**foreign, **ours, FIRST_SEEN: delivery.first_seen_ms}


def _properties(delivery: Delivery, headers: dict[str, Any]) -> pika.BasicProperties:
    old = delivery.properties
    return pika.BasicProperties(
        app_id=old.app_id,
        content_encoding=old.content_encoding,
        content_type=old.content_type,
        correlation_id=old.correlation_id,
        delivery_mode=2,
        headers=headers,
        # A message from stock Dramatiq has its id in the body only.
        message_id=old.message_id or (short(delivery.message_id) if delivery.readable else None),
        priority=old.priority,
        reply_to=old.reply_to,
        timestamp=old.timestamp,
        type=old.type,
        # expiration would let the copy vanish, user_id must be that of our own connection.
    )


def _to_queue(queue_name: str, body: bytes, properties: pika.BasicProperties) -> Publication:
    return Publication("", queue_name, body, properties, needs=[("queue", queue_name)])


def _to_step(hop: Hop, queue_name: str, body: bytes, properties: pika.BasicProperties) -> Publication:
    needs: list[Need] = [("queue", queue_name), ("delay", hop.step_ms)]
    return Publication(step_name(hop.step_ms), queue_name, body, properties, needs=needs)


def _encodable(headers: dict[str, Any], limit: int) -> bool:
    try:
        return int(pika.data.encode_table([], headers)) <= limit
    except Exception:
        return False


def _fits_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
