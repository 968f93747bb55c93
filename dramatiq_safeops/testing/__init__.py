"""For tests: a broker in memory with the real outcomes, private throw-away servers, and a faulty network.

Runs in: test runs and the demo. Needs: nothing for ``StubBroker``, otherwise RabbitMQ and PostgreSQL on this machine.
"""

from dramatiq_safeops.testing.postgres_server import PostgresServer
from dramatiq_safeops.testing.processes import ServerError
from dramatiq_safeops.testing.rabbitmq_cluster import RabbitmqCluster
from dramatiq_safeops.testing.rabbitmq_server import RabbitmqServer
from dramatiq_safeops.testing.servers import Servers, servers
from dramatiq_safeops.testing.stub_broker import DeadLettered, StubBroker
from dramatiq_safeops.testing.tcp_proxy import TcpProxy

__all__ = [
    "DeadLettered",
    "PostgresServer",
    "RabbitmqCluster",
    "RabbitmqServer",
    "ServerError",
    "Servers",
    "StubBroker",
    "TcpProxy",
    "servers",
]
