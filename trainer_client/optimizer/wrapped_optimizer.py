"""The optimizer that a `RemoteOptimizer` wraps: what both have in common, and how it is described to the run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from inspect import signature
from types import MethodType
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_config.environment import CallError
from ps_protocol.errors import BadInput, BadModel
from ps_protocol.optimizers import RING_ADVICE, RULES, HyperParameters, OptimizerSpec, check_optimizer

from ..engines.combined_optimizer import CombinedOptimizer, is_of_torch
from ..engines.torch_state import full_groups
from .wrapped_state import StateInTrainer, WrappedState

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
STATE_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


class WrappingOptimizer(Optimizer):
    """An optimizer with the groups, the hooks and the state of another one, which it wraps."""

    def __init__(self, wrapped: Optimizer) -> None:
        if isinstance(wrapped, WrappingOptimizer):
            raise BadModel("the optimizer is already a RemoteOptimizer")
        if not isinstance(wrapped, Optimizer):
            raise CallError(
                f"RemoteOptimizer wraps an optimizer of torch.optim, not a {type(wrapped).__name__}; write "
                "RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=…))"
            )
        super().__init__([{"params": group["params"]} for group in wrapped.param_groups], wrapped.defaults)
        # The same list: schedulers may hold either optimizer.
        self.param_groups = self._shared_groups = wrapped.param_groups
        self._wrapped = wrapped
        self._state: WrappedState

    def _share(self, state: WrappedState, is_in_run: Callable[[], bool]) -> None:
        """Show this state from now on, run the hooks of both optimizers once, and keep the wrapped one from stepping.

        Its own `step` raises BadModel as long as `is_in_run`.
        """
        self._state = state
        hooks = [*STEP_HOOKS, *STATE_HOOKS]
        if not isinstance(state, StateInTrainer):  # the wrapped optimizer's load_state_dict runs its own hooks
            hooks += LOAD_HOOKS
        for name in hooks:
            setattr(self, name, getattr(self._wrapped, name))
        refuse_changes(self._wrapped, is_in_run)

    def _follow_groups(self) -> None:
        """Share the list of groups that the script has assigned to either optimizer."""
        for optimizer in (self, self._wrapped):
            if optimizer.param_groups is not self._shared_groups:
                self._shared_groups = self.param_groups = self._wrapped.param_groups = optimizer.param_groups
                break
        if isinstance(self._wrapped, CombinedOptimizer):
            self._wrapped.follow_groups()

    def _begin_step(self, closure: Callable[[], float] | None) -> float | None:
        """Call the closure of a step, if any, and adopt what the script has changed; return the loss."""
        vars(self._wrapped)["_opt_called"] = True  # else its learning-rate schedulers would warn
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._follow_groups()
        self._state.check_changes()
        return loss

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the `state_dict` of the wrapped optimizer in a single process, with state fetched from the pservers.

        It waits for the newest step; state is float32, in host memory. With local steps, and in a ring, it is the
        wrapped optimizer's own. Where several processes of a host are one trainer, only process 0 has state.
        """
        with self._state.shown():
            self._follow_groups()
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the hyperparameters now, and the state with the first step: that of the lowest rank. Does not block.

        Other trainers may call it or not, and their state is only checked. A trainer that was restarted, or a resumed
        run, does not load state: the run has its own. With local steps, and in a ring, the state is the wrapped
        optimizer's own, and all trainers must load the same, at any time. Raises BadInput for a `state_dict` that does
        not fit, and BadModel after the first step; then nothing has changed.
        """
        handle = self.register_load_state_dict_pre_hook(  # the last hook that changes the argument
            lambda _, loaded: self._state.load(loaded)
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adopt the state that torch has loaded. Schedulers keep their list of groups."""
        super().__setstate__(state)
        self._shared_groups[:] = self._state.adopt_loaded()
        self.param_groups = self._wrapped.param_groups = self._shared_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; only the constructor may, because the plan is made once."""
        if hasattr(self, "_wrapped"):
            refuse_group()
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: the optimizer is a place in a run."""
        raise CallError(
            "a RemoteOptimizer cannot be copied or pickled, since it holds a trainer's connections; copy or save its "
            "state_dict() instead"
        )


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


