"""The HTTP connections of a trainer that carry tensors."""

from __future__ import annotations

import httpx

from ps_config.certificates import TlsFiles

from .http1 import Http1Transport
from .http2 import Http2Transport


def make_bulk_transport(tls: TlsFiles, *, http2: bool, local: str | None = None) -> httpx.AsyncBaseTransport:
    """What carries tensors; with `local`, of HTTP/2 alone, to the one pserver that has this Unix socket."""
    return Http2Transport(tls, local) if http2 else Http1Transport(tls)


def make_bulk_client(tls: TlsFiles, auth: httpx.Auth | None, *, http2: bool) -> httpx.AsyncClient:
    """httpx over it, for those to whom its time does not matter."""
    transport = make_bulk_transport(tls, http2=http2)
    return httpx.AsyncClient(transport=transport, auth=auth, timeout=None, trust_env=False)
