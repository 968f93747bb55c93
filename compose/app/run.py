"""One demo from its servers to its table.

Runs in: demo. Needs: RabbitMQ, the libraries of the ``demo`` extra.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import dramatiq

from compose.app import records
from compose.app.evidence import Finding, Sent, judge
from compose.app.outside import Rabbitmq, RabbitmqUnusable
from compose.app.plan import Kind, Planned, plan
from compose.app.screen import Screen, Watch
from compose.app.servers import DemoServers, ServersUnusable, servers_for_demo
from compose.app.worker import PROCESSES, THREADS, Worker
from dramatiq_safeops import SafeOpsError

#: How often the files and the number of dead letters are looked at, in seconds.
LOOK_EVERY_S = 0.2

LOG_NAME = "worker-{}.log"


class CannotRun(RuntimeError):
    """Raised with a sentence for people when the demo cannot go on."""


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    months: list[int]
    out: Path
    as_json: bool
    keep: bool
    timeout_s: float


def run(settings: Settings) -> bool:
    """Run the demo; True if every message ended as expected. Raises CannotRun."""
    screen = Screen(to_stderr=settings.as_json)
    records.forget_old(settings.out, now=time.time())
    try:
        with contextlib.ExitStack() as stack:
            servers = stack.enter_context(servers_for_demo(screen, keep=settings.keep))
            rabbitmq = stack.enter_context(Rabbitmq(servers.amqp_url))
            return _run_on(servers, rabbitmq, settings, screen)
    except (RabbitmqUnusable, ServersUnusable, SafeOpsError) as error:
        raise CannotRun(str(error)) from error


def _run_on(servers: DemoServers, rabbitmq: Rabbitmq, settings: Settings, screen: Screen) -> bool:
    queue = rabbitmq.claim_queue("reports")
    environment = {
        "SAFEOPS_AMQP_URL": servers.amqp_url,
        "SAFEOPS_DEMO_OUT": str(settings.out),
        "SAFEOPS_DEMO_QUEUE": queue,
    }
    (settings.out / records.FOLDER).mkdir(exist_ok=True)
    log = settings.out / records.FOLDER / LOG_NAME.format(os.getpid())
    with Worker(environment, log) as worker:
        screen.step(f"Worker started: {PROCESSES} processes of {THREADS} threads, queue {queue!r}.")
        sent = _send(plan(settings.months), queue, rabbitmq, environment)
        screen.step(f"{len(sent)} messages sent. Each process reads 336,776 flights before its first report.")
        with screen.watching(len(sent)) as watch:
            trouble, disturbed = _watch(sent, queue, rabbitmq, worker, settings, watch)
        if not worker.stop():
            trouble = "the worker did not end when it was asked to, and was killed"
    left = rabbitmq.waiting(queue)
    if left and not trouble:
        trouble = f"{left} messages are left in the queue {queue!r}"
    # Once more and from scratch, now that nothing moves any more.
    letters = rabbitmq.dead_letters(f"{queue}.dlq")
    findings = [judge(one, settings.out, letters, disturbed=disturbed) for one in sent]
    _show(findings, servers, queue, trouble, log, settings, screen)
    return not trouble and all(finding.right for finding in findings)


def _send(planned: list[Planned], queue: str, rabbitmq: Rabbitmq, environment: dict[str, str]) -> list[Sent]:
    """Send everything. The junk goes past the product, as junk does."""
    os.environ.update(environment)
    # Reads its settings when it is imported, as the worker does.
    from compose.app import actors

    sent = {}
    # Trouble first: what comes after it must not suffer.
    for one in sorted(planned, key=lambda one: one.kind is Kind.MONTH and not one.reason):
        if one.kind is Kind.JUNK:
            token = uuid.uuid4().hex
            junk = b"\x00\xff{ this is not JSON, " + token.encode()
            rabbitmq.publish(queue, junk)
            sent[one] = Sent(one, f"junk-{token}", junk)
            continue
        if one.kind is Kind.NO_SUCH_ACTOR:
            message: dramatiq.Message[None] = actors.broker.enqueue(
                dramatiq.Message(
                    queue_name=queue, actor_name=one.argument, args=("201x",), kwargs={}, options={}
                )
            )
        else:
            actor = actors.build_month if one.kind is Kind.MONTH else actors.build_year
            message = actor.send(one.argument)
        sent[one] = Sent(one, message.message_id)
    actors.broker.close()
    return [sent[one] for one in planned]


def _watch(
    sent: list[Sent], queue: str, rabbitmq: Rabbitmq, worker: Worker, settings: Settings, watch: Watch
) -> tuple[str, bool]:
    """Return when every message has ended, or with a sentence why not; and whether RabbitMQ was away meanwhile."""
    deadline = time.monotonic() + settings.timeout_s
    open_messages = {one.message_id: one for one in sent}
    attempts = dict.fromkeys(open_messages, 0)
    letters = rabbitmq.dead_letters(f"{queue}.dlq")
    away = disturbed = False
    while True:
        try:
            # Each look counts as a delivery at RabbitMQ, so only when something is there that was not.
            if rabbitmq.waiting(f"{queue}.dlq") != len(letters):
                letters = rabbitmq.dead_letters(f"{queue}.dlq")
            away = False
        except RabbitmqUnusable as error:
            # It may come back, and then no message is lost. Until the time is over we wait as the workers do.
            if not away:
                watch.say(f"RabbitMQ is away, waiting for it: {error}.")
            away = disturbed = True
        for message_id, one in list(open_messages.items()):
            finding = judge(one, settings.out, letters)
            if finding.ended:
                watch.ended(finding)
                del open_messages[message_id]
            elif finding.attempts > max(attempts[message_id], 1):
                watch.started(finding.label, finding.attempts)
            attempts[message_id] = finding.attempts
        if not open_messages:
            return "", disturbed
        if worker.exit_code is not None:
            ended = f"the worker ended by itself with exit code {worker.exit_code}"
            return f"{ended}:\n{worker.last_lines()}", disturbed
        if time.monotonic() > deadline:
            names = ", ".join(judge(one, settings.out, letters).label for one in open_messages.values())
            trouble = f"{len(open_messages)} messages had not ended after {settings.timeout_s:g} s: {names}"
            return trouble, disturbed
        time.sleep(LOOK_EVERY_S)


def _show(
    findings: list[Finding],
    servers: DemoServers,
    queue: str,
    trouble: str,
    log: Path,
    settings: Settings,
    screen: Screen,
) -> None:
    screen.table(findings)
    screen.say(f"Reports:       {settings.out}")
    screen.say(f"Worker's log:  {log}")
    page = servers.dead_letters_page(queue)
    if page is not None:
        screen.say(f"Dead letters:  {page}")
        screen.say(f"               {servers.login}; they are under 'Get messages'")
    screen.say(f"Servers:       {servers.end}")
    wrong = [finding for finding in findings if not finding.right]
    screen.say("")
    for finding in wrong:
        screen.say(f"WRONG: {finding.label}: {finding.problem}", "bold red")
    if trouble:
        screen.say(f"WRONG: {trouble}", "bold red")
    if not wrong and not trouble:
        screen.say(f"All {len(findings)} messages ended as expected.", "bold green")
    if settings.as_json:
        table = [{**asdict(finding), "right": finding.right} for finding in findings]
        json.dump(
            {"right": not wrong and not trouble, "trouble": trouble, "messages": table}, sys.stdout, indent=2
        )
        sys.stdout.write("\n")
