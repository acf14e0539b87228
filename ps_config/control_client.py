"""The httpx client of control messages, and how any client reads an answer: problem documents and gateway pages."""

from __future__ import annotations

import ssl
from collections.abc import Generator
from typing import Any

import httpx

from ps_protocol.errors import error_from_answer
from ps_protocol.fields import Message
from ps_protocol.printable import printable
from ps_protocol.retry import read_retry_after

from .certificates import TlsFiles, client_context
from .tokens import TokenPair

# Requests are limited elsewhere. A request that had to wait for the connection of another would be late.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)
TIMEOUT = httpx.Timeout(10.0, connect=5.0)
MAX_LINE = 100  # characters of a gateway's page that are shown


class BearerAuth(httpx.Auth):
    """Authentication with the token of a file or, if a service refuses it, with the token that it replaced."""

    def __init__(self, tokens: TokenPair) -> None:
        self._tokens = tokens

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Yield the request with the token. Raises SettingsError if there is no token."""
        for token in self._tokens.read():
            request.headers["authorization"] = f"Bearer {token}"
            response = yield request
            if response.status_code != httpx.codes.UNAUTHORIZED:
                return


class ControlTransport(httpx.AsyncHTTPTransport):
    """A transport that mends two properties of httpcore's TLS.

    A client certificate that the service refuses raises httpx.ConnectError: in TLS 1.3 that happens after the
    handshake, and httpcore passes the `ssl.SSLError` on as it is. A request that is cancelled during the handshake
    closes its connection, which httpcore leaves open.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request as httpx does, and convert ssl.SSLError to httpx.ConnectError."""
        if request.url.scheme == "https":
            request.extensions = {**request.extensions, "trace": _CloseAfterFailedHandshake()}
        try:
            return await super().handle_async_request(request)
        except ssl.SSLError as error:
            raise httpx.ConnectError(str(error), request=request) from error


class _CloseAfterFailedHandshake:
    """The `trace` extension of a request (https://www.encode.io/httpcore/extensions/), called for each event."""

    def __init__(self) -> None:
        self._stream: Any = None

    async def __call__(self, event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._stream = info["return_value"]
        elif event == "connection.start_tls.failed":
            await self._stream.aclose()


def make_control_client(
    tls: TlsFiles,
    tokens: TokenPair | None,
    *,
    with_system: bool = False,
) -> httpx.AsyncClient:
    """Return a client that never uses a proxy. It has connections of its own: a tensor must not block a heartbeat.

    `with_system` is as in `client_context`.
    """
    context = client_context(tls, with_system=with_system)
    transport = ControlTransport(verify=context, trust_env=False, limits=LIMITS)
    auth = None if tokens is None else BearerAuth(tokens)
    return httpx.AsyncClient(transport=transport, auth=auth, trust_env=False, timeout=TIMEOUT)


class BlockingTransport(httpx.HTTPTransport):
    """A blocking transport. A client certificate that the service refuses raises httpx.ConnectError, as above."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request as httpx does, and convert ssl.SSLError to httpx.ConnectError."""
        try:
            return super().handle_request(request)
        except ssl.SSLError as error:
            raise httpx.ConnectError(str(error), request=request) from error


def make_blocking_client(tls: TlsFiles, tokens: TokenPair | None) -> httpx.Client:
    """Return a client that blocks and never uses a proxy; safe to use from several threads."""
    transport = BlockingTransport(verify=client_context(tls), trust_env=False, limits=LIMITS)
    auth = None if tokens is None else BearerAuth(tokens)
    return httpx.Client(transport=transport, auth=auth, trust_env=False, timeout=TIMEOUT)


class GatewayPage(httpx.RemoteProtocolError):
    """An answer that does not come from Gradpost.

    It is a transport error whatever its status is: the service may be away, and a gateway answers for it.
    """


async def send_message(
    http: httpx.AsyncClient, method: str, url: str, message: Message | None = None, *, timeout: float
) -> bytes:
    """Send a message, and return the body of the answer. `timeout` is in seconds.

    Raises the GradpostError that the answer contains, or httpx.TransportError, of which GatewayPage is one.
    """
    response = await http.request(
        method, url, timeout=timeout, headers={"content-type": "application/json"},
        content=None if message is None else message.model_dump_json(),
    )  # fmt: skip
    raise_for_problem(response)
    return response.content


def may_be_problem(response: httpx.Response) -> bool:
    """Return whether the body has to be read before `raise_for_problem`, because it may not be what was asked for."""
    return not response.is_success or response.headers.get("content-type", "").startswith("text/html")


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the GradpostError that an answer contains, or GatewayPage if the answer does not come from Gradpost."""
    if not may_be_problem(response):
        return
    error = error_from_answer(response.content)
    if error is not None:
        error.retry_after_seconds = read_retry_after(response.headers.get("retry-after"))
        raise error
    lines = (line.strip() for line in response.text.splitlines())
    first = printable(next(filter(None, lines), "an empty page")[:MAX_LINE])
    text = f"{response.url} answered {response.status_code}, but not as Gradpost: {first}"
    raise GatewayPage(f"{text}. Check the address and any proxy", request=response.request)
