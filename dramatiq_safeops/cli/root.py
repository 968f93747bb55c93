"""The root of the ``safeops`` command: which commands there are.

Runs in: the command line. Needs: the [cli] extra.
"""

from __future__ import annotations

import click

from .queues import queues
from .topology import topology
from .version import version

EXAMPLES = """\b
Examples:
  safeops version --json
  safeops topology --queue reports --queue-type quorum
  safeops queues migrate --help
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXAMPLES)
def safeops() -> None:
    """Look after Dramatiq on RabbitMQ.

    Exit codes: 0 done, 1 done but there is something to look at, 2 called wrongly, 3 a server did not answer.
    """


safeops.add_command(version)
safeops.add_command(topology)
safeops.add_command(queues)
