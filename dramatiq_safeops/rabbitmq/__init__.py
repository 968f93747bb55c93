"""All that knows AMQP: what is declared, what is published, and how a delivery is settled."""
