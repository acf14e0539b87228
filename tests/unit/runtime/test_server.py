"""The life of a server, and of a process: listening, serving, signals and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import pytest
from fastapi import FastAPI

from ps_config.hosts import ListenError, take_port
from services.runtime import server as server_module
from services.runtime.app import make_app
from services.runtime.metrics import ServiceMetrics
from services.runtime.server import advertised_address, serve
from services.runtime.settings import ServiceSettings

from .support import Sample, running

IPV6 = Path("/proc/net/if_inet6")
NO_IPV6: dict[str, Any] = {"condition": not (IPV6.exists() and IPV6.read_text()), "reason": "no IPv6 on this machine"}

# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize("other_shares", [True, False])
def test_port_on_which_another_socket_listens(other_shares: bool) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, other_shares)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port}: another process listens there.*GRADPOST_PORT"):
            take_port("127.0.0.1", port)


def test_port_of_an_earlier_life_whose_connections_linger() -> None:
    """A connection that the server closed first stays in TIME_WAIT for a minute, without anybody listening."""
    with socket.socket() as earlier:
        earlier.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        earlier.bind(("127.0.0.1", 0))
        earlier.listen()
        port = earlier.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            earlier.accept()[0].close()
            assert client.recv(1) == b""
    with take_port("127.0.0.1", port) as bound:
        assert bound.proto == socket.IPPROTO_TCP  # asyncio sets TCP_NODELAY on nothing else


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {host}:0: .*GRADPOST_HOST"):
        take_port(host, 0)


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"host": "0.0.0.0", "advertise_address": "https://ps.example/0/"}, "https://ps.example/0"),
        ({"host": "10.0.0.5"}, "http://10.0.0.5:7071"),
        ({"host": "::1"}, "http://[::1]:7071"),
    ],
)
def test_advertised_address_is_the_one_that_was_set_or_that_of_the_interface(
    settings: dict[str, str], address: str
) -> None:
    assert advertised_address(ServiceSettings(insecure=True, **settings), 7071) == address  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_advertised_address_of_every_interface_is_none_of_them(host: str) -> None:
    address = advertised_address(ServiceSettings(host=host, insecure=True), 7071)
    assert address.startswith("http://")
    assert address.endswith(":7071")
    assert host not in address
    assert "127.0.0.1" not in address


# ---------------------------------------------------------------------- serving


@pytest.mark.parametrize(
    ("host", "hosts"),
    [("0.0.0.0", ["127.0.0.1", "localhost"]), pytest.param("::1", ["[::1]"], marks=pytest.mark.skipif(**NO_IPV6))],
)
async def test_listens_on_every_interface_or_on_ipv6(host: str, hosts: list[str]) -> None:
    async with running(Sample().make_app(), host=host, insecure=True) as running_server, httpx.AsyncClient() as client:
        port = running_server.address.rpartition(":")[2]
        for name in hosts:
            assert (await client.get(f"http://{name}:{port}/healthz")).status_code == 200


@pytest.mark.parametrize(("ends", "answer"), [(True, (200, "slow")), (False, (503, "try_again"))])
async def test_a_stop_waits_for_a_slow_request_for_a_limited_time(
    ends: bool, answer: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "GRACE_SECONDS", 0.5)
    sample = Sample()
    async with running(sample.make_app()) as running_server, httpx.AsyncClient() as client:
        slow = asyncio.create_task(client.get(f"{running_server.address}/slow"))
        await sample.slow_begun.wait()
        running_server.stop.set()
        await asyncio.sleep(0.2)
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as late:
                await late.get(f"{running_server.address}/healthz")
        assert (sample.lifespan, slow.done()) == (["begin"], False)
        if ends:
            sample.slow_ends.set()
        response = await asyncio.wait_for(slow, 5)
        await running_server.task
    assert (response.status_code, response.json() if ends else response.json()["code"]) == answer
    assert sample.lifespan == ["begin", "end"]


async def test_lifespan_that_fails_is_what_serve_raises() -> None:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if ServiceSettings():
            raise ZeroDivisionError("no disk")
        yield

    app = make_app(title="Sample", role="sample", metrics=ServiceMetrics("sample"), is_ready=lambda: None)
    app.router.lifespan_context = lifespan
    with pytest.raises(ZeroDivisionError, match="no disk"):
        await serve(app, ServiceSettings(), stop=asyncio.Event())


# ---------------------------------------------------------------------- a process


SERVICE = """
import asyncio, atexit, sys, threading
from fastapi import Response
from services.runtime import server
from services.runtime.app import make_app
from services.runtime.logs import configure_logs
from services.runtime.metrics import ServiceMetrics
from services.runtime.server import run_service, serve
from services.runtime.settings import ServiceSettings

server.GRACE_SECONDS = 0.5
atexit.register(print, "Python's own way out was taken", file=sys.stderr)

async def main(stop):
    settings = ServiceSettings()
    configure_logs("sample", settings.log_format, settings.log_level)
    app = make_app(title="Sample", role="sample", metrics=ServiceMetrics("sample"), is_ready=lambda: None)
    app.get("/large")(lambda: Response(bytes(50_000_000)))
    async with asyncio.TaskGroup():  # which wraps what serve raises
        await serve(app, settings, stop=stop)
    if "stuck" in sys.argv:
        await asyncio.sleep(60)
    if "hanging" in sys.argv:
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    if "broken" in sys.argv:
        raise ZeroDivisionError("a bug")
    return 3

run_service(main)
"""


@contextmanager
def service(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process that serves on a socket of this one; yields it and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, *arguments],
            env={**os.environ, "GRADPOST_LISTEN_FD": str(descriptor)},
            pass_fds=[descriptor],
            stderr=subprocess.PIPE,
            text=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        urlopen(f"{address}/healthz").close()  # accepted at once, and answered when it serves
        yield process, address
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_it_with_the_exit_code_of_main() -> None:
    """A thread that hangs does not hold it."""
    with service("hanging") as (process, address):
        process.send_signal(signal.SIGTERM)
        _, logs = process.communicate(timeout=10)
    lines = [json.loads(line) for line in logs.splitlines()]
    assert [line["event"] for line in lines] == ["serving", "stopping"]
    assert lines[0]["address"] == address
    assert process.returncode == 3


def test_second_sigint_exits_at_once() -> None:
    with service("stuck") as (process, _):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 128 + signal.SIGINT


def test_a_client_that_does_not_take_its_reply_does_not_hold_it() -> None:
    with service() as (process, address):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert slow.recv(15) == b"HTTP/1.1 200 OK"
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=10)
    assert 0.5 < time.monotonic() - begin < 9
    assert process.returncode == 3
