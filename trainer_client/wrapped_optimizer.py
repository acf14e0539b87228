"""The optimizer that a `RemoteOptimizer` wraps, and what the two have in common: hooks, and the presence of a state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel

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
