"""Settings of a pserver."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ServiceSettings


class PserverSettings(ServiceSettings):
    """Settings of a pserver."""

    pserver_index: int | None = Field(
        default=None, ge=0, description="which shard is its own, from 0; none: the coordinator chooses"
    )
    http2: bool = Field(
        default=True,
        description="whether trainers are to send tensors over HTTP/2; switch it off where a proxy between them and "
        "this pserver speaks HTTP/1.1 alone",
    )
    local_transport: bool = Field(
        default=True,
        description="whether trainers on the pserver's own host may send tensors over a Unix socket. On Linux, "
        "with HTTP/2, without TLS and without `advertise_address`, which may be a proxy's",
    )
    max_inflight_bytes: int | None = Field(
        default=None,
        ge=1,
        description="bodies that are being received, announced bytes of all trainers together; each has an equal "
        "share, and may always send one body. Beyond that `overloaded`. None: a quarter of the memory that the process "
        "may use",
    )
    threads: int = Field(
        default=1, ge=1, description="torch's threads for aggregating and stepping; the result does not depend on them"
    )

    @property
    def listens_locally(self) -> bool:
        """Whether the pserver has a Unix socket, too. It has none where TLS or a proxy decides about access."""
        return self.local_transport and self.http2 and self.tls_cert is None and self.advertise_address is None
