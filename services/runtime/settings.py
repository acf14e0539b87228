"""The common settings of all services; a role adds its own in a subclass."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from ps_config.hosts import check_listening
from ps_config.settings import BaseUrl, Settings
from ps_protocol.frames import FrameLimits

from .failpoints import parse_failpoints
from .logs import LogFormat, LogLevel

_LIMITS = FrameLimits()


class ServiceSettings(Settings):
    """The common settings of all services."""

    sent_scope = "admin"

    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; `0.0.0.0` for every interface. An address beyond loopback requires "
        "`tokens_dir` or `insecure`",
    )
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0 for a free port")
    advertise_address: BaseUrl | None = Field(
        default=None, description="base URL under which others reach the service; none: made from `host` and `port`"
    )
    lease_seconds: float = Field(
        default=10.0,
        gt=0,
        description="seconds without a heartbeat after which a member is lost. The coordinator's value applies to all "
        "members; pservers ignore this setting",
    )
    exit_when_done: bool = Field(
        default=False,
        description="exit when the run is over and all trainers have left, with 0 if the run finished and 1 if it "
        "failed. Pservers need this setting, too",
    )
    log_format: LogFormat = Field(default="auto", description="`auto`: console on a terminal, JSON lines elsewhere")
    log_level: LogLevel = Field(default="info", description="least important messages that are logged")
    insecure: bool = Field(default=False, description="whether to listen beyond loopback without tokens")
    allowed_hosts: str | None = Field(
        default=None,
        description="further host names of the service, separated by commas; `*.example.com` for all its subdomains, "
        "`*` for any host. The coordinator also lists trainers' metrics at these hosts",
    )
    max_body_bytes: int = Field(
        default=_LIMITS.max_body_bytes, ge=1, description="largest frame that a pserver accepts; every block must fit"
    )
    max_header_bytes: int = Field(default=_LIMITS.max_header_bytes, ge=1, description="largest header of a frame")
    max_tensors: int = Field(default=_LIMITS.max_tensors, ge=1, description="largest number of tensors of a frame")
    max_requests: int = Field(
        default=2048,
        ge=1,
        description="limit of concurrent requests, including waiting ones; others are refused with `overloaded`",
    )
    max_connections: int = Field(default=1024, ge=1, description="limit of open connections; others are closed")
    header_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        description="time limit for the headers of a request, which begins with a new connection",
    )
    body_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        description="time for which a body may stall, or be behind 4 KiB a second in all, before it is refused with "
        "`slow_body`",
    )
    state_dir: Path = Field(
        default=Path(".gradpost"),
        description="folder of the persistent state: a pserver's log and identity, the coordinator's state. Each "
        "process needs the same folder after a restart",
    )
    checkpoints: str | None = Field(
        default=None,
        description="location of checkpoints: a folder, or a URL that fsspec can reach (`s3://bucket/run`), the same "
        "for all services; none: `checkpoints` in the coordinator's `state_dir`",
    )
    failpoints: str | None = Field(
        default=None,
        description="for tests: places in the code at which this process dies, stops or gets an error of its disk, "
        "such as `apply.before=kill@3`",
    )
    listen_fd: int | None = Field(
        default=None,
        ge=0,
        description="file descriptor of a socket to listen on instead of `port`, which the program that starts the "
        "service has bound to `host`",
    )

    @property
    def frame_limits(self) -> FrameLimits:
        """The limits for frames of tensors."""
        return FrameLimits(self.max_body_bytes, self.max_header_bytes, self.max_tensors)

    @field_validator("failpoints")
    @classmethod
    def _check_failpoints(cls, text: str | None) -> str | None:
        parse_failpoints(text or "")
        return text

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        check_listening(self.host, has_tokens=self.tokens_dir is not None, insecure=self.insecure)
        return self
