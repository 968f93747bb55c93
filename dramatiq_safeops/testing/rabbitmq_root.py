"""Another RabbitMQ than the machine's: its programs in a folder of their own (a root), and how to run them there.

Runs in: the process that starts servers. Needs: Linux with ``unshare``, and either root or leave to make a user
namespace.

A program of a root sees the root's ``/usr`` instead of the machine's, in a mount namespace of its own: what is mounted
there is not seen by anybody else, and gone with the program, however it ends. Its pid stays that of the command.
"""

from __future__ import annotations

import os
from pathlib import Path

from dramatiq_safeops.testing.processes import ServerError

RABBITMQ = "SAFEOPS_RABBITMQ"

#: The versions that can be fetched, and the release of Debian that has each. The unstable ``sid`` moves on.
RELEASES = {"4.0": "trixie", "4.3": "sid"}

# Nothing is written to the root itself, so that many programs can share it. The files of /etc are all that is asked for.
_ENTER = """
root=$1 folder=$2
shift 2
PATH=/usr/sbin:/usr/bin:/sbin:/bin
set -e
mount -t tmpfs -o mode=755 safeops "$root/mnt"
cd "$root/mnt"
mkdir dev etc proc sys tmp usr
chmod 1777 tmp
for name in bin sbin lib lib64; do
    [ ! -e "$root/usr/$name" ] || ln -s "usr/$name" "$name"
done
mount --bind "$root/usr" usr
for name in dev proc sys; do
    mount --rbind "/$name" "$name"
done
cp /etc/hosts /etc/passwd /etc/group etc/
echo 'hosts: files' >etc/nsswitch.conf
mkdir -p ".$folder"
mount --bind "$folder" ".$folder"
exec chroot . sh -c 'cd "$0" && exec "$@"' "$folder" "$@"
"""


def chosen_root() -> Path | None:
    """Return the root that SAFEOPS_RABBITMQ names, whether it is there or not; None for the machine's RabbitMQ.

    The variable holds a version, or the path of a root. ``ServerError`` if it is neither.
    """
    name = os.environ.get(RABBITMQ)
    if name is None or name == "":
        return None
    if "/" in name:
        root = Path(name).absolute()
        if version_in(root) is None:
            raise ServerError(
                f"{RABBITMQ} names the folder {root}, which holds no RabbitMQ below usr/lib/rabbitmq"
            )
        return root
    if name not in RELEASES:
        raise ServerError(
            f"{RABBITMQ} must be {' or '.join(RELEASES)}, the path of a folder that holds a RabbitMQ, or unset,"
            f" but it is {name!r}"
        )
    roots = [folder / f"rabbitmq-{name}" for folder in (cache_folder(), _SHARED_CACHE)]
    return next((root for root in roots if version_in(root) is not None), roots[0])


def version_in(root: Path) -> str | None:
    """Return the version of the RabbitMQ in a root, say ``"4.0.5"``; None if it holds none."""
    found = sorted((root / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
    return found[-1].name.partition("-")[2] if found else None


def inside(root: Path, folder: Path) -> list[str]:
    """Return what to put before a command to run it in ``root``, where ``folder`` is its working directory.

    Of the machine's files it sees ``folder`` alone, under the same path.
    """
    namespace = ["--mount", "--propagation", "private"]
    if os.getuid() != 0:
        namespace += ["--user", "--map-root-user"]
    return ["unshare", *namespace, "sh", "-c", _ENTER, "sh", str(root), str(folder.absolute())]


#: Roots that root has made serve all users.
_SHARED_CACHE = Path("/var/cache/dramatiq-safeops")


def cache_folder() -> Path:
    """Return the folder where this user's roots are made."""
    if os.getuid() == 0:
        return _SHARED_CACHE
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dramatiq-safeops"
