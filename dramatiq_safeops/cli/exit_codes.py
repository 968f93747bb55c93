"""What the exit code of a ``safeops`` command says.

Runs in: the command line. Needs: nothing.
"""

from __future__ import annotations

EXIT_OK = 0  # done, and nothing to report
EXIT_FINDINGS = 1  # done, and there is something a person should look at
EXIT_USAGE = 2  # called wrongly (click's own code), or the [cli] extra is missing
EXIT_UNREACHABLE = 3  # RabbitMQ or Postgres did not answer
