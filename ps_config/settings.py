"""The settings of every process: where values come from, the coordinator's address, TLS files and tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, AliasChoices, Field, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from .certificates import TlsFiles
from .environment import PREFIX, SETTINGS_FILE_VARIABLE, check_base_url, check_environment, read_settings_file
from .tokens import Scope

BaseUrl = Annotated[str, AfterValidator(check_base_url)]


class Settings(BaseSettings):
    """Settings from arguments, `GRADPOST_*`, the file `GRADPOST_SETTINGS_FILE` and defaults, in this order, read once.

    Raises SettingsError for a variable or key that is no setting of any role, and pydantic's ValidationError for a
    wrong value.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)
    sent_scope: ClassVar[Scope]  # of the token in `tokens_dir` that the process sends

    coordinator: BaseUrl = Field(
        default="http://127.0.0.1:7070",
        description="base URL of the coordinator. The coordinator itself accepts requests for this host name",
    )
    tls_cert: Path | None = Field(
        default=None,
        description="PEM file of the certificate chain of a service, or of a trainer's metrics port; turns TLS on "
        "there. A service reads all files of certificates and tokens again when they change",
    )
    tls_key: Path | None = Field(default=None, description="PEM file of the private key of `tls_cert`")
    tls_ca: Path | None = Field(
        default=None, description="PEM file of the authority that signed the certificates of the services"
    )
    tls_client_ca: Path | None = Field(
        default=None,
        description="PEM file of the authority that must have signed the certificates of callers: mutual TLS. On a "
        "trainer the callers are the readers of its metrics",
    )
    tls_client_cert: Path | None = Field(
        default=None, description="PEM file of the certificate chain that the process presents to services"
    )
    tls_client_key: Path | None = Field(default=None, description="PEM file of the private key of `tls_client_cert`")
    tokens_dir: Path | None = Field(
        default=None,
        description="folder of tokens, in files named `read`, `train` and `admin`. All are accepted",
    )
    token_file: Path | None = Field(
        default=None,
        description="file of the token that the process sends; none: a service sends `admin` of `tokens_dir`, and "
        "a trainer `train`",
    )

    @property
    def server_tls(self) -> TlsFiles:
        """The certificate to present to callers, and the authority of the certificates that callers present."""
        return TlsFiles(self.tls_client_ca, self.tls_cert, self.tls_key)

    @property
    def client_tls(self) -> TlsFiles:
        """The certificate to present to services, and the authority of the certificates that services present."""
        return TlsFiles(self.tls_ca, self.tls_client_cert, self.tls_client_key)

    @property
    def sent_token(self) -> Path | None:
        """The file of the token to send, which may not exist yet; None: no token is sent."""
        return self.token_file or (self.tokens_dir and self.tokens_dir / self.sent_scope)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            raise ValueError("tls_client_cert and tls_client_key go together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: callers present certificates over TLS only")
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
        """Return the sources of values, from the first to the last that counts."""
        check_environment(os.environ)
        of_all_roles = read_settings_file(os.environ)
        own = {key: value for key, value in of_all_roles.items() if key in settings_cls.model_fields}
        return init_settings, env_settings, InitSettingsSource(settings_cls, own)


def describe_problem(cls: type[Settings], problem: ErrorDetails, arguments: Mapping[str, str]) -> str:
    """Describe a wrong value in one line that names its source.

    `arguments` are the settings that the caller gave, and the names that the line calls them by.
    """
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    alias = cls.model_fields[name].validation_alias if name in cls.model_fields else None
    variables = map(str, alias.choices) if isinstance(alias, AliasChoices) else [PREFIX + name.upper()]
    source = arguments.get(name) or next((variable for variable in variables if os.environ.get(variable)), None)
    if source is None and (file := os.environ.get(SETTINGS_FILE_VARIABLE)):
        source = f"{name} in {file}"
    return f"{source or name}: {message[:1].lower()}{message[1:]}, not {str(problem['input'])!r:.200}"
