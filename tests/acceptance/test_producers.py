"""Processes that only send: web servers that fork, pools of processes, and forks at the worst moment.

Real processes on a real RabbitMQ, which are looked at through ``/proc`` and RabbitMQ's own log.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from dramatiq_safeops.testing import RabbitmqServer, TcpProxy
from tests.harness import counts, queues
from tests.harness.worker import App, wait_until

SENDER = """
@dramatiq.actor(time_limit=60_000)
def work(number):
    note("ran", number=number)
"""

#: RabbitMQ's words for a connection that ends without AMQP's good-bye.
BROKEN_OFF = "client unexpectedly closed TCP connection"

#: Seconds that a process may take to end that has nothing more to do. The promise is 2.
ENDS_WITHIN_S = 10


def sent(url: str) -> list[int]:
    """Return the numbers of the messages in the queue, sorted."""
    return sorted(one.message["args"][0] for one in queues.look(url, "default"))


def broken_off(rabbit: RabbitmqServer, pids: set[int]) -> list[str]:
    """Return the complaints of RabbitMQ's about connections of ``pids`` that just broke off."""
    lines = [line for log in (rabbit.folder / "log").glob("*.log") for line in log.read_text().splitlines()]
    complaints = []
    for number, line in enumerate(lines):
        if "closing AMQP connection" in line and "[warning]" in line:
            about = " ".join(lines[number : number + 2])
            complaints += [about for pid in pids if f" {pid}@" in about]
    return complaints


def connections_of(pid: int, port: int) -> list[int]:
    """Return the local ports of the connections to ``port`` that process ``pid`` holds."""
    held = psutil.Process(pid).net_connections("tcp")
    return [one.laddr.port for one in held if one.raddr and one.raddr.port == port]


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


# -- a web server that forks

WEB = """
work.send(-1)  # in the master, which forks afterwards: its connection is open

def application(environ, start_response):
    number = int(environ["PATH_INFO"].strip("/"))
    work.send(number)
    start_response("200 OK", [("Content-Type", "text/plain"), ("Connection", "close")])
    return [str(os.getpid()).encode()]
"""


