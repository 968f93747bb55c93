"""A private RabbitMQ node, with its management UI, for tests and the demo.

Runs in: the process that starts servers. Needs: RabbitMQ >= 3.10 on this machine, or in a folder that
SAFEOPS_RABBITMQ names (see ``binaries``); ``localhost`` in /etc/hosts. It works as root and as any other user.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import os
import re
import secrets
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dramatiq_safeops.testing.binaries import find_rabbitmq
from dramatiq_safeops.testing.processes import ServerError, free_ports, kill_all, look_at, wait_until
from dramatiq_safeops.testing.server import READY_TIMEOUT_S, PortTaken, PrivateServer, clean_environment

#: The management UI and API, and the metrics of Prometheus.
DEFAULT_PLUGINS = ("rabbitmq_management", "rabbitmq_prometheus")

_NODE = "safeops@localhost"
_MEMORY_SHARE = 0.6


class ApiError(ServerError):
    """RabbitMQ's management API refused a request; ``status`` is the HTTP status, ``body`` its answer."""

    def __init__(self, text: str, *, status: int, body: str) -> None:
        super().__init__(text)
        self.status = status
        self.body = body


class RabbitmqServer(PrivateServer):
    """A RabbitMQ node of one's own: start, kill, pause and restart it as a test needs.

    ::

        with RabbitmqServer.start() as rabbitmq:
            broker = RabbitmqBroker(url=rabbitmq.url)
            ...
            rabbitmq.kill()
            rabbitmq.restart()

    Before ``kill()``, give a quorum queue that was just declared 3 seconds: killed younger, it is not yet in
    RabbitMQ's own register and comes back without a leader (3.10, 4.0) or empty (4.3).
    """

    kind = "rabbitmq"
    title = "RabbitMQ"

    def __init__(self, folder: Path | None, *, plugins: Sequence[str], config: Mapping[str, object]) -> None:
        found = find_rabbitmq()
        if found is None:
            raise ServerError("RabbitMQ is not installed, run: python -m dramatiq_safeops.testing install")
        super().__init__(folder)
        self._binaries = found
        self._plugins = tuple(plugins)
        self._config = dict(config)
        self._node = _NODE
        self._cookie = secrets.token_hex(16)
        self._epmd: subprocess.Popen[bytes] | None = None
        self._amqp_port = 0
        self._management_port = 0
        self._environment: dict[str, str] = {}

    @classmethod
    def start(
        cls,
        folder: Path | None = None,
        *,
        plugins: Sequence[str] = DEFAULT_PLUGINS,
        config: Mapping[str, object] | None = None,
        timeout: float = READY_TIMEOUT_S,
    ) -> RabbitmqServer:
        """Start a node and return it when clients can connect (3 to 8 s; 15 s for the first on a cold machine).

        ``folder`` keeps its data after ``stop()`` and may hold data of an earlier node; None means a folder that goes
        with it. ``config`` are lines for rabbitmq.conf, say ``{"consumer_timeout": 4000}``. Raises ``ServerError``
        when it is not ready within ``timeout`` seconds, or cannot run at all.
        """
        server = cls(folder, plugins=plugins, config={} if config is None else config)
        server._boot(timeout)
        return server

    @property
    def url(self) -> str:
        """``amqp://guest:guest@127.0.0.1:PORT/%2F``."""
        return f"amqp://guest:guest@127.0.0.1:{self._amqp_port}/%2F"

    @property
    def management_url(self) -> str:
        """The management UI, ``http://127.0.0.1:PORT``; log in as guest with the password guest."""
        return f"http://127.0.0.1:{self._management_port}"

    @property
    def urls(self) -> dict[str, str]:
        """The URLs of AMQP and of the management UI."""
        return {"url": self.url, "management_url": self.management_url}

    @functools.cached_property
    def version(self) -> tuple[int, ...]:
        """The version of RabbitMQ, say ``(3, 10, 8)``. Asked once, which takes about 0.7 s of CPU."""
        return tuple(int(number) for number in re.findall(r"\d+", self.rabbitmqctl("version"))[:3])

    def api(self, method: str, path: str, body: object = None, *, timeout: float = 30.0) -> Any:
        """Call the management API: ``api("GET", "/api/queues/%2F/orders")``; return its JSON, None if it is empty.

        Numbers in it are up to 5 s old. Raises ``ApiError`` for a status of 400 and above.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._management_port, timeout=timeout)
        login = base64.b64encode(b"guest:guest").decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"RabbitMQ's management API did not answer {method} {path}: {error!r}"
            ) from error
        finally:
            connection.close()
        if answer.status >= 400:
            said = f"RabbitMQ's management API answered {method} {path} with {answer.status}: {text[:300]}"
            raise ApiError(said, status=answer.status, body=text)
        return json.loads(text) if text else None

    def rabbitmqctl(self, *arguments: str, timeout: float = 60.0) -> str:
        """Run ``rabbitmqctl`` against this node and return what it prints. Takes about 0.7 s of CPU."""
        # Without a port mapper the command would start one of its own, which nobody would stop.
        self._check_port_mapper()
        options = ("-q", "-n", self._node)
        command = self._binaries.command(self._binaries.ctl, *options, *arguments, folder=self.folder)
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ServerError(f"rabbitmqctl {arguments[0]} did not end within {timeout:.0f} s") from None
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split())[-500:]
            raise ServerError(f"rabbitmqctl {arguments[0]} failed with {done.returncode}: {said}")
        return done.stdout.strip()

    def eval(self, erlang: str) -> str:
        """Evaluate an Erlang expression in the node, say ``"erlang:system_info(otp_release)."``."""
        return self.rabbitmqctl("eval", erlang)

    def close_all_connections(self, reason: str = "closed by a test") -> None:
        """Close every AMQP connection from the server's side, as an operator does."""
        # Not through the API: its list of connections is up to 5 s old.
        self.rabbitmqctl("close_all_connections", reason)

    def memory_alarm(self, on: bool) -> None:
        """Raise or end RabbitMQ's memory alarm: while it is on, connections that publish are not read."""
        self.rabbitmqctl("set_vm_memory_high_watermark", "0" if on else str(_MEMORY_SHARE))

    def stop(self) -> None:
        """End the node at once and remove its folder (not one that the user named). Safe to repeat."""
        super().stop()
        if self._epmd is not None:
            self._epmd.wait(10)
            self._epmd = None

    def keep(self, name: str) -> None:
        """Let the node live on after this process, until ``python -m dramatiq_safeops.testing down``."""
        super().keep(name)
        if self._epmd is not None:
            self._epmd.returncode = 0  # as for the node itself

    def _prepare(self) -> None:
        self._amqp_port, distribution, self._management_port, prometheus, port_mapper = free_ports(5)
        home = self.folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
        cookie = home / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text(self._cookie)
            cookie.chmod(0o400)
        settings: dict[str, object] = {
            "listeners.tcp.1": f"127.0.0.1:{self._amqp_port}",
            "loopback_users": "none",
            "log.console": "false",
            "vm_memory_high_watermark.relative": _MEMORY_SHARE,
            "disk_free_limit.absolute": "50MB",
        }
        for plugin, port in (("management", self._management_port), ("prometheus", prometheus)):
            if f"rabbitmq_{plugin}" in self._plugins:
                settings[f"{plugin}.tcp.ip"] = "127.0.0.1"
                settings[f"{plugin}.tcp.port"] = port
        settings.update(self._config)
        lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
        (self.folder / "rabbitmq.conf").write_text(lines)
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self._plugins)}].\n")
        loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
        self._environment = {
            **clean_environment(os.environ, "RABBITMQ_", "ERL_", "ERLANG_", "LC_", "NOTIFY_SOCKET"),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._port_mapper_port(port_mapper)),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP": str(self.folder / "log" / "erl_crash.dump"),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_PORT": str(self._amqp_port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            # Not the machine's own settings.
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": loopback,
            "RABBITMQ_CTL_ERL_ARGS": loopback,
            # The script then becomes the node, where it else stays its parent: one pid to kill and to pause.
            "RUNNING_UNDER_SYSTEMD": "true",
        }
        self._start_port_mapper(port_mapper)

    def _port_mapper_port(self, free: int) -> int:
        """Return the port of Erlang's port mapper; ``free`` is one for a mapper of one's own."""
        return free

    def _start_port_mapper(self, port: int) -> None:
        # In the foreground and as a process of ours: left to itself the node starts a daemon that outlives it.
        if self._epmd is not None:
            kill_all(filter(None, [look_at(self._epmd.pid)]))
            self._epmd.wait(10)
        options = ("-port", str(port), "-address", "127.0.0.1")
        command = self._binaries.command(self._binaries.epmd, *options, folder=self.folder)
        self._epmd = self._start_process("epmd", command, environment=self._environment)

        def settled() -> bool:
            return not self._has_port_mapper() or _maps_ports(port)

        wait_until(settled, 10.0)
        self._check_port_mapper()

    def _has_port_mapper(self) -> bool:
        return self._epmd is not None and self._epmd.poll() is None

    def _check_port_mapper(self) -> None:
        if not self._has_port_mapper():
            raise PortTaken(f"Erlang's port mapper does not run, its log says: {self._complaint()}")

    def _launch(self) -> subprocess.Popen[bytes]:
        command = self._binaries.command(self._binaries.server, folder=self.folder)
        return self._start_process("rabbitmq", command, environment=self._environment)

    def _answers(self) -> bool:
        if not _speaks_amqp(self._amqp_port):
            return False
        # Had somebody else's answered on its port when the node started, the node would be registered there.
        self._check_port_mapper()
        if "rabbitmq_management" not in self._plugins:
            return True
        try:
            self.api("GET", "/api/overview", timeout=2.0)
        except ServerError:
            return False
        return True


def _maps_ports(port: int) -> bool:
    """Ask a port mapper for its names: its answer begins with its own port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"\x00\x01n")
            return connection.recv(4) == struct.pack("!I", port)
    except OSError:
        return False


def _speaks_amqp(port: int) -> bool:
    """Tell whether a server greets us: an open port alone is the kernel's doing, also for a paused node."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(1) == b"\x01"
    except OSError:
        return False
