"""Which RabbitMQ the demo uses: the one that SAFEOPS_AMQP_URL names, else a private one.

Runs in: demo. Needs: RabbitMQ's programs on this machine, unless a URL is given (missing ones are installed where
that is possible without asking).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from compose.app.outside import ui_of
from compose.app.screen import Screen
from compose.app.worker import ROOT
from dramatiq_safeops.testing import servers
from dramatiq_safeops.testing.processes import ServerError
from dramatiq_safeops.testing.servers import AMQP_URL, named_url


class ServersUnusable(RuntimeError):
    """Raised with a sentence for people: there is no RabbitMQ, and none can be started."""


@dataclass(frozen=True)
class DemoServers:
    """A RabbitMQ for the demo, and what to tell people about it.

    ``login`` and ``end`` say how to log in to its UI and how it is stopped. Without ``ui_url`` nobody will be able to.
    """

    amqp_url: str
    ui_url: str | None
    login: str
    end: str

    def dead_letters_page(self, queue: str) -> str | None:
        """Return the page of RabbitMQ's UI that shows the dead letters of a queue."""
        if self.ui_url is None:
            return None
        vhost = urlsplit(self.amqp_url).path[1:] or "%2F"
        return f"{self.ui_url}/#/queues/{vhost}/{quote(queue, safe='')}.dlq"


@contextmanager
def servers_for_demo(screen: Screen, *, keep: bool) -> Iterator[DemoServers]:
    """Give a RabbitMQ. Kept ones are used again by the next demo. Raises ServersUnusable."""
    named = named_url(AMQP_URL)
    if named is not None:
        ui_url, user = ui_of(named)
        login = f"log in as {user!r} with the password of {AMQP_URL} (if its UI is on, and on its usual port)"
        yield DemoServers(named, ui_url, login, f"yours ({AMQP_URL}), left as they are")
    elif keep:
        with screen.waiting("Starting private servers, or finding those of the last demo (up to 15 s)."):
            urls = _up()
        yield DemoServers(
            str(urls["amqp_url"]),
            urls["management_url"],
            "log in as 'guest' with the password 'guest'",
            "still running, for you to look and for the next demo; stop them with: make down",
        )
    else:
        yield from _only_for_now(screen)


def _only_for_now(screen: Screen) -> Iterator[DemoServers]:
    with ExitStack() as stack:
        try:
            with screen.waiting("Starting private servers (up to 15 s)."):
                running = stack.enter_context(servers(postgres=False))
        except ServerError as error:
            raise ServersUnusable(str(error)) from error
        yield DemoServers(
            str(running.amqp_url), None, "", "removed now (--no-keep), and the dead letters with them"
        )


def _up() -> dict[str, str | None]:
    command = [sys.executable, "-m", "dramatiq_safeops.testing", "up", "--json"]
    # In a process of its own: the servers must not end with the demo.
    started = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if started.returncode != 0:
        raise ServersUnusable(started.stderr.strip().rpartition("dramatiq-safeops: ")[2] or "no servers")
    urls: dict[str, str | None] = json.loads(started.stdout.splitlines()[-1])
    return urls
