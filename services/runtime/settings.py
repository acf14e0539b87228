"""Settings that every service has; a role adds its own in a subclass."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, FilePath, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from ps_config.certificates import TlsFiles
from ps_config.environment import PREFIX, check_base_url, check_environment, read_settings_file
from ps_config.hosts import check_listening
from ps_protocol.frames import FrameLimits

from .failpoints import parse_failpoints
from .limits import RequestLimits
from .logs import LogFormat, LogLevel

_LIMITS = FrameLimits()


BaseUrl = Annotated[str, AfterValidator(check_base_url)]


class ServiceSettings(BaseSettings):
    """Keyword argument over `GRADPOST_*` over TOML file over default; read once, then frozen.

    Raises ps_config.environment.SettingsError for a variable or key that no role knows, and pydantic's
    ValidationError for a value that does not fit.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; `0.0.0.0` for every interface. Beyond loopback it needs `tokens_dir`, or "
        "`insecure`",
    )
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0: a free one")
    advertise_address: BaseUrl | None = Field(
        default=None, description="base URL under which others reach it; none: made from the host that it listens on"
    )
    coordinator: BaseUrl = Field(
        default="http://127.0.0.1:7070",
        description="base URL of the coordinator. To the coordinator itself only a host name that it goes by",
    )
    lease_seconds: float = Field(
        default=10.0,
        gt=0,
        description="a member that is silent for so long is lost. The coordinator's counts; a pserver's own is not "
        "used",
    )
    exit_when_done: bool = Field(
        default=False,
        description="exit when the run is over and everybody has left: 0 if it finished, 1 if it failed. A pserver "
        "needs it too",
    )
    log_format: LogFormat = Field(default="auto", description="`auto`: console on a terminal, JSON lines elsewhere")
    log_level: LogLevel = Field(default="info", description="what is less important is not logged")
    tls_cert: FilePath | None = Field(
        default=None,
        description="PEM file of the certificate chain; turns TLS on. Files of certificates and tokens are read again "
        "when they change",
    )
    tls_key: FilePath | None = Field(default=None, description="PEM file of the certificate's private key")
    tls_ca: FilePath | None = Field(
        default=None, description="PEM file of the authority that signed the other services' certificates"
    )
    tls_client_ca: FilePath | None = Field(
        default=None, description="PEM file of the authority whose certificates callers must show: mutual TLS"
    )
    tls_client_cert: FilePath | None = Field(
        default=None, description="PEM file of the certificate chain that it shows to other services"
    )
    tls_client_key: FilePath | None = Field(default=None, description="PEM file of that certificate's private key")
    tokens_dir: Path | None = Field(
        default=None, description="folder of the tokens that it accepts, in files named `read`, `train` and `admin`"
    )
    token_file: Path | None = Field(
        default=None,
        description="file of the token that it sends to other services; none: `admin` in `tokens_dir`",
    )
    insecure: bool = Field(default=False, description="listen beyond loopback without tokens")
    allowed_hosts: str | None = Field(
        default=None,
        description="further host names that it goes by, separated by commas; `*.example.com` for all below it, `*` "
        "for any. The coordinator also lists trainers' metrics at these hosts",
    )
    max_body_bytes: int = Field(
        default=_LIMITS.max_body_bytes, ge=1, description="largest frame that a pserver takes; every block must fit"
    )
    max_header_bytes: int = Field(default=_LIMITS.max_header_bytes, ge=1, description="largest header of a frame")
    max_tensors: int = Field(default=_LIMITS.max_tensors, ge=1, description="most tensors of a frame")
    max_requests: int = Field(
        default=2048,
        ge=1,
        description="requests at once, those that wait included; further ones are `overloaded`",
    )
    max_connections: int = Field(default=1024, ge=1, description="open connections; further ones are closed")
    header_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        description="so long may the headers of a request take, and a new connection to send them",
    )
    body_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        description="so long may a body stand still, and be behind 4 KiB a second in all; then it is `slow_body`",
    )
    state_dir: Path = Field(
        default=Path(".gradpost"),
        description="folder for what must outlive the process: a pserver's log and identity, the coordinator's state. "
        "Every process needs a folder that it finds again",
    )
    checkpoints: str | None = Field(
        default=None,
        description="where checkpoints are: a folder, or a URL that fsspec can reach (`s3://bucket/run`), the same for "
        "all services; none: `checkpoints` in `state_dir`",
    )
    failpoints: str | None = Field(
        default=None,
        description="for tests: places at which this process dies, stops or finds its disk full, such as "
        "`apply.before=kill@3`",
    )
    ready_fd: int | None = Field(
        default=None,
        ge=0,
        description="file descriptor that gets the address and a newline once it serves; for a program that starts it",
    )

    @property
    def frame_limits(self) -> FrameLimits:
        """What a receiver of tensors accepts."""
        return FrameLimits(self.max_body_bytes, self.max_header_bytes, self.max_tensors)

    @field_validator("failpoints")
    @classmethod
    def _check_failpoints(cls, text: str | None) -> str | None:
        parse_failpoints(text or "")
        return text

    @property
    def server_tls(self) -> TlsFiles:
        """What it shows to callers, and who must have signed what they show."""
        return TlsFiles(self.tls_client_ca, self.tls_cert, self.tls_key)

    @property
    def client_tls(self) -> TlsFiles:
        """The same for calling other services."""
        return TlsFiles(self.tls_ca, self.tls_client_cert, self.tls_client_key)

    @property
    def sent_token(self) -> Path | None:
        """The file of the token for calling other services, which may not be there yet; None: none is sent."""
        if self.token_file is None and self.tokens_dir is not None:
            return self.tokens_dir / "admin"
        return self.token_file

    @property
    def request_limits(self) -> RequestLimits:
        """How many requests at once, and how slow they may be."""
        return RequestLimits(self.max_requests, self.body_timeout_seconds)

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            raise ValueError("tls_client_cert and tls_client_key go together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: without TLS nobody shows a certificate")
        check_listening(self.host, has_tokens=self.tokens_dir is not None, insecure=self.insecure)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Where values come from, best first."""
        check_environment(os.environ)
        of_all_roles = read_settings_file(os.environ)
        own = {key: value for key, value in of_all_roles.items() if key in settings_cls.model_fields}
        return init_settings, env_settings, InitSettingsSource(settings_cls, own)
