"""Requests over HTTP/1.1, for pservers behind a proxy that does not speak HTTP/2: a thread for each.

httpx's client blocks, and has no way to end a request early. So a request that was given up goes on without effect: it
sends nothing more, and what it receives is dropped.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import httpx

from ps_config.certificates import TlsFiles, client_context
from ps_config.control_client import BlockingTransport, may_be_problem
from ps_http2.stream import Headers, Sink

CHUNK_BYTES = 1024 * 1024
CONNECT_SECONDS = 5.0
PROBE_SECONDS = 5  # between TCP's own probes of a silent connection
KEEP_SECONDS = 60.0  # services close a connection after 75 s without a request

_INTERVALS = [getattr(socket, name) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL") if hasattr(socket, name)]
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, option, PROBE_SECONDS) for option in _INTERVALS),
]


class Http1Calls:
    """A connection for each concurrent request to an origin; connections are kept alive.

    No request has a time limit: the caller gives it up. When a file of `tls` has changed, new connections use it.
    """

    def __init__(self, tls: TlsFiles, wake: Callable[[], None]) -> None:
        """`wake` is called by another thread when a call is done."""
        limits = httpx.Limits(keepalive_expiry=KEEP_SECONDS)  # the number of connections has no limit
        self._transport = BlockingTransport(
            verify=client_context(tls), trust_env=False, limits=limits, socket_options=_KEEP_ALIVE
        )
        self._wake = wake

    def begin(
        self, method: str, url: str, headers: Headers, body: Sequence[memoryview], sink: Sink | None
    ) -> Http1Call:
        """Send a request, and return its call."""
        call = Http1Call(self._transport, self._wake, body, sink)
        thread = threading.Thread(target=call.run, args=(method, url, headers), name="gradpost http1", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts no thread while the interpreter ends
            call.run(method, url, headers)
        except BaseException:  # an interrupt, after which the thread may run
            call.cancel()
            raise
        return call

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()


class Http1Call:
    """One request and its response, as `Call` of the HTTP/2 client."""

    def __init__(
        self, transport: BlockingTransport, wake: Callable[[], None], body: Sequence[memoryview], sink: Sink | None
    ) -> None:
        self.is_done = False
        self._transport = transport
        self._wake = wake
        self._body = body
        self._sink = sink
        self._response: httpx.Response | None = None
        self._error: Exception | None = None
        self._is_given_up = False
        self._lock = threading.Lock()  # held while memory of the caller is read or written

    def run(self, method: str, url: str, headers: Headers) -> None:
        """Send the request, and receive its response."""
        try:
            self._response = self._exchange(method, url, headers)
        except Exception as error:
            self._error = error
        self.is_done = True
        self._wake()

    def _exchange(self, method: str, url: str, headers: Headers) -> httpx.Response:
        if self._body or method == "POST":
            headers = [*headers, (b"content-length", b"%d" % sum(map(len, self._body)))]
        content = self._portions() if self._body else None
        timeout = {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}
        request = httpx.Request(method, url, headers=headers, content=content, extensions={"timeout": timeout})
        response = self._transport.handle_request(request)
        response.request = request
        try:
            if self._sink is None or may_be_problem(response):
                response.read()
            else:
                for part in response.iter_raw():
                    with self._lock:
                        self._check()
                        self._sink.feed(memoryview(part))
        finally:
            response.close()
        return response

    def _portions(self) -> Iterator[bytes]:
        for part in self._body:
            for begin in range(0, len(part), CHUNK_BYTES):
                with self._lock:
                    self._check()
                    portion = bytes(part[begin : begin + CHUNK_BYTES])
                yield portion

    def _check(self) -> None:
        if self._is_given_up:
            raise httpx.ReadError("the call was given up")

    def finish(self) -> httpx.Response:
        """Return the response of a call that `is_done`. Raises httpx.TransportError, or the error of the sink."""
        if self._error is not None:
            raise self._error
        assert self._response is not None, "the call is not done"
        return self._response

    def cancel(self) -> None:
        """Give up the call. Its memory may change once this returns."""
        with self._lock:
            self._is_given_up = True
