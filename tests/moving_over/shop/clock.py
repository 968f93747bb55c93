"""Sends what is due, as a cron job or a scheduler's thread does it."""

from .actors import Newsletter, urgent


def tick(number):
    """One beat of the clock: a message built here and sent later, and one sent at once."""
    message = Newsletter.message_with_options(args=(f"customer-{number}@example.com",))
    message.copy(options={"origin": "clock"})
    Newsletter.broker.enqueue(message)
    urgent.send(number)