def refuse_group(*_: object, **__: object) -> NoReturn:
    """Raise BadModel for another parameter group."""
    raise BadModel("a parameter group cannot be added: the slice plan is made once, when the run starts")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the spec of an optimizer. Raises BadInput (`unsupported_optimizer`) with the reason.

    A subclass of an allowed class is refused: its rule may be another one. `foreach`, `fused` and `capturable` choose
    an implementation, which is the pserver's business; they are ignored.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return OptimizerSpec.combine({name: describe_optimizer(one) for name, one in optimizer.members.items()})
    cls = type(optimizer)
    if not is_of_torch(optimizer):
        raise BadInput(
            f"{cls.__module__}.{cls.__qualname__} cannot run on a pserver: it is not a class of torch.optim"
            f"{RING_ADVICE}",
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
    if isinstance(optimizer, CombinedOptimizer):
        return OptimizerSpec.combine({name: describe_local_optimizer(one) for name, one in optimizer.members.items()})
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadInput(
            "LBFGS evaluates a closure several times a step, each on other gradients", code="unsupported_optimizer"
        )
    return OptimizerSpec(type(optimizer).__name__, tuple({} for _ in optimizer.param_groups))


def read_hyper_parameters(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> list[HyperParameters]:
    """Return the current numbers of every group, as plain floats; tensors (lr) are read.

    Raises BadModel if a group's flag is not what it was when the run began.
    """
    for index, (group, flags) in enumerate(zip(full_groups(optimizer), spec.group_flags, strict=True)):
        for flag, value in flags.items():
            if bool(group[flag]) != value:
                raise BadModel(
                    f"{flag} of parameter group {index} was changed; numbers may change in a run, flags may not",
                    expected=value,
                    actual=bool(group[flag]),
                )
    return [
        {name: _plain(group[name]) for name in RULES[spec.rule(index)].numbers}
        for index, group in enumerate(full_groups(optimizer))
    ]


def _plain(value: Any) -> float | list[float]:
    return [float(v) for v in value] if isinstance(value, tuple | list) else float(value)


def describe_hyper_parameters(optimizer: Optimizer) -> str:
    """Return an optimizer as its constructor is called: the numbers of its first group that are not the defaults."""
    if isinstance(optimizer, CombinedOptimizer):
        return ", ".join(f"{name}: {describe_hyper_parameters(one)}" for name, one in optimizer.members.items())
    defaults = {name: parameter.default for name, parameter in signature(type(optimizer)).parameters.items()}
    group = optimizer.param_groups[0]
    shown = [f"{name}={_show(group[name])}" for name in defaults if name in group and name != "params"
             and (name == "lr" or group[name] != defaults[name])]  # fmt: skip
    rest = len(optimizer.param_groups) - 1
    more = f" and {rest} more parameter groups" if rest else ""
    return f"{type(optimizer).__name__}({', '.join(shown)}){more}"


def _show(value: Any) -> str:
    return f"{float(value):g}" if isinstance(value, float | Tensor) else repr(value)


# ---------------------------------------------------------------- loss scaling by torch.amp.GradScaler


def check_scaling(optimizer: Optimizer, policy: str | None, *, is_overlapped: bool) -> None:
    """Raise BadModel if a GradScaler has called `step`, and an overflow could not skip the step on all trainers.

    `policy`: that of the run for NaN and infinity; None if each trainer skips its own steps.
    """
    if getattr(optimizer, "found_inf", None) is None:
        return
    if is_overlapped:
        raise BadModel(
            "with overlap=True, gradients are sent before a GradScaler unscales them. Use bfloat16, which needs no "
            "GradScaler, or overlap=False"
        )
    if policy not in (None, "skip_round"):
        raise BadModel(
            "a GradScaler skips steps whose gradients overflow, and the other trainers must skip them, too. Set "
            "GRADPOST_NONFINITE=skip_round, or use bfloat16, which needs no GradScaler",
            expected="skip_round",
            actual=policy,
        )


def unscale_gradients(optimizer: Optimizer, parameters: Collection[Tensor]) -> bool:
    """Divide the gradients by the scale of a GradScaler; return False, and clear them, if they have overflowed.

    torch sets `found_inf` and `grad_scale` of the optimizer during `step`. `grad_scale` is None if the script has
    called `unscale_`.
    """
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    is_finite = found_inf is None or not bool(found_inf.item())
    for parameter in parameters:
        if not is_finite:
            parameter.grad = None
        elif scale is not None and parameter.grad is not None:
            inverse = scale.double().reciprocal().float()  # as torch's `unscale_`
            parameter.grad.mul_(inverse.to(parameter.grad.device, non_blocking=True))
    return is_finite
