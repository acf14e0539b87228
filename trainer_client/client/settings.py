"""Settings of a trainer."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError
from pydantic_settings import SettingsConfigDict

from ps_config.environment import CallError, SettingsError, suggest
from ps_config.settings import Settings, describe_problem
from ps_protocol.consistency import Consistency
from ps_protocol.fence import MAX_TEXT
from ps_protocol.vocabulary import NonfinitePolicy, Strategy
from ps_protocol.wire_types import PullType, PushType

_OF_THE_RUN = "none: the coordinator's setting. It must be the same on all trainers"
_OF_THE_MODE = [field.name for field in fields(Consistency)]
BUCKET_BYTES = 32 * 1024 * 1024
EARLY_BUCKET_BYTES = 4 * 1024 * 1024  # the last one leaves after backward, so nothing hides it


def _fixed_number(value: object) -> object:
    """Return None for a range, which torchrun allows for `PET_NNODES`, because it does not state the number of pods."""
    return None if isinstance(value, str) and ":" in value else value


def _rank_in_step(value: object) -> object:
    """Return the rank that `srun` sets if there is no other. A batch script has `SLURM_PROCID`, too, but no rank."""
    return os.environ.get("SLURM_PROCID") if value is None and "SLURM_STEP_NUM_TASKS" in os.environ else value


def _strategy_of_process(value: object) -> object:
    """Return None for a strategy of the coordinator, which a common environment or file of settings may have."""
    return None if value in get_args(Strategy) else value


class TrainerSettings(Settings):
    """Settings of a trainer, each of which is also an argument of the constructors.

    Rank and world size are read as torchrun sets them for each of its processes (`RANK`, `WORLD_SIZE`) or, where there
    is one process to a pod, as a Kubeflow TrainJob (`PET_NODE_RANK`, `PET_NNODES`) or any Indexed Job
    (`JOB_COMPLETION_INDEX`) sets them for the pod. Else each task of Slurm's `srun` is a trainer.
    """

    model_config = SettingsConfigDict(extra="ignore", populate_by_name=True)
    sent_scope = "train"

    rank: Annotated[int | None, BeforeValidator(_rank_in_step)] = Field(
        default=None,
        ge=0,
        validation_alias=AliasChoices("rank", "RANK", "PET_NODE_RANK", "JOB_COMPLETION_INDEX"),
        description="rank of this trainer, from 0; else `PET_NODE_RANK` (of a Kubeflow TrainJob's pod) or "
        "`JOB_COMPLETION_INDEX` (of any Indexed Job's) or `SLURM_PROCID` (of a task of `srun`); none: the "
        "coordinator chooses",
    )
    world_size: Annotated[int | None, BeforeValidator(_fixed_number)] = Field(
        default=None,
        ge=1,
        validation_alias=AliasChoices("world_size", "WORLD_SIZE", "PET_NNODES", "SLURM_STEP_NUM_TASKS"),
        description="number of trainers; refused if the coordinator has another number. Else `PET_NNODES`, "
        "unless that is a range, or `SLURM_STEP_NUM_TASKS`, which only `srun` sets",
    )
    run_name: str | None = Field(
        default=None, max_length=MAX_TEXT, description="name of the run for people, which the dashboard shows"
    )
    one_trainer_per_host: bool = Field(
        default=True,
        description="under torchrun with several processes on a host: whether these are one trainer, whose rank is "
        "that of the host, and add their gradients up among themselves; else each is a trainer",
    )
    strategy: Annotated[Literal["local"] | None, BeforeValidator(_strategy_of_process)] = Field(
        default=None,
        description="`local`: the script trains in its own process, without services. Other strategies are the "
        "coordinator's",
    )
    expect: dict[str, str | int | float | bool] = Field(
        default={},
        description='mode settings of the coordinator that the script relies on, such as `{"mode": "sync"}`; a trainer '
        "is refused if the run has another value",
    )
    nonfinite: NonfinitePolicy | None = Field(default=None, description=_OF_THE_RUN)
    push_type: PushType | None = Field(default=None, description=_OF_THE_RUN)
    pull_type: PullType | None = Field(default=None, description=_OF_THE_RUN)
    max_grad_norm: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="before the optimizer steps, the aggregated gradient is clipped to this norm, taken over all "
        "parameters; in asynchronous modes each trainer clips its own gradient before it is pushed. It must be the "
        "same on all trainers; none: no clipping",
    )
    local_steps: int = Field(
        default=0,
        ge=0,
        description="number of steps of the trainer's own optimizer that are pushed as one; 0: no local steps. It "
        "must be the same on all trainers",
    )
    bucket_bytes: int | None = Field(
        default=None,
        ge=1,
        description=f"approximate number of bytes of blocks in one request; a block is never cut. None: "
        f"{BUCKET_BYTES >> 20} MiB, with `overlap` {EARLY_BUCKET_BYTES >> 20} MiB",
    )
    overlap: bool = Field(
        default=False,
        description="whether gradients are sent while backward still runs; then they must not change before the step, "
        "and all backward passes of a step but the last need `with optimizer.accumulate():`; no effect without "
        "pservers, and among the processes of a host",
    )
    overlap_pulls: bool = Field(
        default=False,
        description="overlap: whether a step ends before its parameters are pulled; each module of `model` waits "
        "for its own parameters before it computes, and other readers must call `synchronize()` first",
    )
    local_transport: bool = Field(
        default=True,
        description="whether the trainer connects to pservers on its own host over Unix sockets, if they offer "
        "that and run as the same user",
    )
    retry_seconds: float = Field(
        default=60.0,
        gt=0,
        description="how long requests to a service that does not answer are repeated; unless it is set, a script that "
        "starts waits 10 s for a coordinator on this machine to listen, or for its host name to be known",
    )
    metrics_host: str = Field(
        default="127.0.0.1",
        description="address on which metrics are shown, and under which the coordinator lists them. The port checks "
        "no token",
    )
    metrics_port: int | None = Field(
        default=0,
        ge=0,
        le=65535,
        description="port of the metrics; 0: a free port; `metrics_port=None` as an argument: no port",
    )

    @property
    def chosen_bucket_bytes(self) -> int:
        """The value of `bucket_bytes`, or its default."""
        return self.bucket_bytes or (EARLY_BUCKET_BYTES if self.overlap else BUCKET_BYTES)

    @property
    def trains_alone(self) -> bool:
        """True if no setting asks for a cluster: the trainer is then the only one, and trains without services."""
        is_alone = self.rank in (None, 0) and self.world_size in (None, 1)
        return is_alone and self.strategy is None and "coordinator" not in self.model_fields_set


def read_settings(**arguments: Any) -> TrainerSettings:
    """Read the settings once; an argument that is None leaves the choice to the environment, except `metrics_port`.

    Raises TypeError for an argument or an expectation that is no setting, SettingsError for a value out of range or an
    unknown `GRADPOST_*` variable.
    """
    of_the_mode = {"strategy"} if arguments.get("strategy") in get_args(Strategy) else set()
    _check_names(arguments, TrainerSettings.model_fields.keys() - of_the_mode, "a setting of a trainer")
    _check_names(arguments.get("expect") or (), _OF_THE_MODE, "a setting of the mode")
    for name in [name for name, value in arguments.items() if value is None and name != "metrics_port"]:
        del arguments[name]
    try:
        return TrainerSettings(**arguments)
    except ValidationError as error:
        names = {name: name for name in arguments}
        problems = [describe_problem(TrainerSettings, problem, names) for problem in error.errors()]
        raise SettingsError("; ".join(problems)) from None


def _check_names(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Raise CallError for a name that is not known, with the closest one that is."""
    for name in names:
        if name in known:
            continue
        if name in _OF_THE_MODE:
            raise CallError(f"{name} is a setting of the coordinator; expect={{{name!r}: …}} checks its value")
        raise CallError(f"{name} is not {what}{suggest(name, known)}")
