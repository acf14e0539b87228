"""A complete service process: signals, exit codes, its logs and its memory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import urlopen

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


def test_bug_in_main_is_a_traceback_and_exit_code_1() -> None:
    with service("broken") as (process, _):
        process.send_signal(signal.SIGTERM)
        _, logs = process.communicate(timeout=10)
    assert "ZeroDivisionError: a bug" in json.loads(logs.splitlines()[-1])["exception"]
    assert process.returncode == 1


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
