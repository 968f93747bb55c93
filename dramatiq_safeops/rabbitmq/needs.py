"""What must exist before something can be published: declared once per process, with what waits for it.

Runs in: the I/O thread. Needs: RabbitMQ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pika.adapters.select_connection import SelectConnection

from .declarer import declare_on_own_channel
from .io_thread import IOThread
from .publication import Batch, Need, Publication
from .topology import Declaration

logger = logging.getLogger(__name__)

#: Seconds after which a declaration that is not answered holds up its messages no longer. In a cluster with a frozen node
#: RabbitMQ 3.10 answers none for a minute, and what is to be declared mostly exists. If not, the messages come back.
DECLARE_PATIENCE_S = 2.0


class Needs:
    """Declares what publications need. Lives on the I/O thread.

    ``on_ready`` is given what has waited, in order; ``on_refused`` the same with RabbitMQ's answer.
    """

    def __init__(
        self,
        io: IOThread,
        declarations_for: Callable[[Need], list[Declaration]],
        *,
        on_ready: Callable[[list[Publication]], None],
        on_refused: Callable[[list[Publication], Need, str], None],
    ) -> None:
        self._io = io
        self._declarations_for = declarations_for
        self._on_ready = on_ready
        self._on_refused = on_refused
        self._declared: set[Need] = set()
        self._ever_declared: set[Need] = set()
        self._waiting: dict[Need, list[Publication]] = {}
        self._unanswered: set[Need] = set()  # declarations that hold up nobody any more

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a declaration."""
        return not self._waiting

    @property
    def quiet(self) -> bool:
        """Whether no declaration is on its way."""
        return not self._waiting and not self._unanswered

    def missing(self, publication: Publication) -> Need | None:
        """Return what ``publication`` needs and is not declared yet, if anything."""
        return next((need for need in publication.needs if need not in self._declared), None)

    def declare(self, need: Need, publication: Publication, connection: SelectConnection | None) -> None:
        """Declare ``need`` over ``connection``, unless somebody waits for it already; let ``publication`` wait for it."""
        waiting = self._waiting.get(need)
        if waiting is not None:
            waiting.append(publication)
            return
        waiting = self._waiting[need] = [publication]
        if connection is not None and need not in self._unanswered:
            self._io.call_later(DECLARE_PATIENCE_S, self._late, need, waiting)
            declare_on_own_channel(
                self._io, connection, self._declarations_for(need), lambda error: self._done(need, error)
            )

    def was_declared(self, need: Need) -> None:
        """``need`` was declared by another part of this process. Should it be other now, it was changed meanwhile."""
        self._ever_declared.add(need)

    def gone(self, publication: Publication) -> None:
        """What ``publication`` needs was deleted: it is declared again when it is needed next."""
        self._declared.difference_update(publication.needs)

    def withdraw(self, batch: Batch) -> None:
        """Nobody waits for ``batch`` any more."""
        for waiting in self._waiting.values():
            waiting[:] = [one for one in waiting if one.batch is not batch]

    def lost(self, *, everything: bool) -> list[list[Publication]]:
        """The channel is lost: return what was waiting. With ``everything``, nothing counts as declared any more."""
        interrupted = list(self._waiting.values())
        self._waiting.clear()
        self._declared -= self._declared if everything else self._unanswered
        self._unanswered.clear()
        return interrupted

    def _late(self, need: Need, waiting: list[Publication]) -> None:
        """Let publish without the answer. What RabbitMQ returns then waits for it after all."""
        if waiting is self._waiting.get(need):
            del self._waiting[need]
            self._unanswered.add(need)
            self._declared.add(need)
            self._on_ready(waiting)

    def _done(self, need: Need, error: str | None) -> None:
        waiting = self._waiting.pop(need, [])
        self._unanswered.discard(need)
        if error is not None and error.startswith("406") and need in self._ever_declared:
            # It was as we declare it, and now it is not: most likely it was migrated. What is sent to it, it takes.
            logger.warning(
                "%s %r does not exist any more as this process would declare it (%s). Messages are sent to it as it is; give"
                " the broker the queue_type and max_priority that it has now, or this process cannot send when it starts"
                " again.",
                *need,
                error,
                extra={"event": "publisher.as_it_is"},
            )
            error = None
        if error is None:
            self._declared.add(need)
            self._ever_declared.add(need)
            self._on_ready(waiting)
        else:
            self._declared.discard(need)
            self._on_refused(waiting, need, error)
