"""Dramatiq's RabbitmqBroker, made to lose nothing: its API on top of ``rabbitmq/`` and the guards.

Runs in: every process. Needs: RabbitMQ; nothing is opened before the first message is sent or consumed.

What becomes of a message is ``SafeBroker``'s part; how it travels is this one's.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dramatiq.brokers.rabbitmq
import dramatiq.worker
import pika
from dramatiq.broker import Consumer as DramatiqConsumer
from dramatiq.common import q_name
from dramatiq.errors import ConnectionFailed, QueueJoinTimeout
from dramatiq.middleware import Middleware

from . import outgoing
from .boot import check_overrides, check_parameters, check_threads, check_urls
from .delivery import Delivery
from .errors import EXIT_UNREACHABLE, ConfigError, leave, refuse, under_dramatiq_command
from .masking import mask
from .middleware import safe_stack
from .options import check_above_zero, check_one_of
from .outcome import DEFAULT_PARK_LIMIT
from .rabbitmq import admin, leftovers, topology
from .rabbitmq.client import Client
from .rabbitmq.consumer import Consumer
from .rabbitmq.publication import Need
from .safe_broker import SafeBroker

if TYPE_CHECKING:
    from dramatiq import Message

#: Milliseconds that send() waits for RabbitMQ's confirm.
DEFAULT_SEND_TIMEOUT = 10_000
#: Seconds that a worker waits at its start for a RabbitMQ that is not there yet.
BOOT_PATIENCE_S = 10.0
#: Seconds that close() waits for what is on its way.
CLOSE_PATIENCE_S = 5.0


class RabbitmqBroker(SafeBroker, dramatiq.brokers.rabbitmq.RabbitmqBroker):
    """A drop-in for Dramatiq's ``RabbitmqBroker`` that loses nothing. One changed import.

    Every publish is confirmed and mandatory; a message is acked only after what became of it is safe at RabbitMQ.
    Thread-safe. Two connections per process however many threads send and however many queues are consumed; after a
    fork the child opens its own.

    Parameters:
        url: as Dramatiq's: one URL, several separated by ``;``, or a list of them.
        middleware: the whole list of middlewares; ``safe_stack()`` when None.
        queue_type: ``quorum`` (default), or ``classic`` for queues that stock Dramatiq has declared.
        max_priority: as Dramatiq's, on classic queues only: quorum queues have no such priorities.
        send_timeout: milliseconds that ``send()`` waits for RabbitMQ's confirm. Default 10,000.
        park_limit: milliseconds that messages which no worker can run yet (unknown actor, arguments that do not fit, a
            guard that breaks) are parked in all before they become dead letters. Default 3,600,000, an hour.
        confirm_delivery: accepted for Dramatiq's sake; publishes are always confirmed.
        parameters, **kwargs: pika connection parameters, as Dramatiq's.

    Raises:
        ConfigError: an option is wrong. In a worker of the ``dramatiq`` command: a sentence and exit code 1.
    """

    def __init__(
        self,
        *,
        url: str | list[str] | None = None,
        middleware: list[Middleware] | None = None,
        queue_type: str = "quorum",
        max_priority: int | None = None,
        send_timeout: float = DEFAULT_SEND_TIMEOUT,
        park_limit: float = DEFAULT_PARK_LIMIT,
        confirm_delivery: bool = True,
        parameters: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        self._lock = threading.Lock()
        self._client_now: Client | None = None
        self._worker: dramatiq.Worker | None = None
        try:
            check_threads()
            check_overrides(type(self))
            check_urls(url)
            check_parameters(kwargs)
            check_one_of("RabbitmqBroker.queue_type", queue_type, topology.QUEUE_TYPES)
            check_above_zero("RabbitmqBroker.send_timeout", send_timeout)
            if max_priority is not None and queue_type == "quorum":
                raise ConfigError(
                    "max_priority does not work on quorum queues, RabbitMQ refuses it: use queue_type='classic',"
                    " or a queue of its own for what is urgent"
                )
            super().__init__(
                park_limit=park_limit,
                confirm_delivery=True,
                url=url,
                middleware=safe_stack() if middleware is None else middleware,
                max_priority=max_priority,
                parameters=parameters,
                **kwargs,
            )
        except ConfigError as error:
            refuse(str(error))
        except (ValueError, TypeError, RuntimeError) as error:
            refuse(mask(f"RabbitmqBroker cannot be made of these parameters: {error}"))
        self.queue_type = queue_type
        self._send_timeout_s = send_timeout / 1000
        _brokers.add(self)

    # -- declaring

    def declare_queue(self, queue_name: str, *, ensure: bool = False) -> None:
        """Register a queue; with ``ensure`` also declare it on RabbitMQ.

        No delay queue goes with it: delayed messages wait in RabbitMQ, nobody consumes them.
        """
        name = q_name(queue_name)
        if name not in self.queues:
            if len(topology.dead_letter_queue(name).encode(errors="replace")) > topology.LONGEST_NAME:
                raise ConfigError(
                    f"queue name {name[:50]!r}... is too long, at most {topology.LONGEST_NAME - 4} bytes"
                )
            self.emit_before("declare_queue", name)
            self.queues.add(name)
            self.emit_after("declare_queue", name)
        if ensure:
            self._declare_now([("queue", name)])

    # -- sending

    def _publish(self, messages: Sequence[Message[Any]], *, delay: float | None) -> None:
        outgoing.send(self.client, messages, delay=delay, patience_s=self._send_timeout_s)

    # -- consuming

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> DramatiqConsumer:
        """Consume ``queue_name``. Returns at once; a lost connection is opened again without anybody's doing.

        For a ``Worker`` the places of ``prefetch`` are shared out among its queues, unless the environment sets
        ``dramatiq_queue_prefetch``. ``timeout`` is in milliseconds, how long the iterator waits for a message.
        """
        name = q_name(queue_name)
        self.declare_queue(name)
        client = self.client
        subscription = client.subscribe(
            name,
            self._prefetch(prefetch),
            self.admit,
            admit_leftover=self._admit_leftover if self.queue_type == "classic" else None,
        )
        return Consumer(client, subscription, timeout_s=timeout / 1000, carry_out=self.carry_out)

    def _prefetch(self, asked: int) -> int:
        worker = self._worker
        if worker is None or dramatiq.worker.QUEUE_PREFETCH:
            return asked
        return max(1, asked // len(worker.consumer_whitelist or self.queues))

    def _admit_leftover(self, delivery: Delivery) -> None:
        leftovers.admit(delivery, self._settlement.carry_out)

    @property
    def client(self) -> Client:
        """This process's connections to RabbitMQ."""
        client = self._client_now
        if client is None or client.pid != os.getpid():
            with self._lock:
                client = self._client_now
                if client is None or client.pid != os.getpid():
                    check_threads()  # again: a web server's workers are patched after the app was imported
                    client = self._client_now = Client(
                        self._all_parameters,
                        self._declarations_for,
                        self._explain_refusal,
                        self._settlement.instead,
                    )
        return client

    def close(self) -> None:
        """Wait a few seconds for what is on its way, then close the connections. They open again when needed."""
        with self._lock:
            client, self._client_now = self._client_now, None
        if client is not None and client.pid == os.getpid():
            client.close(CLOSE_PATIENCE_S)
        super().close()

    @property
    def _all_parameters(self) -> list[pika.connection.Parameters]:
        return self.parameters if isinstance(self.parameters, list) else [self.parameters]

    def _declarations_for(self, need: Need) -> list[topology.Declaration]:
        kind, what = need
        if kind == "delay":
            return topology.delay_step(what)
        if kind == "ladder":
            return topology.ladder()
        return topology.topology_for(what, self.queue_type, max_priority=self.max_priority)

    def _explain_refusal(self, need: Need, answer: str) -> str:
        kind, what = need
        if kind != "queue":
            return f"the delay queues safeops.delay.* cannot be declared, RabbitMQ answers: {answer}"
        return topology.explain_refusal(what, self.queue_type, answer)

    # -- at the start of a worker

    def _check_boot(self, worker: dramatiq.Worker) -> None:
        """Refuse a start that cannot go well, before any middleware has started anything for this worker."""
        super()._check_boot(worker)
        self._worker = worker
        needs: list[Need] = [("queue", name) for name in sorted(worker.consumer_whitelist or self.queues)]
        try:
            self._declare_now([*needs, ("ladder", None)], patience_s=BOOT_PATIENCE_S)
        except ConfigError as error:
            refuse(str(error))
        except ConnectionFailed as error:
            if under_dramatiq_command():
                leave(str(error), EXIT_UNREACHABLE)
            raise

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        """Run after-hooks, see ``SafeBroker``."""
        super().emit_after(signal, *args, **kwargs)
        if signal == "worker_shutdown":
            self._worker = None

    def _declare_now(self, needs: Sequence[Need], *, patience_s: float = 0) -> None:
        try:
            groups = [self._declarations_for(need) for need in needs]
            admin.declare_all(self._all_parameters, groups, patience_s=patience_s)
        except admin.RefusedDeclaration as error:
            raise ConfigError(self._explain_refusal(needs[error.index], str(error))) from None

    # -- for tests of users' apps, as on Dramatiq's broker

    def get_queue_message_counts(self, queue_name: str) -> tuple[int, int, int]:
        """Return the ready messages of the queue, those of all queues that wait in the delay ladder, the dead letters."""
        with admin.connected(self._all_parameters) as connection:
            return admin.counts(connection, q_name(queue_name))

    def flush(self, queue_name: str) -> None:
        """Drop all messages of the queue: those in it, its delayed ones and its dead letters. For tests only."""
        with admin.connected(self._all_parameters) as connection:
            admin.purge(connection, q_name(queue_name))

    def join(
        self, queue_name: str, min_successes: int = 10, idle_time: int = 100, *, timeout: int | None = None
    ) -> None:
        """Wait until the queue is empty, no delayed message waits and nothing is un-acked here. For tests only.

        Raises:
            QueueJoinTimeout: not so after ``timeout`` milliseconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        name, successes = q_name(queue_name), 0
        with admin.connected(self._all_parameters) as connection:
            while successes < min_successes:
                if deadline is not None and time.monotonic() >= deadline:
                    raise QueueJoinTimeout(queue_name)
                waiting, delayed, _ = admin.counts(connection, name)
                held = self.client.unsettled(name)
                successes = 0 if waiting or delayed or held else successes + 1
                connection.sleep(idle_time / 1000)


_brokers: weakref.WeakSet[RabbitmqBroker] = weakref.WeakSet()


def _after_fork() -> None:
    for broker in list(_brokers):
        broker._lock = threading.Lock()
        broker._client_now = None


os.register_at_fork(after_in_child=_after_fork)
