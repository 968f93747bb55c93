"""A dead letter says why it died: readable, masked, bounded, and in a form that AMQP can carry."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import socket
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from hypothesis import given, settings
from hypothesis import strategies as st
from pika import data as amqp

from dramatiq_safeops import dead_letter
from dramatiq_safeops.dead_letter import ExceptionRecord, dead_letter_headers, describe_exception
from dramatiq_safeops.masking import mask

#: 2026-03-01 02:00:00.250 UTC.
SOME_TIME_MS = 1_772_330_400_250


class ReportFailed(Exception):
    pass


def caught(raiser: Any) -> BaseException:
    try:
        raiser()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def module_from(path: Path, source: str) -> ModuleType:
    """Import ``source`` as a user's module, so that its frames have a file and lines."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def size_as_amqp(headers: dict[str, Any]) -> int:
    pieces: list[bytes] = []
    size = amqp.encode_table(pieces, headers)
    assert size == sum(map(len, pieces))
    return size


# --- describe_exception ---------------------------------------------------------------------------


def test_an_exception_is_kept_as_name_text_and_traceback():
    """Without the last traceback, a dead letter is a riddle."""

    def build_report() -> None:
        raise ReportFailed("no flights in 2026-13")

    record = describe_exception(caught(build_report))

    assert record.type == f"{__name__}.ReportFailed"
    assert record.message == "no flights in 2026-13"
    assert record.traceback.startswith("Traceback (most recent call last):\n")
    assert 'raise ReportFailed("no flights in 2026-13")' in record.traceback
    assert record.traceback.endswith("ReportFailed: no flights in 2026-13")


def test_a_builtin_exception_has_no_module_in_its_name():
    """``builtins.ValueError`` would only be longer."""
    assert describe_exception(ValueError("x")).type == "ValueError"


def test_an_exception_that_was_never_raised_is_kept_too():
    """A middleware may hand over one that it made itself."""
    assert describe_exception(ValueError("x")) == ExceptionRecord("ValueError", "x", "ValueError: x")


def test_secrets_are_masked_in_text_and_traceback_also_in_causes_and_code():
    """The dead letter queue is read by people who must not have the database's password."""

    def connect() -> None:
        try:
            raise OSError("amqp://app:hunter2@rabbit refused")
        except OSError as error:
            raise ReportFailed("login failed, password='hunter2'") from error

    record = describe_exception(caught(connect))

    assert "hunter2" not in record.message + record.traceback
    assert record.message == "login failed, password='***'"
    assert "OSError: amqp://app:***@rabbit refused" in record.traceback
    assert "The above exception was the direct cause" in record.traceback


def test_a_long_text_is_cut_and_says_how_much_is_missing():
    """Somebody has to know that there was more."""
    record = describe_exception(ReportFailed("x" * 5_000))

    assert record.message == "x" * 2_000 + " [3000 characters cut]"


def test_a_text_that_masking_made_short_still_says_what_is_missing():
    """The reader must not take what is left for everything."""
    error = ReportFailed("\n".join(["rows"] + ["password='" + "x" * 1_900] * 100 + ["the last row"]))

    traceback = describe_exception(error).traceback

    assert traceback.startswith(f"{__name__}.ReportFailed: rows\npassword='***\n")
    assert "the last row" not in traceback
    assert re.search(r" \[\d+ characters cut\]$", traceback)


def test_a_secret_across_the_cut_is_not_shown_by_half():
    """A password whose @ was cut away would no longer look like one."""
    record = describe_exception(ReportFailed("x" * 1_980 + "amqp://app:" + "hunter2" * 50 + "@rabbit"))

    assert "hunter" not in record.message + record.traceback


def test_of_a_long_traceback_the_end_is_kept(tmp_path: Path):
    """The first frames are the way there; the mistake is at the other end."""
    # Given 400 frames that no formatter can fold into one line, and a limit that holds few of them
    steps = "".join(f"def step_{i}():\n    step_{i + 1}()\n" for i in range(400))
    module = module_from(
        tmp_path / "deep.py", steps + "def step_400():\n    raise ValueError('at the end')\n"
    )

    record = describe_exception(caught(module.step_0), limit=4_000)

    # Then the last frames and the exception are there, and the first line says what is not
    lines = record.traceback.splitlines()
    assert len(record.traceback.encode()) <= 4_000
    assert lines[-1] == "ValueError: at the end"
    assert lines[-2].strip() == "raise ValueError('at the end')"
    assert "in step_399" in record.traceback
    assert "in step_1\n" not in record.traceback
    marker = re.fullmatch(r"\[(\d+) characters cut\]", lines[0])
    assert marker
    whole = describe_exception(caught(module.step_0), limit=1_000_000).traceback
    assert int(marker[1]) + len(record.traceback) - len(lines[0]) - 1 == len(whole)


