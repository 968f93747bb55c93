"""``python -m dramatiq_safeops.testing``: servers for the demo, and the way to be rid of all of them.

Runs in: a process of its own, from the Makefile or by hand. Needs: see the servers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from dramatiq_safeops.testing.install import ensure_binaries
from dramatiq_safeops.testing.instances import Instance, all_instances, destroy_everything, sweep
from dramatiq_safeops.testing.processes import ServerError
from dramatiq_safeops.testing.servers import AMQP_URL, DATABASE_URL, named_url, start_private

EXIT_OK = 0
EXIT_FAILED = 1  # one sentence on stderr says why (2 is argparse's own)
EXIT_INTERRUPTED = 130

_EXAMPLES = """
examples:
  python -m dramatiq_safeops.testing up          start RabbitMQ and PostgreSQL, print their URLs
  python -m dramatiq_safeops.testing up --json   the same for programs
  python -m dramatiq_safeops.testing status      what runs, and who owns it
  python -m dramatiq_safeops.testing down        stop and remove all of it, also what test runs still use

environment:
  SAFEOPS_AMQP_URL, SAFEOPS_DATABASE_URL   use these servers instead, start none
  SAFEOPS_RABBITMQ                         4.0 or 4.3: start that version, fetched from Debian's packages into a folder;
                                           or the path of a folder that holds one
  TMPDIR                                   where the servers' folders are made
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dramatiq_safeops.testing",
        description="Private throw-away RabbitMQ and PostgreSQL servers on free loopback ports.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start both servers, or find those that run, and print their URLs")
    up.add_argument("--json", action="store_true", help="print one JSON object")
    up.add_argument(
        "--name", default="default", help="servers of another name are others (default: %(default)s)"
    )
    status = commands.add_parser("status", help="list the servers of this user")
    status.add_argument("--json", action="store_true", help="print a JSON list")
    commands.add_parser("down", help="stop and remove every server of this user")
    commands.add_parser("sweep", help="stop and remove the servers whose owner is dead")
    commands.add_parser("install", help="install the programs that are missing")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "up":
            _print_up(_up(chosen.name), chosen.json)
        elif chosen.command == "status":
            _print_status([_state(instance) for instance in all_instances()], chosen.json)
        elif chosen.command == "down":
            _say(f"{_count(destroy_everything())} stopped and removed.")
        elif chosen.command == "sweep":
            _say(f"{_count(sweep())} of dead owners stopped and removed.")
        else:
            ensure_binaries()
            _say("RabbitMQ and PostgreSQL are installed.")
    except ServerError as error:
        print(f"dramatiq-safeops: {error}", file=sys.stderr)  # noqa: T201 - a command's output
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("dramatiq-safeops: interrupted, what was started is being removed", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    return EXIT_OK


def _up(name: str) -> dict[str, str | None]:
    """Return the URLs of the named servers: the environment's, else kept ones, else new ones that we keep."""
    sweep()
    kept = _kept(name)
    amqp_url, database_url = named_url(AMQP_URL), named_url(DATABASE_URL)
    management_url = None
    if amqp_url is None and "rabbitmq" in kept:
        amqp_url, management_url = kept["rabbitmq"]["url"], kept["rabbitmq"]["management_url"]
    if database_url is None and "postgres" in kept:
        database_url = kept["postgres"]["url"]
    ensure_binaries(rabbitmq=amqp_url is None, postgres=database_url is None)
    rabbitmq, postgres = start_private(rabbitmq=amqp_url is None, postgres=database_url is None)
    if rabbitmq is not None:
        amqp_url, management_url = rabbitmq.url, rabbitmq.management_url
        rabbitmq.keep(name)
    if postgres is not None:
        database_url = postgres.url
        postgres.keep(name)
    return {"amqp_url": amqp_url, "database_url": database_url, "management_url": management_url}


def _kept(name: str) -> dict[str, dict[str, str]]:
    """Return the URLs of the kept servers of this name, by kind. Dead ones (killed, rebooted) are removed."""
    found = {}
    for instance in all_instances():
        record = instance.record
        if record.get("owner") is None and record.get("name") == name:
            if instance.running:
                found[record["kind"]] = record["urls"]
            else:
                instance.destroy()
    return found


def _state(instance: Instance) -> dict[str, Any]:
    record = instance.record
    owner = record.get("owner")
    return {
        "kind": record.get("kind"),
        "name": record.get("name"),
        "owner": None if owner is None else owner["pid"],
        "running": instance.running,
        "folder": str(instance.folder),
        **record.get("urls", {}),
    }


def _print_up(urls: dict[str, str | None], as_json: bool) -> None:
    if as_json:
        _say(json.dumps(urls))
        return
    _say(f"{AMQP_URL}={urls['amqp_url']}")
    _say(f"{DATABASE_URL}={urls['database_url']}")
    if urls["management_url"] is not None:
        _say(f"# RabbitMQ's UI: {urls['management_url']} (user guest, password guest)")


def _print_status(states: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        _say(json.dumps(states))
        return
    for state in states:
        belongs = f"kept as {state['name']!r}" if state["owner"] is None else f"of process {state['owner']}"
        life = "runs" if state["running"] else "does not run"
        _say(f"{state['kind']} {life}, {belongs}, {state.get('url', 'not ready yet')}, in {state['folder']}")
    if not states:
        _say("No server of this user.")


def _count(servers: int) -> str:
    return "1 server" if servers == 1 else f"{servers} servers"


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's output


if __name__ == "__main__":
    raise SystemExit(main())
