"""All guards in the one right order: ``safe_stack()`` makes the list, ``check_stack`` refuses another.

Runs in: every process. Needs: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dramatiq.middleware
from dramatiq.middleware import Callbacks, CurrentMessage, Middleware, Pipelines

from ..errors import ConfigError, refusing
from ..options import check_known
from .age_limit import AgeLimit
from .async_io import AsyncIO
from .dead_letters import DeadLetters
from .drain import Drain
from .guard import Guard
from .retries import Retries
from .time_limit import TimeLimit

#: Before-hooks run from the top down, after-hooks from the bottom up. TimeLimit is last: it announces the body, and
#: nothing may come between. AsyncIO is first: its loop is there before any other middleware's hooks at the start of a worker,
#: and until after their hooks at its end, so that these may use it. Drain stands above the guards that a message which goes
#: back at once need not pass.
ORDER: tuple[type[Guard], ...] = (AsyncIO, DeadLetters, Retries, Drain, AgeLimit, TimeLimit)

#: Dramatiq's middlewares that decide by themselves what becomes of a message, and ours that take their place.
STOCK_TWINS: dict[type[Middleware], type[Guard]] = {
    dramatiq.middleware.Retries: Retries,
    dramatiq.middleware.AgeLimit: AgeLimit,
    dramatiq.middleware.TimeLimit: TimeLimit,
    dramatiq.middleware.ShutdownNotifications: Drain,
    dramatiq.middleware.AsyncIO: AsyncIO,
}

_OPTIONS: dict[str, type[Guard]] = {
    "app_version": DeadLetters,
    "max_retries": Retries,
    "min_backoff": Retries,
    "max_backoff": Retries,
    "retry_when": Retries,
    "max_age": AgeLimit,
    "notify_shutdown": Drain,
    "time_limit": TimeLimit,
}


@refusing
def safe_stack(*, strict: bool = False, **options: Any) -> list[Middleware]:
    """Return the whole list of middlewares for a broker, in the one right order.

    Parameters:
        strict: an actor without a ``time_limit`` is an error instead of a warning.
        **options: defaults of the guards: ``app_version``, ``max_retries``, ``min_backoff``, ``max_backoff``,
            ``retry_when``, ``notify_shutdown``, ``max_age``, ``time_limit``. What they mean stands with the guards.

    Raises:
        ConfigError: an option is unknown or its value makes no sense.
    """
    check_known("safe_stack()", options, _OPTIONS)
    given: dict[type[Guard], dict[str, Any]] = {guard: {} for guard in ORDER}
    for name, value in options.items():
        given[_OPTIONS[name]][name] = value
    return [
        AsyncIO(),
        DeadLetters(**given[DeadLetters]),
        Retries(**given[Retries]),
        Drain(**given[Drain]),
        AgeLimit(**given[AgeLimit]),
        Callbacks(),
        Pipelines(),
        CurrentMessage(),
        TimeLimit(strict=strict, **given[TimeLimit]),
    ]


def check_stack(middleware: Sequence[Middleware], *, on_foreign_broker: bool = False) -> None:
    """Raise ``ConfigError`` if a guard stands twice, in the wrong place, or beside the stock middleware it replaces.

    On ``RabbitmqBroker`` a stock middleware that has such a twin is refused also alone. A foreign broker may have one.
    """
    places = [type(one) for one in middleware]
    for one in middleware:
        for stock, ours in STOCK_TWINS.items():
            if on_foreign_broker and not any(issubclass(kind, ours) for kind in places):
                continue
            if isinstance(one, stock) and not isinstance(one, ours):
                there = any(issubclass(kind, ours) for kind in places)
                way = (
                    f"remove it, dramatiq_safeops.{ours.__name__} is there already"
                    if there
                    else f"use dramatiq_safeops.{ours.__name__} in its place, or safe_stack()"
                )
                raise ConfigError(
                    f"dramatiq.middleware.{stock.__name__} cannot be used with this broker: it does not keep"
                    f" what this package promises; {way}"
                )
    last: tuple[int, str] = (-1, "")
    for kind in places:
        rank = next((i for i, ours in enumerate(ORDER) if issubclass(kind, ours)), None)
        if rank is None:
            continue
        if rank == last[0]:
            raise ConfigError(f"{kind.__name__} stands twice in the middleware list: remove one of them")
        if rank < last[0]:
            raise ConfigError(
                f"{kind.__name__} stands below {last[1]} in the middleware list: the order is"
                f" {', '.join(ours.__name__ for ours in ORDER)}; safe_stack() returns it"
            )
        last = (rank, kind.__name__)
