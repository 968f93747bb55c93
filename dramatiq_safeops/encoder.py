"""Dramatiq's JSON shape of a message, written and read with msgspec.

Runs in: every process that sends, works or schedules. Needs: nothing but memory.

What ``encode`` writes is byte for byte what Dramatiq's own ``JSONEncoder`` writes, so any
Dramatiq worker and the RabbitMQ UI can read it. ``decode`` gives the view of a message that
its actor and the middleware see; the producer's bytes are kept elsewhere and never rebuilt
from it. An app that called ``dramatiq.set_encoder`` keeps its encoder on both ways.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import uuid
from typing import Any, NoReturn

import msgspec
from dramatiq import Message
from dramatiq.encoder import Encoder, JSONEncoder
from dramatiq.errors import DecodeError
from dramatiq.message import get_encoder

#: Messages with more values than this (nested ones and dict keys counted) are written by ``json``.
#: Looking at a value in Python costs what json's C code needs to write it (45 ns each on CPython
#: 3.11), so msgspec wins json's fixed cost only: 1.8 us, half of a small message, a quarter of one
#: with 64 values, nothing any more at about 400. And where the last value turns out to be one for
#: json, the look at the others was for nothing.
MOST_VALUES_LOOKED_AT = 64

# Where msgspec writes a float with the same characters as json. Beyond, it writes 1e16 for 1e+16
# and 0.00001 for 1e-05: equal numbers, but other bytes. Integers of any size are written alike.
_LEAST_FLOAT, _FLOAT_END = 1e-4, 1e16

#: Ids for messages that came without one. Fixed for ever: a redelivery, perhaps to a newer
#: version of this package, must get the id that the first delivery got.
_ID_NAMESPACE = uuid.UUID("6f0a7c1e-3d58-5b0e-9a64-0c6f4c1d2b97")


class Unreadable(Exception):
    """A body that is not a message. Its text says what was expected, what came, and where.

    The text quotes one character of the body at most, so it may be logged.
    """


class _Body(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A message as nearly all are. What does not fit is looked at again, patiently, by `_checked`.

    Unknown fields are forbidden here only because msgspec does not check that what it skips is
    UTF-8.
    """

    queue_name: str
    actor_name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    message_id: str
    message_timestamp: int


# They keep no state between calls, so all threads share them.
_write = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder(_Body).decode
# What Dramatiq does with json.dumps, which would build this anew for each message.
_write_as_json = json.JSONEncoder(separators=(",", ":")).encode


def encode(message: Message[Any]) -> bytes:
    """Return the bytes that stand for ``message`` in RabbitMQ.

    Raises what the app's encoder raises: with Dramatiq's own, ``TypeError`` for a value that
    JSON does not know (a date, a UUID, a set, bytes) and ``ValueError`` for a structure that
    contains itself. Nothing is turned into a string silently. Safe to call from any thread.
    """
    if type(message) is Message and type(get_encoder()) is JSONEncoder:
        # The order of the fields is Dramatiq's.
        data = {
            "queue_name": message.queue_name,
            "actor_name": message.actor_name,
            "args": message.args,
            "kwargs": message.kwargs,
            "options": message.options,
            "message_id": message.message_id,
            "message_timestamp": message.message_timestamp,
        }
        if _msgspec_writes_the_same(data):
            return _write(data)
        return _write_as_json(data).encode("utf-8")
    return message.encode()


def decode(body: bytes, queue_name: str) -> Message[Any]:
    """Return the view of the message in ``body``, which was read from ``queue_name``.

    The view belongs to the queue it was read from, whatever the body says, and has no ``eta``
    among its options: Dramatiq's worker would wait for it in memory, and a delay is over when
    the message arrives.

    All that Dramatiq reads is read, with the same values, and more leniently in one point:
    unknown fields beside the known ones are ignored, as a newer producer may add one. More
    strictly in another: Dramatiq checks no types and breaks later, here they are checked.
    A message without an id gets one made from its bytes, the same on each delivery; two equal
    bodies without id are therefore one message. Without a timestamp it counts as sent now.

    Raises `Unreadable`, and nothing else, for everything that is not a message. Safe to call
    from any thread.
    """
    encoder = get_encoder()
    if type(encoder) is not JSONEncoder:
        return _checked(_from_foreign(encoder, body), body, queue_name)
    try:
        fields = _read(body)
    except Exception:
        # Not a message, or one that msgspec is too strict for: NaN, half a surrogate pair, a
        # float beyond its range, a missing id, an unknown field. json has the last word.
        return _checked(_from_json(body), body, queue_name)
    fields.options.pop("eta", None)
    return Message(
        queue_name,
        fields.actor_name,
        fields.args,
        fields.kwargs,
        fields.options,
        fields.message_id,
        fields.message_timestamp,
    )


