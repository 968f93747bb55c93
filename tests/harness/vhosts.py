"""Virtual hosts as tests need them: empty ones that several tests share, and ones where queues refuse what is published."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from dramatiq_safeops.testing import RabbitmqServer

from .queues import channel


@contextmanager
def virtual_host(rabbit: RabbitmqServer) -> Iterator[str]:
    """Yield the URL of an empty virtual host, which is deleted afterwards."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    rabbit.api("PUT", f"/api/vhosts/{name}", {})
    rabbit.api("PUT", f"/api/permissions/{name}/guest", {"configure": ".*", "write": ".*", "read": ".*"})
    server, _, _ = rabbit.url.rpartition("/")
    yield f"{server}/{name}"
    rabbit.api("DELETE", f"/api/vhosts/{name}")


@contextmanager
def refusing(rabbit: RabbitmqServer, url: str, pattern: str, *, ended_by: str = "delete") -> Iterator[None]:
    """Let the queues that match ``pattern`` refuse publishes, as queues over their limit do.

    A classic queue refuses everything. A quorum queue looks at its length after each message, so it takes one and
    refuses the next: put one in that stays (see ``jam``).

    At the end an operator deletes the limit or (``ended_by="raise"``) raises it. Until the limit is raised, RabbitMQ
    3.10 goes on refusing on channels where it has refused before; new channels find the queue open.
    """
    _, _, vhost = url.rpartition("/")
    path = f"/api/policies/{vhost}/limit-{uuid.uuid4().hex[:8]}"

    def limit(length: int) -> None:
        definition = {"max-length": length, "overflow": "reject-publish"}
        rabbit.api("PUT", path, {"pattern": pattern, "definition": definition, "apply-to": "queues"})

    limit(0)
    try:
        yield
    finally:
        if ended_by == "raise":
            limit(100_000)
        else:
            rabbit.api("DELETE", path)


def jam(url: str, step: str) -> None:
    """Put a message into a step of the delay ladder that never leaves it: the queue it is for takes nothing."""
    with channel(url) as ch:
        ch.confirm_delivery()
        ch.queue_declare(
            "jammed", durable=True, arguments={"x-max-length": 0, "x-overflow": "reject-publish"}
        )
        ch.queue_bind("jammed", "safeops.delivery", "jammed")
        ch.basic_publish(step, "jammed", b"stays", mandatory=True)
