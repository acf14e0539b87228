"""The settings of a trainer as keyword arguments: written by `make reference`."""

from pathlib import Path
from typing import Literal, TypedDict

class TrainerArguments(TypedDict, total=False):
    """The settings of a trainer as keyword arguments; None leaves one to the environment. docs/settings.md has more."""

    tls_cert: str | Path | None
    tls_key: str | Path | None
    tls_ca: str | Path | None
    tls_client_ca: str | Path | None
    tls_client_cert: str | Path | None
    tls_client_key: str | Path | None
    tokens_dir: str | Path | None
    token_file: str | Path | None
    rank: int | None
    world_size: int | None
    run_name: str | None
    one_trainer_per_host: bool | None
    strategy: Literal["local"] | None
    expect: dict[str, str | int | float | bool] | None
    nonfinite: Literal["reject", "skip_round", "allow"] | None
    push_type: Literal["float32", "bfloat16", "float16", "int8", "topk"] | None
    pull_type: Literal["float32", "bfloat16", "float16", "int8"] | None
    max_grad_norm: float | None
    local_steps: int | None
    bucket_bytes: int | None
    overlap: bool | None
    overlap_pulls: bool | None
    local_transport: bool | None
    retry_seconds: float | None
    metrics_host: str | None
    metrics_port: int | None
