"""Gives a queue other arguments: moves its messages aside, deletes it, declares it anew, and moves them back.

Runs in: the command line, on blocking connections. Needs: RabbitMQ. Can be killed at any moment and started again.

    <queue>, .DQ, .XQ ──▶ <queue>.migrating        workers stand back first, see ``migration_watch``
    publishers pause, <queue> is deleted and declared anew, publishers go on        see ``presence``
    <queue>.migrating ──▶ <queue>, <queue>.dlq     then workers consume again

Where it stands can be seen from the queues alone: while ``<queue>.migrating`` exists it is not over, and what has not its new
arguments yet is moved there first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pika
import pika.exceptions
from dramatiq.common import dq_name, xq_name

from . import admin, topology
from .holding import Hold
from .migration_plan import Found, MigrationError, Plan, look_at, make_plan
from .moving import ORIGIN, InUse, NotTaken, digests_in, from_staging, move, to_staging
from .topology import DELIVERY_EXCHANGE, MIGRATION_LOCK, MIGRATIONS, UNROUTABLE

#: Seconds for what RabbitMQ itself had on its way from the delay ladder to the queue.
LADDER_S = 0.25

#: Seconds after which a quorum queue counts what was returned to it.
RETURNED_S = 0.1

#: Seconds between two looks at what we wait for.
LOOK_EVERY_S = 0.25

#: Seconds before anything is moved into a quorum queue that was just declared: killed together with its RabbitMQ while it is
#: younger than two seconds, it loses what it has confirmed (3.10, 4.0, 4.3).
SETTLING_S = 3.0

#: Seconds between two tries to let all publishers pause, doubling: each that fails costs them some seconds.
FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0

#: As many messages as are moved in a moment: with more, publishers would have to pause for longer.
MOMENT = 500

#: AMQP's code for what a quorum queue cannot do: to be deleted only if it is empty and unused.
NOT_IMPLEMENTED = 540


class Busy(MigrationError):
    """Another migration runs."""


class _Outrun(MigrationError):
    """Somebody else has declared the queue between its deletion and ours."""


@dataclass
class Result:
    """What has been moved: messages by the queue they came from."""

    moved: Counter[str] = field(default_factory=Counter)
    held_s: float = 0.0


#: Told of what happens: a word for the step, a sentence, and counts.
Report = Callable[[str, str, int], None]


class Migration:
    """The migration of one queue over one connection. Not thread-safe."""

    def __init__(
        self,
        connection: pika.BlockingConnection,
        parameters: Sequence[pika.connection.Parameters],
        queue: str,
        *,
        to: str = "quorum",
        max_priority: int | None = None,
        timeout_s: float = 900.0,
        report: Report = lambda step, sentence, count: None,
    ) -> None:
        self._connection = connection
        self._parameters = parameters
        self._queue = queue
        self._to = to
        self._max_priority = max_priority
        self._timeout_s = timeout_s
        self._report = report
        self._staging = topology.staging_queue(queue)
        self._dq, self._xq = dq_name(queue), xq_name(queue)
        self._result = Result()

    def plan(self) -> Plan:
        """Look what is there. Changes nothing."""
        return make_plan(self._connection, self._queue, self._to, self._max_priority)

    def _look(self, name: str) -> Found:
        return look_at(self._connection, name)

    def _is_empty(self, name: str) -> bool:
        """Ask for a message. RabbitMQ says of a quorum queue without a leader that it has none, and deletes it with all."""
        channel = self._connection.channel()
        with admin.answering(self._connection):
            method, _, _ = channel.basic_get(name)
        if method is not None:
            channel.basic_nack(method.delivery_tag, requeue=True)
        channel.close()
        return method is None

    def run(self) -> Result:
        """Do what is to be done; return when it is.

        Raises:
            Busy: another migration runs in this vhost.
            MigrationError: it cannot go on; says why. Start it again to go on.
            admin.NotConnected, pika.exceptions.AMQPError: RabbitMQ has gone. Start it again when it is back.
        """
        lock = self._lock()
        plan = self.plan()
        if not plan.steps:
            self._forget_markers()
            lock.close()
            return self._result
        try:
            self._migrate(plan)
        except NotTaken as error:
            raise MigrationError(f"{error}; nothing is lost, start it again when that is mended") from None
        # The lock is given back with its queue.
        lock.queue_delete(MIGRATION_LOCK)
        return self._result

    def _lock(self) -> Any:
        channel = self._connection.channel()
        try:
            channel.queue_declare(MIGRATION_LOCK, exclusive=True)
        except pika.exceptions.ChannelClosedByBroker as error:
            if error.reply_code != 405:
                raise MigrationError(f"no migration can be started: {error.reply_text}") from None
            raise Busy(
                "another migration runs in this vhost: wait until it is done (it lets go a few seconds after it was killed)"
            ) from None
        return channel

    def _migrate(self, plan: Plan) -> None:
        begun = plan.staging.exists
        switched = plan.kind in ("wanted", "missing")
        needed = (self._staging, topology.dead_letter_queue(self._queue), MIGRATIONS, UNROUTABLE)
        fresh = not all(self._look(name).exists for name in needed)
        self._announce()
        declared_at = time.monotonic()
        try:
            self._wait_for_workers(undo=not begun)
        except KeyboardInterrupt:
            # Nobody would let them consume again.
            if not begun and self._is_empty(self._staging):
                self._finish()
                raise MigrationError("interrupted. Nothing was moved, everything goes on as before") from None
            raise
        if switched:
            # Also if it is there: an earlier migration may have been killed before it was bound to the delay ladder.
            self._declare()
        if fresh:
            self._settle(declared_at)
        copied = begun and not self._is_empty(self._staging)
        already = self._already(self._staging) if copied else Counter[bytes]()
        if not switched:
            self._aside(self._queue, already, None)
        for name in (self._dq, self._xq):
            if self._look(name).exists:
                self._aside(name, already, name)
        if not switched:
            self._switch(plan.kind, already)
            declared_at = time.monotonic()
        for name in (self._dq, self._xq):
            if self._look(name).exists:
                self._remove(name, already)
        self._recover_unroutable(already)
        if not switched:
            self._settle(declared_at)
        # Only who finds it switched can find messages in both places.
        self._back(look=begun and plan.kind == "wanted")
        self._finish()

    def _settle(self, declared_at: float) -> None:
        self._connection.sleep(max(declared_at + SETTLING_S - time.monotonic(), 0.01))

    def _announce(self) -> None:
        """Let workers stand back: first the queue that says which, then the message that makes them look."""
        channel = self._connection.channel()
        channel.confirm_delivery()
        topology.apply([topology.staging(self._queue), topology.migrations()], channel)
        topology.apply(topology.dead_letters_of(self._queue), channel)
        properties = pika.BasicProperties(delivery_mode=2)
        channel.basic_publish("", MIGRATIONS, self._queue.encode(), properties, mandatory=True)
        channel.close()

    def _wait_for_workers(self, *, undo: bool) -> None:
        """Wait until nobody consumes: as long as somebody does, somebody may hold un-acked messages."""
        deadline = time.monotonic() + self._timeout_s
        told = -1
        while True:
            found = [self._look(name) for name in (self._queue, self._dq, self._xq)]
            consumers = sum(one.consumers or 0 for one in found)
            if not consumers:
                return
            if consumers != told:
                told = consumers
                self._report(
                    "workers", f"{consumers} consumers still attached, waiting until they let go", consumers
                )
            if time.monotonic() >= deadline:
                self._give_up(found, undo=undo)
            self._connection.sleep(LOOK_EVERY_S)

    def _give_up(self, found: list[Found], *, undo: bool) -> None:
        held = ", ".join(f"{one.consumers} of {one.name!r}" for one in found if one.consumers)
        sentence = (
            f"after {self._timeout_s:g} s there are still consumers ({held}): stop workers of stock Dramatiq and of older"
            " versions; workers of this version let go when their running messages are done"
        )
        if undo and self._is_empty(self._staging):
            self._finish()
            raise MigrationError(f"{sentence}. Nothing was moved, everything goes on as before")
        raise MigrationError(f"{sentence}, then start it again; its workers stand back until it is done")

    def _already(self, *names: str) -> Counter[bytes]:
        self._report("look", "an earlier migration was cut off: looking at what it has moved", 0)
        found: Counter[bytes] = Counter()
        for name in names:
            is_dead = _always if name == topology.dead_letter_queue(self._queue) else self._is_dead
            found += digests_in(self._connection, name, is_dead)
        return found

    def _is_dead(self, properties: pika.BasicProperties) -> bool:
        return bool((properties.headers or {}).get(ORIGIN) == self._xq)

    def _aside(self, name: str, already: Counter[bytes], origin: str | None, *, wait: bool = True) -> None:
        self._move(
            name,
            to_staging(self._staging, origin),
            already=already,
            is_dead=lambda _properties: name == self._xq,
            wait=wait,
        )

    def _move(self, name: str, copy_of: Any, *, wait: bool = True, **how: Any) -> None:
        def on_moved(count: int) -> None:
            self._result.moved[name] += count
            self._report("moved", name, count)

        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                move(self._connection, name, copy_of, on_moved=on_moved, **how)
                return
            except InUse:
                if not wait:
                    raise
                if time.monotonic() >= deadline:
                    self._give_up([self._look(name)], undo=False)
                self._report("workers", f"somebody consumes {name!r}, waiting until they let go", 1)
                self._connection.sleep(LOOK_EVERY_S)

    # -- the moment in which the queue does not exist

    def _switch(self, kind: str, already: Counter[bytes]) -> None:
        deadline = time.monotonic() + self._timeout_s
        pause = FIRST_PAUSE_S
        while True:
            # What comes out of the delay ladder waits in safeops.unroutable from now on, see _recover_unroutable.
            channel = self._connection.channel()
            channel.queue_unbind(self._queue, DELIVERY_EXCHANGE, self._queue)
            channel.close()
            self._connection.sleep(LADDER_S)
            while (self._look(self._queue).messages or 0) > MOMENT:
                self._aside(self._queue, already, None)
            hold = Hold(self._connection)
            try:
                # Publishers must not wait for a RabbitMQ that does not answer: without the connection the pause is over.
                with admin.answering(self._connection):
                    begun = hold.begin()
                if not begun:
                    self._report(
                        "hold", f"{hold.publishing} producers have not paused, trying again", hold.publishing
                    )
                else:
                    with admin.answering(self._connection):
                        replaced = self._replace(kind, already)
                    if replaced:
                        return
            finally:
                if self._connection.is_open:
                    with admin.answering(self._connection):
                        self._result.held_s += hold.end()
            if time.monotonic() >= deadline:
                raise MigrationError(
                    f"queue {self._queue!r} could not be replaced within {self._timeout_s:g} s: a producer does not pause, or"
                    " something goes on declaring or consuming the queue (stock Dramatiq?); stop it and start this again"
                )
            self._connection.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_S)

    def _replace(self, kind: str, already: Counter[bytes]) -> bool:
        """Delete the queue and declare it anew, while nobody publishes. Return whether that went well."""
        try:
            self._aside(self._queue, already, None, wait=False)
        except InUse:
            return False
        if not self._delete(self._queue, kind):
            return False
        try:
            self._declare()
        except _Outrun:
            return False
        self._report("switched", f"queue {self._queue!r} is a {self._to} queue now", 0)
        return True

    def _declare(self) -> None:
        declarations = topology.topology_for(self._queue, self._to, max_priority=self._max_priority)
        try:
            admin.declare(self._connection, declarations)
        except admin.RefusedDeclaration as error:
            if f"'{self._queue}'" in str(error) and "406" in str(error):
                raise _Outrun(
                    f"somebody else has declared queue {self._queue!r} in this moment: start this again"
                ) from None
            explained = topology.explain_refusal(self._queue, self._to, str(error))
            raise MigrationError(f"{explained}; its messages are safe in {self._staging!r}") from None

    def _delete(self, name: str, kind: str = "classic") -> bool:
        """Delete a queue if it is empty and nobody consumes it; return whether it is gone."""
        if kind == "classic":
            # Both are looked at by the queue itself. On our own connection, with which the hold would end.
            return self._delete_unused(self._connection, name)
        if kind == "other":
            # A quorum queue answers with the end of the connection, so that must be another one.
            with admin.connected(self._parameters) as connection:
                try:
                    return self._delete_unused(connection, name)
                except pika.exceptions.ConnectionClosedByBroker as error:
                    if error.reply_code != NOT_IMPLEMENTED:
                        raise
        # Nobody publishes to it and nobody consumes it. What we returned may be counted a moment later.
        for _ in range(2):
            found = self._look(name)
            if found.messages or found.consumers or not self._is_empty(name):
                return False
            self._connection.sleep(RETURNED_S)
        channel = self._connection.channel()
        channel.queue_delete(name)
        channel.close()
        return True

    def _delete_unused(self, connection: pika.BlockingConnection, name: str) -> bool:
        channel = connection.channel()
        try:
            channel.queue_delete(name, if_unused=True, if_empty=True)
        except pika.exceptions.ChannelClosedByBroker:
            return False
        channel.close()
        return True

    # -- afterwards

    def _remove(self, name: str, already: Counter[bytes]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._delete(name):
            if time.monotonic() >= deadline:
                self._give_up([self._look(name)], undo=False)
            self._connection.sleep(LOOK_EVERY_S)
            self._aside(name, already, name)

    def _recover_unroutable(self, already: Counter[bytes]) -> None:
        """Take back what came out of the delay ladder while the queue was not bound."""
        count = self._look(UNROUTABLE).messages
        if not count:
            return
        copy = to_staging(self._staging, None)

        def copy_of(method: Any, properties: Any, body: bytes) -> Any:
            ours = method.routing_key == self._queue and method.exchange == DELIVERY_EXCHANGE
            return copy(method, properties, body) if ours else None

        self._move(UNROUTABLE, copy_of, already=already, is_dead=lambda _properties: False, most=count)

    def _back(self, *, look: bool) -> None:
        if not self._look(self._staging).exists:
            return
        targets = [self._queue, topology.dead_letter_queue(self._queue)]
        already = (
            self._already(*(one for one in targets if self._look(one).messages)) if look else Counter[bytes]()
        )
        while not self._is_empty(self._staging):
            self._move(
                self._staging,
                from_staging(self._queue, self._dq, self._xq),
                already=already,
                is_dead=self._is_dead,
            )

    def _finish(self) -> None:
        # Only we write there, so what is empty now stays so.
        if not self._is_empty(self._staging):
            raise MigrationError(f"there are messages in {self._staging!r} again: start this again")
        channel = self._connection.channel()
        channel.queue_delete(self._staging)
        channel.close()
        self._forget_markers()

    def _forget_markers(self) -> None:
        channel = self._connection.channel()
        topology.apply([topology.migrations()], channel)
        others = []
        while True:
            method, _, body = channel.basic_get(MIGRATIONS)
            if method is None:
                break
            if body == self._queue.encode():
                channel.basic_ack(method.delivery_tag)
            else:
                others.append(method.delivery_tag)
        for tag in others:
            channel.basic_nack(tag, requeue=True)
        channel.close()


def _always(_properties: pika.BasicProperties) -> bool:
    return True