def _msgspec_writes_the_same(data: dict[str, Any]) -> bool:
    """Say whether msgspec writes ``data`` with the same bytes as json; False also when unsure.

    msgspec knows more types than json (dates, sets, enums, dataclasses) and treats NaN, text
    outside ASCII and dict keys in its own way, hence the list of what is let through.
    """
    pending: list[Any] = [data]
    for value in pending:  # grows while we walk it
        kind = type(value)
        if kind is str:
            # json escapes DEL, msgspec does not.
            if not value.isascii() or "\x7f" in value:
                return False
        elif kind is int or value is None or kind is bool:
            pass
        elif kind is dict:
            if len(pending) + 2 * len(value) > MOST_VALUES_LOOKED_AT:
                return False
            for key in value:
                if type(key) is not str:
                    return False
            pending += value
            pending += value.values()
        elif kind is list or kind is tuple:
            # Before the copy: the list may be long. A structure that contains itself ends here too.
            if len(pending) + len(value) > MOST_VALUES_LOOKED_AT:
                return False
            pending += value
        elif kind is float:
            if not (_LEAST_FLOAT <= abs(value) < _FLOAT_END or value == 0.0):
                return False
        else:
            return False
    return True


def _from_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = body[error.start]
        raise Unreadable(f"Expected JSON in UTF-8, got byte 0x{byte:02x} at position {error.start}") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"Expected JSON, got something else: {error}") from None
    except RecursionError:
        raise Unreadable("Expected JSON, got one nested too deep to be read") from None
    except Exception as error:
        # A number with thousands of digits (ValueError), or more than fits into memory.
        raise Unreadable(f"Expected JSON, got one that cannot be read: {type(error).__name__}") from None


def _from_foreign(encoder: Encoder, body: bytes) -> Any:
    try:
        return encoder.decode(body)
    except Exception as error:
        # Names only: the texts of such errors tend to quote the whole body.
        cause = error.error if isinstance(error, DecodeError) else error
        raise Unreadable(
            f"Expected a body for the app's {type(encoder).__name__}, "
            f"got one that it cannot read: {type(cause).__name__}"
        ) from None


def _checked(data: Any, body: bytes, queue_name: str) -> Message[Any]:
    """Turn what an encoder read into a view, or say what is wrong with it."""
    if not isinstance(data, dict):
        _refuse("object", data, "$")
    for name in ("queue_name", "actor_name", "args", "kwargs", "options"):
        if name not in data:
            raise Unreadable(f"Object missing required field `{name}` - at `$`")
    for name in ("queue_name", "actor_name"):
        if not isinstance(data[name], str):
            _refuse("str", data[name], f"$.{name}")
    if not isinstance(data["args"], (list, tuple)):
        _refuse("array", data["args"], "$.args")
    for name in ("kwargs", "options"):
        if not isinstance(data[name], dict):
            _refuse("object", data[name], f"$.{name}")
        for key in data[name]:
            if not isinstance(key, str):  # never in JSON, but an app's encoder may allow it
                _refuse("str", key, f"key in $.{name}")
    return Message(
        queue_name,
        data["actor_name"],
        tuple(data["args"]),
        data["kwargs"],
        {name: value for name, value in data["options"].items() if name != "eta"},
        _id_of(data, body),
        _timestamp_of(data),
    )


def _id_of(data: dict[str, Any], body: bytes) -> str:
    if "message_id" not in data:
        # Dramatiq would make up a new one at each delivery, and nothing could then tell a
        # redelivery from another message.
        return str(uuid.uuid5(_ID_NAMESPACE, hashlib.sha256(body).hexdigest()))
    message_id = data["message_id"]
    if not isinstance(message_id, str):
        _refuse("str", message_id, "$.message_id")
    return message_id


def _timestamp_of(data: dict[str, Any]) -> int:
    if "message_timestamp" not in data:
        return int(time.time() * 1000)
    timestamp = data["message_timestamp"]
    if isinstance(timestamp, float) and math.isfinite(timestamp):
        return int(timestamp)
    if not isinstance(timestamp, int) or isinstance(timestamp, bool):
        _refuse("int", timestamp, "$.message_timestamp")
    return timestamp


def _refuse(expected: str, value: object, path: str) -> NoReturn:
    raise Unreadable(f"Expected `{expected}`, got `{_kind_of(value)}` - at `{path}`")


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "object"
    if isinstance(value, (list, tuple)):
        return "array"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity"
    return type(value).__name__
