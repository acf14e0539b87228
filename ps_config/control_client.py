"""The httpx client of control messages: small JSON bodies, with the TLS files and the token of the settings."""

from __future__ import annotations

import ssl
from collections.abc import Generator

import httpx

from .certificates import TlsFiles, client_context
from .tokens import TokenPair

# Requests are limited elsewhere. A request that had to wait for the connection of another would be late.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)
TIMEOUT = httpx.Timeout(10.0, connect=5.0)


class BearerAuth(httpx.Auth):
    """Sends the token of a file. If a service refuses it, sends the token that it replaced."""

    def __init__(self, tokens: TokenPair) -> None:
        self._tokens = tokens

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """See httpx.Auth. Raises SettingsError if there is no token."""
        for token in self._tokens.read():
            request.headers["authorization"] = f"Bearer {token}"
            response = yield request
            if response.status_code != httpx.codes.UNAUTHORIZED:
                return


class ControlTransport(httpx.AsyncHTTPTransport):
    """Raises httpx.ConnectError also for a client certificate that the service refuses.

    In TLS 1.3 that happens after the handshake, and httpcore passes the `ssl.SSLError` on as it is.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx.AsyncHTTPTransport. Raises httpx.TransportError."""
        try:
            return await super().handle_async_request(request)
        except ssl.SSLError as error:
            raise httpx.ConnectError(str(error), request=request) from error


def make_control_client(tls: TlsFiles, tokens: TokenPair | None, *, with_system: bool = False) -> httpx.AsyncClient:
    """Return a client that never uses a proxy. It has connections of its own: a tensor must not block a heartbeat.

    `with_system` is as in `client_context`.
    """
    transport = ControlTransport(verify=client_context(tls, with_system=with_system), trust_env=False, limits=LIMITS)
    auth = None if tokens is None else BearerAuth(tokens)
    return httpx.AsyncClient(transport=transport, auth=auth, trust_env=False, timeout=TIMEOUT)
