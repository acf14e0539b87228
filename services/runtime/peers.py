"""The httpx client with which services talk to each other: small messages, never tensors of a step."""

from __future__ import annotations

import ssl

import httpx

from .settings import ServiceSettings


def make_peer_client(settings: ServiceSettings) -> httpx.AsyncClient:
    """A client that trusts `tls_ca` besides the system's authorities and never goes through a proxy."""
    context = ssl.create_default_context()
    if settings.tls_ca is not None:
        context.load_verify_locations(cafile=str(settings.tls_ca))
    return httpx.AsyncClient(verify=context, trust_env=False)
