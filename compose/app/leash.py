"""Run a command that must not outlive whoever started it: ``python leash.py COMMAND...``.

Runs in: a process of its own, between the demo and its worker. Needs: a pipe as its input.

The other end of the pipe is held by the demo alone. However the demo ends, also by ``kill -9``, the kernel closes
it; the command is then killed with all its children. RabbitMQ delivers again what they had in hand.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from types import FrameType


def main(command: list[str]) -> int:
    """Run the command and return its exit code; SIGTERM is passed on to it."""
    # A session of its own, so that it can be killed with its children and without us.
    worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        worker.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    threading.Thread(target=_kill_when_let_go, args=(worker.pid,), daemon=True).start()
    exit_code = worker.wait()
    # Children of a command that was killed go on without it.
    _kill(worker.pid)
    return exit_code


def _kill_when_let_go(session: int) -> None:
    # Not sys.stdin: a thread that waits in there is in the way of a normal end.
    while os.read(0, 1024):
        pass
    _kill(session)


def _kill(session: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
