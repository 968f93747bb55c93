"""A private cluster of three RabbitMQ nodes, each of which a test may kill, pause and restart.

Runs in: the process that starts servers. Needs: what ``rabbitmq_server`` needs, and about half a gigabyte of memory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote

from dramatiq_safeops.testing.processes import ServerError, wait_until
from dramatiq_safeops.testing.rabbitmq_server import DEFAULT_PLUGINS, RabbitmqServer
from dramatiq_safeops.testing.server import READY_TIMEOUT_S, PortTaken

if TYPE_CHECKING:
    from typing_extensions import Self

#: How many nodes a cluster has: one may be away, and the others are still the majority.
NODES = 3

#: How often a start is tried anew when another program was faster to take one of the ports.
_PORT_TRIES = 4

#: A node that was paused for longer is started anew: to the others it may be down by now (``net_ticktime``, 60 s with an
#: error of a quarter), and such a partition ends by a restart only.
_LONGEST_PAUSE_S = 40.0

_LEADER = """
{{ok, Q}} = rabbit_amqqueue:lookup({{resource, <<"{vhost}">>, queue, <<"{queue}">>}}),
case amqqueue:get_pid(Q) of
  {{Name, _}} -> ra_leaderboard:lookup_leader(Name);
  _ -> undefined
end.
"""

# (RabbitMQ 4.3 knows the nodes of a queue with an id each, earlier ones have a list of them.)
# Every member of every quorum queue runs and knows a leader, seen from the node that is asked: a member that has just
# come back counts for the majority only then. The waiting is done in there, since each call of rabbitmqctl costs 0.7 s.
_MEMBERS_ONLINE = """
Missing = fun() ->
  [{{element(4, amqqueue:get_name(Q)), Node, State}}
    || Q <- rabbit_amqqueue:list_by_type(rabbit_quorum_queue),
       {{Name, _}} <- [amqqueue:get_pid(Q)],
       Node <- case maps:get(nodes, amqqueue:get_type_state(Q)) of
                 ById when is_map(ById) -> maps:keys(ById);
                 Listed -> Listed
               end,
       State <- [case rpc:call(Node, ets, lookup, [ra_state, Name], 2000) of
                   [Row | _] when element(2, Row) == leader; element(2, Row) == follower ->
                     case rpc:call(Node, ra_leaderboard, lookup_leader, [Name], 2000) of
                       {{_, _}} -> online;
                       Other -> Other
                     end;
                   Other -> Other
                 end],
       State /= online]
end,
Wait = fun Again(Left) ->
  case Missing() of
    [] -> online;
    Found when Left =< 0 -> lists:sublist(Found, 5);
    _ -> timer:sleep(100), Again(Left - 100)
  end