def test_an_exception_with_thousands_of_lines_leaves_room_for_the_frames():
    """A database that quotes the whole statement would otherwise push out every frame."""

    def insert() -> None:
        raise ReportFailed("\n".join(f"row {i} is wrong" for i in range(50_000)))

    traceback = describe_exception(caught(insert)).traceback

    assert len(traceback.encode()) <= 16 * 1024
    assert "in insert" in traceback
    assert "ReportFailed: row 0 is wrong\nrow 1 is wrong\n" in traceback
    assert re.search(r" \[\d+ characters cut\]$", traceback)


def test_a_single_overlong_line_is_cut_and_the_lines_around_it_stay():
    """One line of generated code, or of a text, must not be all there is to see."""

    def build_report() -> None:
        raise ReportFailed("first\n" + "x" * 1_000_000 + "\nlast")

    traceback = describe_exception(caught(build_report)).traceback

    assert "in build_report" in traceback
    assert "ReportFailed: first\n" in traceback
    assert "x [998000 characters cut]\n" in traceback
    assert traceback.endswith("\nlast")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of 3.11")
def test_an_exception_group_shows_its_members():
    """The group itself only says how many there are."""

    def build_report() -> None:
        raise ExceptionGroup("two pages failed", [ValueError("page 1"), OSError("page 2")])  # noqa: F821

    record = describe_exception(caught(build_report))

    assert record.type == "ExceptionGroup"
    assert record.message == "two pages failed (2 sub-exceptions)"
    assert "ValueError: page 1" in record.traceback
    assert "OSError: page 2" in record.traceback


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of 3.11")
def test_a_huge_exception_group_keeps_the_limit():
    """A task group over a thousand pages fails a thousand times."""
    members = [ValueError(f"page {i} " + "x" * 500) for i in range(1_000)]

    record = describe_exception(ExceptionGroup("pages failed", members))  # noqa: F821

    assert len(record.traceback.encode()) <= 16 * 1024
    assert "page" in record.traceback


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are of 3.11")
def test_notes_are_kept():
    """Libraries add there what the text does not say."""
    error = ValueError("x")
    error.add_note("while reading month 13")

    assert describe_exception(error).traceback == "ValueError: x\nwhile reading month 13"


def test_a_syntax_error_shows_the_place():
    """An import inside the actor may hit a half-deployed file."""
    record = describe_exception(caught(lambda: compile("x = = 1\n", "half_deployed.py", "exec")))

    assert record.type == "SyntaxError"
    assert 'File "half_deployed.py", line 1' in record.traceback
    assert "x = = 1" in record.traceback
    assert record.traceback.endswith("SyntaxError: invalid syntax")


def test_a_recursion_error_is_folded_to_fit():
    """A thousand equal frames say no more than three."""

    def build_report() -> None:
        build_report()

    traceback = describe_exception(caught(build_report)).traceback

    assert "more times]" in traceback
    assert "RecursionError" in traceback


class Hostile(Exception):
    """An exception whose text is whatever ``text()`` does."""

    def __init__(self, text: Any) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def fail_with(error: BaseException) -> Any:
    def fail() -> str:
        raise error

    return fail


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (fail_with(ValueError("no")), "(cannot be shown: ValueError while asking for it)"),
        (fail_with(SystemExit(1)), "(cannot be shown: SystemExit while asking for it)"),
        (fail_with(RecursionError()), "(cannot be shown: RecursionError while asking for it)"),
        (lambda: None, "(cannot be shown: TypeError while asking for it)"),
        (lambda: "half \ud800 of a pair", "half \\ud800 of a pair"),
        (lambda: "x" * 1_000_000, "x" * 2_000 + " [998000 characters cut]"),
        (lambda: "", ""),
    ],
    ids=["raises", "exits", "recurses", "no text", "surrogate", "a megabyte", "empty"],
)
def test_an_exception_that_misbehaves_when_asked_for_its_text_is_kept_all_the_same(text: Any, message: str):
    """If describing it raised, the message would have no dead letter, and would run for ever."""

    def build_report() -> None:
        raise Hostile(text)

    record = describe_exception(caught(build_report))

    assert record.message == message
    assert record.type == f"{__name__}.Hostile"
    assert "in build_report" in record.traceback
    assert len(record.traceback.encode()) <= 16 * 1024


