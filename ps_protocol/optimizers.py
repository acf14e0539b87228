"""The optimizers that run on a pserver: their flags, their numbers, and the optimizer state of a block.

A message contains an optimizer as a class name, flags and numbers, which are checked against this list. All of them
are element-wise, so that a pserver can step a block without the rest of its parameter. Flags determine the slots and
are fixed for a run, as part of the plan's digest. Numbers may change with every push.
Names and defaults are those of https://docs.pytorch.org/docs/stable/optim.html.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .errors import BadInput

HyperParameters = dict[str, float | list[float]]  # the numbers of one parameter group


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """The names of the numbers and flags of one update rule of `torch.optim`."""

    numbers: tuple[str, ...]
    flags: tuple[str, ...]


class OptimizerMember(NamedTuple):
    """One of several optimizers of a run: the name that the script gives it, its class name, and its groups."""

    name: str
    optimizer: str
    num_groups: int


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The optimizer of a run: its class name and the flags of each parameter group.

    Of several optimizers, `members` has one entry each, and `name` consists of their class names.
    """

    name: str
    group_flags: tuple[dict[str, bool], ...]
    members: tuple[OptimizerMember, ...] = ()

    @classmethod
    def combine(cls, specs: Mapping[str, OptimizerSpec]) -> OptimizerSpec:
        """Return the spec of several optimizers by name, whose groups follow each other.

        >>> adam, sgd = (OptimizerSpec(name, ({"maximize": False},)) for name in ("Adam", "SGD"))
        >>> spec = OptimizerSpec.combine({"D": adam, "G": sgd})
        >>> spec.name, spec.rule(1), spec.groups_of("G")
        ('Adam+SGD', 'SGD', [1])
        """
        members = tuple(OptimizerMember(name, s.name, len(s.group_flags)) for name, s in specs.items())
        flags = tuple(flags for s in specs.values() for flags in s.group_flags)
        return cls("+".join(member.optimizer for member in members), flags, members)

    def with_buffers(self, rules: Iterable[str]) -> OptimizerSpec:
        """Return this spec with one more group of float buffers for each of these BUFFER_RULES."""
        return replace(self, group_flags=(*self.group_flags, *({rule: True} for rule in rules)))

    def rule(self, group: int) -> str:
        """Return the update rule of a parameter group: the class name of its optimizer, or one of BUFFER_RULES."""
        rule = next((rule for rule in BUFFER_RULES if rule in self.group_flags[group]), self.name)
        return self._owners[group].optimizer if group < len(self._owners) else rule

    def find_member(self, group: int) -> str | None:
        """Return the name of a parameter group's optimizer, if there are several."""
        return self._owners[group].name if group < len(self._owners) else None

    @property
    def _owners(self) -> list[OptimizerMember]:
        """The optimizer of each group, if there are several."""
        return [member for member in self.members for _ in range(member.num_groups)]

    @property
    def rules(self) -> frozenset[str]:
        return frozenset(map(self.rule, range(len(self.group_flags))))

    def member(self, name: str) -> OptimizerSpec:
        """Return the spec of one of several optimizers alone. Raises BadInput for an unknown name."""
        groups = self.groups_of(name)
        return OptimizerSpec(self.rule(groups[0]), tuple(self.group_flags[group] for group in groups))

    def groups_of(self, member: str) -> list[int]:
        """Return the groups of one of several optimizers. Raises BadInput for an unknown name."""
        if groups := [group for group, owner in enumerate(self._owners) if owner.name == member]:
            return groups
        raise BadInput(
            f"this run has no optimizer {member!r:.80}",
            code="invalid_message", expected=", ".join(m.name for m in self.members) or "no name", actual=member,
        )  # fmt: skip

    @property
    def num_stepped(self) -> int:
        """The number of groups that the optimizer steps. Those of buffers come after them."""
        return sum(BUFFER_RULES.keys().isdisjoint(flags) for flags in self.group_flags)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OptimizerSpec:
        """Read the result of `to_json`, without a check."""
        members = tuple(OptimizerMember(*member) for member in value["members"])
        return cls(value["name"], tuple(value["group_flags"]), members)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        members = [list(member) for member in self.members]
        return {"name": self.name, "group_flags": [dict(flags) for flags in self.group_flags], "members": members}


