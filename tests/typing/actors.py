"""What a user's module looks like to a type checker. Never run: ``test_actor_types.py`` shows it to them.

Lines that end in ``# wrong`` must be reported, all others must not.
"""

from __future__ import annotations

import dramatiq

from dramatiq_safeops import RabbitmqBroker, safe_stack

broker = RabbitmqBroker(url="amqp://127.0.0.1:5672", middleware=safe_stack())
dramatiq.set_broker(broker)


@dramatiq.actor
def greet(name: str) -> int:
    return len(name)


@dramatiq.actor(queue_name="reports", broker=broker, max_retries=4, time_limit=60_000)
def build_report(month: int, *, currency: str = "EUR") -> None:
    greet(f"{month} {currency}")


@dramatiq.actor
async def fetch(url: str) -> bytes:
    return url.encode()


greet.send("Ada")
greet.send(7)  # wrong
greet.send()  # wrong
build_report.send(7)
build_report.send(7, currency="USD")
build_report.send("x")  # wrong
build_report.send(7, curency="USD")  # wrong
build_report.message(7)
build_report.message("x")  # wrong
fetch.send("https://example.org")
fetch.send(b"https://example.org")  # wrong

length: int = greet("Ada")
word: str = greet("Ada")  # wrong

broker.enqueue(build_report.message(7), delay=1_000)
broker.enqueue("x")  # wrong
RabbitmqBroker(url="amqp://127.0.0.1:5672", queue_type="quorum")
RabbitmqBroker(url=7)  # wrong
