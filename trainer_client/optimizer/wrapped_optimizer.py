"""The optimizer that a `RemoteOptimizer` wraps: what both have in common, and how it is described to the run.

Its state is in the trainer or, if the optimizer steps there, on the pservers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
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

from ..engines.pserver import PserverEngine
from ..engines.script_optimizers import CombinedOptimizer, is_of_torch
from ..engines.torch_state import full_groups, plain_number, read_state, write_state
from ..session.script import hide_frames
from ..session.session import Session
from .guard import ScriptGuard

SHARED = (
    "defaults",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class InitializedState(defaultdict[Tensor, Any]):
    """The state of an optimizer, true even while it is empty.

    `torch.distributed.checkpoint` takes an empty state for one that a step with zero gradients would create.
    """

    def __bool__(self) -> bool:
        return True


class EmptyState(InitializedState):
    """The state that is shown while the slots are on the pservers."""

    def clear(self) -> NoReturn:
        """Raise BadModel, because nothing else would show that the script wants to begin without slots."""
        refuse_changes_of_state()


def refuse_changes_of_state() -> NoReturn:
    """Raise BadModel for a script that has changed `optimizer.state`."""
    raise BadModel(
        "optimizer.state cannot be changed, since the slots are on the pservers. Before the first step, change what "
        "optimizer.state_dict() returns, and give it to optimizer.load_state_dict()"
    )


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
        self._wrapped = wrapped
        self._remote_state: RemoteState | None = None  # None: the wrapped optimizer steps in the trainer
        for name in SHARED:
            setattr(self, name, getattr(wrapped, name))
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer: schedulers may hold either optimizer."""
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the wrapped optimizer; empty while pservers have it."""
        return self._wrapped.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self._wrapped.state = state

    def _take_over(self, remote_state: RemoteState | None, is_in_run: Callable[[], bool]) -> None:
        """Show this state from now on, and keep the wrapped optimizer from stepping as long as `is_in_run`."""
        self._remote_state = remote_state
        self._show_state()
        refuse_changes(self._wrapped, is_in_run)

    def _show_state(self) -> None:
        self.state = InitializedState(dict, self.state) if self._remote_state is None else EmptyState(dict)

    def _check_state(self) -> None:
        """Raise BadModel for a script that has changed or replaced the state."""
        if self._remote_state is not None and (type(self.state) is not EmptyState or any(self.state.values())):
            refuse_changes_of_state()

    def _begin_step(self, closure: Callable[[], float] | None) -> float | None:
        """Call the closure of a step, if any, and check what the script has changed; return the loss."""
        vars(self._wrapped)["_opt_called"] = True  # else its learning-rate schedulers would warn
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._check_state()
        return loss

    @torch.no_grad()
    @hide_frames
    def state_dict(self) -> dict[str, Any]:
        """Return the `state_dict` of the wrapped optimizer in a single process, with state fetched from the pservers.

        It waits for the newest step; state is float32, in host memory. With local steps, and in a ring, it is the
        wrapped optimizer's own. Where several processes of a host are one trainer, only process 0 has state.
        """
        if self._remote_state is None:
            return super().state_dict()
        self._check_state()
        self.state.update(self._remote_state.fetch(self))
        try:
            return super().state_dict()
        finally:
            self._show_state()

    @hide_frames
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the hyperparameters now, and the state with the first step: that of the lowest rank. Does not block.

        Other trainers may call it or not, and their state is only checked. A trainer that was restarted, or a resumed
        run, does not load state: the run has its own. With local steps, and in a ring, the state is the wrapped
        optimizer's own, and all trainers must load the same, at any time. Raises BadInput for a `state_dict` that does
        not fit, and BadModel after the first step; then nothing has changed.
        """
        remote = self._remote_state
        with self.register_load_state_dict_pre_hook(  # the last hook that changes the argument
            lambda _, loaded: loaded if remote is None else remote.load(self, loaded)
        ):
            type(self._wrapped).load_state_dict(self._wrapped, state_dict)
        self._show_state()

    @hide_frames
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise BadModel: the plan is made once, when the run starts."""
        refuse_group()

    @hide_frames
    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: the optimizer is a place in a run."""
        raise CallError(
            "a RemoteOptimizer cannot be copied or pickled, since it holds a trainer's connections; copy or save its "
            "state_dict() instead"
        )


