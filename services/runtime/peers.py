"""Control messages between services."""

from __future__ import annotations

import httpx

from ps_config.control_client import make_control_client
from ps_config.tokens import TokenPair
from ps_protocol.errors import error_from_answer

from .logs import get_logger
from .settings import ServiceSettings

log = get_logger()


def make_peer_client(settings: ServiceSettings) -> httpx.AsyncClient:
    """Return a client for the other services, which trusts `tls_ca` as well as the system's authorities."""
    tokens = None if settings.sent_token is None else TokenPair(settings.sent_token, log.warning)
    return make_control_client(settings.client_tls, tokens, with_system=True)


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the GradpostError that an answer stands for, if it is one; a gateway's page is an httpx.TransportError."""
    if response.is_error:
        if (error := error_from_answer(response.content)) is not None:
            raise error
        raise httpx.TransportError(f"{response.url} answered {response.status_code} without a problem document")
