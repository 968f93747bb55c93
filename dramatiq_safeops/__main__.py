"""``python -m dramatiq_safeops`` is the ``safeops`` command.

Runs in: the command line. Needs: the [cli] extra.
"""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
