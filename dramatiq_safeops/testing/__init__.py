"""Private throw-away servers and a faulty network, for tests that need a real RabbitMQ and a real PostgreSQL.

Runs in: test runs and the demo. Needs: RabbitMQ and PostgreSQL on this machine, no other Python package.
"""

from dramatiq_safeops.testing.postgres_server import PostgresServer
from dramatiq_safeops.testing.processes import ServerError
from dramatiq_safeops.testing.rabbitmq_server import RabbitmqServer
from dramatiq_safeops.testing.servers import Servers, servers
from dramatiq_safeops.testing.tcp_proxy import TcpProxy

__all__ = ["PostgresServer", "RabbitmqServer", "ServerError", "Servers", "TcpProxy", "servers"]
