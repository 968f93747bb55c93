"""Sends COUNT messages the way MODE says and prints how many went out per second.

Runs in: a process of the benchmark. Usage: producer.py one|threads|many COUNT
"""

from __future__ import annotations

import sys
import threading
import time

from app import broker, noop

THREADS = 8


def main(mode: str, count: int) -> None:
    noop.send(0)  # connects and declares
    started = time.perf_counter()
    if mode == "many":
        broker.send_many([noop.message(number) for number in range(count)])
    elif mode == "threads":
        threads = [threading.Thread(target=send, args=(count // THREADS,)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        send(count)
    print(count / (time.perf_counter() - started))


def send(count: int) -> None:
    for number in range(count):
        noop.send(number)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
