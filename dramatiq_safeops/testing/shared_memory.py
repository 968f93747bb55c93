"""Remove the shared memory that a killed PostgreSQL leaves in the kernel.

Runs in: the process that starts, kills or sweeps servers. Needs: ``ipcrm`` (else the memory stays: 56 bytes).

PostgreSQL keeps one System V segment per server, by which it knows that a folder is in use. Only an orderly end
removes it; the next start makes do without. Test runs that kill would pile them up, up to the kernel's limit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path


def segment_of(data: Path) -> str | None:
    """Return the id of the segment of the server that runs, or was killed, in this data folder."""
    with contextlib.suppress(OSError, IndexError):
        return (data / "postmaster.pid").read_text().splitlines()[6].split()[1]
    return None


def remove_segment(data: Path) -> None:
    """Remove the segment of a server that is dead."""
    segment, ipcrm = segment_of(data), shutil.which("ipcrm")
    if segment is None or ipcrm is None:
        return
    # Under the server's account, so that no wrong number in its data can make root remove a stranger's.
    owner = data.stat()
    other = None if owner.st_uid == os.getuid() else owner
    subprocess.run(
        [ipcrm, "-m", segment],
        capture_output=True,
        check=False,
        user=None if other is None else other.st_uid,
        group=None if other is None else other.st_gid,
        extra_groups=None if other is None else [],
    )
