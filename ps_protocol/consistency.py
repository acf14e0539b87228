"""The mode of a run and its bounds on the distance between trainers, chosen once for the whole run.

    sync    rounds: a get of version r waits until the gradients of round r of all trainers are applied
    async   each contribution is applied by itself when it arrives; gets are served beside the updates
    ssp     asynchronous, but a get waits while the slowest trainer is more than `max_staleness` steps behind

In every mode, `max_delay` bounds how far a trainer's own pushes and pulls may run behind its computation. With the
strategy `ps` pservers aggregate the gradients; with `ring`, which is synchronous, the trainers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args, get_type_hints

from pydantic import Field
from pydantic.fields import FieldInfo

from .errors import BadModel
from .fields import Count, Flag, Positive, Real
from .vocabulary import Mode, Round, Strategy

ReadConsistency: TypeAlias = Literal["none", "block", "shard"]
Compensation: TypeAlias = Literal["none", "divide", "dc"]

DEFAULT_MAX_STALENESS = 4


@dataclass(frozen=True, slots=True)
class Consistency:
    """The mode and its bounds. Raises BadModel for a combination in which a setting could have no effect."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    mode: Annotated[Mode, Field(description="how trainers wait for each other")] = "sync"
    strategy: Annotated[
        Strategy,
        Field(
            description="the processes that aggregate gradients: pservers (`ps`), or the trainers, with "
            "`torch.distributed` (`ring`)"
        ),
    ] = "ps"
    max_delay: Annotated[
        Count,
        Field(description="steps that a trainer's pushes and pulls may run behind its computation, in every mode"),
    ] = 0
    max_staleness: Annotated[
        Count | None,
        Field(description="`ssp`: steps that the fastest trainer may be ahead of the slowest; none: 4"),
    ] = None
    wait_for_apply: Annotated[
        Flag, Field(description="asynchronous modes: a get waits until the trainer's own gradients are applied")
    ] = True
    read_consistency: Annotated[
        ReadConsistency,
        Field(
            description="asynchronous modes: the unit that a get reads consistently: nothing (`none`), each `block`, "
            "or the `shard`"
        ),
    ] = "block"
    max_queued: Annotated[
        Positive,
        Field(
            description="asynchronous modes: the most gradients in the queue of each block; a full queue delays pushes"
        ),
    ] = 16
    compensation: Annotated[
        Compensation,
        Field(
            description="asynchronous modes: compensation for staleness: `none`, `divide` the rate by it, or `dc` "
            "(DC-ASGD)"
        ),
    ] = "none"
    dc_lambda: Annotated[Real, Field(ge=0, description="factor λ of DC-ASGD")] = 0.04

    def __post_init__(self) -> None:
        if self.mode == "ssp" and self.max_staleness is None:
            object.__setattr__(self, "max_staleness", DEFAULT_MAX_STALENESS)
        if self.is_ring and self.is_async:
            raise BadModel(f"mode {self.mode} needs pservers: with strategy ring all trainers take every step together")
        if useless := self._find_useless():
            where = "with strategy ring" if self.is_ring else f"in mode {self.mode}"
            raise BadModel(f"{', '.join(useless)} would have no effect {where}")

    def _find_useless(self) -> list[str]:
        of_all = ("mode", "strategy")
        changed = [f.name for f in fields(self) if f.name not in of_all and getattr(self, f.name) != f.default]
        if self.is_ring:
            return changed
        if self.mode == "sync":
            return [name for name in changed if name != "max_delay"]
        useless = [] if self.mode == "ssp" or self.max_staleness is None else ["max_staleness"]
        return useless + (["dc_lambda"] if "dc_lambda" in changed and self.compensation != "dc" else [])

    @property
    def is_async(self) -> bool:
        """True if contributions are applied one by one."""
        return self.mode != "sync"

    def check_log(self, what: str) -> None:
        """Raise BadModel in an asynchronous mode, because `what` needs the log of a pserver."""
        if self.is_async:
            raise BadModel(
                f"{what} needs the synchronous mode: in mode {self.mode} a pserver has no log and returns with its "
                f"newest checkpoint. Omit {what}, and set checkpoint_rounds"
            )

    @property
    def is_ring(self) -> bool:
        """True if the trainers aggregate gradients themselves, without pservers."""
        return self.strategy == "ring"

    @property
    def has_common_versions(self) -> bool:
        """True if all pservers have the same versions in the same order."""
        return self.mode == "sync" and self.max_delay == 0

    def unmet(self, expected: Mapping[str, Any]) -> dict[str, Any]:
        """Return the expectations (name -> value) that the run does not meet."""
        mine = asdict(self)
        return {name: value for name, value in expected.items() if mine.get(name) != value}


def declare_setting(name: str, *, default: Any, description: str | None = None) -> Any:
    """Return the pydantic field of a process's setting with the bounds, and the description, that this class gives it.

    The types are those of the process: an environment variable is text, where a message is strict.

    >>> declare_setting("max_staleness", default=None).metadata
    [Ge(ge=0)]
    """
    declared = FieldInfo.from_annotation(get_type_hints(Consistency, include_extras=True)[name])
    members = [FieldInfo.from_annotation(member) for member in get_args(declared.annotation)]  # of `Count | None`
    bounds = [bound for field in (declared, *members) for bound in field.metadata]
    least = next((bound.ge for bound in bounds if hasattr(bound, "ge")), None)
    return Field(default=default, ge=least, description=description or declared.description)


def oldest_start(step: Round, max_delay: int) -> Round:
    """Return the oldest version on which the gradient of `step` may have been computed.

    >>> oldest_start(12, 0), oldest_start(12, 2), oldest_start(1, 2)
    (11, 9, 0)
    """
    return max(0, step - 1 - max_delay)


def needed_clock(step: Round, max_staleness: int) -> Round:
    """Return how many steps the slowest trainer must have completed before a get after `step` is answered.

    >>> needed_clock(12, 0), needed_clock(12, 4), needed_clock(3, 4)
    (12, 8, 0)
    """
    return max(0, step - max_staleness)