# The update rules of buffers. A push contains their values, and value += lr * (v - value), where v is the mean of the
# pushed values, or that of the lowest rank.
MEAN = "mean"
LOWEST_RANK = "lowest_rank"
BUFFER_RULES: dict[str, OptimizerRule] = {rule: OptimizerRule(("lr",), (rule,)) for rule in (MEAN, LOWEST_RANK)}
_ADAM = OptimizerRule(("lr", "betas", "eps", "weight_decay"), ("amsgrad", "maximize", "decoupled_weight_decay"))

RULES: Mapping[str, OptimizerRule] = {
    "SGD": OptimizerRule(("lr", "momentum", "dampening", "weight_decay"), ("nesterov", "maximize")),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": OptimizerRule(("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"), ("maximize",)),
    "RMSprop": OptimizerRule(("lr", "alpha", "eps", "weight_decay", "momentum"), ("centered", "maximize")),
    "Adadelta": OptimizerRule(("lr", "rho", "eps", "weight_decay"), ("maximize",)),
    "Adamax": OptimizerRule(("lr", "betas", "eps", "weight_decay"), ("maximize",)),
    "NAdam": OptimizerRule(
        ("lr", "betas", "eps", "weight_decay", "momentum_decay"), ("decoupled_weight_decay", "maximize")
    ),
    "RAdam": OptimizerRule(("lr", "betas", "eps", "weight_decay"), ("decoupled_weight_decay", "maximize")),
    "SparseAdam": OptimizerRule(("lr", "betas", "eps"), ("maximize",)),
}
# The rules that step sparse parameters, with the numbers that must be 0 for them: these touch rows without a gradient.
SPARSE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("momentum", "weight_decay"), "Adagrad": ("weight_decay",), "SparseAdam": (),
}  # fmt: skip

# Optimizers of torch that are refused, with the reason.
REFUSED: Mapping[str, str] = {
    "LBFGS": "it evaluates a closure several times a step and mixes all elements in its line search",
    "Adafactor": "its second moment is factored over the rows and columns of the whole tensor",
    "Muon": "it orthogonalises whole matrices",
    "ASGD": "its averaging is not implemented on the pserver",
    "Rprop": "its sign rule is not implemented on the pserver",
}
RING_ADVICE = "; gradpost up --strategy ring runs it, in the trainers"


def check_optimizer(
    name: str, group_flags: Sequence[Mapping[str, Any]], members: Sequence[Sequence[Any]] = ()
) -> OptimizerSpec:
    """Return the spec, or raise BadInput naming what is allowed."""
    optimizers = [name] * len(group_flags)
    for buffer_rule in reversed(BUFFER_RULES):
        flags = group_flags[len(optimizers) - 1] if len(optimizers) > 1 else {}
        if flags == {buffer_rule: True} and flags[buffer_rule] is True:
            optimizers.pop()
    if members:
        _check_members(name, members, num_groups=len(optimizers))
        optimizers = [optimizer for _, optimizer, num_groups in members for _ in range(num_groups)]
    for optimizer in dict.fromkeys([*optimizers] or [name]):
        _find_rule(optimizer)
    for index, (optimizer, flags) in enumerate(zip(optimizers, group_flags, strict=False)):
        rule = RULES[optimizer]
        if set(flags) != set(rule.flags):
            raise BadInput(
                f"the flags of group {index} must be those of {optimizer}",
                code="unsupported_optimizer", expected=f"booleans {', '.join(rule.flags)}", actual=f"{flags!s:.200}",
            )  # fmt: skip
    return OptimizerSpec(
        name,
        tuple(dict(sorted(flags.items())) for flags in group_flags),
        tuple(OptimizerMember(*member) for member in members),
    )


def _find_rule(optimizer: str) -> None:
    if optimizer not in RULES:
        reason = REFUSED.get(optimizer, "it is not on the list, so it is not known to be element-wise")
        advice = "" if optimizer == "LBFGS" else RING_ADVICE
        raise BadInput(
            f"{optimizer} cannot run on a pserver: {reason}{advice}",
            code="unsupported_optimizer", expected=", ".join(RULES), actual=optimizer,
        )  # fmt: skip


def _check_members(name: str, members: Sequence[Sequence[Any]], num_groups: int) -> None:
    names, optimizers, counts = zip(*members, strict=True)
    if len(set(names)) < len(names) or "+".join(optimizers) != name or sum(counts) != num_groups:
        raise BadInput(
            "the members of an optimizer must have different names, its class names and all of its groups",
            code="unsupported_optimizer", expected=f"{name} with {num_groups} groups", actual=f"{members!r:.200}",
        )  # fmt: skip


