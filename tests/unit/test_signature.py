"""Do a message's arguments fit its actor? The answer must be Python's own: a wrong "no" parks a good message for an hour."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from dramatiq import actor as declare
from dramatiq.brokers.stub import StubBroker
from hypothesis import given, settings
from hypothesis import strategies as st

from dramatiq_safeops.middleware import TimeLimit
from dramatiq_safeops.signature import misfit

NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def broker() -> StubBroker:
    return StubBroker(middleware=[])


def actor_of(broker: StubBroker, fn: Callable[..., Any]) -> Any:
    broker.actors.clear()
    return declare(fn, broker=broker, actor_name="build")


@st.composite
def functions(draw: st.DrawFn) -> Callable[..., Any]:
    """A function with any mixture of the kinds of parameters that Python has, with and without defaults."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    kinds = sorted(
        draw(st.lists(st.sampled_from("pbk"), min_size=len(names), max_size=len(names))), key="pbk".index
    )
    defaults = [draw(st.booleans()) for _ in names]
    optional = False  # among the positional ones, all after the first optional one are optional
    parts: list[str] = []
    star = draw(st.booleans())
    for place, (name, kind, default) in enumerate(zip(names, kinds, defaults, strict=True)):
        if kind == "k":
            if "k" not in kinds[:place]:
                parts.append("*rest" if star else "*")
        else:
            optional = default = optional or default
            if kind == "b" and place > 0 and kinds[place - 1] == "p":
                parts.append("/")
        parts.append(f"{name}=None" if default else name)
    if kinds and kinds[-1] == "p":
        parts.append("/")
    if star and "k" not in kinds:
        parts.append("*rest")
    if draw(st.booleans()):
        parts.append("**more")
    namespace: dict[str, Any] = {}
    exec(f"def build({', '.join(parts)}): return 'ran'", namespace)
    return namespace["build"]  # type: ignore[no-any-return]


arguments = st.lists(st.integers(), max_size=6).map(tuple)
keywords = st.dictionaries(st.sampled_from((*NAMES, "self", "args", "unknown")), st.integers(), max_size=4)


@settings(max_examples=600, deadline=None)
@given(fn=functions(), args=arguments, kwargs=keywords)
def test_arguments_fit_exactly_if_python_takes_them(
    broker: StubBroker, fn: Callable[..., Any], args: tuple[int, ...], kwargs: dict[str, int]
):
    """Hurts both ways: a wrong "no" parks a good message, a wrong "yes" charges an attempt for what cannot succeed."""
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        fits, says = False, str(error)
    else:
        fits, says = True, ""

    answer = misfit(actor_of(broker, fn), args, kwargs)

    assert (answer is None) == fits, f"{inspect.signature(fn)} {args} {kwargs}: {answer!r}"
    if answer is not None:
        assert answer == says
    else:
        assert fn(*args, **kwargs) == "ran"


def test_the_answer_names_the_argument(broker: StubBroker):
    """Hurts whoever reads the dead letter: "does not fit" alone says nothing."""
    actor = actor_of(broker, lambda period, *, currency: None)

    assert "'currency'" in str(misfit(actor, ("2026-03",), {}))
    assert "'curency'" in str(misfit(actor, ("2026-03",), {"currency": "EUR", "curency": "EUR"}))
    assert "too many" in str(misfit(actor, ("2026-03", 4), {"currency": "EUR"}))
    assert misfit(actor, ("2026-03",), {"currency": "EUR"}) is None


def test_a_decorated_actor_is_asked_for_what_it_really_takes(broker: StubBroker):
    """Hurts users of decorators: functools.wraps shows through, and so does the wrapper of the time limit."""

    def traced(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return inner

    @traced
    def build(period: str, currency: str = "EUR") -> None: ...

    actor = actor_of(broker, build)
    TimeLimit().after_declare_actor(broker, actor)

    assert misfit(actor, ("2026-03",), {}) is None
    assert misfit(actor, ("2026-03", "EUR", 3), {}) is not None
    assert misfit(actor, (), {}) is not None


def test_an_actor_that_cannot_be_asked_gets_what_comes(broker: StubBroker):
    """Hurts users of functions from C without a signature: Python itself must say no, by running them."""
    with pytest.raises((ValueError, TypeError)):
        inspect.signature(max)

    actor = actor_of(broker, max)

    assert misfit(actor, (), {}) is None
    assert misfit(actor, (1, 2), {"key": abs}) is None


def test_an_actor_that_is_declared_again_is_asked_anew(broker: StubBroker):
    """Hurts users who reload code: the old signature must not answer for the new one."""
    first = actor_of(broker, lambda a: None)
    assert misfit(first, (1,), {}) is None

    second = actor_of(broker, lambda a, b: None)

    assert misfit(second, (1,), {}) is not None
    assert misfit(second, (1, 2), {}) is None
