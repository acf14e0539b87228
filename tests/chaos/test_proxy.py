"""The proxy of the campaign disturbs connections as requested."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from .proxy import UPLOAD_BYTES, Proxy


class Handler(socketserver.BaseRequestHandler):
    """Answers each chunk with its length."""

    def handle(self) -> None:
        with suppress(ConnectionError):
            while chunk := self.request.recv(100_000):
                self.server.received.append(chunk)  # type: ignore[attr-defined]
                self.request.sendall(str(len(chunk)).encode())


class Server(socketserver.ThreadingTCPServer):
    """A server that records what it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[bytes] = []


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(lambda port: "trainer 0", lambda: server.server_address[1])
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.settimeout(5)
        client.sendall(b"abc")
        assert client.recv(100) == b"3"
        yield client


def test_an_answer_is_lost_after_the_upload(client: socket.socket, proxy: Proxy, server: Server) -> None:
    proxy.num_lost_replies = 1
    client.sendall(b"x" * UPLOAD_BYTES)
    with pytest.raises(ConnectionResetError):
        client.recv(100)
    assert b"".join(server.received) == b"abc" + b"x" * UPLOAD_BYTES
    assert proxy.num_lost_replies == 0


@pytest.mark.parametrize(("direction", "blocked"), [("up", ""), ("down", "trainer 0")])
def test_blocked_bytes_arrive_later(client: socket.socket, proxy: Proxy, direction: str, blocked: str) -> None:
    proxy.blocked = {(direction, blocked)}  # type: ignore[arg-type]
    client.settimeout(0.3)
    client.sendall(b"defg")
    with pytest.raises(TimeoutError):
        client.recv(100)
    client.settimeout(5)
    proxy.blocked = set()
    assert client.recv(100) == b"4"


def test_a_reply_is_cut_off(client: socket.socket, proxy: Proxy) -> None:
    client.sendall(b"abcdefghijkl")
    assert client.recv(100) == b"12"
    proxy.num_cut_replies = 1
    client.sendall(b"abcdefghijkl")
    assert client.recv(100) == b"1"
    assert client.recv(100) == b""


@pytest.mark.parametrize("http2", [True, False])
def test_a_page_is_the_answer_to_every_request(proxy: Proxy, server: Server, http2: bool) -> None:
    proxy.page = 502
    with httpx.Client(http1=not http2, http2=http2, timeout=1, trust_env=False) as client:
        for body in (b"", b"x" * 200_000):
            response = client.post(f"{proxy.address}/v1/send", content=body)
            assert (response.status_code, response.headers["content-type"]) == (502, "text/html")
            assert "<h1>Bad Gateway</h1>" in response.text
        assert server.received == []
