"""The TCP proxy does to connections what networks do, and only that. Needs: nothing but loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dramatiq_safeops.testing import TcpProxy

#: Long enough for a loaded machine, never waited for in full by a test that passes.
PATIENCE_S = 10.0
#: How long nothing may arrive before we believe that nothing will.
SILENCE_S = 0.3


class EchoServer:
    """Sends back what it gets; counts how its connections ended."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.broken = threading.Event()
        self.received = bytearray()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.echo, args=(connection,), daemon=True).start()

    def echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65_536):
                    self.received += data
                    connection.sendall(data)
            except ConnectionResetError:
                self.broken.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: EchoServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", echo.port) as running:
        yield running


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)


def ask(connection: socket.socket, data: bytes = b"hello") -> bytes:
    connection.sendall(data)
    return receive(connection, len(data))


def receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count and (data := connection.recv(65_536)):
        received += data
    return bytes(received)


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(SILENCE_S)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(PATIENCE_S)
    return False


def test_bytes_pass_unchanged_and_in_order_in_both_directions(proxy: TcpProxy) -> None:
    """A proxy that changes what it carries makes every test behind it worthless."""
    sent = bytes(range(256)) * 20_000  # 5 MB: more than any buffer on the way holds
    with connect(proxy) as client:
        writing = threading.Thread(target=client.sendall, args=(sent,))
        writing.start()

        received = receive(client, len(sent))

        writing.join(PATIENCE_S)
    assert received == sent


def test_the_url_keeps_everything_but_host_and_port(proxy: TcpProxy) -> None:
    """A lost login or vhost would look like a fault of the network."""
    assert proxy.url_for("amqp://gu:p%40s@rabbit.example:5672/%2F?heartbeat=5") == (
        f"amqp://gu:p%40s@127.0.0.1:{proxy.port}/%2F?heartbeat=5"
    )
    assert proxy.url_for("postgresql://127.0.0.1/db") == f"postgresql://127.0.0.1:{proxy.port}/db"


def test_a_cut_resets_both_sides_and_lets_new_connections_in(proxy: TcpProxy, echo: EchoServer) -> None:
    """A connection that ends in order (FIN) is another fault than one that breaks (RST)."""
    with connect(proxy) as one, connect(proxy) as other:
        ask(one)
        ask(other)

        assert proxy.cut() == 2

        for client in (one, other):
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        assert echo.broken.wait(PATIENCE_S)
        assert proxy.connections == 0
    with connect(proxy) as later:
        assert ask(later) == b"hello"


def test_a_connection_that_was_just_made_is_cut_too(proxy: TcpProxy) -> None:
    """A test that cuts right after connecting must not miss its victim now and then."""
    for _ in range(50):
        with connect(proxy) as client:
            proxy.cut()

            with pytest.raises(ConnectionResetError):
                client.recv(1)


@pytest.mark.parametrize("direction", ["to_server", "to_client", "both"])
def test_held_bytes_wait_and_none_is_lost(proxy: TcpProxy, echo: EchoServer, direction: str) -> None:
    """ "The ack never arrives" must leave the connection standing, and the other direction alone."""
    with connect(proxy) as client:
        ask(client)
        proxy.hold(direction)
        client.sendall(b"late")

        assert is_silent(client)
        if direction == "to_client":
            wait_for(lambda: b"late" in echo.received)
        else:
            assert b"late" not in echo.received

        assert proxy.connections == 1
        proxy.release(direction)
        assert receive(client, 4) == b"late"


def test_new_connections_are_held_as_well(proxy: TcpProxy) -> None:
    """A client that reconnects into a partition must not find it healed."""
    proxy.hold()
    with connect(proxy) as client:
        client.sendall(b"hello")

        assert is_silent(client)
        proxy.release()
        assert receive(client, 5) == b"hello"


def test_the_break_of_a_client_does_not_pass_a_held_proxy(proxy: TcpProxy, echo: EchoServer) -> None:
    """The server must not learn of a client's death through a network that is down."""
    with connect(proxy) as client:
        ask(client)
        proxy.hold()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")

    assert not echo.broken.wait(SILENCE_S)
    proxy.release()
    assert echo.broken.wait(PATIENCE_S)


def test_a_held_sender_is_stopped_by_tcp_and_goes_on_afterwards(proxy: TcpProxy) -> None:
    """A stuck network does not take gigabytes, and a test that holds must not fill the memory."""
    sent = bytes(32_000_000)
    with connect(proxy) as client:
        proxy.hold("to_server")
        writing = threading.Thread(target=client.sendall, args=(sent,))
        writing.start()

        writing.join(1.0)
        assert writing.is_alive()

        proxy.release()
        assert receive(client, len(sent)) == sent
        writing.join(PATIENCE_S)


def test_a_delay_postpones_every_byte_and_ends_at_zero(proxy: TcpProxy) -> None:
    """A slow line: each way takes its time, and twenty messages in a row take no longer than one."""
    with connect(proxy) as client:
        proxy.delay(0.3)
        before = time.monotonic()
        for _ in range(20):
            client.sendall(b"hello")
            time.sleep(0.005)  # so that they are twenty pieces
        receive(client, 100)
        took = time.monotonic() - before

        assert 0.6 <= took < 20 * 0.6 / 2

        proxy.delay(0)
        before = time.monotonic()
        assert ask(client) == b"hello"
        assert time.monotonic() - before < 0.6


def test_refused_connections_fail_at_once_while_present_ones_go_on(proxy: TcpProxy) -> None:
    """A server that is full or restarting refuses; who is inside stays inside."""
    with connect(proxy) as inside:
        ask(inside)
        proxy.refuse()

        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        assert ask(inside) == b"hello"

        proxy.accept()
        with connect(proxy) as client:
            assert ask(client) == b"hello"


def test_a_callback_can_strike_at_the_byte_that_matters(proxy: TcpProxy, echo: EchoServer) -> None:
    """Between confirm and ack is a window of microseconds: only the proxy sees it."""
    seen: list[tuple[str, bytes]] = []

    def cut_at_the_word(direction: str, data: bytes) -> None:
        seen.append((direction, data))
        if b"confirm" in data:
            proxy.cut()

    proxy.on_bytes = cut_at_the_word
    with connect(proxy) as client:
        ask(client)
        client.sendall(b"confirm")

        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert seen == [("to_server", b"hello"), ("to_client", b"hello"), ("to_server", b"confirm")]
    assert echo.received == b"hello"


def test_an_orderly_end_is_passed_on_in_its_direction_only(proxy: TcpProxy) -> None:
    """Half-closed connections are how some clients say that they are done sending."""
    with connect(proxy) as client:
        client.sendall(b"last words")
        client.shutdown(socket.SHUT_WR)

        assert receive(client, 100) == b"last words"
    # The server closed in turn, so both ends are over.
    wait_for(lambda: proxy.connections == 0)


def test_a_server_that_is_down_breaks_the_clients_connection(echo: EchoServer) -> None:
    """A client behind a proxy cannot be refused any more, but it must not hang either."""
    with TcpProxy("127.0.0.1", echo.port) as proxy:
        echo.listener.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionResetError), connect(proxy) as client:
            client.recv(1)
        wait_for(lambda: proxy.connections == 0)


def test_a_closed_proxy_leaves_no_thread_and_no_port() -> None:
    """Hundreds of tests in one process use hundreds of proxies."""
    before = threading.active_count()
    proxy = TcpProxy("127.0.0.1", 1)
    proxy.close()
    proxy.close()

    assert threading.active_count() == before
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
