"""What is written is what Dramatiq writes; what is read is what Dramatiq reads; the rest is refused with a reason."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import threading
import timeit
import uuid
from collections import OrderedDict
from typing import Any

import dramatiq
import pytest
from dramatiq import Message
from dramatiq.encoder import Encoder, JSONEncoder, PickleEncoder
from dramatiq.message import get_encoder, set_encoder
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dramatiq_safeops import encoder
from dramatiq_safeops.encoder import Unreadable, decode, encode

#: A message as a producer in another language might write it; tests replace what they are about.
FIELDS: dict[str, Any] = {
    "queue_name": "default",
    "actor_name": "build_report",
    "args": ["2026-03", 7],
    "kwargs": {"currency": "EUR"},
    "options": {"max_retries": 4},
    "message_id": "b022e66c-cce0-40f4-a151-8f713c66dadf",
    "message_timestamp": 1_774_000_000_000,
}


def body_with(**fields: Any) -> bytes:
    return json.dumps({**FIELDS, **fields}).encode()


def body_without(*names: str) -> bytes:
    return json.dumps({name: value for name, value in FIELDS.items() if name not in names}).encode()


def message_with(*args: Any, **kwargs: Any) -> Message[Any]:
    return Message("default", "build_report", args, kwargs, {}, "an-id", 1_774_000_000_000)


def same(one: Any, other: Any) -> bool:
    """Equal in value and type all the way down; NaN equals NaN, and 1 is neither 1.0 nor True."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return repr(one) == repr(other)
    return bool(one == other)


@pytest.fixture
def app_encoder():
    """Lets a test set the app's encoder, and puts back what was there."""
    before = get_encoder()
    yield set_encoder
    set_encoder(before)


# Numbers at the edges of what msgspec and json treat alike, and texts that JSON has to escape.
numbers = (
    st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from([2**53 + 1, 2**63, 2**64, 10**400, 1e16, 1e15, 1e-4, 1e-5, 5e-324, -0.0])
)
texts = st.text() | st.text('aé\x00\x1f\x7f\x80\ud800\udc00😀"\\/\n\u2028', max_size=6)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)
objects = st.dictionaries(texts, values, max_size=4)


@settings(deadline=None)
@given(st.lists(values, max_size=4), objects, objects, texts, texts, st.integers(0, 2**50))
def test_a_message_is_written_with_the_bytes_that_dramatiq_writes(
    args, kwargs, options, actor, message_id, timestamp
):
    """Workers of stock Dramatiq, and whoever compares bodies, must not notice who sent it."""
    message: Message[Any] = Message("default", actor, tuple(args), kwargs, options, message_id, timestamp)

    assert encode(message) == message.encode()


@settings(deadline=None)
@given(st.lists(values, max_size=4), objects, objects, texts, texts, st.integers(0, 2**50))
@example([math.nan, math.inf], {"\ud800": 2**80}, {"eta": 1, "delay": 2}, "a", "b", 0)
def test_a_message_is_read_as_dramatiq_reads_it(args, kwargs, options, actor, message_id, timestamp):
    """An actor that got 1e30 for the integer it was sent would compute with another number."""
    # Given what stock Dramatiq wrote
    body = Message("default", actor, tuple(args), kwargs, options, message_id, timestamp).encode()

    # When we read it, and Dramatiq reads it
    view, theirs = decode(body, "default"), Message.decode(body)

    # Then both are the same, up to the delay that is over
    theirs.options.pop("eta", None)
    assert same(view.asdict(), theirs.asdict())


