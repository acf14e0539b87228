"""The requests of a trainer to its pservers: on the thread that waits for them, or on one thread of their own.

    step() ──► start(work) ──► wait() ──► resume all work ──► poll the sockets ──► resume all work … ──► result

Requests do without httpx's client, whose overhead exceeds the time of a small request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from ps_config.certificates import TlsFiles
from ps_config.control_client import may_be_problem
from ps_config.tokens import TokenPair
from ps_http2.polled_client import PolledTransport
from ps_http2.stream import Sink

from .http1 import Http1Calls
from .work import CHECK_SECONDS, Signal, Work

T = TypeVar("T")


class Started(Generic[T]):
    """A piece of work that an exchange has started."""

    def __init__(self, work: Work[T]) -> None:
        self.is_done = False  # it has ended, or was given up
        self.error: BaseException | None = None  # that it has ended with
        self._work = work
        self._result: T
        self._is_given_up = False
        self._ended = Signal()

    def advance(self) -> float:
        """Resume the work, and return when to resume it again at the latest. Called by the thread of the exchange."""
        if not self.can_go_on:
            return math.inf
        try:
            if not self._is_given_up:
                return next(self._work)
            self._work.close()
            self.error = RuntimeError("the work was given up")
        except StopIteration as end:
            self._result = end.value
        except Exception as error:
            self.error = error
        except BaseException as error:
            self.error = error
            self._end()
            raise
        self._end()
        return 0.0

    def _end(self) -> None:
        self.is_done = True
        self._ended.set()

    @property
    def can_go_on(self) -> bool:
        """True unless it is done, or the caller is a signal handler of the script that has interrupted it."""
        return not self.is_done and getgeneratorstate(self._work) != GEN_RUNNING

    def give_up(self) -> None:
        """Close the work with the next `advance`."""
        self._is_given_up = True

    def wait_for_end(self, thread: threading.Thread) -> None:
        """Block until the thread of the exchange has ended it. Raises RuntimeError if a bug ends the thread."""
        while not self.is_done:
            if not self._ended.wait(CHECK_SECONDS) and not thread.is_alive():
                raise RuntimeError("the thread of the requests has ended")

    def result(self) -> T:
        """Return the result of work that is done, or raise its error."""
        if self.error is not None:
            raise self.error
        return self._result


class Exchange:
    """The connections to the pservers, and the work that is under way.

    Without `use_thread` all work goes on while the caller is in `wait` or `make_progress`, and sleeps meanwhile. If the
    bearer token is refused, its predecessor is sent (as `BearerAuth` does).
    """

    def __init__(self, tls: TlsFiles, tokens: TokenPair | None) -> None:
        self._tls = tls
        self._tokens = tokens
        self._http2 = PolledTransport(tls)
        self._http1: Http1Calls | None = None
        self._running: list[Started[Any]] = []
        self._posted: deque[Started[Any]] = deque()  # which the thread has not seen yet
        self._thread: threading.Thread | None = None
        self._is_closing = False

    # ------------------------------------------------------------------ work

    def use_thread(self) -> None:
        """Let work go on while the caller computes, on a thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="gradpost io", daemon=True)
            self._thread.start()

    def start(self, work: Work[T]) -> Started[T]:
        """Start a piece of work: without a thread with the next `make_progress` or `wait`. An interrupt gives it up."""
        started = Started(work)
        try:
            self._add(started)
        except BaseException:
            started.give_up()
            self._add(started)  # again: the interrupt may have come before that
            raise
        return started

    def _add(self, started: Started[Any]) -> None:
        if self._thread is None:
            self._running.append(started)
        else:
            self._posted.append(started)
            self.wake()

    def wait(self, started: Started[T]) -> T:
        """Block until the work has ended, and return its result. An interrupt gives the work up."""
        try:
            if self._thread is not None:
                started.wait_for_end(self._thread)
            while not started.is_done:
                self._poll()
        except BaseException:
            self.give_up(started)
            raise
        return started.result()

    def run(self, work: Work[T]) -> T:
        """Start a piece of work, and wait for its end."""
        return self.wait(self.start(work))

    def give_up(self, started: Started[Any]) -> None:
        """Give up a piece of work. Once this returns, it uses no memory of the caller."""
        started.give_up()
        if self._thread is None:
            self._advance()
        else:
            self.wake()
            started.wait_for_end(self._thread)

    def notify(self) -> None:
        """Let work look again at what it waits for: on the thread now, else with the next `make_progress` or `wait`."""
        if self._thread is not None:
            self.wake()

    def make_progress(self) -> None:
        """Let work look again at what it waits for, and send and receive what is possible at once. Does not block."""
        if self._thread is not None:
            self.wake()
            return
        self._advance()
        self._http2.wait(0.0)

    def wake(self) -> None:
        """Let all work look again at what it waits for. Any thread may call it."""
        self._http2.wake()

    def _poll(self) -> None:
        due = self._advance()
        self._http2.wait(max(0.0, due - time.monotonic()))

    def _advance(self) -> float:
        """Resume all work, and return when to do it again at the latest."""
        due = math.inf
        for started in self._running:
            due = min(due, started.advance())  # 0.0 at its end, which other work may wait for
        self._running = [started for started in self._running if not started.is_done]
        return due

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                while self._posted:
                    self._running.append(self._posted.popleft())
                self._poll()
        finally:
            for started in [*self._running, *self._posted]:
                started.give_up()
                started.advance()
            self._running.clear()

    # ------------------------------------------------------------------ requests

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        *,
        body: Sequence[memoryview] = (),
        sink: Sink | None = None,
        http2: bool = True,
        local: str | None = None,
    ) -> Work[httpx.Response]:
        """Send a request and return its response, which was read. The body of a 200 response goes to `sink`.

        The names of `headers` are in lower case. Until the end neither `body` nor the memory of `sink` may be touched.
        `local` is the name of the server's Unix socket (HTTP/2 only). Raises httpx.TransportError.
        """
        raw = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        response: httpx.Response | None = None
        for token in [None] if self._tokens is None else self._tokens.read():
            sent = raw if token is None else [*raw, (b"authorization", f"Bearer {token}".encode("ascii"))]
            if http2:
                call = self._http2.begin(method, url, sent, body, sink, local=local)
            else:
                call = self._begin_http1(method, url, sent, body, sink)
            try:
                while not call.is_done:
                    yield math.inf
                response = call.finish()
            finally:
                call.cancel()
            if response.status_code != httpx.codes.UNAUTHORIZED:
                break
        assert response is not None  # TokenPair.read returns a token or raises
        is_problem = may_be_problem(response)
        if is_problem:
            response.request = httpx.Request(method, url)
        if sink is None or is_problem:
            response.read()
        return response

    def _begin_http1(self, *request: Any) -> Any:
        if self._http1 is None:
            self._http1 = Http1Calls(self._tls, self.wake)
        return self._http1.begin(*request)

    def close(self) -> None:
        """Give up all work, and close all connections."""
        if self._thread is not None:
            self._is_closing = True
            self.wake()
            self._thread.join()
            _wait_for_kernel(self._thread)
        for started in self._running:
            started.give_up()
        self._advance()
        self._http2.close()
        if self._http1 is not None:
            self._http1.close()


def _wait_for_kernel(thread: threading.Thread) -> None:
    """Wait until the kernel has ended a thread, on Linux, for at most a second.

    `join` returns earlier, while OpenSSL still holds a lock to free the thread's memory. A process that is forked
    meanwhile would wait for that lock forever.
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    deadline = time.monotonic() + 1
    while task.exists() and time.monotonic() < deadline:  # there is no event for it
        time.sleep(0.0005)
