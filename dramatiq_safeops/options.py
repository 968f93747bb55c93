"""Where an option's value comes from, and how a wrong one is reported.

Runs in: every process. Needs: nothing. Thread-safe: pure functions.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from .errors import ConfigError

if TYPE_CHECKING:
    from dramatiq import Actor


#: The largest number that an option may be. Beyond it ints and floats part, and AMQP headers hold no more than 64 bits.
MOST = 2**53


def option_of(
    name: str, message_options: Mapping[str, Any], actor: Actor[..., Any] | None, default: Any
) -> Any:
    """Return the option set closest to the message: message, then actor, then ``default``.

    Only ``None`` counts as unset, so that ``0`` and ``False`` can switch things off.
    """
    value = message_options.get(name)
    if value is not None:
        return value
    if actor is not None:
        value = actor.options.get(name)
        if value is not None:
            return value
    return default


def number_of(
    name: str, message_options: Mapping[str, Any], actor: Actor[..., Any] | None, default: float
) -> float:
    """Like ``option_of`` for numbers that a message may carry: what is no number of at least 0 counts as unset.

    A message's options come from outside and must not be able to break a worker; an actor's were checked when it was
    declared.
    """
    value: Any = message_options.get(name)
    if is_number(value) and value >= 0:
        return value
    return option_of(name, {}, actor, default)  # type: ignore[no-any-return]


def count_in(table: Mapping[str, Any], name: str) -> int:
    """Return a count from headers or options, which come from outside; 0 if it is missing or makes no sense."""
    value = table.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST:
        return value
    return 0


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether ``value`` is an int or a float that can be reckoned with: not a bool, not NaN, not beyond 2**53."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -MOST <= value <= MOST


def check_number(name: str, value: object, *, at_least: float = 0) -> None:
    """Raise ``ConfigError`` unless ``value`` is a number of at least ``at_least``."""
    if not is_number(value) or value < at_least:
        raise ConfigError(f"expected {name} to be a number of at least {at_least:g}, got {value!r}")


def check_above_zero(name: str, value: object) -> None:
    """Raise ``ConfigError`` unless ``value`` is a number above 0."""
    if not is_number(value) or value <= 0:
        raise ConfigError(f"expected {name} to be a number above 0, got {value!r}")


def check_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``allowed``, and suggest the likely one."""
    if value not in allowed:
        raise ConfigError(
            f"expected {name} to be one of {sorted(allowed)}, got {value!r}{did_you_mean(value, allowed)}"
        )


def check_known(where: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise ``ConfigError`` for the first of ``names`` that is not ``known``, and suggest the likely one."""
    for name in names:
        if name not in known:
            raise ConfigError(
                f"unknown option {name!r} for {where}{did_you_mean(name, known)}; known options: {', '.join(sorted(known))}"
            )


def did_you_mean(name: object, known: Collection[str]) -> str:
    """Return ``, did you mean 'x'?`` for the closest of ``known``, or nothing."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
