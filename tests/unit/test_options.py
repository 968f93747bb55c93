"""Where an option's value comes from, and what is said about a wrong one.

Dramatiq and others take ``x or DEFAULT``, which turns an explicit 0 into something else; here only ``None`` is unset.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from dramatiq_safeops import ConfigError, SafeOpsError
from dramatiq_safeops.options import (
    check_above_zero,
    check_known,
    check_number,
    check_one_of,
    did_you_mean,
    is_number,
    number_of,
    option_of,
)


def actor(**options: Any) -> Any:
    return SimpleNamespace(actor_name="build", options=options)


@pytest.mark.parametrize("nothing", [0, 0.0, False, "", (), []])
def test_an_explicit_nothing_is_a_value(nothing: Any):
    """Hurts users who switch something off with 0: a default would switch it on again."""
    assert option_of("max_age", {"max_age": nothing}, actor(max_age=5), 7) == nothing
    assert option_of("max_age", {}, actor(max_age=nothing), 7) == nothing


def test_what_stands_closest_to_the_message_wins():
    """Hurts users of ``send_with_options``: what a message says is meant for this one."""
    assert option_of("max_age", {"max_age": 1}, actor(max_age=2), 3) == 1
    assert option_of("max_age", {"max_age": None}, actor(max_age=2), 3) == 2
    assert option_of("max_age", {}, actor(max_age=None), 3) == 3
    assert option_of("max_age", {}, None, 3) == 3


@pytest.mark.parametrize("junk", ["3", -1, math.nan, math.inf, 10**30, True, [3], {"a": 1}, None])
def test_a_message_that_says_nonsense_is_treated_as_if_it_said_nothing(junk: Any):
    """Hurts the worker: a message comes from outside and must not be able to break it."""
    assert number_of("max_retries", {"max_retries": junk}, actor(max_retries=2), 4) == 2
    assert number_of("max_retries", {"max_retries": junk}, actor(), 4) == 4
    assert number_of("max_retries", {"max_retries": junk}, None, 4) == 4


@pytest.mark.parametrize("number", [0, 0.5, 3, 2**53])
def test_a_message_that_says_a_number_is_believed(number: float):
    """Hurts users of ``send_with_options(max_retries=0)``."""
    assert number_of("max_retries", {"max_retries": number}, actor(max_retries=2), 4) == number


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0, True),
        (-1.5, True),
        (2**53, True),
        (2**53 + 2, False),
        (-(10**400), False),
        (math.inf, False),
        (math.nan, False),
        (True, False),
        ("1", False),
        (None, False),
    ],
)
def test_a_number_is_one_that_can_be_reckoned_with_and_no_flag(value: Any, number: bool):
    """Hurts whoever writes ``max_retries=True``, which would mean one retry, and who gets a number of 400 digits."""
    assert is_number(value) is number


@pytest.mark.parametrize("value", [-1, -0.001, "3", None, True, math.nan, [1]])
def test_what_must_be_a_number_says_its_name_the_rule_and_the_value(value: Any):
    """Hurts whoever has to find the line: an error without a name sends them through the whole configuration."""
    with pytest.raises(ConfigError) as caught:
        check_number("min_backoff of actor 'build'", value)

    assert str(caught.value) == (
        f"expected min_backoff of actor 'build' to be a number of at least 0, got {value!r}"
    )


@pytest.mark.parametrize("value", [0, -1, "3", None, True, math.nan])
def test_what_must_be_above_zero_says_so(value: Any):
    """Hurts users of a time limit of 0, which would strike at once."""
    with pytest.raises(ConfigError, match="expected time_limit to be a number above 0"):
        check_above_zero("time_limit", value)


def test_good_values_pass():
    """Hurts everybody if it does not hold."""
    check_number("min_backoff", 0)
    check_number("min_backoff", 1.5)
    check_number("prefetch", 3, at_least=3)
    check_above_zero("time_limit", 0.001)
    check_one_of("queue_type", "quorum", ("quorum", "classic"))
    check_known("safe_stack()", ["max_age"], {"max_age"})


def test_a_word_that_is_not_in_the_list_gets_the_list_and_the_likely_one():
    """Hurts whoever mistypes: the right name is one letter away."""
    with pytest.raises(ConfigError) as caught:
        check_one_of("queue_type", "quorom", ("quorum", "classic"))
    assert str(caught.value) == (
        "expected queue_type to be one of ['classic', 'quorum'], got 'quorom', did you mean 'quorum'?"
    )

    with pytest.raises(ConfigError) as caught:
        check_known("safe_stack()", ["max_retry"], {"max_retries", "max_age"})
    assert "unknown option 'max_retry' for safe_stack(), did you mean 'max_retries'?" in str(caught.value)
    assert "known options: max_age, max_retries" in str(caught.value)


def test_no_suggestion_is_better_than_a_wrong_one():
    """Hurts whoever follows it."""
    assert did_you_mean("zebra", {"max_retries", "max_age"}) == ""
    assert did_you_mean(7, {"max_retries"}) == ""


@pytest.mark.parametrize("unhashable", [[1], {"a": 1}])
def test_a_value_of_any_kind_is_refused_with_a_sentence(unhashable: Any):
    """Hurts whoever passes a list where a word belongs: a TypeError of ours says nothing about their option."""
    with pytest.raises(ConfigError):
        check_one_of("queue_type", unhashable, ("quorum", "classic"))


def test_a_wrong_option_is_a_value_error_too():
    """Hurts programs that catch ValueError around their set-up."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, SafeOpsError)
