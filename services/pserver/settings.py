"""Settings of a pserver."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ServiceSettings


class PserverSettings(ServiceSettings):
    """Flag over `GRADPOST_*` over file over default."""

    pserver_index: int | None = Field(default=None, ge=0, description="None: the coordinator chooses")
    max_inflight_bytes: int | None = Field(
        default=None, ge=1, description="bodies that are being received; None: a quarter of the memory"
    )
    threads: int = Field(default=1, ge=1, description="torch threads of the compute thread")
