"""A gateway in front of one service, as an ingress is: it forwards requests, or answers a page while it cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

FORWARDED = ("authorization", "content-type")


class Gateway(ThreadingHTTPServer):
    """Forwards to `target`. While no service listens there it answers with a page of this status, and counts it."""

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = ""
        self.status = status
        self.num_pages = 0
        self.has_answered = threading.Condition()
        self.http = httpx.Client(trust_env=False, timeout=60)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def wait_for_pages(self, number: int) -> None:
        """Wait until so many more pages have been answered."""
        with self.has_answered:
            wanted = self.num_pages + number
            assert self.has_answered.wait_for(lambda: self.num_pages >= wanted, 90)

    def handle_error(self, *_: object) -> None:
        """The client has gone away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {k: v for k, v in self.headers.items() if k.lower().startswith(("gradpost-", *FORWARDED))}
        try:
            answer = self.server.http.request(
                self.command, self.server.target + self.path, content=body, headers=headers
            )
        except httpx.TransportError:
            self.send_error(self.server.status)  # a page of HTML
            with self.server.has_answered:
                self.server.num_pages += 1
                self.server.has_answered.notify_all()
            return
        self.send_response(answer.status_code)
        for name in ("content-type", "retry-after"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_POST = do_PUT = _forward  # noqa: N815 - names that the base class calls

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serve_gateway(status: int) -> Iterator[Gateway]:
    with Gateway(status) as gateway:
        thread = threading.Thread(target=gateway.serve_forever, daemon=True)
        thread.start()
        try:
            yield gateway
        finally:
            gateway.shutdown()
            thread.join()
            gateway.http.close()
