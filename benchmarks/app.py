"""The app that is measured: one actor that does nothing, on the broker that BENCH_BROKER names.

Runs in: worker and producer processes of the benchmark.
"""

from __future__ import annotations

import os

import dramatiq
import dramatiq.brokers.rabbitmq

import dramatiq_safeops

QUEUE = f"bench-{os.environ['BENCH_BROKER']}"


def make_broker() -> dramatiq.Broker:
    """Return stock Dramatiq's broker, unconfirmed or confirmed, or ours on quorum or classic queues."""
    url, kind = os.environ["BENCH_AMQP_URL"], os.environ["BENCH_BROKER"]
    if kind.startswith("stock"):
        return dramatiq.brokers.rabbitmq.RabbitmqBroker(url=url, confirm_delivery=kind == "stock-confirmed")
    return dramatiq_safeops.RabbitmqBroker(url=url, queue_type=kind.removeprefix("safe-"))


broker = make_broker()
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name=QUEUE, time_limit=600_000)
def noop(number: int) -> None:
    pass
