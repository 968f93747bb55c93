"""make bench: this package against stock Dramatiq, both in one run on one machine, on a private RabbitMQ.

Rounds alternate, so that whatever else the machine does hits both sides. What counts are the ratios of the medians; the
figures themselves belong to the machine. The result is written to benchmarks/results/ with machine and versions.

Usage: bench.py [--messages 20000] [--rounds 5] [--no-lateness] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import lateness
import pika
from figures import FOLDER, Figures, environment, medians

from dramatiq_safeops.testing import RabbitmqServer

#: What is compared: its name, its figure, the figure that it is measured against, and the goal for the ratio.
RATIOS = (
    ("worker, full stack, no-op actor", "worker safe-quorum", "worker stock", 1.5),
    ("the same on classic queues", "worker safe-classic", "worker stock", 1.5),
    ("confirmed send_many / stock unconfirmed send", "send_many safe-quorum", "send stock", 1.0),
    ("confirmed send, 8 threads / stock confirmed", "send x8 safe-classic", "send x8 stock-confirmed", 1.5),
    ("confirmed send, 1 thread / stock confirmed", "send safe-classic", "send stock-confirmed", None),
)


def consume(figures: Figures, url: str, broker: str, messages: int) -> None:
    """Work off ``messages`` with one process of 8 threads; time starts when the first tenth is gone."""
    mode = "many" if broker.startswith("safe") else "one"
    env = environment(url, broker)
    produce(figures, url, broker, mode, messages, keep=False)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "dramatiq", "app", "-p", "1", "-t", "8"]
    worker = subprocess.Popen(command, env=env, cwd=FOLDER, stdout=quiet, stderr=quiet)
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    started = left = None
    while True:
        ready = channel.queue_declare(f"bench-{broker}", passive=True).method.message_count
        if started is None and ready < messages * 0.9:
            started, left = time.perf_counter(), ready
        if ready == 0:
            break
        connection.sleep(0.01)
    took = time.perf_counter() - (started or 0)
    connection.close()
    worker.terminate()
    worker.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures.rate(f"worker {broker}", (left or 0) / took)
    figures.cpu(f"worker {broker}", cpu / messages * 1e6)


def produce(figures: Figures, url: str, broker: str, mode: str, messages: int, *, keep: bool = True) -> None:
    """Send ``messages`` from a process of its own."""
    done = subprocess.run(
        [sys.executable, "producer.py", mode, str(messages)],
        env=environment(url, broker),
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=True,
    )
    if keep:
        names = {"many": "send_many", "one": "send", "threads": "send x8"}
        figures.rate(f"{names[mode]} {broker}", float(done.stdout))
        drop(url, broker)


def drop(url: str, broker: str) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    connection.channel().queue_purge(f"bench-{broker}")
    connection.close()


def summary(figures: Figures) -> dict[str, Any]:
    rates = medians(figures.rates)
    ratios = {
        name: {"ratio": round(rates[ours]["median"] / rates[theirs]["median"], 2), "goal": goal}
        for name, ours, theirs, goal in RATIOS
        if ours in rates and theirs in rates
    }
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in ("dramatiq", "pika", "msgspec", "dramatiq-safeops")},
        "ratios": ratios,
        "messages_per_second": rates,
        "cpu_microseconds_per_message": medians(figures.cpu_us),
        "lateness": figures.lateness,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="example: bench.py --rounds 3 --save"
    )
    parser.add_argument(
        "--messages", type=int, default=20_000, help="messages per round of a worker (default: 20000)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, alternating (default: 5)")
    parser.add_argument(
        "--no-lateness", action="store_true", help="leave out the delays (they take two minutes)"
    )
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    options = parser.parse_args()
    figures = Figures()
    with RabbitmqServer.start() as server:
        overview = server.api("GET", "/api/overview")
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", flush=True)
            for broker in ("stock", "safe-quorum", "safe-classic"):
                consume(figures, server.url, broker, options.messages)
            produce(figures, server.url, "stock", "one", options.messages // 2)
            produce(figures, server.url, "safe-quorum", "many", options.messages // 2)
            for broker in ("stock-confirmed", "safe-classic"):
                produce(figures, server.url, broker, "one", options.messages // 20)
                produce(figures, server.url, broker, "threads", options.messages // 10)
        if not options.no_lateness:
            lateness.measure(figures, server.url, burst=options.messages)
    result = {**summary(figures), "rabbitmq": overview["rabbitmq_version"], "messages": options.messages}
    print(json.dumps(result, indent=2))
    if options.save:
        path = FOLDER / "results" / f"{result['when'][:10]}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
