"""A private cluster takes what a single private server takes, and is whole again when ``heal()`` returns.

Needs: RabbitMQ on this machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import pika
import pytest

from dramatiq_safeops.testing import RabbitmqCluster
from tests.integration import test_private_servers
from tests.integration.test_private_servers import NOBODY, World

#: The fixture of that name.
world = test_private_servers.world

#: A queue that is younger than this when RabbitMQ is killed may be gone afterwards: that is RabbitMQ's doing.
SETTLING_S = 3.0


def kill_two(cluster: RabbitmqCluster) -> None:
    cluster.nodes[0].kill()
    cluster.nodes[2].kill()


def kill_all(cluster: RabbitmqCluster) -> None:
    for node in cluster.nodes:
        node.kill()


def kill_one_and_pause_another(cluster: RabbitmqCluster) -> None:
    cluster.leader_of("kept").pause()
    cluster.serving[0].kill()


@pytest.mark.parametrize(
    "harm",
    [
        kill_one_and_pause_another,
        pytest.param(kill_two, marks=pytest.mark.long),
        pytest.param(kill_all, marks=pytest.mark.long),
    ],
)
def test_a_healed_cluster_has_its_messages_on_all_nodes(
    cluster: RabbitmqCluster, harm: Callable[[RabbitmqCluster], None]
) -> None:
    """A fault test is worth something only if the cluster that it leaves behind is whole for the next one."""
    # Given a confirmed message in a queue with three members
    connection = pika.BlockingConnection(pika.URLParameters(cluster.urls[1]))
    channel = connection.channel()
    channel.queue_declare("kept", durable=True, arguments={"x-queue-type": "quorum"})
    channel.confirm_delivery()
    channel.basic_publish("", "kept", b"precious", pika.BasicProperties(delivery_mode=2))
    # RabbitMQ writes declarations to disk a moment later and confirms none of it: there is nothing to wait for.
    time.sleep(SETTLING_S)
    connection.close()
    urls = cluster.urls

    # When nodes are lost and the cluster is healed
    harm(cluster)
    cluster.heal()

    # Then any one node may go, and the message is there: all three have it
    assert cluster.urls == urls
    leader = cluster.leader_of("kept")
    leader.kill()
    try:
        assert cluster.leader_of("kept") is not leader
        survivor = cluster.serving[0]
        connection = pika.BlockingConnection(pika.URLParameters(survivor.url))
        _, _, body = connection.channel().basic_get("kept", auto_ack=True)
        connection.close()
        assert body == b"precious"
    finally:
        cluster.heal()


def test_a_cluster_is_seen_and_dies_with_its_owner(world: World) -> None:
    """kill -9 of a test run must not leave half a gigabyte of nodes on a developer's machine."""
    with world.owner(
        "from dramatiq_safeops.testing import RabbitmqCluster; c = RabbitmqCluster.start()"
    ) as owner:
        states = json.loads(world.command("status", "--json").stdout)
        assert [(one["kind"], one["running"], one["owner"]) for one in states] == [
            ("rabbitmq", True, owner.pid)
        ] * 3
        assert len({one["url"] for one in states}) == 3

        owner.kill()

        world.wait_for_nothing_left()


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="as a normal user the other tests show it")
def test_a_cluster_runs_for_a_normal_user(world: World) -> None:
    """Root is the exception on developers' machines."""
    os.chown(world.folder, NOBODY, NOBODY)
    # The user is changed after the imports: this Python may stand where only root can read it.
    code = f"""
import encodings.idna, os
from dramatiq_safeops.testing import RabbitmqCluster
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
with RabbitmqCluster.start() as cluster:
    cluster.nodes[0].kill()
    cluster.heal()
    print(len(cluster.serving))
"""
    done = world.python(code, HOME=str(world.folder))

    assert done.stdout == "3\n"
    world.wait_for_nothing_left()
    os.chown(world.folder, 0, 0)
