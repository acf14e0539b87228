"""What an optimizer remembers of a block: its slots by torch's name, and how often it was stepped.

Both sides have to know which slots there are: pservers keep them, and a trainer's `state_dict` is made of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import BadInput
from .optimizers import MEAN

Options = dict[str, Any]  # the numbers and the flags of one parameter group

MAX_STEPS = 1 << 53
MASTER = "master"  # stands for a slot where a trainer brings the float32 values of a block


class StepState(NamedTuple):
    """What a rule remembers of a block besides its slots. Blocks of equal state are stepped together."""

    steps: int = 0  # how often the block was stepped; not counted by SGD, which does not want to know
    has_momentum: bool = False  # SGD: the momentum buffer holds something
    mu_product: float = 1.0  # NAdam: product of its momenta so far, rounded to float32 as torch keeps it


FRESH = StepState()


def _sgd(options: Options) -> tuple[str, ...]:
    return ("momentum_buffer",) if options["momentum"] != 0 else ()


def _adam(options: Options) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ()))


def _rmsprop(options: Options) -> tuple[str, ...]:
    centered = ("grad_avg",) if options["centered"] else ()
    momentum = ("momentum_buffer",) if options["momentum"] > 0 else ()
    return ("square_avg", *centered, *momentum)


def _always(*names: str) -> Callable[[Options], tuple[str, ...]]:
    return lambda options: names


# The slots that an optimizer needs under these options.
SLOTS: Mapping[str, Callable[[Options], tuple[str, ...]]] = {
    MEAN: _always(),
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "Adagrad": _always("sum"),
    "RMSprop": _rmsprop,
    "Adadelta": _always("square_avg", "acc_delta"),
    "Adamax": _always("exp_avg", "exp_inf"),
    "NAdam": _always("exp_avg", "exp_avg_sq"),
    "RAdam": _always("exp_avg", "exp_avg_sq"),
}

_EVERYTHING: Options = {"momentum": 1.0, "amsgrad": True, "centered": True}


def possible_slots(optimizer: str) -> tuple[str, ...]:
    """The slots that it may have under any options.

    >>> possible_slots("RMSprop")
    ('square_avg', 'grad_avg', 'momentum_buffer')
    """
    return SLOTS[optimizer](_EVERYTHING)


def slot_key(slot: str, block: str) -> str:
    """A slot of a block, as it is called in frames. No slot's name has a slash in it, whatever a parameter's has."""
    return f"{slot}/{block}"


def split_key(key: str) -> tuple[str, str]:
    """The inverse.

    >>> split_key(slot_key("exp_avg", "a/b.block0"))
    ('exp_avg', 'a/b.block0')
    """
    slot, _, block = key.partition("/")
    return slot, block


def write_states(states: Mapping[str, StepState]) -> str:
    """Step states by block, as the metadata of a frame has them.

    >>> write_states({"w.block0": StepState(steps=3)})
    '{"w.block0":[3,false,1.0]}'
    """
    return json.dumps({name: list(state) for name, state in states.items()}, separators=(",", ":"))


def read_states(text: str) -> dict[str, StepState]:
    """The inverse of `write_states`, of what another process sent. Raises BadInput."""
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
