"""``safeops topology``: what a broker will declare on RabbitMQ, before it does.

Runs in: the command line. Needs: the [cli] extra, and no server.
"""

from __future__ import annotations

import json
import re
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..rabbitmq.topology import QUEUE_TYPES, Declaration, ladder, topology_for

EXAMPLES = """\b
Examples:
  safeops topology --queue reports --queue reports-low
  safeops topology --queue reports --queue-type classic
  safeops topology --queue reports --ladder --json
"""

#: What Dramatiq accepts as the queue of an actor.
QUEUE_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9._-]*")

#: Columns where the output is no terminal: as many as the table needs, so that grep finds a long name whole.
PIPE_WIDTH = 10_000


def _check_names(context: click.Context, option: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not QUEUE_NAME.fullmatch(name):
            raise click.BadParameter(
                f"{name!r} is no queue name: a letter or underscore first, then letters, digits, '.', '_' and '-'."
            )
    return names


@click.command(epilog=EXAMPLES)
@click.option(
    "--queue",
    "queues",
    multiple=True,
    default=["default"],
    show_default=True,
    metavar="NAME",
    callback=_check_names,
    help="Queue of an actor. May be given more than once.",
)
@click.option(
    "--queue-type",
    type=click.Choice(QUEUE_TYPES),
    default="quorum",
    show_default=True,
    help="Type of the work queues.",
)
@click.option("--ladder", "with_ladder", is_flag=True, help="Include the steps of the delay ladder.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, one object per declaration.")
def topology(queues: tuple[str, ...], queue_type: str, with_ladder: bool, as_json: bool) -> None:
    """Print what a broker declares on RabbitMQ.

    These are the exchanges, queues and bindings for its queues, in the order of their declaration. A worker also
    declares the delay ladder at its start, a queue and an exchange for each step; --ladder lists it, too. Nothing is
    sent to RabbitMQ.
    """
    declarations: list[Declaration] = []
    parts = [topology_for(queue, queue_type) for queue in queues] + ([ladder()] if with_ladder else [])
    for part in parts:
        # What all parts share is declared with each of them, and listed once.
        declarations += [d for d in part if d not in declarations]
    if as_json:
        objects = [{"method": d.method, "arguments": d.arguments} for d in declarations]
        click.echo(json.dumps(objects, indent=2))
        return
    table = Table("what", "name", "how", box=None, pad_edge=False)
    for declaration in declarations:
        table.add_row(*_row(declaration))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)


def _row(declaration: Declaration) -> tuple[str, str, str]:
    """Return kind, name and arguments of ``declaration``, one argument a line."""
    kind = declaration.method.partition("_")[0]
    arguments: dict[str, Any] = dict(declaration.arguments)
    if declaration.method == "queue_bind":
        how = f"to exchange {arguments['exchange']}\nrouting key {arguments['routing_key']!r}"
        return "binding", f"of {arguments['queue']}", how
    name = arguments.pop(kind)
    queue_arguments = arguments.pop("arguments", {})
    lines = [f"{key} = {_plain(value)}" for key, value in (arguments | queue_arguments).items()]
    return kind, name, "\n".join(lines)


def _plain(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)