end,
Wait({patience_ms}).
"""


class ClusterNode(RabbitmqServer):
    """One node of a ``RabbitmqCluster``. Its port mapper is the first node's, which outlives that node's RabbitMQ."""

    def __init__(
        self,
        number: int,
        first: ClusterNode | None,
        *,
        cookie: str,
        plugins: Sequence[str],
        config: Mapping[str, object],
        advanced_config: str | None,
    ) -> None:
        peers = {
            f"cluster_formation.classic_config.nodes.{one}": f"{_name(one)}" for one in range(1, NODES + 1)
        }
        formation = {
            "cluster_formation.peer_discovery_backend": "classic_config",
            **peers,
            # Nodes go on after a partition, so that what a test sees is the queues' own doing.
            "cluster_partition_handling": "ignore",
        }
        super().__init__(None, plugins=plugins, config={**formation, **config})
        self._node = _name(number)
        self._cookie = cookie
        self._first = first
        self._advanced_config = advanced_config
        self._port_of_mapper = 0
        self._paused_since = 0.0

    @property
    def name(self) -> str:
        """What the other nodes call it, ``safeops1@localhost`` for the first."""
        return self._node

    @property
    def serving(self) -> bool:
        """Whether it runs and is not paused."""
        return self.running and not self._paused

    def begin(self) -> None:
        """Start it, without waiting until it is ready: nodes of a cluster wait for each other."""
        self._begin()

    def prepare(self) -> None:
        """Choose ports and write the configuration."""
        self._prepare()
        if self._advanced_config is not None:
            (self.folder / "advanced.config").write_text(self._advanced_config)

    def pause(self) -> None:
        """SIGSTOP, as for a single server. Its clients and the other nodes take it for living for 45 s at least."""
        super().pause()
        self._paused_since = time.monotonic()

    def revive(self) -> None:
        """Resume it if it is paused, start it if it is dead; do not wait until it is ready."""
        if self._paused and time.monotonic() - self._paused_since > _LONGEST_PAUSE_S:
            self.kill()
        self.resume()
        if not self.running:
            if self._process is not None:
                self._reap()
            self._begin()

    def finish_start(self, timeout: float) -> None:
        """Wait until it is ready, and let ``testing status`` tell its URLs."""
        self.wait_ready(timeout)
        self.instance.write(urls=self.urls)

    def _port_mapper_port(self, free: int) -> int:
        self._port_of_mapper = free if self._first is None else self._first._port_of_mapper
        return self._port_of_mapper

    def _start_port_mapper(self, port: int) -> None:
        if self._first is None:
            super()._start_port_mapper(port)

    def _has_port_mapper(self) -> bool:
        return super()._has_port_mapper() if self._first is None else self._first._has_port_mapper()


class RabbitmqCluster:
    """Three RabbitMQ nodes of one's own in one cluster.

    ::

        with RabbitmqCluster.start() as cluster:
            broker = RabbitmqBroker(url=cluster.urls)
            ...
            cluster.leader_of("orders").kill()
            ...
            cluster.heal()

    A context manager that stops all nodes; they are bound to the process that started them, as single servers are. Give
    a quorum queue that was just declared 3 seconds before a ``kill()`` (see ``RabbitmqServer``). Methods are for one
    thread at a time, but each node may have a thread of its own.
    """

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self.nodes = list(nodes)

    @classmethod
    def start(
        cls,
        *,
        plugins: Sequence[str] = DEFAULT_PLUGINS,
        config: Mapping[str, object] | None = None,
        advanced_config: str | None = None,
        timeout: float = READY_TIMEOUT_S,
    ) -> RabbitmqCluster:
        """Start three nodes and return when all of them run as one cluster (about 20 s on RabbitMQ 3.10, 8 s on 4).

        ``config`` are lines for each node's rabbitmq.conf, ``advanced_config`` is its advanced.config (Erlang terms), for
        what rabbitmq.conf has no names for. Raises ``ServerError`` when they are not ready within
        ``timeout`` seconds, or cannot run at all.
        """
        for attempt in range(1, _PORT_TRIES + 1):
            try:
                return cls._start(plugins, {} if config is None else config, advanced_config, timeout)
            except PortTaken:
                if attempt == _PORT_TRIES:
                    raise
        raise AssertionError("unreachable")

    @classmethod
    def _start(
        cls,
        plugins: Sequence[str],
        config: Mapping[str, object],
        advanced_config: str | None,
        timeout: float,
    ) -> RabbitmqCluster:
        cookie = secrets.token_hex(16)
        cluster = cls([])
        try:
            for number in range(1, NODES + 1):
                first = cluster.nodes[0] if cluster.nodes else None
                cluster.nodes.append(
                    ClusterNode(
                        number,
                        first,
                        cookie=cookie,
                        plugins=plugins,
                        config=config,
                        advanced_config=advanced_config,
                    )
                )
                cluster.nodes[-1].prepare()
            # At once: the first that is up forms the cluster, the others find it.
            for node in cluster.nodes:
                node.begin()
            cluster.wait_until_running(timeout)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @property
    def urls(self) -> list[str]:
        """An AMQP URL per node, in the order of ``nodes``; clients try them in this order."""
        return [node.url for node in self.nodes]

    def urls_for(self, vhost: str) -> list[str]:
        """The same for another virtual host than the default one."""
        return [f"{url.rpartition('/')[0]}/{quote(vhost, safe='')}" for url in self.urls]

    @property
    def serving(self) -> list[ClusterNode]:
        """The nodes that run and are not paused."""
        return [node for node in self.nodes if node.serving]

    def leader_of(self, queue: str, vhost: str = "/", *, timeout: float = 30.0) -> ClusterNode:
        """Return the node that leads a quorum queue, as a node that serves sees it: a paused leader leads for 8 s more.

        Waits for the end of an election; ``ServerError`` when there is no leader within ``timeout`` seconds, as for a
        classic queue, which has none. Takes about 0.7 s of CPU.
        """
        # Not through the API: while a node is paused it does not learn of a new leader.
        ask = _LEADER.format(vhost=vhost, queue=queue)
        found: list[ClusterNode] = []

        def look() -> bool:
            said = self.serving[0].eval(ask)
            found.extend(node for node in self.nodes if node.running and f",{node.name}}}" in said)
            return bool(found)

        if not wait_until(look, timeout):
            raise ServerError(f"queue {queue!r} has no leader for {timeout:.0f} s")
        return found[0]

    def wait_until_running(self, timeout: float = READY_TIMEOUT_S) -> None:
        """Return when every node serves clients and knows all others; ``ServerError`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        _at_once(lambda node: node.finish_start(timeout), self.nodes)
        left = max(deadline - time.monotonic(), 1.0)
        if not wait_until(lambda: all(map(_knows_all, self.nodes)), left, interval=0.1):
            raise ServerError(
                f"the {NODES} RabbitMQ nodes did not find each other within {timeout:.0f} s, the first one's log says:"
                f" {self.nodes[0]._complaint()}"
            )

    def heal(self, timeout: float = READY_TIMEOUT_S) -> None:
        """Resume and restart what is paused or dead, and return when all members of all quorum queues are online."""
        for node in self.nodes:
            node.revive()
        self.wait_until_running(timeout)
        patience_ms = int(timeout * 1000)
        said = self.nodes[0].rabbitmqctl(
            "eval", _MEMBERS_ONLINE.format(patience_ms=patience_ms), timeout=timeout + 60
        )
        if said != "online":
            raise ServerError(f"these quorum queues have members that do not come back: {said}")

    def stop(self) -> None:
        """End all nodes at once and remove their folders. Safe to repeat."""
        # The first one last: the port mapper is its.
        for node in reversed(self.nodes):
            node.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _name(number: int) -> str:
    return f"safeops{number}@localhost"


def _knows_all(node: ClusterNode) -> bool:
    try:
        seen = node.api("GET", "/api/nodes", timeout=5.0)
    except ServerError:
        return False
    return sum(bool(one["running"]) for one in seen) == NODES


def _at_once(action: Callable[[ClusterNode], None], nodes: Sequence[ClusterNode]) -> None:
    """Run ``action`` for all nodes at the same time; the first error is raised after all have ended."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        running = [pool.submit(action, node) for node in nodes]
    for one in running:
        one.result()
