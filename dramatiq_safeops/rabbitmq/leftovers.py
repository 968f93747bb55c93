"""What stock Dramatiq has left in a delay queue, ``<queue>.DQ``: moved to where this package keeps delayed messages.

Runs in: the I/O thread of workers with ``queue_type="classic"``. Needs: nothing by itself; never blocks.

Stock workers hold delayed messages and retries in their memory until they are due. Here none of them reaches a worker
thread: each goes on into the delay ladder, or to its queue if it is due, and is acked once that is confirmed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from dramatiq import Message

from ..delivery import RETURNED, Delivery
from ..encoder import Unreadable, decode
from ..outcome import Decision, Outcome, Reason
from . import copies
from .connection import UNDECODABLE
from .delays import LONGEST_MS

logger = logging.getLogger(__name__)

#: Messages of a delay queue that are on their way at a time. It bounds the memory, and is enough to wait for confirms
#: in batches.
PREFETCH = 200


def admit(delivery: Delivery, carry_out: Callable[[Delivery], None]) -> None:
    """Settle a message that was read from a delay queue. Never raises; ``carry_out`` must not either."""
    try:
        delivery.decision = _look_at(delivery)
    except Exception as error:
        logger.critical("Unexpected failure on arrival of a delayed message.", exc_info=True)
        delivery.decision = Decision(Outcome.DEAD, Reason.UNREADABLE, f"{type(error).__name__} on arrival")
    delivery.leave_buffer(RETURNED)
    carry_out(delivery)


def _look_at(delivery: Delivery) -> Decision:
    copies.read_headers(delivery)
    if UNDECODABLE in delivery.headers:
        return Decision(Outcome.DEAD, Reason.UNREADABLE, "its AMQP headers cannot be decoded")
    try:
        message = decode(delivery.body, delivery.queue)
    except Unreadable as error:
        return Decision(Outcome.DEAD, Reason.UNREADABLE, str(error))
    delivery.show(copies.view_of(delivery, message))
    delivery.headers = {**delivery.headers, **due_headers(eta_of(delivery.body), now_ms=copies.now_ms())}
    return Decision(Outcome.DELAYED)


def eta_of(body: bytes) -> object:
    """Return what stands in a body as the instant before which stock Dramatiq would not run it; None if nothing does."""
    try:
        return Message.decode(body).options.get("eta")
    except Exception:
        return None  # it can be read some other way, or decode() had said so


def due_headers(eta: object, *, now_ms: int) -> dict[str, Any]:
    """Return the headers that let a message wait for ``eta`` (Unix time in ms). What is no instant is due at once.

    An instant beyond all reason, as of a clock in nanoseconds, is cut to ten years: late rather than early.
    """
    if isinstance(eta, bool) or not isinstance(eta, (int, float)) or eta != eta:
        # NaN is the one number that is not itself; math.isnan() fails for huge ints.
        eta = now_ms
    due_ms = math.ceil(max(min(eta, now_ms + LONGEST_MS), 0))
    return {copies.DUE: due_ms, copies.LEFT: max(due_ms - now_ms, 0)}