def test_a_class_that_misbehaves_when_asked_for_its_name_is_kept_all_the_same():
    """Proxies and mocks answer for anything."""

    class Nameless(type):
        def __getattribute__(cls, name: str) -> Any:
            if name in ("__module__", "__qualname__", "__name__"):
                raise RuntimeError("no name")
            return super().__getattribute__(name)

    record = describe_exception(Nameless("Odd", (Exception,), {})("text"))

    assert record.type == "(cannot be shown: RuntimeError while asking for it)"
    assert record.message == "text"
    assert record.traceback == "(cannot be shown: RuntimeError while asking for it)"


@settings(deadline=None, max_examples=200)
@given(
    st.text(),
    st.text(max_size=50) | st.text(max_size=50).map(lambda text: text * 1_000),
    st.integers(0, 3_000),
)
def test_no_text_breaks_the_limit_or_the_encoding(name: str, text: str, limit: int):
    """One byte too many closes the connection; one half of a surrogate pair stops the publish."""
    kind = type("Odd", (Exception,), {"__qualname__": name, "__module__": "app"})

    def fail() -> None:
        raise kind(text)

    record = describe_exception(caught(fail), limit=limit)

    assert len(record.traceback.encode("utf-8")) <= limit
    assert len(record.type.encode("utf-8")) <= 255
    assert len(record.message.encode("utf-8")) < 10_000


def with_cause(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        ReportFailed("password='\n" * 1_000_000),
        ReportFailed("password='" * 1_000_000),
        ReportFailed(("password='" * 500 + "\n") * 2_000),
        with_cause(ReportFailed("x"), ValueError("password='\n" * 1_000_000)),
    ],
    ids=["lines", "one line", "long lines", "cause"],
)
def test_of_a_hostile_text_only_what_may_be_shown_is_masked(monkeypatch, error: BaseException):
    """Masking holds the interpreter, a second for each few MB, and the worker answers no heartbeat meanwhile."""
    # Given ten megabytes of text
    lengths: list[int] = []
    monkeypatch.setattr(dead_letter, "mask", lambda text: lengths.append(len(text)) or mask(text))

    # When an exception with it is described
    record = describe_exception(error)

    # Then little of it is masked, and all that is shown is
    assert sum(lengths) < 1_000_000
    assert len(record.message) + len(record.traceback) < sum(lengths)


def test_a_record_keeps_nothing_of_the_actor_alive():
    """A kept frame keeps its locals: the whole page of rows, for as long as the letter is unconfirmed."""

    class Rows:
        pass

    kept: list[weakref.ref[Rows]] = []

    def build_report() -> None:
        rows = Rows()
        kept.append(weakref.ref(rows))
        raise ReportFailed("x")

    record = describe_exception(caught(build_report))
    gc.collect()

    assert "build_report" in record.traceback
    assert kept[0]() is None


def test_the_frames_that_lead_to_the_actor_are_left_out():
    """They are the same in each dead letter, and push the actor's own out of a short one."""
    # Given an actor that a real Dramatiq worker runs
    broker = StubBroker(middleware=[])
    records: list[ExceptionRecord] = []

    class Recorder(dramatiq.Middleware):
        def after_process_message(
            self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
        ) -> None:
            records.append(describe_exception(exception))

    broker.add_middleware(Recorder())

    @dramatiq.actor(broker=broker, actor_name="broken_report")
    def broken_report() -> None:
        raise ReportFailed("in the actor")

    # When it fails there
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    try:
        broken_report.send()
        broker.join("default", timeout=10_000)
    finally:
        worker.stop()

    # Then the traceback begins with it
    lines = records[0].traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in broken_report")
    assert os.path.dirname(dramatiq.__file__) not in records[0].traceback


