"""``safeops queues``: give a queue other arguments while producers and workers go on.

Runs in: the command line. Needs: the [cli] extra and RabbitMQ.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import pika
import pika.exceptions
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..boot import check_urls
from ..errors import ConfigError
from ..rabbitmq import admin
from ..rabbitmq.migration import Migration, Result
from ..rabbitmq.migration_plan import MigrationError, Plan
from ..rabbitmq.topology import LONGEST_NAME, QUEUE_TYPES
from .exit_codes import EXIT_FINDINGS, EXIT_OK, EXIT_UNREACHABLE

GROUP_EXAMPLES = """\b
Examples:
  safeops queues migrate --help
"""

EXAMPLES = """\b
Examples:
  safeops queues migrate --dry-run reports
  safeops queues migrate reports reports-low
  safeops queues migrate --to classic --json reports
"""

#: Endings of queues that belong to a work queue, and are moved with it.
_ENDINGS = (".DQ", ".XQ", ".dlq", ".migrating")

_KINDS = {
    "wanted": "as wanted",
    "classic": "classic, as stock Dramatiq declares it",
    "quorum": "quorum, as this package declares it",
    "other": "with other arguments",
    "missing": "does not exist",
}

_DISTURBED = (
    "Disturbed: workers of these queues stand back until it is done (about 5 s and the time of what runs, plus a second for"
    " each 3,000 messages), and every send() in this vhost waits for about half a second. Producers of stock Dramatiq, of"
    " older versions, and without the permission to read safeops.publishers do not wait: stop them first, RabbitMQ loses what they send in the moment of the change."
)


@click.group(epilog=GROUP_EXAMPLES)
def queues() -> None:
    """Look after work queues."""


def _check_names(
    _context: click.Context, _argument: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    for name in names:
        if not name or name.startswith(("amq.", "safeops.")):
            raise click.BadParameter(f"{name!r} is no work queue.")
        if name.endswith(_ENDINGS):
            raise click.BadParameter(
                f"{name!r} is moved together with its work queue: give {name.rpartition('.')[0]!r}."
            )
        if len(name.encode(errors="replace")) > LONGEST_NAME - len(".migrating"):
            raise click.BadParameter(f"{name[:50]!r}... is too long.")
    return tuple(dict.fromkeys(names))


def _check_url(_context: click.Context, _option: click.Parameter, url: str) -> str:
    try:
        check_urls(url)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    return url


@queues.command(epilog=EXAMPLES)
@click.argument("names", metavar="QUEUE...", nargs=-1, required=True, callback=_check_names)
@click.option(
    "--url",
    envvar="SAFEOPS_AMQP_URL",
    show_envvar=True,
    required=True,
    callback=_check_url,
    help="RabbitMQ, as amqp://user:password@host/vhost.",
)
@click.option(
    "--to",
    type=click.Choice(QUEUE_TYPES),
    default="quorum",
    show_default=True,
    help="Type that the queues shall have.",
)
@click.option(
    "--max-priority", type=click.IntRange(1, 255), help="With --to classic: as RabbitmqBroker(max_priority=)."
)
@click.option("--dry-run", is_flag=True, help="Only say what is there and what would be done.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=900.0,
    show_default=True,
    help="Seconds to wait for workers that still consume.",
)
def migrate(
    names: tuple[str, ...],
    url: str,
    to: str,
    max_priority: int | None,
    dry_run: bool,
    as_json: bool,
    timeout: float,
) -> None:
    """Give each QUEUE the arguments of the other type, with all messages.

    What stock Dramatiq keeps beside it is moved, too: delayed messages (QUEUE.DQ) are delayed on by this package, dead ones
    (QUEUE.XQ) become dead letters in QUEUE.dlq. Producers and workers of this package go on meanwhile; change their
    queue_type afterwards. It can be cut off at any moment: start it again, and it goes on.

    Exit codes: 0 done, or nothing to do; 1 it could not be done, or with --dry-run there is something to do; 3 RabbitMQ did
    not answer.
    """
    if max_priority is not None and to == "quorum":
        raise click.UsageError("quorum queues have no priorities: --max-priority goes with --to classic.")
    parameters = [pika.URLParameters(one) for one in url.split(";")]
    reports: list[dict[str, Any]] = []
    code = EXIT_OK
    for name in names:
        report: dict[str, Any] = {"queue": name, "to": to}
        reports.append(report)
        try:
            with admin.connected(parameters) as connection, _shown(as_json or dry_run, name) as show:
                migration = Migration(
                    connection,
                    parameters,
                    name,
                    to=to,
                    max_priority=max_priority,
                    timeout_s=timeout,
                    report=show,
                )
                code = max(code, _one(migration, report, dry_run=dry_run, as_json=as_json))
        except MigrationError as error:
            code = max(code, EXIT_FINDINGS)
            report |= {"status": "failed", "error": str(error)}
            click.echo(f"{name}: {error}", err=True)
        except KeyboardInterrupt:
            sentence = (
                "interrupted; nothing is lost, its workers stand back until you start it again and it is done"
            )
            code = max(code, EXIT_FINDINGS)
            report |= {"status": "failed", "error": sentence}
            click.echo(f"{name}: {sentence}", err=True)
            break
        except (admin.NotConnected, pika.exceptions.AMQPError) as error:
            code = EXIT_UNREACHABLE
            sentence = (
                f"{error or type(error).__name__}; nothing is lost, start it again when RabbitMQ is back:"
                " if it had begun, workers stand back until it is done"
            )
            report |= {"status": "unreachable", "error": sentence}
            click.echo(f"{name}: {sentence}", err=True)
            break
    if as_json:
        click.echo(json.dumps({"queues": reports}, indent=2))
    sys.exit(code)


def _one(migration: Migration, report: dict[str, Any], *, dry_run: bool, as_json: bool) -> int:
    plan = migration.plan()
    report |= _as_json(plan)
    if not as_json:
        _print(plan)
    if plan.kind == "missing" and not plan.steps:
        report["status"] = "missing"
        return EXIT_FINDINGS
    if dry_run:
        report["status"] = "to do" if plan.steps else "nothing to do"
        return EXIT_FINDINGS if plan.steps else EXIT_OK
    result = migration.run()
    report |= {
        "status": "migrated" if plan.steps else "nothing to do",
        "moved": dict(result.moved),
        "held_s": round(result.held_s, 3),
    }
    if plan.steps and not as_json:
        click.echo(_sentence(plan, result))
    return EXIT_OK


def _sentence(plan: Plan, result: Result) -> str:
    moved = ", ".join(f"{count} from {name}" for name, count in result.moved.items()) or "nothing"
    return (
        f"{plan.queue}: done, moved {moved}. Producers paused for {result.held_s:.1f} s. Now change the app to"
        f" queue_type={plan.to!r}: a worker or producer that starts anew with another one is refused."
    )


def _print(plan: Plan) -> None:
    click.echo(
        f"{plan.queue} -> {plan.to}: {_KINDS[plan.kind]}{f' ({plan.difference})' if plan.difference else ''}"
    )
    table = Table("queue", "messages", "consumers", box=None, pad_edge=False)
    for one in plan.found:
        if one.exists:
            table.add_row(one.name, str(one.messages), str(one.consumers))
    if table.row_count:
        console = Console(markup=False, highlight=False)
        if not console.is_terminal:
            console.width = 10_000
        console.print(table)
    if not plan.steps:
        click.echo("Nothing to do." if plan.kind == "wanted" else "There is nothing of that name, check it.")
        return
    for number, step in enumerate(plan.steps, 1):
        click.echo(f"  {number}. {step}")
    click.echo(_DISTURBED)
    if "x-max-priority" in plan.difference:
        click.echo(
            "Its priorities are lost: messages keep the order in which they come out now, later ones come in turn."
        )


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "kind": plan.kind,
        "difference": plan.difference,
        "found": {
            one.name: {"messages": one.messages, "consumers": one.consumers}
            for one in plan.found
            if one.exists
        },
        "steps": plan.steps,
    }


@contextmanager
def _shown(quiet: bool, queue: str) -> Iterator[Any]:
    """Yield what shows how far it is: moving figures on a terminal, a line for each step elsewhere."""
    if quiet:
        yield lambda step, sentence, count: None
        return
    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:

        def line(step: str, sentence: str, count: int) -> None:
            if step != "moved":
                click.echo(f"{queue}: {sentence}", err=True)

        yield line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(queue, total=None)
        counts: dict[str, int] = {}
        begun: dict[str, float] = {}

        def move(step: str, sentence: str, count: int) -> None:
            if step == "moved":
                counts[sentence] = counts.get(sentence, 0) + count
                seconds = time.monotonic() - begun.setdefault(sentence, time.monotonic() - 0.1)
                sentence = f"{counts[sentence]} messages of {sentence}, {counts[sentence] / seconds:.0f}/s"
            progress.update(task, description=f"{queue}: {sentence}")

        yield move