@settings(deadline=None)
@given(values.map(lambda value: json.dumps(value).encode()), st.sampled_from(["args", "kwargs", "options"]))
def test_what_is_read_never_differs_from_what_json_reads(written: bytes, field: str):
    """A value may be refused, but not changed silently."""
    # Given a body in which some JSON stands where an array or object is expected
    body = body_with(**{field: "HERE"}).replace(b'"HERE"', written)

    # When it is accepted
    try:
        view = decode(body, "default")
    except Unreadable:
        assert not isinstance(json.loads(written), list if field == "args" else dict)
        return

    # Then it means what json says it means
    expected = json.loads(written)
    if field == "options":
        expected.pop("eta", None)
    assert same(getattr(view, field), tuple(expected) if field == "args" else expected)


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int = 1


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 3, 1),
        datetime.date(2026, 3, 1),
        datetime.timedelta(seconds=1),
        uuid.UUID(int=7),
        decimal.Decimal("1.5"),
        {1, 2},
        frozenset({1}),
        b"bytes",
        bytearray(b"bytes"),
        Colour.RED,
        Point(),
        object(),
        {("a", "b"): 1},
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize(
    "wrap", [lambda value: value, lambda value: {"deep": [value]}], ids=["bare", "nested"]
)
def test_a_value_that_json_does_not_know_is_refused_as_dramatiq_refuses_it(value: Any, wrap: Any):
    """A date that silently became a string would break the actor, hours later and elsewhere."""
    message = message_with(wrap(value))
    with pytest.raises(TypeError) as theirs:
        message.encode()

    with pytest.raises(TypeError) as ours:
        encode(message)

    assert str(ours.value) == str(theirs.value)


