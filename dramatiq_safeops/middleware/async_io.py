"""Async actors: where their coroutines run, and that a message is never tried again beside one that still runs.

Runs in: worker. Needs: nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import dramatiq.middleware

from .. import event_loop
from .guard import Guard

if TYPE_CHECKING:
    from dramatiq import Broker, Worker

logger = logging.getLogger(__name__)


class AsyncIO(Guard, dramatiq.middleware.AsyncIO):
    """Runs the coroutines of async actors on one event loop per process.

    Dramatiq's own gives up on an interrupted coroutine after a second, and the message is tried again beside it; a
    coroutine that blocks the loop keeps the process from ending. With this one a message waits for its coroutine, however
    long that takes, and one that fails for its threads (``asyncio.to_thread``), too; the process ends all the same. See
    ``dramatiq_safeops.event_loop``.

    Several brokers in one process share the loop; the last of their workers stops it. It starts with the first coroutine,
    so an app without async actors pays nothing.
    """

    def __init__(self) -> None:
        self.logger = logger

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Make the loop known to Dramatiq. In here, and not at import: a fork would leave its thread behind."""
        super().before_worker_boot(broker, worker)
        event_loop.acquire(worker)

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Stop the loop, unless another worker in this process needs it."""
        event_loop.release(worker)