class RemoteState:
    """The state of an optimizer that steps on the pservers: `state_dict` fetches it, `load_state_dict` pushes it."""

    def __init__(
        self,
        spec: OptimizerSpec,
        names: Mapping[int, str],
        engine: PserverEngine | None,
        session: Session,
        guard: ScriptGuard,
    ) -> None:
        """`names` are those of the parameters, by id. Without `engine` process 0 of this host has the state."""
        self._spec = spec
        self._names = names
        self._engine = engine
        self._session = session
        self._guard = guard

    def of_member(self, name: str) -> RemoteState:
        """Return the state of one of several optimizers."""
        return RemoteState(self._spec.member(name), self._names, self._engine, self._session, self._guard)

    def fetch(self, optimizer: Optimizer) -> dict[Tensor, Any]:
        """Return the newest step's state of an optimizer's parameters, as torch has it. Blocks for the pservers.

        Processes of one host do not wait for each other's steps.
        """
        self._session.check_open("state_dict()")
        if self._session.host is None:
            self._guard.synchronize()
        if self._engine is None:
            return {}
        num_rollbacks = self._engine.progress.num_rollbacks
        slots = self._engine.pull_optimizer_state(self._names_of(optimizer))
        if self._engine.progress.num_rollbacks != num_rollbacks:
            self._guard.note()
        return write_state(self._spec, full_groups(optimizer), self._names, slots)

    def load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Push the state in a state_dict with the first step, and return the rest. Raises BadInput before a change."""
        if self._guard.has_stepped:
            raise BadModel(
                "optimizer state is loaded before the first step only. Go back to a checkpoint of the run with "
                "`gradpost checkpoint restore`, or load the state in a new run"
            )
        slots = read_state(self._spec, full_groups(optimizer), self._names, state_dict)
        if self._engine is not None:
            self._engine.load_optimizer_state(self._names_of(optimizer), slots)
        pairs = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
        return {**state_dict, "state": {}, "param_groups": [{**group, **theirs} for group, theirs in pairs]}

    def _names_of(self, optimizer: Optimizer) -> list[str]:
        return [self._names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def refuse_changes(wrapped: Optimizer, is_in_run: Callable[[], bool]) -> None:
    """Make methods of a wrapped optimizer that the run would not notice raise BadModel: `step` while `is_in_run`."""
    step = wrapped.step

    @hide_frames
    @wraps(step)  # keeps the mark of a scheduler that was made before, which warns if it is missing
    def refuse_step(_: Optimizer, *arguments: Any, **options: Any) -> Any:
        if is_in_run():
            raise BadModel(
                f"this {type(wrapped).__name__} is wrapped, and its own step() would train this process alone; keep "
                "the result of RemoteOptimizer(…), and call step() of that, or scaler.step() with it"
            )
        return step(*arguments, **options)

    @hide_frames
    def refuse_load(*_: object, **__: object) -> NoReturn:
        raise BadModel(
            "the run would not notice what the wrapped optimizer loads: call load_state_dict() of the RemoteOptimizer"
        )

    changing = {"step": MethodType(refuse_step, wrapped), "load_state_dict": refuse_load}  # schedulers want a method
    vars(wrapped).update(changing, add_param_group=refuse_group)


@hide_frames
def refuse_group(*_: object, **__: object) -> NoReturn:
    """Raise BadModel for another parameter group."""
    raise BadModel("a parameter group cannot be added: the slice plan is made once, when the run starts")


def describe_optimizer(optimizer: torch.optim.Optimizer, *, steps_here: bool = False) -> OptimizerSpec:
    """Return the spec of an optimizer. Raises BadInput (`unsupported_optimizer`) with the reason.

    If it `steps_here`, in the trainer, any but LBFGS will do. Otherwise a subclass of an allowed class is refused: its
    rule may be another one. `foreach`, `fused` and `capturable` choose an implementation, which is the pserver's
    business; they are ignored.
    """
    if isinstance(optimizer, CombinedOptimizer):
        members = optimizer.members.items()
        return OptimizerSpec.combine({name: describe_optimizer(one, steps_here=steps_here) for name, one in members})
    cls = type(optimizer)
    if steps_here and isinstance(optimizer, torch.optim.LBFGS):
        raise BadInput(
            "LBFGS evaluates a closure several times a step, each on other gradients", code="unsupported_optimizer"
        )
    if steps_here:
        return OptimizerSpec(cls.__name__, tuple({} for _ in optimizer.param_groups))
    if not is_of_torch(optimizer):
        raise BadInput(
            f"{cls.__module__}.{cls.__qualname__} cannot run on a pserver: it is not a class of torch.optim"
            f"{RING_ADVICE}",
            code="unsupported_optimizer", expected=", ".join(RULES), actual=cls.__qualname__,
        )  # fmt: skip
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise BadInput(
            "differentiable=True cannot work across a network",
            code="unsupported_optimizer", actual="differentiable=True",
        )  # fmt: skip
    flags = RULES[cls.__name__].flags if cls.__name__ in RULES else ()
    return check_optimizer(
        cls.__name__, [{flag: bool(group[flag]) for flag in flags} for group in optimizer.param_groups]
    )


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
        {name: plain_number(group[name]) for name in RULES[spec.rule(index)].numbers}
        for index, group in enumerate(full_groups(optimizer))
    ]


def describe_hyper_parameters(optimizer: Optimizer) -> str:
    """Return an optimizer as its constructor is called: the numbers of its first group that are not the defaults."""
    if isinstance(optimizer, CombinedOptimizer):
        return ", ".join(f"{name}: {describe_hyper_parameters(one)}" for name, one in optimizer.members.items())
    defaults = {name: parameter.default for name, parameter in signature(type(optimizer)).parameters.items()}
    group = optimizer.param_groups[0]
    shown = [f"{name}={_show(group[name])}" for name in defaults if name in group and name != "params"
             and (name == "lr" or group[name] != defaults[name])]  # fmt: skip
    return f"{type(optimizer).__name__}({', '.join(shown)})"


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
            gradient = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
            gradient.mul_(inverse.to(gradient.device, non_blocking=True))
    return is_finite
