"""Settings of the coordinator."""

from __future__ import annotations

from pydantic import Field

from ps_protocol.plan import DEFAULT_PLACEMENT
from ps_protocol.slicing import DEFAULT_MIN_BLOCK_SIZE
from ps_protocol.vocabulary import Mode, NonfinitePolicy, Placement
from services.runtime.settings import ServiceSettings

from .run import RunDefaults


class CoordinatorSettings(ServiceSettings):
    """Flag over `GRADPOST_*` over file over default."""

    port: int = Field(default=7070, ge=0, le=65535)
    num_pservers: int = Field(default=1, ge=1, description="how many pservers make the cluster complete")
    num_trainers: int = Field(default=1, ge=1, description="how many trainers make the cluster complete")
    mode: Mode = "sync"
    min_block_size: int = Field(default=DEFAULT_MIN_BLOCK_SIZE, ge=1, description="elements")
    placement: Placement = DEFAULT_PLACEMENT
    slice_parameters: bool = True
    nonfinite: NonfinitePolicy = "reject"
    round_timeout_seconds: float = Field(default=300.0, gt=0)

    @property
    def run_defaults(self) -> RunDefaults:
        """The part that a run needs."""
        return RunDefaults(
            num_trainers=self.num_trainers,
            mode=self.mode,
            min_block_size=self.min_block_size,
            placement=self.placement,
            slice_parameters=self.slice_parameters,
            nonfinite=self.nonfinite,
            round_timeout_seconds=self.round_timeout_seconds,
        )
