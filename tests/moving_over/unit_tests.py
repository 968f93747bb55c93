"""The shop's own unit tests, with Dramatiq's StubBroker. Run by acceptance/test_moving_over.py, in a copy of this folder."""

import pytest
from dramatiq import Worker
from shop import actors, clock
from shop.broker import broker
from shop.storage import journal


@pytest.fixture(autouse=True)
def worker(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOP_DATABASE", str(tmp_path / "shop.db"))
    broker.flush_all()
    worker = Worker(broker, worker_timeout=50)
    worker.start()
    yield worker
    worker.stop()


def done(worker, queue="default"):
    broker.join(queue, timeout=10_000)
    worker.join()


def test_an_order_is_taken(worker):
    actors.take_order.send(1)
    done(worker)
    assert [one["number"] for one in journal("order")] == [1]


def test_a_charge_is_tried_until_the_bank_answers(worker):
    actors.charge.send(1)
    done(worker)
    assert len(journal("charge")) == 3
    assert len(journal("charged")) == 1


def test_the_tax_is_added(worker):
    sale = actors.price.message(3) | actors.with_tax.message(19)
    sale.run()
    done(worker)
    assert sale.get_result(block=True) == 357


def test_the_clock_sends_the_newsletter(worker):
    clock.tick(1)
    done(worker, "mail")
    done(worker)
    assert journal("newsletter")[0]["address"] == "customer-1@example.com"
    assert journal("urgent")


def test_an_actor_can_be_called(worker):
    actors.take_order(7)
    actors.Newsletter("somebody@example.com")
    assert [one["number"] for one in journal("order")] == [7]


def test_a_notification_is_sent(worker):
    actors.notify.send(1)
    done(worker)
    assert journal("notified")
