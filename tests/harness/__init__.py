"""What the tests of this project share: real workers, their effects, and what RabbitMQ holds."""
