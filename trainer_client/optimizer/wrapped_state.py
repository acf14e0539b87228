"""The `state` of a RemoteOptimizer: that of the wrapped optimizer in the trainer, or the state on the pservers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.optimizers import OptimizerSpec

from ..engines.pserver import PserverEngine
from ..engines.torch_state import full_groups, read_state, write_state
from ..session.session import Session
from .guard import ScriptGuard


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


class WrappedState(Protocol):
    """The state that a RemoteOptimizer shows. Only `shown` blocks."""

    def load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Load the state in a state_dict, and return the rest, which torch loads. Raises BadInput before a change."""

    def adopt_loaded(self) -> list[dict[str, Any]]:
        """Show the state again after torch has replaced it, and return the loaded groups."""

    def check_changes(self) -> None:
        """Follow a script that has replaced `state`, or raise BadModel for one that has changed it."""

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
        self.check_changes()
        return nullcontext()

    def of_member(self, member: Optimizer, wrapped: Optimizer, name: str) -> StateInTrainer:
        """Implement `WrappedState.of_member`."""
        return StateInTrainer(member, wrapped)

    def check_changes(self) -> None:
        """Implement `WrappedState.check_changes`."""
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
        self.check_changes()
        if self._engine is not None:
            with self._guard.noting_rollback():
                slots = self._engine.pull_optimizer_state(self._names.values())
            self._state.update(write_state(self._spec, full_groups(self._remote), self._names, slots))
        try:
            yield
        finally:
            dict.clear(self._state)

    def of_member(self, member: Optimizer, wrapped: Optimizer, name: str) -> StateOnPservers:
        """Implement `WrappedState.of_member`. The run has the state of `wrapped`."""
        names = {id(p): self._names[id(p)] for group in member.param_groups for p in group["params"]}
        return StateOnPservers(
            member, wrapped, self._spec.member(name), names, self._engine, self._session, self._guard
        )

    def load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Implement `WrappedState.load`. The state is pushed with the first step."""
        if self._guard.has_stepped:
            raise BadModel(
                "optimizer state is loaded before the first step only. Go back to a checkpoint of the run with "
                "`gradpost checkpoint restore`, or load the state in a new run"
            )
        slots = read_state(self._spec, full_groups(self._remote), self._names, state_dict)
        pairs = zip(self._remote.param_groups, state_dict["param_groups"], strict=True)
        if self._engine is not None:
            self._engine.load_optimizer_state(self._names.values(), slots)
        return {**state_dict, "state": {}, "param_groups": [{**group, **theirs} for group, theirs in pairs]}

    def adopt_loaded(self) -> list[dict[str, Any]]:
        """Implement `WrappedState.adopt_loaded`."""
        self._show()
        return self._remote.param_groups

    def check_changes(self) -> None:
        """Implement `WrappedState.check_changes`."""
        if any(one.state is not self._state for one in (self._remote, self._wrapped)) or any(self._state.values()):
            refuse_changes_of_state()
