"""Settings of the coordinator."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from services.runtime.settings import ServiceSettings

from .run_settings import RunSettings

_OF_PSERVERS = {  # settings that need pservers
    *("num_pservers", "min_block_size", "placement", "slice_parameters", "push_type", "pull_type", "topk"),
    *("on_trainer_loss", "min_trainers", "rejoin_timeout_seconds"),
    *("durability", "checkpoint_rounds", "max_log_bytes", "keep_checkpoints", "checkpoints", "resume"),
}
_WITHOUT = {"on_trainer_loss": "fail", "durability": "none"}  # their values without pservers


class CoordinatorSettings(RunSettings, ServiceSettings):
    """Settings of the coordinator."""

    port: int = Field(default=7070, ge=0, le=65535, description="port to listen on; 0: a free one")
    num_pservers: int = Field(default=1, ge=1, description="number of pservers of a complete cluster")
    resume: bool = Field(
        default=False,
        description="resume the run in `state_dir`, or else the newest checkpoint, with new processes",
    )

    @model_validator(mode="after")
    def _check_ring(self) -> Self:
        """Raise ValueError for explicit settings that could have no effect without pservers."""
        if not self.consistency.is_ring:
            return self
        given = {name: getattr(self, name) for name in _OF_PSERVERS & self.model_fields_set}
        if given.get("on_trainer_loss", "fail") != "fail":
            raise ValueError(
                f"on_trainer_loss {self.on_trainer_loss}: a ring cannot continue without a trainer; only fail"
            )
        useless = [
            name
            for name, value in sorted(given.items())
            if name == "num_pservers" or value not in (type(self).model_fields[name].default, _WITHOUT.get(name))
        ]
        if useless:
            raise ValueError(f"{', '.join(useless)} would have no effect with strategy ring, which has no pservers")
        return self

    @property
    def wanted_pservers(self) -> int:
        """The number of pservers of a complete cluster; with strategy ring none."""
        return 0 if self.consistency.is_ring else self.num_pservers
