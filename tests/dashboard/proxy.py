"""A proxy that serves a coordinator under a path, as an ingress does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

PREFIX = "/team/gradpost"


@contextmanager
def serve_under_a_path(address: str) -> Iterator[str]:
    """Yield the address of the proxy, which serves paths below `PREFIX`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(PREFIX + "/"):
                self.send_error(404)
                return
            headers = {k: v for k, v in self.headers.items() if k.lower() in ("authorization", "accept-encoding")}
            with httpx.stream("GET", address + self.path.removeprefix(PREFIX), headers=headers, timeout=30) as reply:
                self.send_response(reply.status_code)
                for name in ("content-type", "content-encoding", "content-security-policy"):
                    if name in reply.headers:
                        self.send_header(name, reply.headers[name])
                self.end_headers()
                for chunk in reply.iter_raw():
                    self.wfile.write(chunk)
                    self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Ignore a browser that disconnects during a stream."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
