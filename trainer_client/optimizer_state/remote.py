"""`state_dict` and `load_state_dict` of a `RemoteOptimizer` whose state lives on the pservers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from ps_protocol.optimizers import OptimizerSpec, StepState

from ..engines.pserver import PserverEngine
from .torch_state import OptimizerState, needed_slots, read_state, write_state


class RemoteOptimizerState:
    """The state of the optimizer that steps on the pservers."""

    def __init__(self, spec: OptimizerSpec, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """`names` are those of its parameters, by id. Raises BadModel for slots that no pserver could have."""
        self._spec = spec
        self._optimizer = optimizer
        self._names = names
        # Of steps that it has taken, or of a checkpoint: they are the run's initial slots.
        own = optimizer.state_dict() if optimizer.state else None
        self._initial: OptimizerState = {} if own is None else read_state(spec, self._groups(), names, own)
        self._engine: PserverEngine | None = None

    def begin(self, engine: PserverEngine | None) -> None:
        """Push the optimizer's own state to the run, and free it in the trainer.

        Without `engine` process 0 of this host talks to the pservers, and only process 0 has state to show.
        """
        self._engine = engine
        if self._initial:
            self.load(self._initial)
            self._optimizer.state.clear()
        self._initial = {}

    def _groups(self) -> list[dict[str, Any]]:
        """The groups; but torch's Adagrad fills its sums with its own argument, whatever a group says."""
        fixed = {key: value for key, value in self._optimizer.defaults.items() if key == "initial_accumulator_value"}
        return [{**group, **fixed} for group in self._optimizer.param_groups]

    @contextmanager
    def in_state(self, remote: Optimizer) -> Iterator[None]:
        """Put the state into `remote.state` within the block. Blocks for the pservers."""
        named = {self._names[id(p)]: (group, p) for group in remote.param_groups for p in group["params"]}

        def needed(name: str, state: StepState) -> tuple[str, ...]:
            group, parameter = named[name]
            return needed_slots(self._spec.name, group, state, parameter.dtype)

        if self._engine is not None:
            slots = self._engine.pull_optimizer_state(needed)
            remote.state.update(write_state(self._spec, self._groups(), self._names, slots))
        try:
            yield
        finally:
            dict.clear(remote.state)  # which is no reset by the script

    def read(self, state_dict: dict[str, Any]) -> tuple[OptimizerState, dict[str, Any]]:
        """Return the state in a state_dict, and its rest with complete groups. Raises BadModel."""
        groups = self._optimizer.param_groups
        slots = read_state(self._spec, self._groups(), self._names, state_dict)
        saved = state_dict["param_groups"]
        whole = [{**group, **theirs} for group, theirs in zip(groups, saved, strict=True)]
        return slots, {**state_dict, "state": {}, "param_groups": whole}

    def load(self, slots: OptimizerState) -> None:
        """Push this state with the next step. Does not block."""
        if self._engine is not None:
            self._engine.load_optimizer_state(slots)
