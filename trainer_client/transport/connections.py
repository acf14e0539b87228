"""The two kinds of HTTP connections of a trainer: small control messages, and tensors."""

from __future__ import annotations

import httpx

from ps_config.certificates import TlsFiles, client_context

from .http1 import ControlTransport, Http1Transport
from .http2 import Http2Transport

CONNECT_SECONDS = 5.0


def make_control_client(tls: TlsFiles, auth: httpx.Auth | None) -> httpx.AsyncClient:
    """Plain httpx for small control messages, on connections of their own: a tensor must not block a heartbeat."""
    timeout = httpx.Timeout(10.0, connect=CONNECT_SECONDS)
    transport = ControlTransport(verify=client_context(tls), trust_env=False)
    return httpx.AsyncClient(transport=transport, auth=auth, trust_env=False, timeout=timeout)


def make_bulk_transport(tls: TlsFiles, *, http2: bool, local: str | None = None) -> httpx.AsyncBaseTransport:
    """What carries tensors; with `local`, of HTTP/2 alone, to the one pserver that has this Unix socket."""
    return Http2Transport(tls, local) if http2 else Http1Transport(tls)


def make_bulk_client(tls: TlsFiles, auth: httpx.Auth | None, *, http2: bool) -> httpx.AsyncClient:
    """httpx over it, for those to whom its time does not matter."""
    transport = make_bulk_transport(tls, http2=http2)
    return httpx.AsyncClient(transport=transport, auth=auth, timeout=None, trust_env=False)
