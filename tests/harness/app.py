"""What every test app starts with: the broker that the test asked for, and ``note`` for effects.

Runs in: worker and producer processes of the tests, never in pytest itself.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import dramatiq

from dramatiq_safeops import PermanentError, RabbitmqBroker, safe_stack

__all__ = ["PermanentError", "broker", "dramatiq", "note", "os", "safe_stack", "signal", "threading", "time"]


def note(what: str, **facts: Any) -> None:
    """Append one effect to the test's file, in one write, so that it is there even if the process is killed next."""
    line = json.dumps({"what": what, "at": time.time(), "pid": os.getpid(), **facts}) + "\n"
    fd = os.open(os.environ["TEST_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def _broker() -> dramatiq.Broker:
    options = json.loads(os.environ.get("TEST_BROKER_OPTIONS", "{}"))
    if os.environ["TEST_BROKER"] == "stock":
        import dramatiq.brokers.rabbitmq

        return dramatiq.brokers.rabbitmq.RabbitmqBroker(url=os.environ["TEST_AMQP_URL"], **options)
    stack = safe_stack(**json.loads(os.environ.get("TEST_STACK_OPTIONS", "{}")))
    return RabbitmqBroker(url=os.environ["TEST_AMQP_URL"], middleware=stack, **options)


broker = _broker()
dramatiq.set_broker(broker)
