"""The actors of the demo: this is what an application looks like that uses dramatiq-safeops.

Runs in: worker (``dramatiq compose.app.actors``), and in the demo, which only sends. Needs: RabbitMQ.

Environment: SAFEOPS_AMQP_URL, the RabbitMQ to use; SAFEOPS_DEMO_OUT, the folder of the reports; SAFEOPS_DEMO_QUEUE,
the queue (``reports``).
"""

from __future__ import annotations

import os
from pathlib import Path

import dramatiq
from dramatiq.middleware import CurrentMessage

from compose.app import chart, flights
from compose.app.records import Recorder
from compose.app.reports import Report, UnknownMonth, month_report, to_csv, write_whole, year_report
from dramatiq_safeops import RabbitmqBroker, safe_stack

OUT = Path(os.environ.get("SAFEOPS_DEMO_OUT", "compose/app/out"))
QUEUE = os.environ.get("SAFEOPS_DEMO_QUEUE", "reports")

#: How often the source of the year's overview is away before it answers.
TIMES_AWAY = 2

broker = RabbitmqBroker(
    url=os.environ["SAFEOPS_AMQP_URL"],
    middleware=safe_stack(),
    # How long a message for an unknown actor waits for a worker that knows it, in ms. Long enough for a rolling
    # deploy in real life; here people are watching.
    park_limit=6_000,
)
dramatiq.set_broker(broker)


class SourceAway(ConnectionError):
    """Stands for a database or service that does not answer for a moment."""


@dramatiq.actor(
    queue_name=QUEUE,
    time_limit=60_000,
    max_retries=4,
    min_backoff=500,
    throws=(UnknownMonth,),  # no retry helps: a dead letter at once
)
def build_month(month: str) -> None:
    """Write ``<month>.csv`` and ``<month>.png``, for a month such as ``2013-01``."""
    recorder = _recorder()
    recorder.started()
    _publish(month_report(flights.load(), month), recorder)


@dramatiq.actor(queue_name=QUEUE, time_limit=60_000, max_retries=4, min_backoff=500, throws=(UnknownMonth,))
def build_year(year: str) -> None:
    """Write ``<year>.csv`` and ``<year>.png``. Its source is away twice, so it succeeds at the third attempt.

    The count is in a file: retries may run in any process, and a killed worker forgets what it had in memory.
    """
    recorder = _recorder()
    attempt = recorder.started()
    if attempt <= TIMES_AWAY:
        raise SourceAway(f"the source of {year} does not answer (time {attempt} of {TIMES_AWAY})")
    _publish(year_report(flights.load(), year), recorder)


def _publish(report: Report, recorder: Recorder) -> None:
    for file, content in (
        (f"{report.name}.csv", to_csv(report)),
        (f"{report.name}.png", chart.to_png(report)),
    ):
        recorder.wrote(file, write_whole(OUT / file, content))


def _recorder() -> Recorder:
    message = CurrentMessage.get_current_message()
    assert message is not None  # only ever called by a worker
    return Recorder(OUT, message.message_id)