class Text(str):
    pass


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [
        {1: "int key"},
        {None: 1, True: 2, 1.5: 3},
        Text("sub"),
        {Text("key"): 1},
        Number.ONE,
        "delete: \x7f",
        {"\x7f": 1},
        {"é": 1},
        [2**63, 2**64, -(2**63) - 1, 10**400],
        [1e16, 1e-5, 9999999999999998.0, 1e-4, 5e-324, -0.0, math.nan, -math.inf],
        OrderedDict(b=1, a=2),
        (1, (2, (3,))),
        list(range(500)),
        {f"k{i}": i for i in range(500)},
        "x" * 100_000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_unusual_values_that_dramatiq_can_write_are_written_alike(value: Any):
    """The fast way knows plain types only; everything else must take the other one unnoticed."""
    message = message_with(value)

    assert encode(message) == message.encode()


def test_arguments_that_contain_themselves_are_refused():
    """A walk without an end would hang the web process that sends."""
    endless: list[Any] = []
    endless.append(endless)

    with pytest.raises(ValueError, match="Circular reference"):
        encode(message_with(endless))


def test_the_view_belongs_to_the_queue_it_was_read_from_and_is_due_now():
    """A worker thread of Dramatiq dies of a foreign queue name, and holds a message with an eta in memory."""
    # Given a replayed message that names the queue it once came from
    body = body_with(queue_name="elsewhere", options={"eta": 99, "delay": 5})

    # When it is read from another
    view = decode(body, "reports")

    assert view.queue_name == "reports"
    assert view.options == {"delay": 5}
    assert view.args == ("2026-03", 7)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expected JSON, got something else: Expecting value: line 1 column 1 (char 0)"),
        (b"\x00\x01 junk", "Expected JSON, got something else: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff\xfe", "Expected JSON in UTF-8, got byte 0xff at position 0"),
        (body_with()[:-1] + b',"new":"\xff"}', "Expected JSON in UTF-8, got byte 0xff at position 238"),
        (body_with() + b"x", "Expected JSON, got something else: Extra data: line 1 column 232 (char 231)"),
        (b"[]", "Expected `object`, got `array` - at `$`"),
        (b"null", "Expected `object`, got `null` - at `$`"),
        (b'"text"', "Expected `object`, got `str` - at `$`"),
        (b"7", "Expected `object`, got `int` - at `$`"),
        (b"{}", "Object missing required field `queue_name` - at `$`"),
        (body_without("actor_name"), "Object missing required field `actor_name` - at `$`"),
        (body_without("args"), "Object missing required field `args` - at `$`"),
        (body_without("kwargs"), "Object missing required field `kwargs` - at `$`"),
        (body_without("options"), "Object missing required field `options` - at `$`"),
        (body_with(queue_name=1), "Expected `str`, got `int` - at `$.queue_name`"),
        (body_with(actor_name=[]), "Expected `str`, got `array` - at `$.actor_name`"),
        (body_with(actor_name=None), "Expected `str`, got `null` - at `$.actor_name`"),
        (body_with(args="text"), "Expected `array`, got `str` - at `$.args`"),
        (body_with(args={"a": 1}), "Expected `array`, got `object` - at `$.args`"),
        (body_with(args=None), "Expected `array`, got `null` - at `$.args`"),
        (body_with(kwargs=[]), "Expected `object`, got `array` - at `$.kwargs`"),
        (body_with(options=None), "Expected `object`, got `null` - at `$.options`"),
        (body_with(options=True), "Expected `object`, got `bool` - at `$.options`"),
        (body_with(message_id=7), "Expected `str`, got `int` - at `$.message_id`"),
        (body_with(message_id=None), "Expected `str`, got `null` - at `$.message_id`"),
        (body_with(message_timestamp="x"), "Expected `int`, got `str` - at `$.message_timestamp`"),
        (body_with(message_timestamp=True), "Expected `int`, got `bool` - at `$.message_timestamp`"),
        (body_with(message_timestamp=None), "Expected `int`, got `null` - at `$.message_timestamp`"),
        (body_with(message_timestamp=math.nan), "Expected `int`, got `NaN` - at `$.message_timestamp`"),
        (body_with(message_timestamp=math.inf), "Expected `int`, got `Infinity` - at `$.message_timestamp`"),
        (b"[" * 200_000, "Expected JSON, got one nested too deep to be read"),
        (body_with(args="HERE").replace(b'"HERE"', b"[" * 90_000 + b"]" * 90_000), "Expected JSON, got one nested too deep to be read"),
        (body_with(args="HERE").replace(b'"HERE"', b"[" + b"9" * 9_000 + b"]"), "Expected JSON, got one that cannot be read: ValueError"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused_with_what_was_expected_what_came_and_where(body: bytes, reason: str):
    """The reason stands in the dead letter; whoever reads it has to find the producer to blame."""
    with pytest.raises(Unreadable) as refused:
        decode(body, "default")

    assert str(refused.value) == reason


@settings(deadline=None)
@given(
    st.binary(max_size=300)
    | st.builds(lambda head, junk: head + junk, st.just(body_with()[:60]), st.binary())
)
def test_no_bytes_whatever_raise_anything_but_unreadable(body: bytes):
    """Another error would leave the I/O thread, and the queue would stand still."""
    with pytest.raises(Unreadable):
        decode(body, "default")


json_bodies = st.fixed_dictionaries(
    {}, optional={name: values | st.just(value) for name, value in FIELDS.items()}
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(json_bodies | values)
def test_no_json_whatever_raises_anything_but_unreadable(data: Any):
    """Fields may be absent or of any type; what is accepted has the types that Dramatiq relies on."""
    try:
        view = decode(json.dumps(data).encode(), "default")
    except Unreadable:
        return

    assert [type(value) for value in view.asdict().values()] == [str, str, tuple, dict, dict, str, int]


@pytest.mark.parametrize("size", [1_000_000])
def test_a_megabyte_of_junk_is_refused_with_a_short_reason(size: int):
    """The reason goes into a header, and headers that do not fit a frame close the connection."""
    for junk in (b"x" * size, b'"' + b"x" * size, b"\x00" * size, b'{"a":' * (size // 5)):
        with pytest.raises(Unreadable) as refused:
            decode(junk, "default")
        assert len(str(refused.value)) < 300


def test_a_float_timestamp_becomes_whole_milliseconds():
    """Producers in JavaScript and PHP have but one kind of number."""
    assert decode(body_with(message_timestamp=1774000000000.9), "q").message_timestamp == 1_774_000_000_000
    assert type(decode(body_with(message_timestamp=1774000000000.0), "q").message_timestamp) is int


def test_an_unknown_field_is_ignored():
    """A newer producer may add one, and its messages must not die while old workers still run."""
    view = decode(body_with(added_in_version_9={"a": 1}), "default")

    assert view.asdict() == decode(body_with(), "default").asdict()


def test_the_last_of_two_equal_keys_wins_as_everywhere_in_python():
    """Two readers that take different ones would run different work."""
    body = body_with()[:-1] + b',"args":[1],"args":[2]}'

    assert decode(body, "default").args == Message.decode(body).args == (2,)


def test_a_message_without_id_has_the_same_id_at_each_delivery():
    """With a random one, nothing could tell a redelivery from new work, and it would be done twice."""
    one, other = body_without("message_id"), body_without("message_id").replace(b"EUR", b"USD")

    assert decode(one, "default").message_id == decode(one, "elsewhere").message_id
    assert decode(one, "default").message_id != decode(other, "default").message_id
    # Fixed across versions: a redelivery may come to a newer worker.
    assert decode(one, "default").message_id == "422f3225-4570-5b30-a729-c037460857ee"


def test_a_message_without_timestamp_counts_as_sent_now(monkeypatch):
    """Dramatiq reads it so, and an age limit needs some time to count from."""
    monkeypatch.setattr(encoder.time, "time", lambda: 1_774_000_000.5)

    assert decode(body_without("message_timestamp"), "default").message_timestamp == 1_774_000_000_500


class Upside(Encoder):
    """An app's own format."""

    def encode(self, data: dict[str, Any]) -> bytes:
        return b"upside:" + json.dumps(data)[::-1].encode()

    def decode(self, data: bytes) -> dict[str, Any]:
        return json.loads(data.removeprefix(b"upside:").decode()[::-1])


class Louder(JSONEncoder):
    def encode(self, data: dict[str, Any]) -> bytes:
        return super().encode(data) + b"\n"


@pytest.mark.parametrize(
    "chosen", [Upside(), Louder(), PickleEncoder()], ids=lambda chosen: type(chosen).__name__
)
def test_the_encoder_of_the_app_is_used_in_both_directions(app_encoder, chosen: Encoder):
    """Its messages must stay readable for the workers that do not run this package yet."""
    app_encoder(chosen)
    message = message_with("a", 1, kind={"b": [None]})

    body = encode(message)

    assert body == message.encode()
    assert decode(body, "default") == message


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "Expected `object`, got `null` - at `$`"),
        ({**FIELDS, "options": None}, "Expected `object`, got `null` - at `$.options`"),
        ({**FIELDS, "kwargs": {1: 2}}, "Expected `str`, got `int` - at `key in $.kwargs`"),
        ({**FIELDS, "message_id": uuid.UUID(int=1)}, "Expected `str`, got `UUID` - at `$.message_id`"),
    ],
)
def test_what_the_encoder_of_the_app_gives_is_checked_as_well(app_encoder, data: Any, reason: str):
    """Pickle can hold anything, and Dramatiq would break on it in the middle of its worker."""
    app_encoder(PickleEncoder())

    with pytest.raises(Unreadable) as refused:
        decode(PickleEncoder().encode(data), "default")

    assert str(refused.value) == reason


def test_a_body_that_the_encoder_of_the_app_cannot_read_is_refused_without_quoting_it(app_encoder):
    """The reason is logged and shown; the body may hold what nobody should see."""
    app_encoder(Louder())

    with pytest.raises(Unreadable) as refused:
        decode(b"hunter2", "default")

    assert str(refused.value) == (
        "Expected a body for the app's Louder, got one that it cannot read: JSONDecodeError"
    )


def test_changing_a_view_that_the_encoder_gave_does_not_change_the_encoders_own_data(app_encoder):
    """An encoder may cache what it decodes."""
    cached = {**FIELDS, "options": {"eta": 1}}

    class Caching(JSONEncoder):
        def decode(self, data: bytes) -> dict[str, Any]:
            return cached

    app_encoder(Caching())

    assert decode(b"", "default").options == {}
    assert cached["options"] == {"eta": 1}


def test_a_message_of_a_subclass_is_written_by_its_own_method():
    """An app may add a field or override ``encode``; the fast way must not undo it."""

    class Signed(dramatiq.Message):
        def encode(self) -> bytes:
            return b"signed:" + super().encode()

    message = Signed("default", "a", (), {}, {}, "id", 1)

    assert encode(message) == b"signed:" + message_bytes(message)


def message_bytes(message: Message[Any]) -> bytes:
    return JSONEncoder().encode(message.asdict())


def test_threads_share_encoder_and_decoder():
    """Eight worker threads send while the I/O thread reads."""
    wrong: list[Any] = []

    def work(number: int) -> None:
        for i in range(500):
            message = message_with(number, i, text=f"{number}-{i}" * 20, share=i / 7)
            view = decode(encode(message), "default")
            if view != message:
                wrong.append((view, message))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_a_small_message_is_written_and_read_faster_than_by_dramatiq():
    """Safety must not cost speed: this runs once for every message sent and once for every one received."""
    message = message_with("2026-03", 7, currency="EUR")
    body = message.encode()

    def best(work: Any) -> float:
        return min(timeit.repeat(work, number=2_000, repeat=7))

    assert best(lambda: encode(message)) < best(message.encode)
    assert best(lambda: decode(body, "default")) < best(lambda: Message.decode(body))
