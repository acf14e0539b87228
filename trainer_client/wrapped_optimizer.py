"""The optimizer that a `RemoteOptimizer` wraps, and what the two have in common: hooks, and the presence of a state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadInput, BadModel
from ps_protocol.optimizers import RULES, HyperParameters, OptimizerSpec, check_optimizer

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STATE_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


class InitializedState(defaultdict[Tensor, Any]):
    """The state of an optimizer, true even while it is empty.

    `torch.distributed.checkpoint` takes an empty state for one that a step with zero gradients would create.
    """

    def __bool__(self) -> bool:
        return True


class RemoteState(InitializedState):
    """The state of an optimizer whose slots are on the pservers. Raises BadModel where a script changes an entry."""

    was_cleared = False

    def clear(self) -> None:
        """Remove all entries; `was_cleared` says that the next step begins without slots."""
        super().clear()
        self.was_cleared = True

    def pop(self, *_: object) -> NoReturn:
        """Raise BadModel."""
        refuse_entries()

    def __delitem__(self, _: Tensor) -> NoReturn:
        refuse_entries()

    def __setitem__(self, _: Tensor, __: object) -> NoReturn:
        refuse_entries()

    def __missing__(self, parameter: Tensor) -> Any:
        """Return an empty entry, and keep it: what a script writes to it is found before the next step."""
        return self.setdefault(parameter, {})


class SharedState:
    """The `state` of a RemoteOptimizer: that of the wrapped optimizer, or an empty one for state on the pservers."""

    def __init__(self, remote: Optimizer, stepping: Optimizer | None) -> None:
        """`stepping` is the wrapped optimizer if it steps in the trainer, and so has the state."""
        self._optimizers = (remote,) if stepping is None else (remote, stepping)
        self._kind = RemoteState if stepping is None else InitializedState
        self._state: InitializedState
        self.share(self._optimizers[-1].state)

    def share(self, state: Mapping[Tensor, Any]) -> None:
        """Make this the state of both optimizers."""
        self._state = self._kind(dict, state)
        for optimizer in self._optimizers:
            optimizer.state = self._state

    def adopt_loaded(self) -> None:
        """Share the state that torch has just loaded into the optimizer that has it."""
        self.share(self._optimizers[-1].state)

    def was_reset(self) -> bool:
        """Return True, and share the new state, if the script has cleared or replaced the state.

        Raises BadModel for entries that the script has added, which the run would not notice.
        """
        replaced = next((one.state for one in self._optimizers if one.state is not self._state), None)
        is_remote = isinstance(self._state, RemoteState)
        if is_remote and (replaced or any(self._state.values())):
            refuse_entries()
        if replaced is None and not (isinstance(self._state, RemoteState) and self._state.was_cleared):
            return False
        self.share(replaced or {})
        return True


def share_hooks(remote: Optimizer, wrapped: Optimizer, *, loads_itself: bool) -> None:
    """Make the hooks of both optimizers the same, so that a call of `remote` runs them once.

    `loads_itself`: `load_state_dict` of `remote` calls that of `wrapped`, which runs its own hooks.
    """
    for hooks in (*STEP_HOOKS, *STATE_HOOKS, *(() if loads_itself else LOAD_HOOKS)):
        setattr(remote, hooks, getattr(wrapped, hooks))


def step_without_hooks(wrapped: Optimizer) -> None:
    """Step a wrapped optimizer whose hooks, and torch's global ones, run with the step of the RemoteOptimizer."""
    step = type(wrapped).step
    getattr(step, "__wrapped__", step)(wrapped)  # torch wraps the method of each class once, to run the hooks


def refuse_changes(wrapped: Optimizer, is_in_run: Callable[[], bool]) -> None:
    """Make methods of a wrapped optimizer that the run would not notice raise BadModel: `step` while `is_in_run`."""
    step = wrapped.step

    @wraps(step)  # keeps the mark of a scheduler that was made before, which warns if it is missing
    def refuse_step(_: Optimizer, *arguments: Any, **options: Any) -> Any:
        if is_in_run():
            raise BadModel(
                f"this {type(wrapped).__name__} is wrapped, and its own step() would train this process alone; keep "
                "the result of RemoteOptimizer(…), and call step() of that, or scaler.step() with it"
            )
        return step(*arguments, **options)

    def refuse_load(*_: object, **__: object) -> NoReturn:
        raise BadModel(
            "the run would not notice what the wrapped optimizer loads: call load_state_dict() of the RemoteOptimizer"
        )

    changing = {"step": MethodType(refuse_step, wrapped), "load_state_dict": refuse_load}  # schedulers want a method
    vars(wrapped).update(changing, add_param_group=refuse_group)


def refuse_entries() -> NoReturn:
    """Raise BadModel for entries of `optimizer.state` that a script has set or removed."""
    raise BadModel(
        "entries of optimizer.state cannot be set or removed, since the slots are on the pservers. Change what "
        "optimizer.state_dict() returns, and give it to optimizer.load_state_dict()"
    )


def refuse_group(*_: object, **__: object) -> NoReturn:
    """Raise BadModel for another parameter group."""
    raise BadModel("a parameter group cannot be added: the slice plan is made once, when the run starts")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the spec of an optimizer. Raises BadInput (`unsupported_optimizer`) with the reason.

    A subclass of an allowed class is refused: its rule may be another one. `foreach`, `fused` and `capturable` choose
    an implementation, which is the pserver's business; they are ignored.
    """
    cls = type(optimizer)
    if cls is not getattr(torch.optim, cls.__name__, None):
        raise BadInput(
            f"{cls.__module__}.{cls.__qualname__} cannot run on a pserver: it is not a class of torch.optim",
            code="unsupported_optimizer", expected=", ".join(RULES), actual=cls.__qualname__,
        )  # fmt: skip
    rule = RULES.get(cls.__name__)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise BadInput(
            "differentiable=True cannot work across a network",
            code="unsupported_optimizer", actual="differentiable=True",
        )  # fmt: skip
    flags = () if rule is None else rule.flags
    return check_optimizer(
        cls.__name__, [{flag: bool(group[flag]) for flag in flags} for group in optimizer.param_groups]
    )


def describe_local_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the spec of an optimizer that steps in the trainer. Raises BadInput for LBFGS."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadInput(
            "LBFGS evaluates a closure several times a step, each on other gradients", code="unsupported_optimizer"
        )
    return OptimizerSpec(type(optimizer).__name__, tuple({} for _ in optimizer.param_groups))


def read_hyper_parameters(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> list[HyperParameters]:
    """Return the current numbers of every group, as plain floats; tensors (lr) are read.

    Raises BadModel if a group's flag is not what it was when the run began.
    """
    for index, (group, flags) in enumerate(zip(optimizer.param_groups, spec.group_flags, strict=True)):
        for flag, value in flags.items():
            if bool(group[flag]) != value:
                raise BadModel(
                    f"{flag} of parameter group {index} was changed; numbers may change in a run, flags may not",
                    expected=value,
                    actual=bool(group[flag]),
                )
    names = RULES[spec.name].numbers
    # torch's Adagrad fills its slot when it is made, from its own argument, whatever a group says.
    fixed = {name: optimizer.defaults[name] for name in names if name == "initial_accumulator_value"}
    return [{name: _plain({**group, **fixed}[name]) for name in names} for group in optimizer.param_groups]


def _plain(value: Any) -> float | list[float]:
    return [float(v) for v in value] if isinstance(value, tuple | list) else float(value)
