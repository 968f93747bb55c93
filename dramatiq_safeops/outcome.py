"""PURE: what becomes of a delivery. This is the one place that decides.

Runs in: worker processes. Needs: nothing. Thread-safe: data in, decision out.

The broker asks ``decide`` once per delivery, before the first after-hook. Everybody else reads the decision, and
``Settlement.carry_out`` makes it true at RabbitMQ.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dramatiq.errors import Retry
from dramatiq.middleware import Shutdown

from .errors import PermanentError
from .options import is_number

if TYPE_CHECKING:
    from .delivery import Delivery


#: Milliseconds. A parked message is looked at again after about a second, later less often, and at least this often: it
#: should run within seconds once a worker is there that knows it.
PARK_FIRST_MS = 1_000
PARK_MOST_MS = 10_000
PARK_GROWTH = 1.5

#: Milliseconds that a message for which this fleet is not ready (unknown actor, for example) is parked in all.
DEFAULT_PARK_LIMIT = 3_600_000


class Outcome(str, Enum):
    """What becomes of a delivery, and how it is carried out."""

    DONE = "done"  # follow-ups confirmed, then acked
    SKIPPED = "skipped"  # a middleware of the user's said "not this one": acked
    RETRIED = "retried"  # an attempt is charged: a copy into the ladder, confirmed, then acked
    PARKED = (
        "parked"  # not yet for this worker, nothing charged: a copy into the ladder, confirmed, then acked
    )
    DELAYED = "delayed"  # came out of the ladder before it was due: the next step, confirmed, then acked
    DEAD = "dead"  # the dead letter and its follow-ups confirmed, then acked
    RETURNED = "returned"  # back to its queue at once, nothing charged
    STALE = "stale"  # its channel is gone, RabbitMQ delivers it again: nothing can or need be done


class Reason:
    """Why a message died or waits. These words stand in the dead letters."""

    RETRIES_EXHAUSTED = "retries_exhausted"
    PERMANENT_ERROR = "permanent_error"
    UNKNOWN_ACTOR = "unknown_actor"
    ARGUMENTS_DO_NOT_FIT = "arguments_do_not_fit"
    UNREADABLE = "unreadable"
    TOO_OLD = "too_old"
    GUARD_FAILED = "guard_failed"
    REJECTED = "rejected"
    FOLLOW_UP_FAILED = "follow_up_failed"
    REFUSED = "refused_by_rabbitmq"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class Decision:
    """An outcome with its reason. ``delay_ms`` is how long a retried or parked message waits."""

    outcome: Outcome
    reason: str = ""
    detail: str = ""
    delay_ms: float = 0

    @property
    def counts_for_hooks(self) -> bool:
        """Whether ``before_ack``, ``after_nack`` and so on are told: only when this message has come to an end or
        charged an attempt. Whoever stores results there must not take a park for an end."""
        return self.outcome in _COUNTS

    @classmethod
    def parked(
        cls,
        reason: str,
        detail: str,
        *,
        parks: int,
        waited_ms: float,
        limit_ms: float,
        jitter: Callable[[], float],
    ) -> Decision:
        """Return the decision to park what was parked ``parks`` times before, or, after ``limit_ms`` in all, to bury it."""
        if waited_ms >= limit_ms:
            waited = f", after {parks} parks of {waited_ms / 1000:.0f} s in all" if parks else ""
            return cls(Outcome.DEAD, reason, detail + waited)
        delay = min(PARK_MOST_MS, PARK_FIRST_MS * PARK_GROWTH ** min(parks, 20)) * (0.75 + jitter() / 2)
        return cls(Outcome.PARKED, reason, detail, min(delay, limit_ms - waited_ms))


_COUNTS = frozenset({Outcome.DONE, Outcome.SKIPPED, Outcome.RETRIED, Outcome.DEAD})

DONE = Decision(Outcome.DONE)
SKIPPED = Decision(Outcome.SKIPPED)
STALE = Decision(Outcome.STALE)


@dataclass(frozen=True)
class RetryPolicy:
    """How often a failing message runs again, and after how long. Times in milliseconds."""

    max_retries: int = 0
    min_backoff: float = 0
    max_backoff: float = 0
    throws: tuple[type[BaseException], ...] = ()
    retry_when: Callable[[int, BaseException], bool] | None = None

    def backoff(self, retries: int, jitter: Callable[[], float]) -> float:
        """Return the delay before retry ``retries + 1``: full jitter below a doubling cap.

        Full jitter spreads a thousand messages that failed together over the whole interval, where a jitter around
        the cap would send them back as one wave.
        """
        cap = min(self.max_backoff, self.min_backoff * 2.0 ** min(retries, 64))
        return cap * jitter()


NO_RETRIES = RetryPolicy()


def decide(
    delivery: Delivery,
    *,
    exception: BaseException | None = None,
    skipped: bool = False,
    policy: RetryPolicy = NO_RETRIES,
    jitter: Callable[[], float] = random.random,
) -> Decision:
    """Return what becomes of ``delivery``, whose processing ended with ``exception``, ``skipped``, or well.

    ``policy`` is that of the actor; without one a failure is final. ``jitter`` gives numbers in [0, 1).
    """
    if delivery.turned_away is not None:
        return delivery.turned_away
    if exception is not None:
        return after_failure(delivery.retries, exception, policy, jitter)
    if delivery.failed:
        return Decision(Outcome.DEAD, Reason.REJECTED, "a middleware called message.fail()")
    return SKIPPED if skipped else DONE


def after_failure(
    retries: int,
    exception: BaseException,
    policy: RetryPolicy = NO_RETRIES,
    jitter: Callable[[], float] = random.random,
) -> Decision:
    """Return what becomes of a message whose actor raised ``exception`` and has been retried ``retries`` times before."""
    name = type(exception).__name__
    if isinstance(exception, Shutdown):
        return Decision(Outcome.RETURNED, Reason.SHUTDOWN, "interrupted by the shutdown of its worker")
    if isinstance(exception, PermanentError) or (policy.throws and isinstance(exception, policy.throws)):
        return Decision(Outcome.DEAD, Reason.PERMANENT_ERROR, f"{name} is never retried")
    if retries >= policy.max_retries:
        return Decision(
            Outcome.DEAD, Reason.RETRIES_EXHAUSTED, f"failed {_times(retries + 1)}, the last time with {name}"
        )
    if policy.retry_when is not None and not policy.retry_when(retries, exception):
        return Decision(
            Outcome.DEAD, Reason.RETRIES_EXHAUSTED, f"retry_when refused another attempt after {name}"
        )
    if isinstance(exception, Retry) and is_number(exception.delay):
        return Decision(Outcome.RETRIED, name, "the actor asked for this delay", max(exception.delay, 0))
    return Decision(Outcome.RETRIED, name, f"failed {_times(retries + 1)}", policy.backoff(retries, jitter))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
