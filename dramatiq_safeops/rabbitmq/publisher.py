"""Confirmed publishing. Its only primitive: publish a batch, and be told which of it RabbitMQ has confirmed.

Runs in: the I/O thread; ``Batch`` is handed over from and waited for in any thread. Needs: RabbitMQ.

Everything is published mandatory, on a connection of its own: under a memory alarm RabbitMQ stops reading from
connections that publish, and acks must not wait behind that.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pika
from pika.adapters.select_connection import SelectConnection

from .connection import Link
from .io_thread import IOThread
from .needs import Needs
from .presence import Presence
from .publication import (
    Batch,
    Impossible,
    Need,
    Publication,
    PublishError,
    Refused,
    Undeclarable,
    Unroutable,
    Withdrawn,
)
from .topology import Declaration
from .trouble import close_reason

logger = logging.getLogger(__name__)

#: How many publications to one destination may be unconfirmed at a time. RabbitMQ confirms a few hundred together; beyond
#: that only memory is spent (measured: 500 is within 10 % of the best rate).
WINDOW = 1000

#: What RabbitMQ and pika agree on unless told otherwise.
DEFAULT_FRAME_MAX = 131_072

#: AMQP's codes after which no message is to blame: lost without a word, closed by us, server shut down, exchange
#: deleted, and an internal error (RabbitMQ 3.10 has one when a queue was made anew with another type).
BLAMELESS_CODES = frozenset({0, 200, 320, 404, 541})

#: After a refusal the channel is changed for a new one before the next publish: when it is older than this, in seconds, and
#: nothing is in flight over it; or, where there is always something, when it is older than the second number, after holding
#: all publishes for the third. RabbitMQ 3.10 goes on refusing on a channel on which it has refused before, also when the
#: limit of the queue is gone.
RENEW_AFTER_S = 1.0
RENEW_AT_LAST_S = 15.0
RENEW_PATIENCE_S = 0.2


@dataclass
class _Lane:
    """What goes to one destination. A queue that does not confirm must not hold up the others."""

    waiting: deque[Publication] = field(default_factory=deque)
    in_flight: int = 0


class Publisher:
    """Publishes with confirms over one connection. Lives on the I/O thread, opens its connection when first used.

    A publication that was written but not confirmed when the connection broke is published again, so it may arrive
    twice under one message id, and never not at all.
    """

    def __init__(
        self,
        io: IOThread,
        parameters: Sequence[pika.connection.Parameters],
        declarations_for: Callable[[Need], list[Declaration]],
        explain_refusal: Callable[[Need, str], str],
    ) -> None:
        self._io = io
        self._explain_refusal = explain_refusal
        self._link = Link(io, parameters, "publish", on_up=self._up, on_down=self._down)
        self._presence = Presence(io, quiet=self._is_quiet, on_present=self._pump, on_free=self._free)
        self._channel: Any = None
        self._ready = False
        self._blocked = ""
        self._tag = 0
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._in_flight: OrderedDict[int, Publication] = OrderedDict()
        # After an error of RabbitMQ's: what was in flight is tried one by one, to find the culprit.
        self._suspects: deque[Publication] = deque()
        self._suspect_in_flight: Publication | None = None
        self._refused = False  # over this channel, something was
        self._opened_at = 0.0
        self._renewing = False
        self._needs = Needs(io, declarations_for, on_ready=self._needs_ready, on_refused=self._needs_refused)

    @property
    def trouble(self) -> str:
        """Why nothing can be published just now, for people; empty when all is well. Thread-safe."""
        return self._link.trouble or self._blocked

    @property
    def frame_max(self) -> int:
        """The largest frame that RabbitMQ takes, in bytes: all headers of a message must fit into one. Thread-safe."""
        connection = self._link.connection
        agreed = 0 if connection is None else int(connection.params.frame_max)
        return agreed if agreed > 0 else DEFAULT_FRAME_MAX

    @property
    def idle(self) -> bool:
        """Whether nothing waits for its confirm."""
        moving = any(lane.waiting or lane.in_flight for lane in self._lanes.values())
        return not (moving or self._suspects) and self._needs.idle

    @property
    def closed(self) -> bool:
        """Whether there is no connection any more."""
        return self._link.closed

    def submit(self, batch: Batch) -> None:
        """Publish ``batch``, in order for each destination, as soon as it is possible."""
        self._link.open()
        for publication in batch.publications:
            self._lane(publication).waiting.append(publication)
        self._pump()

    def forget(self, batch: Batch) -> None:
        """Give up ``batch``: what is not written yet is not published any more, and nothing of it takes up a place.

        Without a connection, or with a queue that does not confirm, it would stay in memory for good.
        """
        mine = [one for one in batch.publications if one.batch is batch]
        flying = set(self._in_flight.values())
        for publication in mine:
            if publication in flying:
                # Its tag stays: the confirms of the others are counted by it.
                publication.body = b""
                self._out_of_flight(publication)
        for waiting in (self._suspects, *(lane.waiting for lane in self._lanes.values())):
            kept = [one for one in waiting if one.batch is not batch]
            waiting.clear()
            waiting.extend(kept)
        self._needs.withdraw(batch)
        for publication in mine:
            self._settle(publication, Withdrawn("nobody waits for it any more"))
        self._pump()

    def was_declared(self, need: Need) -> None:
        """``need`` was declared by another part of this process."""
        self._needs.was_declared(need)

    def close(self) -> None:
        """Close the connection politely."""
        self._link.close()

    # -- the connection and its channel

    def _up(self, connection: SelectConnection) -> None:
        connection.add_on_connection_blocked_callback(self._io.safely(self._on_blocked))
        connection.add_on_connection_unblocked_callback(self._io.safely(self._on_unblocked))
        self._presence.up(connection)
        self._open_channel(connection)

    def _is_quiet(self) -> bool:
        # Also what nobody waits for any more may still be on its way.
        return not self._in_flight and self._needs.quiet

    def _free(self, held: bool) -> None:
        if held and self._channel is not None and self._channel.is_open:
            # RabbitMQ 3.10 loses the connection when a channel publishes to a queue that was made anew with another type.
            # Nothing is in flight; _channel_closed opens the next one.
            self._ready = False
            self._channel.close()
        self._pump()

    def _on_blocked(self, _connection: Any, method: Any) -> None:
        self._blocked = (
            f"RabbitMQ blocks publishers: {getattr(method.method, 'reason', '') or 'resource alarm'}"
        )
        logger.warning(
            "%s. Messages wait until it ends.", self._blocked, extra={"event": "publisher.blocked"}
        )

    def _on_unblocked(self, _connection: Any, _method: Any) -> None:
        self._blocked = ""
        logger.info("RabbitMQ lets publishers publish again.", extra={"event": "publisher.unblocked"})
        self._pump()

    def _down(self, code: int, text: str) -> None:
        self._blocked = ""
        self._presence.down()
        self._channel_lost(code, text)

    def _open_channel(self, connection: SelectConnection) -> None:
        connection.channel(on_open_callback=self._io.safely(self._channel_open))

    def _channel_open(self, channel: Any) -> None:
        self._channel = channel
        self._tag = 0
        self._refused = False
        self._opened_at = time.monotonic()
        channel.add_on_close_callback(self._io.safely(self._channel_closed))
        channel.add_on_return_callback(self._io.safely(self._on_return))
        channel.confirm_delivery(
            self._io.safely(self._on_confirm), callback=self._io.safely(self._confirms_on)
        )

    def _confirms_on(self, _frame: Any) -> None:
        self._ready = True
        self._pump()

    def _channel_closed(self, channel: Any, reason: BaseException) -> None:
        if channel is not self._channel:
            return
        connection = self._link.connection
        if connection is None or not connection.is_open:
            return  # the connection itself is closing: _down follows
        code, text = close_reason(reason)
        self._channel_lost(code, text)
        self._open_channel(connection)

    def _channel_lost(self, code: int, text: str) -> None:
        """Line up again what was in flight."""
        self._channel = None
        self._ready = False
        again = [one for one in self._in_flight.values() if one.batch is not None]
        self._in_flight.clear()
        self._renewing = False
        self._suspect_in_flight = None
        for lane in self._lanes.values():
            lane.in_flight = 0
        if code not in BLAMELESS_CODES and len(again) == 1:
            self._settle(again.pop(), Impossible(text))
        for publication in reversed(again):
            publication.returned = False
            if publication.suspect or code not in BLAMELESS_CODES:
                publication.suspect = True
                self._suspects.appendleft(publication)
            else:
                self._lane(publication).waiting.appendleft(publication)
        for waiting in self._needs.lost(everything=code == 404):
            self._line_up_again(waiting)

    # -- publishing

    def _pump(self) -> None:
        for destination in [
            key for key, lane in self._lanes.items() if not lane.waiting and not lane.in_flight
        ]:
            del self._lanes[destination]
        if not self._ready or self._blocked:
            return
        if not self._presence.free:
            if self._presence.present:
                self._declare_ahead()
            return
        if self._refused and self._renew_soon():
            return
        if self._suspects or self._suspect_in_flight is not None:
            # A suspect flies alone: if the channel is closed again, it was the one.
            if self._suspects and not self._flying:
                self._publish(self._suspects.popleft())
            return
        for lane in list(self._lanes.values()):
            while lane.waiting and lane.in_flight < WINDOW and self._ready:
                self._publish(lane.waiting.popleft())

    def _declare_ahead(self) -> None:
        """Declare what is needed first while it is not known yet whether we may publish: both take a few round trips."""
        for lane in list(self._lanes.values()):
            missing = self._needs.missing(lane.waiting[0]) if lane.waiting else None
            if missing is not None:
                self._needs.declare(missing, lane.waiting.popleft(), self._link.connection)

    @property
    def _flying(self) -> bool:
        return any(lane.in_flight for lane in self._lanes.values())

    def _publish(self, publication: Publication) -> None:
        missing = self._needs.missing(publication)
        if missing is not None:
            self._needs.declare(missing, publication, self._link.connection)
            return
        try:
            self._channel.basic_publish(
                publication.exchange,
                publication.routing_key,
                publication.body,
                publication.properties,
                mandatory=True,
            )
        except Exception as error:
            if self._channel.is_open:
                self._settle(publication, Impossible(f"{type(error).__name__}: {error}"))
            else:
                self._ready = False
                self._line_up_again([publication])
            return
        self._tag += 1
        publication.written = True
        self._in_flight[self._tag] = publication
        self._lane(publication).in_flight += 1
        if publication.suspect:
            self._suspect_in_flight = publication

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        nacked = method.NAME == "Basic.Nack"
        if method.multiple:
            while self._in_flight and next(iter(self._in_flight)) <= method.delivery_tag:
                self._landed(self._in_flight.popitem(last=False)[1], nacked)
        else:
            publication = self._in_flight.pop(method.delivery_tag, None)
            if publication is not None:
                self._landed(publication, nacked)
        self._pump()

    def _landed(self, publication: Publication, nacked: bool) -> None:
        if publication.batch is None:
            return  # withdrawn in flight, and not counted any more
        self._out_of_flight(publication)
        if nacked:
            self._refused = True
            self._settle(
                publication,
                Refused(
                    f"a queue behind {publication.routing_key!r} is over its length limit, or too few nodes of its cluster"
                    " are up"
                ),
            )
        elif not publication.returned:
            self._settle(publication, None)
        elif publication.needs and not publication.redeclared:
            # Somebody deleted the queue. Declare it once more, then it is the caller's error.
            publication.redeclared, publication.returned = True, False
            self._needs.gone(publication)
            self._line_up_again([publication])
        else:
            self._settle(publication, Unroutable(f"no queue takes messages for {publication.routing_key!r}"))

    def _renew_soon(self) -> bool:
        """Change the channel if that disturbs nobody; tell whether publishes have to wait for it."""
        age = time.monotonic() - self._opened_at
        waiting = self._suspects or any(lane.waiting for lane in self._lanes.values())
        if not self._renewing and waiting and age >= RENEW_AFTER_S:
            if not self._flying:
                self._renewing = True
            elif age >= RENEW_AT_LAST_S:
                self._renewing = True
                self._io.call_later(RENEW_PATIENCE_S, self._renew, self._channel)
        if self._renewing and not self._flying:
            self._renew(self._channel)
        return self._renewing

    def _renew(self, channel: Any) -> None:
        if self._renewing and channel is self._channel and channel.is_open:
            channel.close()  # _channel_closed opens the next one

    def _on_return(self, _channel: Any, method: Any, properties: Any, _body: bytes) -> None:
        # RabbitMQ returns a message before it confirms it, in order, and without its delivery tag.
        for publication in self._in_flight.values():
            if (
                not publication.returned
                and publication.routing_key == method.routing_key
                and publication.exchange == method.exchange
                and publication.properties.message_id == properties.message_id
            ):
                publication.returned = True
                return

    def _settle(self, publication: Publication, error: PublishError | None) -> None:
        batch, publication.batch = publication.batch, None
        if batch is not None:
            self._io.run_safely(batch.settle, publication, error)

    def _out_of_flight(self, publication: Publication) -> None:
        self._lane(publication).in_flight -= 1
        publication.suspect = False
        if publication is self._suspect_in_flight:
            self._suspect_in_flight = None

    def _lane(self, publication: Publication) -> _Lane:
        return self._lanes.setdefault(publication.destination, _Lane())

    def _line_up_again(self, publications: list[Publication]) -> None:
        for publication in reversed(publications):
            waiting = self._suspects if publication.suspect else self._lane(publication).waiting
            waiting.appendleft(publication)

    # -- what had to be declared first

    def _needs_ready(self, waiting: list[Publication]) -> None:
        self._line_up_again(waiting)
        self._pump()

    def _needs_refused(self, waiting: list[Publication], need: Need, answer: str) -> None:
        # 404: somebody deletes it faster than we declare it. That may pass, other arguments do not.
        kind = Unroutable if answer.startswith("404") else Undeclarable
        for publication in waiting:
            self._settle(publication, kind(self._explain_refusal(need, answer)))
        self._pump()
