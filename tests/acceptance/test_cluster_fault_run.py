"""Nodes of a cluster are killed and frozen in turn, workers are killed, and afterwards every message is accounted for.

The messages, their outcomes and the producers are those of the run on one RabbitMQ (``test_fault_run``), and so is what
counts: what RabbitMQ holds in the end, and what the actors wrote to a file.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from dramatiq_safeops.rabbitmq.delays import STEPS_MS, step_name
from dramatiq_safeops.testing import RabbitmqCluster
from dramatiq_safeops.testing.rabbitmq_cluster import ClusterNode
from tests.acceptance.test_fault_run import (
    ATTEMPTS,
    PATIENCE_S,
    PREFETCH,
    QUEUE,
    SETTLING_S,
    SOURCE,
    THREADS,
    Plan,
    Producer,
    Run,
    kind_of,
)
from tests.harness import queues
from tests.harness.worker import App, Worker, wait_until

#: Seconds for which a node is frozen, in turn: short enough that its clients stay, and (in the long run) long enough that
#: they leave, which takes 15.
FREEZES_S = (2.0, 18.0, 6.0)


class ClusterFaults:
    """Two workers, three nodes of which at most one is away, and what happens to them. What ``Run`` needs of ``Faults``."""

    def __init__(self, app: App, cluster: RabbitmqCluster, seed: int) -> None:
        self.app, self.cluster = app, cluster
        self.draw = random.Random(seed)
        self.workers: list[Worker] = []
        self.struck: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self.over = threading.Event()
        self.breaking = threading.Thread(target=self._break_nodes, daemon=True)

    @property
    def rabbit(self) -> ClusterNode:
        return self.cluster.nodes[0]

    def start(self) -> None:
        for _ in range(2):
            self.workers.append(self.app.start_worker(threads=THREADS, wait=False))
        for worker in self.workers:
            worker.wait_ready()

    def _break_nodes(self) -> None:
        """One node after the other, freeze and kill in turn; the next one when the cluster is whole again."""
        try:
            for number in range(1_000):
                if self.over.is_set():
                    return
                node = self.cluster.nodes[number % len(self.cluster.nodes)]
                if number % 2 == 0:
                    self.struck["freeze"] += 1
                    node.pause()
                    self.over.wait(FREEZES_S[number // 2 % len(FREEZES_S)])
                else:
                    self.struck["kill node"] += 1
                    node.kill()
                    self.over.wait(1)
                self.cluster.heal()
        except BaseException as error:
            self.errors.append(error)

    def kill_worker(self) -> None:
        self.struck["kill worker"] += 1
        self.draw.choice(self.workers).kill()
        self.tend()

    def tend(self) -> None:
        """Start a worker for each that has ended, as a supervisor does: one that starts while a node is frozen gives up."""
        for place, worker in enumerate(self.workers):
            if worker.process.poll() is not None:
                self.workers[place] = self.app.start_worker(threads=THREADS, wait=False)

    def end(self) -> None:
        self.over.set()
        self.breaking.join(PATIENCE_S)
        self.cluster.heal()

        def all_ready() -> bool:
            self.tend()
            return all("ready for action" in worker.text for worker in self.workers)

        wait_until(all_ready, PATIENCE_S, "two workers")

    def terminate(self) -> list[int]:
        for worker in self.workers:
            worker.process.send_signal(15)
        return [worker.process.wait(PATIENCE_S) for worker in self.workers]

    def destroy(self) -> None:
        for worker in self.workers:
            worker.destroy()


@pytest.mark.parametrize(
    ("count", "seconds", "seed"),
    [
        pytest.param(400, 14, 20260401, id="short"),
        pytest.param(3_000, 60, 20260402, id="full", marks=pytest.mark.long),
    ],
)
def test_nodes_die_and_freeze_in_turn_and_no_message_is_lost(
    tmp_path: Path, cluster: RabbitmqCluster, count: int, seconds: int, seed: int
):
    """Hurts everybody with a cluster: this is what they have one for."""
    url = ";".join(cluster.urls)
    started = time.monotonic()
    faults = ClusterFaults(App(tmp_path, SOURCE, url), cluster, seed)
    plan = Plan(count)
    keys = random.Random(seed).sample(plan.keys, len(plan.keys))
    # Junk goes over a plain connection to one node, the first that its producer knows: a different one for each.
    producers = [Producer(url, keys[place::3], seconds) for place in range(3)]
    for producer, junk_url in zip(producers, cluster.urls, strict=True):
        producer.junk_url = junk_url
    run = Run(plan, faults, producers)
    try:
        # Given two workers, and producers that send all the time
        faults.start()
        time.sleep(SETTLING_S)
        for producer in producers:
            producer.start()

        # When one node after the other dies or freezes, and workers are killed meanwhile
        begin = time.monotonic()
        faults.breaking.start()
        while time.monotonic() - begin < seconds:
            time.sleep(4)
            faults.kill_worker()
        faults.end()
        for producer in producers:
            producer.join(PATIENCE_S)

        # Then every send was confirmed in the end, and every message has its outcome
        assert [error for producer in producers for error in producer.errors] == []
        assert faults.errors == []
        assert not any(producer.is_alive() for producer in producers)
        run.wait_for_all()
        run.wait_until_quiet()
        assert faults.terminate() == [0, 0]
    finally:
        faults.over.set()
        faults.destroy()
        cluster.heal()

    # Nothing is anywhere but among the dead letters, which are taken out and counted
    home = cluster.urls[0]
    left = {
        name: found
        for name in [QUEUE, "safeops.unroutable", *map(step_name, STEPS_MS)]
        if (found := [one.message_id for one in queues.take(home, name)])
    }
    assert left == {}
    letters = queues.take(home, f"{QUEUE}.dlq")
    by_id = Counter(one.message_id for one in letters)
    assert set(by_id) == set(plan.dead)
    for letter in letters:
        assert letter.headers["x-safeops-reason"] == plan.dead[letter.message_id]
        assert letter.headers["x-safeops-attempts"] == ATTEMPTS[kind_of(letter.message_id)]
    assert set(run.effects) == plan.done
    for key in plan.dead:
        assert run.failures[key] >= ATTEMPTS[kind_of(key)]

    # No worker has stumbled over itself
    for log in tmp_path.glob("worker-*.log"):
        assert "Unexpected failure" not in log.read_text()

    # A repeat needs a fault: at most what two workers held un-acked, or a producer had on its way
    sys.stdout.write(run.summary(by_id, time.monotonic() - started) + "\n")
    most = faults.struck.total() * (2 * PREFETCH + len(producers))
    assert by_id.total() - len(by_id) <= most
    assert run.effects.total() - len(run.effects) <= most
