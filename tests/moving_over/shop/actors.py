"""The shop's actors."""

import asyncio
from functools import partial

import dramatiq
from dramatiq.middleware import CurrentMessage

from .broker import broker
from .storage import journal, record

actor = partial(dramatiq.actor, broker=broker)


class CardDeclined(Exception):
    pass


@actor
def take_order(number):
    record("order", number=number)


@actor(audited=True, max_retries=3, min_backoff=100, max_backoff=400)
def charge(number):
    """The bank answers at the third attempt."""
    record("charge", number=number, retries=CurrentMessage.get_current_message().options.get("retries", 0))
    if len([one for one in journal("charge") if one["number"] == number]) < 3:
        raise ConnectionError("the bank does not answer")
    record("charged", number=number)


@actor(throws=(CardDeclined,), queue_name="cards")
def check_card(number):
    record("card", number=number)
    raise CardDeclined(number)


@actor
def card_trouble(message, error):
    record("card trouble", number=message["args"][0], error=error["type"])


@actor(store_results=True)
def price(number):
    return number * 100


@actor(store_results=True)
def with_tax(percent, amount):
    record("taxed", amount=amount)
    return amount * (100 + percent) // 100


@actor
def remind(number, sent_at):
    record("reminder", number=number, sent_at=sent_at)


@actor
def pack(number):
    record("packed", number=number)


@actor
def ship(order):
    record("shipped", order=order)


@actor(priority=-10)
def urgent(number):
    record("urgent", number=number)


@actor
async def notify(number):
    await asyncio.sleep(0.05)
    record("notified", number=number)


class Mail(dramatiq.GenericActor):
    class Meta:
        abstract = True
        broker = broker
        queue_name = "mail"


class Newsletter(Mail):
    def perform(self, address):
        record("newsletter", address=address)
