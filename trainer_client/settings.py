"""Settings of a trainer; every constructor argument is also one, and the argument wins."""

from __future__ import annotations

import difflib
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ps_protocol.certificates import TlsFiles
from ps_protocol.consistency import Compensation, Consistency, ReadConsistency, StepCount
from ps_protocol.environment import PREFIX, check_base_url, check_environment, read_settings_file
from ps_protocol.hosts import check_listening
from ps_protocol.vocabulary import Mode, NonfinitePolicy, Placement


def _fixed_number(value: object) -> object:
    """None for a range, as torchrun takes it for `PET_NNODES`: so many pods or fewer say nothing of their number."""
    return None if isinstance(value, str) and ":" in value else value


class TrainerSettings(BaseSettings):
    """Argument over `GRADPOST_*` over the file `GRADPOST_SETTINGS_FILE` over default.

    Rank and world size are read as torchrun sets them for each of its processes (`RANK`, `WORLD_SIZE`) or, where there
    is one process to a pod, as a Kubeflow TrainJob (`PET_NODE_RANK`, `PET_NNODES`) or any Indexed Job
    (`JOB_COMPLETION_INDEX`) sets them for the pod.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="ignore", populate_by_name=True
    )

    coordinator: Annotated[str, AfterValidator(check_base_url)] = "http://127.0.0.1:7070"
    rank: int | None = Field(
        default=None, ge=0, validation_alias=AliasChoices("rank", "RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    )
    world_size: Annotated[int | None, BeforeValidator(_fixed_number)] = Field(
        default=None, ge=1, validation_alias=AliasChoices("world_size", "WORLD_SIZE", "PET_NNODES")
    )
    mode: Mode | None = Field(default=None, description="refuse to train in another mode than this")
    max_delay: int | None = Field(default=None, ge=0, description="the same for the settings of a mode; None: any")
    max_staleness: int | None = Field(default=None, ge=0)
    wait_for_apply: bool | None = None
    read_consistency: ReadConsistency | None = None
    max_queued: int | None = Field(default=None, ge=1)
    max_merged: int | None = Field(default=None, ge=1)
    compensation: Compensation | None = None
    dc_lambda: float | None = Field(default=None, ge=0)
    step_count: StepCount | None = None
    min_block_size: int | None = Field(default=None, ge=1, description="elements; None: the coordinator's")
    placement: Placement | None = None
    slice_parameters: bool | None = None
    nonfinite: NonfinitePolicy | None = None
    local_steps: int = Field(
        default=0, ge=0, description="steps of the trainer's own optimizer between pushes; 0: none"
    )
    outer_lr: float | None = Field(
        default=None, ge=0, description="local steps: the rate of the outer SGD; None: that of a mean"
    )
    outer_momentum: float = Field(default=0.0, ge=0)
    outer_nesterov: bool = False
    bucket_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    retry_seconds: float = Field(default=60.0, gt=0, description="how long an unreachable service is tried")
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = Field(default=0, ge=0, le=65535, description="0: a free one")
    tls_ca: Path | None = None
    tls_client_cert: Path | None = Field(default=None, description="shown to services that demand a certificate")
    tls_client_key: Path | None = None
    tls_cert: Path | None = Field(default=None, description="of the metrics port, as the other two")
    tls_key: Path | None = None
    tls_client_ca: Path | None = Field(default=None, description="whose certificates readers of metrics must show")
    tokens_dir: Path | None = Field(default=None, description="folder of the tokens that the metrics port accepts")
    token_file: Path | None = Field(default=None, description="the token that is sent; None: train in tokens_dir")
    insecure: bool = Field(default=False, description="show metrics beyond loopback without tokens")

    @property
    def client_tls(self) -> TlsFiles:
        """Whom to trust, and what to show."""
        return TlsFiles(self.tls_ca, self.tls_client_cert, self.tls_client_key)

    @property
    def metrics_tls(self) -> TlsFiles:
        """The same for the metrics port."""
        return TlsFiles(self.tls_client_ca, self.tls_cert, self.tls_key)

    @property
    def sent_token(self) -> Path | None:
        """The file of the token that is sent; None: none is."""
        if self.token_file is None and self.tokens_dir is not None:
            return self.tokens_dir / "train"
        return self.token_file

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            raise ValueError("tls_client_cert and tls_client_key go together: give both or neither")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: without TLS nobody shows a certificate")
        if self.metrics_port is not None:
            has_tokens = self.tokens_dir is not None
            check_listening(self.metrics_host, "metrics_host", has_tokens=has_tokens, insecure=self.insecure)
        return self

    @property
    def outer_is_set(self) -> bool:
        """Whether anything is said of the outer optimizer."""
        return self.outer_lr is not None or bool(self.outer_momentum) or self.outer_nesterov

    @property
    def expectations(self) -> dict[str, Any]:
        """What the servers' mode must be, as far as this trainer was told."""
        told = {field.name: getattr(self, field.name) for field in fields(Consistency)}
        return {name: value for name, value in told.items() if value is not None}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flag over environment over file."""
        of_all_roles = read_settings_file(os.environ)
        own = {key: value for key, value in of_all_roles.items() if key in settings_cls.model_fields}
        return init_settings, env_settings, InitSettingsSource(settings_cls, own)


def read_settings(**arguments: object) -> TrainerSettings:
    """Read the settings once; an argument that is None leaves the choice to the environment.

    Raises TypeError for an argument that is no setting, ValueError for a value out of range or an unknown
    `GRADPOST_*` variable.
    """
    for name in arguments.keys() - TrainerSettings.model_fields.keys():
        near = difflib.get_close_matches(name, TrainerSettings.model_fields, n=1)
        raise TypeError(f"{name} is no setting of a trainer" + (f"; did you mean {near[0]}?" if near else ""))
    check_environment(os.environ)
    given = {name: value for name, value in arguments.items() if value is not None}
    return TrainerSettings(**given)  # type: ignore[arg-type]
