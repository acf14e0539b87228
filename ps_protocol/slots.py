"""The optimizer state of a block: its slots by torch's name, and how often it was stepped.

Pservers hold the slots, and a trainer's `state_dict` consists of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import BadInput
from .optimizers import MEAN

Options = dict[str, Any]  # the numbers and the flags of one parameter group

MAX_STEPS = 1 << 53
MASTER = "master"  # stands for a slot where a trainer brings the float32 values of a block


class StepState(NamedTuple):
    """The state of a block beside its slots. An update rule steps blocks of equal state together."""

    steps: int = 0  # how often the block was stepped; SGD, which does not need the number, does not count
    has_momentum: bool = False  # SGD: the momentum buffer holds something
    mu_product: float = 1.0  # NAdam: product of its momenta so far, rounded to float32 as torch keeps it


FRESH = StepState()


# The slots that an optimizer may have, and the options without which a parameter group does not have a slot.
SLOTS: Mapping[str, tuple[str, ...]] = {
    MEAN: (),
    "SGD": ("momentum_buffer",),
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "Adagrad": ("sum",),
    "RMSprop": ("square_avg", "grad_avg", "momentum_buffer"),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
}
_NEEDED_OPTIONS = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad", "grad_avg": "centered"}


def slots_under(optimizer: str, options: Options) -> tuple[str, ...]:
    """Return the slots that an optimizer has under these options.

    >>> slots_under("RMSprop", {"centered": True, "momentum": 0.0})
    ('square_avg', 'grad_avg')
    """
    return tuple(slot for slot in SLOTS[optimizer] if slot not in _NEEDED_OPTIONS or options[_NEEDED_OPTIONS[slot]])


def slot_key(slot: str, block: str) -> str:
    """Return the name of a slot of a block in frames. The name of a slot contains no slash."""
    return f"{slot}/{block}"


def split_key(key: str) -> tuple[str, str]:
    """Return the slot and the block of a `slot_key`.

    >>> split_key(slot_key("exp_avg", "a/b.block0"))
    ('exp_avg', 'a/b.block0')
    """
    slot, _, block = key.partition("/")
    return slot, block


def write_states(states: Mapping[str, StepState]) -> str:
    """Encode the step states of blocks for the metadata of a frame.

    >>> write_states({"w.block0": StepState(steps=3)})
    '{"w.block0":[3,false,1.0]}'
    """
    return json.dumps({name: list(state) for name, state in states.items()}, separators=(",", ":"))


def read_states(text: str) -> dict[str, StepState]:
    """Decode the result of `write_states` from another process. Raises BadInput."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the step states are not JSON: {error}", code="malformed_frame") from None
    if not isinstance(values, dict):
        raise BadInput("the step states are an object by block", code="malformed_frame", actual=type(values).__name__)
    return {name: _read_state(name, value) for name, value in values.items()}


def _read_state(name: str, value: object) -> StepState:
    match value:
        case [int(steps), bool(has_momentum), int() | float() as mu_product] if (
            not isinstance(steps, bool) and 0 <= steps <= MAX_STEPS and abs(mu_product) <= sys.float_info.max
        ):
            return StepState(steps, has_momentum, float(mu_product))
    raise BadInput(
        f"the step state of block {name!r:.200} is none",
        code="malformed_frame",
        expected="steps, whether there is momentum, and a finite product",
        actual=f"{value!r:.80}",
    )
