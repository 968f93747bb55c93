"""The app that notes how late its delayed messages are. As a program it sends them: delayed_app.py '[[delay, count], ...]'.

Runs in: worker and producer processes of the benchmark.
"""

from __future__ import annotations

import json
import os
import sys
import time

import dramatiq

import dramatiq_safeops

broker = dramatiq_safeops.RabbitmqBroker(url=os.environ["BENCH_AMQP_URL"])
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="bench-delayed", time_limit=600_000)
def arrive(delay: float, due: float) -> None:
    line = f"{delay} {(time.time() - due) * 1000:.2f}\n".encode()
    fd = os.open(os.environ["BENCH_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line)
    os.close(fd)


if __name__ == "__main__":
    for delay, count in json.loads(sys.argv[1]):
        for start in range(0, count, 500):
            due = time.time() + delay
            batch = [arrive.message(delay, due) for _ in range(min(500, count - start))]
            broker.send_many(batch, delay=int(delay * 1000))
