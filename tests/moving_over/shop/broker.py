"""Where the broker is made. Moving over changes the import in here."""

import os

import dramatiq
import dramatiq.middleware
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, CurrentMessage, GroupCallbacks
from dramatiq.results import Results

from .storage import Audit, Counters, SavedResults

if os.environ.get("SHOP_UNIT_TESTS") == "1":
    broker = StubBroker()
else:
    broker = RabbitmqBroker(url=os.environ["SHOP_AMQP_URL"])

broker.add_middleware(AsyncIO())
broker.add_middleware(CurrentMessage())
broker.add_middleware(GroupCallbacks(Counters()))
broker.add_middleware(Results(backend=SavedResults()))
broker.add_middleware(Audit(), before=dramatiq.middleware.Retries)
dramatiq.set_broker(broker)

if isinstance(broker, StubBroker):
    broker.emit_after("process_boot")
