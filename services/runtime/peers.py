"""The httpx client with which services talk to each other: small messages, never tensors of a step."""

from __future__ import annotations

import ssl
from collections.abc import Generator
from pathlib import Path

import httpx

from ps_config.certificates import client_context
from ps_config.tokens import TokenPair
from ps_protocol.errors import error_from_answer

from .logs import get_logger
from .settings import ServiceSettings

log = get_logger()

MAX_IDLE = 100  # connections that are kept


def make_peer_client(settings: ServiceSettings) -> httpx.AsyncClient:
    """A client that trusts `tls_ca` besides the system's authorities and never goes through a proxy.

    It sends the token of the settings, and shows their client certificate; files that change are read again.
    """
    auth = None if settings.sent_token is None else BearerAuth(settings.sent_token)
    # Of connections there are as many as requests, which are limited: one that had to wait for another's would be late.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE)
    context = client_context(settings.client_tls, with_system=True)
    transport = PeerTransport(verify=context, trust_env=False, limits=limits)
    return httpx.AsyncClient(transport=transport, auth=auth, trust_env=False)


class PeerTransport(httpx.AsyncHTTPTransport):
    """In TLS 1.3 a client certificate is refused when the handshake is over: httpcore lets that through as it is."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx.AsyncHTTPTransport. Raises httpx.TransportError and its children."""
        try:
            return await super().handle_async_request(request)
        except ssl.SSLError as error:
            raise httpx.ConnectError(str(error), request=request) from error


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the GradpostError that an answer stands for, if it is one; a gateway's page is an httpx.TransportError."""
    if response.is_error:
        if (error := error_from_answer(response.content)) is not None:
            raise error
        raise httpx.TransportError(f"{response.url} answered {response.status_code} without a problem document")


class BearerAuth(httpx.Auth):
    """Sends a file's token; if that is refused, the one that it replaced, which the other side may still go by."""

    def __init__(self, path: Path) -> None:
        self._pair = TokenPair(path, log.warning)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """See httpx.Auth. Raises SettingsError if the file is gone."""
        for token in self._pair.read():
            request.headers["authorization"] = f"Bearer {token}"
            response = yield request
            if response.status_code != httpx.codes.UNAUTHORIZED:
                return
