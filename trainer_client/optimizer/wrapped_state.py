"""The `state` of a RemoteOptimizer: that of the wrapped optimizer in the trainer, or the state on the pservers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.optimizers import OptimizerSpec, StepState

from ..engines.pserver import PserverEngine
from ..engines.torch_state import NO_STATE, ParameterState, full_groups, needed_slots, read_state, write_state
from ..session.session import Session
from .script_guard import ScriptGuard


class InitializedState(defaultdict[Tensor, Any]):
    """The state of an optimizer, true even while it is empty.

    `torch.distributed.checkpoint` takes an empty state for one that a step with zero gradients would create.
    """

    def __bool__(self) -> bool:
        return True


class EmptyState(InitializedState):
    """The shown state while the slots are on the pservers. Raises BadModel where a script changes an entry."""

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


def refuse_entries() -> NoReturn:
    """Raise BadModel for entries of `optimizer.state` that a script has set or removed."""
    raise BadModel(
        "entries of optimizer.state cannot be set or removed, since the slots are on the pservers. Change what "
        "optimizer.state_dict() returns, and give it to optimizer.load_state_dict()"
    )


class WrappedState(Protocol):
    """The state that a RemoteOptimizer shows. Only `shown` blocks."""

    def load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Load the state in a state_dict, and return the rest, which torch loads. Raises BadInput before a change."""

    def adopt_loaded(self) -> list[dict[str, Any]]:
        """Show the state again after torch has replaced it, and return the loaded groups."""

    def check_reset(self) -> None:
        """Follow a script that has cleared or replaced `state`. Raises BadModel for entries that it has added."""

    def shown(self) -> AbstractContextManager[None]:
        """Show the state for `state_dict` within the block. Blocks for the newest step if pservers have the state."""

    def of_member(self, member: Optimizer, wrapped: Optimizer, name: str) -> WrappedState:
        """Return the state that `member` shows, which wraps one of several optimizers."""


class StateInTrainer:
    """The state of a wrapped optimizer that steps in the trainer; both optimizers show it."""

    def __init__(self, remote: Optimizer, wrapped: Optimizer) -> None:
        self._remote, self._wrapped = remote, wrapped
        self._share(wrapped.state)

    def _share(self, state: Mapping[Tensor, Any]) -> None:
        self._state = self._remote.state = self._wrapped.state = InitializedState(dict, state)

    def load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Implement `WrappedState.load`."""
        type(self._wrapped).load_state_dict(self._wrapped, state_dict)
        return {**state_dict, "state": {}}

    def adopt_loaded(self) -> list[dict[str, Any]]:
        """Implement `WrappedState.adopt_loaded`."""
        self._share(self._wrapped.state)
        return self._wrapped.param_groups

    def shown(self) -> AbstractContextManager[None]:
        """Implement `WrappedState.shown`."""
        self.check_reset()
        return nullcontext()

    def of_member(self, member: Optimizer, wrapped: Optimizer, name: str) -> StateInTrainer:
        """Implement `WrappedState.of_member`."""
        return StateInTrainer(member, wrapped)

    def check_reset(self) -> None:
        """Implement `WrappedState.check_reset`."""
        for optimizer in (self._remote, self._wrapped):
            if optimizer.state is not self._state:
                self._share(optimizer.state)
                return


class StateOnPservers:
    """The state of the optimizer that steps on the pservers; the RemoteOptimizer shows it in `state_dict` only."""

    def __init__(
        self,
        remote: Optimizer,
        wrapped: Optimizer,
        spec: OptimizerSpec,
        names: Mapping[int, str],
        engine: PserverEngine | None,
        session: Session,
        guard: ScriptGuard,
    ) -> None:
        """`names` are those of the optimizer's parameters, by id; other parameters of the run keep their state.

        Without `engine` process 0 of this host has the state to show.
        """
        self._remote, self._wrapped = remote, wrapped
        self._spec = spec
        self._names = names
        self._engine = engine
        self._session = session
        self._guard = guard
        self._show()

    def _show(self) -> None:
        self._state = self._remote.state = self._wrapped.state = EmptyState(dict)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Implement `WrappedState.shown`. Processes of one host do not wait for each other's steps."""
        self._session.check_open("state_dict()")
        if self._session.host is None:
            self._guard.synchronize()
        self.check_reset()
        groups = {
            self._names[id(p)]: (i, p) for i, group in enumerate(self._remote.param_groups) for p in group["params"]
        }

        def needed(name: str, state: StepState) -> tuple[str, ...]:
            if name not in groups:
                return ()
            index, parameter = groups[name]
            return needed_slots(self._spec.rule(index), self._remote.param_groups[index], state, parameter.dtype)

        if self._engine is not None:
            with self._guard.noting_rollback():
                slots = self._engine.pull_optimizer_state(needed)
            self._state.update(write_state(self._spec, full_groups(self._remote), self._names, slots))
        try:
            yield
        finally:
            dict.clear(self._state)  # unlike a reset by the script, this is not noted

    def of_member(self, member: Optimizer, wrapped: Optimizer, name: str) -> StateOnPservers:
        """Implement `WrappedState.of_member`. The run has the state of `wrapped`."""
        names = {id(p): self._names[id(p)] for group in member.param_groups for p in group["params"]}
        return StateOnPservers(
            member, wrapped, self._spec.member(name), names, self._engine, self._session, self._guard
        )

    def load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Implement `WrappedState.load`. The state is pushed with the next step."""
        slots = read_state(self._spec, full_groups(self._remote), self._names, state_dict)
        pairs = zip(self._remote.param_groups, state_dict["param_groups"], strict=True)
        if self._engine is not None:
            self._engine.load_optimizer_state({**self._without_state(), **slots})
        return {**state_dict, "state": {}, "param_groups": [{**group, **theirs} for group, theirs in pairs]}

    def adopt_loaded(self) -> list[dict[str, Any]]:
        """Implement `WrappedState.adopt_loaded`."""
        self._show()
        return self._remote.param_groups

    def check_reset(self) -> None:
        """Implement `WrappedState.check_reset`. The next step begins without state."""
        replaced = [one for one in (self._remote, self._wrapped) if one.state is not self._state]
        if any(self._state.values()) or any(one.state for one in replaced):
            refuse_entries()
        if replaced or self._state.was_cleared:
            self._show()
            if self._engine is not None:
                self._engine.load_optimizer_state(self._without_state())

    def _without_state(self) -> dict[str, ParameterState]:
        return dict.fromkeys(self._names.values(), NO_STATE)