def check_hyper_parameters(spec: OptimizerSpec, groups: object) -> list[HyperParameters]:
    """Return one dictionary of numbers for each parameter group, or raise BadInput.

    Every number of the rule must be there, finite and not negative; betas are pairs in [0, 1).
    """
    if not isinstance(groups, list) or len(groups) != len(spec.group_flags):
        raise BadInput(
            "hyperparameters must be a list with one object for each parameter group",
            code="bad_hyper_parameters",
            expected=f"{len(spec.group_flags)} groups",
            actual=f"{len(groups)} groups" if isinstance(groups, list) else f"{groups!r:.80}",
        )
    for index, numbers in enumerate(groups):
        names = (BUFFER_RULES.get(spec.rule(index)) or RULES[spec.rule(index)]).numbers
        if not isinstance(numbers, dict) or set(numbers) != set(names):
            raise BadInput(
                f"group {index} of {spec.name} must have exactly the expected hyperparameters",
                code="bad_hyper_parameters",
                expected=", ".join(names),
                actual=f"{', '.join(map(str, numbers)):.200}" if isinstance(numbers, dict) else type(numbers).__name__,
            )
        for key, value in numbers.items():
            _check_number(index, key, value)
    return groups


def check_sparse_numbers(
    spec: OptimizerSpec, sparse_groups: Iterable[int], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise BadInput if a group with sparse parameters has a number that would change rows without a gradient."""
    for index in sparse_groups:
        for name in SPARSE_NUMBERS.get(spec.rule(index), ()):
            if groups[index][name]:
                raise BadInput(
                    f"{spec.rule(index)} with {name} cannot step sparse parameters: it would change rows without a "
                    "gradient. Set it to 0, or create the Embedding with sparse=False",
                    code="bad_hyper_parameters", expected=f"{name} 0 in group {index}", actual=groups[index][name],
                )  # fmt: skip


def find_difference(one: Sequence[HyperParameters], other: Sequence[HyperParameters]) -> tuple[str, object, object]:
    """Return the first hyperparameter that differs, and its two values.

    >>> find_difference([{"lr": 0.1, "eps": 0.0}], [{"lr": 0.2, "eps": 0.0}])
    ('lr of parameter group 0', 0.1, 0.2)
    """
    return next(
        (f"{name} of parameter group {index}", mine[name], theirs[name])
        for index, (mine, theirs) in enumerate(zip(one, other, strict=True))
        for name in mine
        if mine[name] != theirs[name]
    )


def _check_number(group: int, key: str, value: object) -> None:
    if key == "betas":
        ok = isinstance(value, list) and len(value) == 2 and all(_is_number(v) and 0 <= v < 1 for v in value)
        expected = "two numbers in [0, 1)"
    elif key == "dampening":  # the one number that torch lets be anything
        ok, expected = _is_number(value), "a finite number"
    else:
        ok, expected = _is_number(value) and value >= 0, "a finite number of at least 0"  # type: ignore[operator]
    if not ok:
        raise BadInput(
            f"{key} of group {group} is invalid",
            code="bad_hyper_parameters",
            expected=expected,
            actual=f"{value!r:.80}",
        )


def _is_number(value: object) -> bool:
    if type(value) is int:
        return abs(value) < 1 << 63  # a larger one is no float, and JSON may hold one
    return isinstance(value, float) and math.isfinite(value)


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
    **dict.fromkeys(BUFFER_RULES, ()),
    "SGD": ("momentum_buffer",),
    "Adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "Adagrad": ("sum",),
    "RMSprop": ("square_avg", "grad_avg", "momentum_buffer"),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "SparseAdam": ("exp_avg", "exp_avg_sq"),
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
        raise BadInput(
            "the step states must be an object with a member for each block",
            code="malformed_frame",
            actual=type(values).__name__,
        )
    return {name: _read_state(name, value) for name, value in values.items()}


def _read_state(name: str, value: object) -> StepState:
    match value:
        case [int(steps), bool(has_momentum), int() | float() as mu_product] if (
            not isinstance(steps, bool) and 0 <= steps <= MAX_STEPS and abs(mu_product) <= sys.float_info.max
        ):
            return StepState(steps, has_momentum, float(mu_product))
    raise BadInput(
        f"the step state of block {name!r:.200} is invalid",
        code="malformed_frame",
        expected="steps, whether there is momentum, and a finite product",
        actual=f"{value!r:.80}",
    )