def test_the_frames_of_an_error_of_our_own_are_all_kept():
    """A guard that broke has no actor's frames; cut to nothing it could not be repaired."""
    # Given an error whose every frame lies inside Dramatiq, as one raised in a thread of its worker
    error = caught(lambda: dramatiq.Message.decode(b"junk"))
    while error.__traceback__.tb_frame.f_code.co_filename != dramatiq.message.__file__:
        error.__traceback__ = error.__traceback__.tb_next
    error.__cause__ = None

    traceback = describe_exception(error).traceback

    assert traceback.startswith(f'Traceback (most recent call last):\n  File "{dramatiq.message.__file__}"')


# --- dead_letter_headers --------------------------------------------------------------------------


def headers_of(**known: Any) -> dict[str, Any]:
    required = {"reason": "unreadable", "detail": "no", "queue": "default", "failed_at_ms": SOME_TIME_MS}
    return dead_letter_headers(**{**required, **known})


def test_a_dead_letter_says_everything_that_is_known():
    """Whoever finds it at night has RabbitMQ's UI and nothing else."""
    headers = dead_letter_headers(
        reason="retries_exhausted",
        detail="failed 5 times, the last time with ReportFailed",
        exception=ExceptionRecord(
            "app.ReportFailed", "no flights", "Traceback ...\nReportFailed: no flights\n"
        ),
        attempts=5,
        max_attempts=5,
        parks=0,
        enqueued_at_ms=SOME_TIME_MS - 60_000,
        first_seen_ms=SOME_TIME_MS - 59_999,
        failed_at_ms=SOME_TIME_MS,
        queue="reports",
        actor="build_report",
        message_id="b022e66c",
        app_version="2026.3",
    )

    assert re.fullmatch(r"\d+\.\d+.*", headers.pop("x-safeops-version", "0.0"))
    assert headers == {
        "x-safeops-reason": "retries_exhausted",
        "x-safeops-detail": "failed 5 times, the last time with ReportFailed",
        "x-safeops-exception-type": "app.ReportFailed",
        "x-safeops-exception-message": "no flights",
        "x-safeops-traceback": "Traceback ...\nReportFailed: no flights\n",
        "x-safeops-attempts": 5,
        "x-safeops-max-attempts": 5,
        "x-safeops-parks": 0,
        "x-safeops-enqueued-at": "2026-03-01T01:59:00.250Z",
        "x-safeops-first-seen": "2026-03-01T01:59:00.251Z",
        "x-safeops-failed-at": "2026-03-01T02:00:00.250Z",
        "x-safeops-queue": "reports",
        "x-safeops-actor": "build_report",
        "x-safeops-message-id": "b022e66c",
        "x-safeops-host": socket.gethostname(),
        "x-safeops-process": os.getpid(),
        "x-safeops-app-version": "2026.3",
    }


def test_what_is_not_known_has_no_header_and_zero_is_known():
    """``None`` in a header reads as a value; and no attempt at all is what explains a message too old."""
    headers = headers_of(attempts=0, parks=0, first_seen_ms=0)

    assert headers["x-safeops-attempts"] == 0
    assert headers["x-safeops-first-seen"] == "1970-01-01T00:00:00.000Z"
    assert None not in headers.values()
    unknown = {"actor", "message-id", "exception-type", "exception-message", "traceback", "max-attempts"}
    assert not {f"x-safeops-{name}" for name in unknown} & headers.keys()


def test_the_table_of_headers_in_the_documentation_is_complete():
    """Alerts and dashboards are built from it."""
    record = ExceptionRecord("a", "b", "c")
    numbers = {"attempts": 1, "max_attempts": 1, "parks": 1, "enqueued_at_ms": 1, "first_seen_ms": 1}
    headers = headers_of(exception=record, actor="a", message_id="b", app_version="c", **numbers)

    documented = set(re.findall(r"``(x-safeops-[a-z-]+)``", dead_letter.__doc__ or ""))

    assert documented == headers.keys() | {"x-safeops-version"}


def test_secrets_in_the_sentence_are_masked():
    """It may quote what a server said."""
    assert headers_of(detail="amqp://u:hunter2@h refused")["x-safeops-detail"] == "amqp://u:***@h refused"


@pytest.mark.parametrize("ms", [10**30, -(10**30), 2**63, -(2**63)])
def test_a_time_that_no_calendar_has_is_left_out(ms: int):
    """A message may carry any number as its timestamp, and must die properly all the same."""
    headers = headers_of(enqueued_at_ms=ms, first_seen_ms=ms, failed_at_ms=ms)

    assert not {name for name in headers if name.endswith(("-at", "-seen"))}


