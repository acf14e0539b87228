"""Settings of a pserver."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ServiceSettings


class PserverSettings(ServiceSettings):
    """Settings of a pserver."""

    pserver_index: int | None = Field(
        default=None, ge=0, description="index of the shard, from 0. Default: the coordinator chooses"
    )
    follow: int | None = Field(
        default=None,
        ge=0,
        description="index of a pserver to follow as a standby, which repeats its updates, serves reads, and may "
        "replace it. Default: be a pserver",
    )
    http2: bool = Field(
        default=True,
        description="whether trainers send tensors over HTTP/2; switch it off behind a proxy with HTTP/1.1 only",
    )
    local_transport: bool = Field(
        default=True,
        description="whether trainers on the pserver's host may send tensors over a Unix socket. This needs Linux and "
        "HTTP/2, without TLS and without `advertise_address`, which may be a proxy's",
    )
    max_inflight_bytes: int | None = Field(
        default=None,
        ge=1,
        description="limit on the announced bytes of bodies that are being received. Each trainer has an equal share, "
        "and may always send one body; other pushes get `overloaded`. Default: a quarter of the usable memory",
    )
    threads: int = Field(
        default=1, ge=1, description="torch threads for aggregating and stepping; results do not depend on the number"
    )

    @property
    def listens_locally(self) -> bool:
        """True if the pserver has a Unix socket, too. It has none where TLS or a proxy controls access."""
        return self.local_transport and self.http2 and self.tls_cert is None and self.advertise_address is None
