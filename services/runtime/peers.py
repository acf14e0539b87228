"""The httpx client with which services talk to each other: small messages, never tensors of a step."""

from __future__ import annotations

import httpx

from ps_protocol.certificates import client_context

from .settings import ServiceSettings


def make_peer_client(settings: ServiceSettings) -> httpx.AsyncClient:
    """A client that trusts `tls_ca` besides the system's authorities and never goes through a proxy.

    It shows the settings' client certificate; files that change are read again.
    """
    return httpx.AsyncClient(verify=client_context(settings.client_tls, with_system=True), trust_env=False)
