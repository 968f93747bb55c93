"""An existing Dramatiq app moves over: one changed import, its leftovers delivered, its own unit tests still green.

The app is ``tests/moving_over/shop``, written for stock Dramatiq. Real processes on a real RabbitMQ.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import queues
from tests.harness.worker import DRAMATIQ, ROOT, wait_until

#: What a user changes.
STOCK_IMPORT = "from dramatiq.brokers.rabbitmq import RabbitmqBroker\n"
OUR_IMPORT = "from dramatiq_safeops import RabbitmqBroker\n"
#: And beside it, while the queues are the ones that stock Dramatiq has declared.
STOCK_CALL = 'RabbitmqBroker(url=os.environ["SHOP_AMQP_URL"])'
CLASSIC_CALL = 'RabbitmqBroker(url=os.environ["SHOP_AMQP_URL"], queue_type="classic")'


@dataclass
class Shop:
    """A copy of the app in a folder of its own."""

    folder: Path
    url: str

    def __post_init__(self) -> None:
        shutil.copytree(
            ROOT / "tests" / "moving_over", self.folder, ignore=shutil.ignore_patterns("__pycache__")
        )

    def change(self, old: str, new: str) -> None:
        """Edit the module that makes the broker, as a user does."""
        path = self.folder / "shop" / "broker.py"
        source = path.read_text()
        assert source.count(old) == 1
        path.write_text(source.replace(old, new))

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",  # two edits within a second look the same to Python
            "SHOP_AMQP_URL": self.url,
            "SHOP_DATABASE": str(self.folder / "shop.db"),
        }

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**self.environment, **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def run(self, code: str) -> str:
        """Run ``code`` as one of the shop's producers; returns what it printed."""
        header = "import time, dramatiq\nfrom shop.actors import *\nfrom shop import clock\n"
        done = self.python("-c", header + textwrap.dedent(code))
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run ``dramatiq shop.actors`` as long as the block lasts, then end it as a deploy does."""
        log = self.folder / "worker.log"
        with log.open("w") as stream:
            process = subprocess.Popen(
                [*DRAMATIQ, "shop.actors", "-p", "1", "-t", "4"],
                env=self.environment,
                cwd=self.folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
            if process.poll() is None:
                process.terminate()
                process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)

    @property
    def log(self) -> str:
        return (self.folder / "worker.log").read_text()

    def journal(self, what: str) -> list[dict[str, Any]]:
        if not (self.folder / "shop.db").exists():
            return []
        with closing(sqlite3.connect(self.folder / "shop.db", timeout=30)) as database:
            try:
                rows = database.execute("SELECT at, facts FROM journal WHERE what = ?", (what,)).fetchall()
            except sqlite3.OperationalError:
                return []  # the table is not there yet
        return [{"at": at, **json.loads(facts)} for at, facts in rows]

    def numbers(self, what: str) -> list[int]:
        return sorted(one["number"] for one in self.journal(what))


@pytest.fixture
def shop(amqp_url: str, tmp_path: Path) -> Shop:
    return Shop(tmp_path / "app", amqp_url)


#: A day in the shop: each thing that the app does with Dramatiq.
A_DAY = """
take_order.send(1)
charge.send(2)
check_card.send_with_options(args=(3,), on_failure=card_trouble)
sale = (price.message(4) | with_tax.message(19)).run()
remind.send_with_options(args=(5, time.time()), delay=1500)
packing = dramatiq.group([pack.message(n) for n in (6, 7, 8)])
packing.add_completion_callback(ship.message(9))
packing.run()
notify.send(10)
clock.tick(11)
print(sale.get_result(block=True, timeout=20_000))
"""


def check_a_day(shop: Shop) -> None:
    """Let the shop work for a day and look at all that it should have done."""
    with shop.worker():
        assert shop.run(A_DAY) == "476\n"
        for what in (
            "order",
            "charged",
            "card trouble",
            "reminder",
            "shipped",
            "notified",
            "newsletter",
            "urgent",
        ):
            wait_until(lambda what=what: shop.journal(what), what=what)
        assert shop.numbers("order") == [1]
        assert [one["retries"] for one in shop.journal("charge")] == [0, 1, 2]
        assert Counter(one["failed"] for one in shop.journal("audit")) == {True: 2, False: 1}
        assert shop.journal("card trouble")[0]["error"] == "CardDeclined"
        assert shop.numbers("card") == [3]
        [reminder] = shop.journal("reminder")
        assert reminder["at"] - reminder["sent_at"] >= 1.5
        assert shop.numbers("packed") == [6, 7, 8]
        assert [one["order"] for one in shop.journal("shipped")] == [9]
        assert shop.journal("newsletter")[0]["address"] == "customer-11@example.com"
    assert "CRITICAL" not in shop.log


# -- its own unit tests


@pytest.mark.parametrize("changed", [False, True], ids=["as it was", "moved over"])
def test_the_apps_own_unit_tests_go_on_working(changed: bool, shop: Shop) -> None:
    """Nobody moves an app whose tests turn red with it."""
    if changed:
        shop.change(STOCK_IMPORT, OUR_IMPORT)

    done = shop.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "unit_tests.py", SHOP_UNIT_TESTS="1")

    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


# -- in a new environment: one changed import


def test_the_app_works_as_it_was(shop: Shop) -> None:
    """The twin: what is expected below is what stock Dramatiq does."""
    check_a_day(shop)


def test_the_app_works_with_one_changed_import(shop: Shop) -> None:
    """Where its queues do not exist yet, there is nothing else to change."""
    shop.change(STOCK_IMPORT, OUR_IMPORT)

    check_a_day(shop)


# -- where its queues exist: the error says the rest


def test_with_its_old_queues_the_error_says_what_else_to_change(shop: Shop) -> None:
    """An error that sends people to a search engine is no way to move."""
    # Given an app that has worked on stock Dramatiq
    shop.run("take_order.send(1)")

    # When the import is changed
    shop.change(STOCK_IMPORT, OUR_IMPORT)
    with shop.worker() as worker:
        assert worker.wait(60) == 1
    producer = shop.python("-c", "from shop.actors import take_order; take_order.send(2)")

    # Then worker and producer say the one thing that is left
    for said in (shop.log, producer.stderr):
        assert "queue 'default'" in said
        assert "queue_type='classic'" in said
    assert "Traceback" not in shop.log

    # And with that the app works, and what was left is delivered
    shop.change(STOCK_CALL, CLASSIC_CALL)
    check_a_day_and(shop, 1)


def check_a_day_and(shop: Shop, number: int) -> None:
    with shop.worker():
        wait_until(lambda: shop.numbers("order") == [number], what="the order that was left over")
    with closing(sqlite3.connect(shop.folder / "shop.db")) as database, database:
        database.execute("DELETE FROM journal")
    check_a_day(shop)


# -- leftovers

#: Orders that nobody takes, one whose retry is a minute away, reminders that are far from due, and a dead letter.
LEAVES = """
for number in range(20):
    take_order.send(number)
