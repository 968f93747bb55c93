"""``safeops version``: what is installed here, for a bug report.

Runs in: the command line. Needs: the [cli] extra.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform

import click

DISTRIBUTIONS = ("dramatiq-safeops", "dramatiq", "pika", "msgspec")

EXAMPLES = """\b
Examples:
  safeops version
  safeops version --json
"""


@click.command(epilog=EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print the versions that are installed here."""
    versions = {name: _version_of(name) for name in DISTRIBUTIONS}
    versions["python"] = platform.python_version()
    if as_json:
        click.echo(json.dumps(versions, indent=2))
        return
    width = max(map(len, versions))
    for name, number in versions.items():
        click.echo(f"{name:<{width}}  {number}")


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # Run from a source tree that was never installed.
        return "not installed"