def test_a_hostile_name_is_cut():
    """Anybody who can publish can name an actor with a megabyte."""
    headers = headers_of(actor="x" * 1_000_000, message_id="é" * 1_000_000, queue="q\ud800")

    assert len(headers["x-safeops-actor"].encode()) <= 255
    assert headers["x-safeops-actor"].startswith("xxx")
    assert headers["x-safeops-actor"].endswith(" characters cut]")
    assert len(headers["x-safeops-message-id"].encode()) <= 255
    assert headers["x-safeops-queue"] == "q\\ud800"


def test_an_id_that_is_not_utf8_is_kept_readable():
    """Another producer's library may have set it, and pika hands it over as bytes."""
    assert headers_of(message_id=b"id-\xff")["x-safeops-message-id"] == "id-\\xff"


anything = st.text(max_size=40) | st.text(min_size=1, max_size=5).map(lambda text: text * 40_000)
numbers = st.none() | st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None, max_examples=200)
@given(
    known=st.fixed_dictionaries(
        {"reason": anything, "detail": anything, "queue": anything, "failed_at_ms": numbers.filter(lambda n: n is not None)},
        optional={
            "exception": st.none() | st.builds(ExceptionRecord, anything, anything, anything),
            "actor": st.none() | anything,
            "message_id": st.none() | anything,
            "app_version": st.none() | anything,
            "attempts": numbers,
            "max_attempts": numbers,
            "parks": numbers,
            "enqueued_at_ms": st.none() | st.integers(),
            "first_seen_ms": numbers,
        },
    ),
    frame_max=st.sampled_from([4_096, 5_000, 8_192, 65_536, 131_072, 0]) | st.integers(4_096, 262_144),
)  # fmt: skip
def test_the_headers_always_fit_half_a_frame(known: dict[str, Any], frame_max: int):
    """RabbitMQ closes the whole connection over headers that do not fit one frame."""
    headers = dead_letter_headers(**known, frame_max=frame_max)

    assert size_as_amqp(headers) < (frame_max if frame_max else 131_072) / 2
    assert {type(value) for value in headers.values()} <= {str, int}
    assert headers["x-safeops-reason"][:10] == known["reason"].encode(errors="backslashreplace").decode()[:10]
    assert all(name.startswith("x-safeops-") for name in headers)


def test_in_a_small_frame_the_traceback_gives_way_first_and_from_its_beginning():
    """The reason is worth more than the way there."""
    frames = "".join(f"  line {i}\n" for i in range(3_000))
    record = ExceptionRecord(
        "app.ReportFailed", "no flights", f"[70 characters cut]\n{frames}ReportFailed: x\n"
    )

    headers = headers_of(exception=record, actor="build_report", frame_max=8_192)

    assert size_as_amqp(headers) < 4_096
    assert headers["x-safeops-exception-message"] == "no flights"
    cut = re.match(r"\[(\d+) characters cut\]\n", headers["x-safeops-traceback"])
    assert cut
    rest = headers["x-safeops-traceback"][cut.end() :]
    assert rest.endswith("  line 2999\nReportFailed: x\n")
    assert rest.startswith("  line ")
    # What was missing before is counted as well.
    assert int(cut[1]) + len(rest) == 70 + len(frames) + len("ReportFailed: x\n")


def test_the_largest_real_traceback_fits_the_default_frame():
    """Both limits are ours; together they must not cut twice."""
    traceback = "x" * 2_000 + "\n"
    record = ExceptionRecord("a" * 255, "é" * 2_000, traceback * 8)

    headers = headers_of(exception=record, detail="d" * 2_000, actor="a" * 255, message_id="m" * 255)

    assert headers["x-safeops-traceback"] == record.traceback
    assert headers["x-safeops-exception-message"] == record.message
    assert headers["x-safeops-detail"] == "d" * 2_000


def test_the_host_is_asked_for_once(monkeypatch):
    """A resolver that hangs must not hold up each dead letter."""
    headers_of()

    def unexpected() -> str:
        raise AssertionError("asked again")

    monkeypatch.setattr(socket, "gethostname", unexpected)

    assert headers_of()["x-safeops-host"]