@contextmanager
def gunicorn(app: App, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Serve ``app`` with four forked workers of eight threads as long as the block lasts."""
    log = (app.folder / "gunicorn.log").open("w")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gunicorn", "app:application", "--preload", "--bind", "unix:web.sock"),
            *("--workers", "4", "--threads", "8", "--worker-class", "gthread", "--no-control-socket"),
            *arguments,
        ],
        env=app.environment(),
        cwd=app.folder,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until(lambda: len(psutil.Process(process.pid).children()) == 4, what="gunicorn's workers")
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
        log.close()


def get(app: App, number: int) -> int:
    """Ask the web server to send ``number``; return the process that did."""
    for _ in range(200):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            try:
                client.connect(str(app.folder / "web.sock"))
                client.sendall(f"GET /{number} HTTP/1.0\r\n\r\n".encode())
                answer = b"".join(iter(lambda: client.recv(4096), b""))
            except OSError:
                answer = b""
        if b"200 OK" in answer:
            return int(answer.rpartition(b"\r\n\r\n")[2])
        time.sleep(0.05)
    raise AssertionError(f"no answer for {number}: {(app.folder / 'gunicorn.log').read_text()}")


def get_all(app: App, numbers: range, *, threads: int = 8) -> set[int]:
    """Ask for ``numbers`` from several threads; return the processes that answered."""
    pids: set[int] = set()

    def client(mine: range) -> None:
        pids.update(get(app, number) for number in mine)

    clients = [threading.Thread(target=client, args=(numbers[n::threads],)) for n in range(threads)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return pids


def test_a_web_server_that_forks_after_its_first_send_sends_each_message_once(
    rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """gunicorn --preload: each worker inherits an open connection, and two processes on one destroy each other's frames."""
    # Given a master that has sent, and its workers
    app = App(tmp_path, SENDER + WEB, amqp_url)
    port = port_of(amqp_url)
    with gunicorn(app) as master:
        [masters] = connections_of(master.pid, port)

        # When the workers send
        answered = get_all(app, range(400))

        # Then each has a connection of its own, and none holds the master's
        workers = {child.pid for child in psutil.Process(master.pid).children()}
        assert answered <= workers
        held = [one for pid in answered for one in connections_of(pid, port)]
        assert len(set(held)) == len(answered) == len(held)
        assert masters not in held

        # And when one is killed, the next one sends as well
        victim = answered.pop()
        psutil.Process(victim).kill()
        get_all(app, range(400, 500))
        wait_until(
            lambda: (
                len(counts.connections(rabbit, amqp_url))
                == 1 + sum(bool(connections_of(c.pid, port)) for c in psutil.Process(master.pid).children())
            ),
            what="no connection but those of living processes",
        )
        everybody = {child.pid for child in psutil.Process(master.pid).children()} | {master.pid}

        # And the end is quick and polite
        started = time.monotonic()
        master.terminate()
        assert master.wait(60) == 0
        took = time.monotonic() - started
    assert took < ENDS_WITHIN_S
    assert sent(amqp_url) == list(range(-1, 500))
    assert not counts.connections(rabbit, amqp_url)
    assert not broken_off(rabbit, everybody)


# -- pools of processes

POOLS = {
    "multiprocessing.Pool": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(4) as pool:
            pids = pool.map(one, range(1, 200), chunksize=1)
            pool.close()
            pool.join()
        """,
    "ProcessPoolExecutor": """
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("fork")) as pool:
            pids = list(pool.map(one, range(1, 200)))
        """,
    "os.fork": """
        pids = []
        for first in 1, 68, 135:
            pid = os.fork()
            if not pid:
                for number in range(first, min(first + 67, 200)):
                    one(number)
                sys.exit()
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        """,
}


@pytest.mark.parametrize("pool", POOLS)
def test_children_of_a_process_that_has_sent_send_each_message_once_and_end_politely(
    pool: str, rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """A connection that just breaks off is a warning in RabbitMQ's log, and somebody looks into each."""
    app = App(tmp_path, SENDER, amqp_url)

    said = app.send(
        "import sys\nwork.send(0)\ndef one(number):\n    work.send(number)\n    return os.getpid()\n"
        + textwrap.dedent(POOLS[pool])
        + "\nprint(os.getpid(), *set(pids))\n"
    )

    pids = {int(pid) for pid in said.split()}
    assert len(pids) > 2
    assert sent(amqp_url) == list(range(200))
    wait_until(lambda: not counts.connections(rabbit, amqp_url), what="all connections to be gone")
    assert not broken_off(rabbit, pids)


# -- forks at the worst moment

FORKS_WHILE_OTHERS_SEND = """
stop = threading.Event()
first = {}

def sender(lane):
    number = lane
    while not stop.is_set():
        work.send(number)
        number += 8
    first[lane] = number

threads = [threading.Thread(target=sender, args=(lane,)) for lane in range(8)]
for thread in threads:
    thread.start()
children = []
for n in range(40):
    time.sleep(0.02)
    child = os.fork()
    if not child:
        work.send(1_000_000 + n)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
stop.set()
for thread in threads:
    thread.join()
print(*(f"{lane}:{number}" for lane, number in first.items()))
"""


def test_a_fork_while_other_threads_send_disturbs_neither_parent_nor_child(
    amqp_url: str, tmp_path: Path
) -> None:
    """A web process forks whenever it likes: locks may be held, and a frame may be half written."""
    app = App(tmp_path, SENDER, amqp_url)

    said = app.send(FORKS_WHILE_OTHERS_SEND)

    lanes = dict(map(int, piece.split(":")) for piece in said.split())
    of_threads = [number for lane, end in lanes.items() for number in range(lane, end, 8)]
    assert sent(amqp_url) == sorted([*of_threads, *(1_000_000 + n for n in range(40))])


FORKS_WHILE_IT_CONNECTS = """
threading.Thread(target=work.send, args=(0,), daemon=True).start()
input()
child = os.fork()
if not child:
    for pipe in (0, 1, 2):
        os.close(pipe)
    threading.Event().wait()
print(child, flush=True)
input()
"""


def test_a_child_forked_during_a_connection_attempt_does_not_keep_its_socket(
    amqp_url: str, tmp_path: Path
) -> None:
    """The child would keep a connection that nobody serves open beyond the death of its parent."""
    # Given a process in the middle of connecting
    with TcpProxy("127.0.0.1", port_of(amqp_url)) as proxy:
        proxy.hold()
        app = App(tmp_path, SENDER, proxy.url_for(amqp_url))
        with app.program(FORKS_WHILE_IT_CONNECTS) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            wait_until(lambda: connections_of(parent.pid, proxy.port), what="the process to connect")

            # When it forks
            parent.stdin.write("\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            try:
                # Then its child lets go of its sockets, first of all that it does
                wait_until(lambda: not connections_of(child, proxy.port), what="the child to let go")
                assert connections_of(parent.pid, proxy.port)
            finally:
                psutil.Process(child).kill()


# -- the end of a process

ENDS = {
    "after a send": "work.send(0)",
    "with a handler that sends": "import atexit\natexit.register(work.send, 0)",
    "while threads send": """
        work.send(0)
        def sender():
            while True:
                work.send(1)
        for _ in range(4):
            threading.Thread(target=sender, daemon=True).start()
        time.sleep(0.5)
        """,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_producer_ends_quickly_and_politely(
    end: str, rabbit: RabbitmqServer, amqp_url: str, tmp_path: Path
) -> None:
    """A command line tool that sends one message must not hang about, nor leave a warning on the server each time."""
    app = App(tmp_path, SENDER, amqp_url)
    code = f"import time\nprint(os.getpid())\n{textwrap.dedent(ENDS[end])}\nprint(time.time())"

    pid, ending = app.send(code).split()
    took = time.time() - float(ending)

    assert took < ENDS_WITHIN_S
    assert sent(amqp_url)[0] == 0
    assert not broken_off(rabbit, {int(pid)})


def test_a_producer_ends_although_its_rabbitmq_has_fallen_silent(amqp_url: str, tmp_path: Path) -> None:
    """The good-bye is a courtesy: a deploy must not wait for a frozen server."""
    with TcpProxy("127.0.0.1", port_of(amqp_url)) as proxy:
        app = App(tmp_path, SENDER, proxy.url_for(amqp_url))
        with app.program("work.send(0)\nprint('sent', flush=True)\ninput()") as producer:
            assert producer.stdout is not None
            assert producer.stdout.readline() == "sent\n"
            proxy.hold()

            # communicate() ends its input
            producer.communicate("\n", timeout=ENDS_WITHIN_S)

            assert producer.returncode == 0
