"""The ``safeops`` command: a thin face, one module per command.

Runs in: the command line. Needs: the [cli] extra; without it ``main`` says how to install it.

click and not typer: typer's current releases left Python 3.10 and bring pydantic along, and click, which the commands
need anyway to be tested, already suggests the likely name for a mistyped option. rich draws the tables.
"""

from __future__ import annotations

import sys

from .exit_codes import EXIT_USAGE


def main() -> int:
    """Run ``safeops`` with the arguments of this process; return its exit code (see ``exit_codes``)."""
    # Here and not above, so that a missing extra becomes a sentence.
    try:
        from .root import safeops
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("click", "rich"):
            raise
        sys.stderr.write("The safeops command needs click and rich: pip install 'dramatiq-safeops[cli]'\n")
        return EXIT_USAGE
    # click ends the process itself, with the exit code of the command or its own 2 for wrong usage.
    safeops.main(prog_name="safeops")
    raise AssertionError("click returned")