for number in range(5):
    remind.send_with_options(args=(number, time.time()), delay=12_000)
"""


def test_what_stock_workers_left_in_the_queues_runs_once(shop: Shop) -> None:
    """The switch itself must not cost a message: stock stops with a full queue, ours starts."""
    # Given a stock worker that has dead-lettered something, and stops with a full queue
    with shop.worker():
        shop.run("check_card.send(1)")
        wait_until(lambda: queues.depth(shop.url, "cards.XQ"), what="a dead letter of stock's")
    shop.run(LEAVES)
    assert queues.depth(shop.url, "default") == 20
    assert queues.depth(shop.url, "default.DQ") == 5

    # When the app has moved over
    shop.change(STOCK_IMPORT, OUR_IMPORT)
    shop.change(STOCK_CALL, CLASSIC_CALL)
    with shop.worker():
        wait_until(lambda: shop.numbers("order") == list(range(20)), what="the orders")

        # Then old dead letters stay where they are
        assert queues.depth(shop.url, "cards.XQ") == 1
    assert shop.numbers("order") == list(range(20))


def test_what_stock_workers_left_delayed_runs_once_and_not_early(shop: Shop) -> None:
    """A reminder for next week must not be forgotten in a queue that nobody reads any more."""
    # Given delayed messages that stock workers have in their hands and in ``.DQ``
    with shop.worker():
        shop.run(LEAVES)
        wait_until(lambda: shop.numbers("order") == list(range(20)), what="the orders")
    wait_until(lambda: queues.depth(shop.url, "default.DQ") == 5, what="the reminders to be back in .DQ")

    # When the app has moved over
    shop.change(STOCK_IMPORT, OUR_IMPORT)
    shop.change(STOCK_CALL, CLASSIC_CALL)
    with shop.worker():
        wait_until(lambda: shop.numbers("reminder") == list(range(5)), 60, "the reminders")

    # Then each came once, when it was due
    reminders = shop.journal("reminder")
    assert all(one["at"] - one["sent_at"] >= 12 for one in reminders)
    assert len(reminders) == 5
    assert not queues.depth(shop.url, "default.DQ")
