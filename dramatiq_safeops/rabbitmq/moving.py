"""Moves messages from one queue to another, so that nothing is lost or doubled whoever is killed at whatever moment.

Runs in: the command line, on a blocking connection. Needs: RabbitMQ.

A message is acked where it came from only after RabbitMQ has confirmed it where it goes. Whoever is killed between the two
leaves it in both; so who goes on first looks at what is there already (``digests_in``), and does not copy that again.

Not with RabbitMQ's transactions, the copies and the acks in one: they would need no such look when the mover is killed, but
nothing says that RabbitMQ writes the copies before the acks, and it answers that all is well when a queue refuses a copy
for its length limit (seen on 3.10).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pika
import pika.data
import pika.exceptions

from ..dead_letter import dead_letter_headers
from ..masking import mask
from ..options import count_in
from . import copies
from .leftovers import due_headers, eta_of
from .topology import DEAD_LETTER_EXCHANGE

#: From which queue a message in a staging queue has come, if not from the work queue itself.
ORIGIN = "x-safeops-migrated-from"

#: Messages on their way to this process at a time, and confirmed together.
PREFETCH = 1000
#: What AMQP can say. To leave it open means 2000 to a quorum queue, and not all.
MOST_PREFETCH = 65_535
BATCH = 250

#: Seconds without a message after which a queue is looked at whether it is empty.
PAUSE_S = 0.1

#: How often a queue is found not to be empty after all, before that is taken for somebody who publishes to it.
ROUNDS = 5

#: Seconds in which messages come that a mover had when it was killed.
LATE_S = 2.0

#: What became of a message in stock Dramatiq's dead-letter queue.
DEAD_BY_STOCK = "dead_lettered_by_stock"

#: Bytes of a traceback of stock Dramatiq's that go into the headers of a dead letter.
MOST_TRACEBACK = 8192

#: What may differ between a message and its copy, or is counted by RabbitMQ.
_STATE_HEADERS = (copies.RETRIES, copies.PARKS, copies.PARKED_MS)

#: CC and BCC would send a copy elsewhere, too; the others are RabbitMQ's own counts.
_DROPPED_HEADERS = frozenset({"CC", "BCC", "x-delivery-count", "x-acquired-count"})


class InUse(Exception):
    """Somebody else consumes the queue."""


class NotTaken(Exception):
    """RabbitMQ does not take a copy: says which queue, and its answer."""


@dataclass(frozen=True)
class Copy:
    """What is published in place of a message."""

    exchange: str
    routing_key: str
    body: bytes
    properties: pika.BasicProperties


#: Returns the copy of a message; None leaves it where it is.
CopyOf = Callable[[Any, pika.BasicProperties, bytes], "Copy | None"]


def digest(properties: pika.BasicProperties, body: bytes, *, dead: bool) -> bytes | None:
    """Return what a message and its copies have in common; None for one without an id, which has no identity.

    A dead letter and a message of the same id that somebody has sent again are two.
    """
    if not properties.message_id and b'"message_id"' not in body:
        return None
    headers = properties.headers or {}
    state = repr([dead, properties.message_id, *(headers.get(name) for name in _STATE_HEADERS)])
    return hashlib.blake2b(state.encode(errors="replace") + body, digest_size=12).digest()


def digests_in(
    connection: pika.BlockingConnection, queue: str, is_dead: Callable[[pika.BasicProperties], bool]
) -> Counter[bytes]:
    """Return the digests of all messages in ``queue``, which stay there. About 100 bytes of memory a message."""
    found: Counter[bytes] = Counter()
    channels: list[Any] = []
    # What comes late, of a RabbitMQ that just started or is busy, must be seen, too: it would be doubled.
    expected = _ready(connection, queue)
    seen, room = 0, 0
    caught_up_at = math.inf
    try:
        while True:
            if room == 0:
                # A full window stays as it is, and the next one goes on behind it.
                channels.append(connection.channel())
                channels[-1].basic_qos(prefetch_count=MOST_PREFETCH)
                deliveries = channels[-1].consume(queue, inactivity_timeout=PAUSE_S)
                room = MOST_PREFETCH
            method, properties, body = next(deliveries)
            if method is not None:
                seen, room = seen + 1, room - 1
                one = digest(properties, body, dead=is_dead(properties))
                if one is not None:
                    found[one] += 1
            if seen >= expected:
                caught_up_at = min(caught_up_at, time.monotonic())
                late = time.monotonic() - caught_up_at
                # Who publishes all the time must not keep us here.
                if late > LATE_S or (method is None and late > LATE_S / 4 and _ready(connection, queue) == 0):
                    break
    except pika.exceptions.ChannelClosedByBroker as error:
        raise _in_use(error) from None
    for channel in channels:
        channel.close()  # which returns them, in their order
    return found


def move(
    connection: pika.BlockingConnection,
    source: str,
    copy_of: CopyOf,
    *,
    already: Counter[bytes],
    is_dead: Callable[[pika.BasicProperties], bool],
    on_moved: Callable[[int], None] = lambda count: None,
    most: int | None = None,
) -> int:
    """Move the messages of ``source`` until it is empty, or ``most`` were looked at; return how many were moved.

    Where somebody goes on publishing to it, a few are left.

    Those in ``already`` are taken for copied and only removed. Nobody else can consume ``source`` meanwhile.

    Raises:
        InUse: somebody else does.
        NotTaken: RabbitMQ does not take a copy.
    """
    reading, writer = connection.channel(), _Writer(connection)
    # What is left out stays un-acked here until the end, and would fill a small window.
    reading.basic_qos(prefetch_count=PREFETCH if most is None else MOST_PREFETCH)
    moved, looked, last, skipped = 0, 0, 0, False
    waiting: list[int] = []

    def commit() -> None:
        nonlocal moved
        if not waiting:
            return
        writer.wait()
        if skipped:
            for tag in waiting:
                reading.basic_ack(tag)
        else:
            reading.basic_ack(last, multiple=True)
        moved += len(waiting)
        on_moved(len(waiting))
        waiting.clear()

    try:
        for _ in range(ROUNDS):
            for method, properties, body in reading.consume(
                source, exclusive=True, inactivity_timeout=PAUSE_S
            ):
                if method is None:
                    commit()
                    if most is not None or _ready(connection, source) == 0:
                        break
                    continue
                looked += 1
                copy = copy_of(method, properties, body)
                if copy is None:
                    skipped = True
                else:
                    last = method.delivery_tag
                    waiting.append(last)
                    known = digest(properties, body, dead=is_dead(properties)) if already else None
                    if known is not None and already[known] > 0:
                        already[known] -= 1
                    else:
                        writer.publish(copy)
                if len(waiting) >= BATCH:
                    commit()
                    if not reading.get_waiting_message_count() and _ready(connection, source) == 0:
                        break
                if looked == most:
                    break
            commit()
            # What was still on its way to us goes back to the queue, and has come back there before this is answered.
            reading.cancel()
            left = reading.queue_declare(source, passive=True).method.message_count
            if left == 0 or most is not None:
                break
    except pika.exceptions.ChannelClosedByBroker as error:
        raise _in_use(error) from None
    reading.close()  # returns what was left out
    writer.close()
    return moved


class _Writer:
    """Publishes without waiting for each confirm, and then waits for all of them.

    pika's blocking channel would wait for one after the other, which is ten times slower; its asynchronous one, of which it
    is made, does not.
    """

    def __init__(self, connection: pika.BlockingConnection) -> None:
        self._connection = connection
        self._channel = connection.channel()
        self._pending: dict[int, str] = {}
        self._tag = 0
        self._refused = ""
        on: list[Any] = []
        self._channel._impl.add_on_return_callback(self._on_return)
        self._channel._impl.confirm_delivery(self._on_confirm, callback=on.append)
        connection._flush_output(lambda: bool(on) or not self._channel.is_open)

    def publish(self, copy: Copy) -> None:
        """Publish ``copy``; ``wait`` tells whether it arrived."""
        self._tag += 1
        self._pending[self._tag] = copy.routing_key
        self._channel._impl.basic_publish(
            copy.exchange, copy.routing_key, copy.body, copy.properties, mandatory=True
        )

    def wait(self) -> None:
        """Wait until all is confirmed.

        Raises:
            NotTaken: some of it never will be.
        """
        self._connection._flush_output(lambda: not self._pending or not self._channel.is_open)
        if not self._channel.is_open:
            raise NotTaken("RabbitMQ closed the channel over a message that it does not take")
        if self._refused:
            raise NotTaken(self._refused)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _on_return(self, _channel: Any, method: Any, _properties: Any, _body: bytes) -> None:
        self._refused = f"no queue takes messages for {method.routing_key!r}"

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        first = min(self._pending) if method.multiple and self._pending else method.delivery_tag
        for tag in range(first, method.delivery_tag + 1):
            key = self._pending.pop(tag, None)
            if method.NAME == "Basic.Nack" and key is not None:
                self._refused = f"a queue behind {key!r} is over its length limit (a policy?)"


def _ready(connection: pika.BlockingConnection, queue: str) -> int:
    channel = connection.channel()
    count = int(channel.queue_declare(queue, passive=True).method.message_count)
    channel.close()
    return count


def _in_use(error: pika.exceptions.ChannelClosedByBroker) -> Exception:
    if error.reply_code == 403:
        return InUse(error.reply_text)
    return NotTaken(f"RabbitMQ closed the channel: {error.reply_code} {error.reply_text}")


# -- what is published in place of a message


def to_staging(staging: str, origin: str | None) -> CopyOf:
    """Return what copies messages as they are into ``staging``, with a note where they come from."""

    def copy_of(_method: Any, properties: pika.BasicProperties, body: bytes) -> Copy:
        return Copy("", staging, body, _properties(properties, {} if origin is None else {ORIGIN: origin}))

    return copy_of


def from_staging(queue_name: str, delay_queue: str, dead_queue: str) -> CopyOf:
    """Return what copies messages out of a staging queue: each to where this package has its kind.

    Delayed ones go to the work queue with the instant in their headers, and the first worker that sees them hands them to the
    delay ladder. In the ladder itself nobody could look whether they are there already.
    """

    def copy_of(_method: Any, properties: pika.BasicProperties, body: bytes) -> Copy:
        origin = (properties.headers or {}).get(ORIGIN)
        if origin == dead_queue:
            record = dead_letter_record(queue_name, properties, body)
            return Copy(DEAD_LETTER_EXCHANGE, queue_name, body, _properties(properties, record))
        if origin == delay_queue:
            now_ms = copies.now_ms()
            due = due_headers(eta_of(body), now_ms=now_ms)
            return Copy("", queue_name, body, _properties(properties, due if due[copies.LEFT] else {}))
        return Copy("", queue_name, body, _properties(properties, {}))

    return copy_of


def dead_letter_record(queue_name: str, properties: pika.BasicProperties, body: bytes) -> dict[str, Any]:
    """Return the headers of a dead letter of stock Dramatiq's: what can still be known."""
    message = _fields_of(body)
    options = message.get("options")
    options = options if isinstance(options, dict) else {}
    death = _first_death(properties.headers or {})
    died_at = death.get("time")
    failed_at_ms = int(died_at.timestamp() * 1000) if isinstance(died_at, datetime) else copies.now_ms()
    reason = death.get("reason")
    detail = "stock Dramatiq had given it up"
    if reason:
        detail += (
            f"; RabbitMQ says: {reason} from queue {death.get('queue')!r}, {death.get('count', 1)} times"
        )
    actor, timestamp = message.get("actor_name"), message.get("message_timestamp")
    headers = dead_letter_headers(
        reason=DEAD_BY_STOCK,
        detail=detail,
        queue=queue_name,
        failed_at_ms=failed_at_ms,
        actor=actor if isinstance(actor, str) else None,
        message_id=properties.message_id or str(message.get("message_id") or "") or None,
        attempts=count_in(options, "retries") + 1,
        enqueued_at_ms=timestamp if isinstance(timestamp, int) and not isinstance(timestamp, bool) else None,
    )
    traceback = options.get("traceback")
    if isinstance(traceback, str):
        headers["x-safeops-traceback"] = mask(traceback[-MOST_TRACEBACK // 4 :])
    for name in ("reason", "queue", "count", "exchange"):
        if isinstance(death.get(name), (str, int)) and death.get(name) != "":
            headers[f"x-safeops-stock-death-{name}"] = death[name]
    return headers


def _first_death(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    deaths = headers.get("x-death")
    if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict):
        return deaths[0]
    return {}


def _fields_of(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _properties(old: pika.BasicProperties, added: Mapping[str, Any]) -> pika.BasicProperties:
    """Return the properties of a copy: all that may be published again."""
    headers = {
        name: value
        for name, value in (old.headers or {}).items()
        if isinstance(name, str) and name not in _DROPPED_HEADERS and (name != ORIGIN or ORIGIN in added)
    }
    if not _encodable(headers):
        headers = {}  # pika reads more than it can write
    headers.update(added)
    return pika.BasicProperties(
        app_id=old.app_id,
        content_encoding=old.content_encoding,
        content_type=old.content_type,
        correlation_id=old.correlation_id,
        delivery_mode=2,
        headers=headers or None,
        message_id=old.message_id,
        priority=old.priority,
        reply_to=old.reply_to,
        timestamp=old.timestamp,
        type=old.type,
        # expiration would let the copy vanish, user_id must be that of our own connection.
    )


def _encodable(headers: dict[str, Any]) -> bool:
    try:
        pika.data.encode_table([], headers)
    except Exception:
        return False
    return True
