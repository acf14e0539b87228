"""`DividedWork`: the model and the optimizers of a script, where they step, and the contribution of each step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from ps_protocol.optimizers import HyperParameters, OptimizerSpec
from ps_protocol.requests import Completion

from ..engines.combined_optimizer import members_of
from ..engines.engine import StepGradients
from ..engines.local_steps import LocalSteps, check_outer
from ..engines.model_tensors import TrainedModel
from ..engines.torch_state import ParameterStates, own_state
from ..session.session import Session
from ..transport.tensors import Flattening
from .wrapped_optimizer import describe_local_optimizer, describe_optimizer, read_hyper_parameters


@dataclass(frozen=True)
class DividedWork:
    """The model and the optimizers of a script, and where they step."""

    model: TrainedModel
    optimizer: Optimizer  # steps on the pservers; in a ring on each trainer
    spec: OptimizerSpec
    local: LocalSteps | None  # before each of its steps
    is_stepped_here: bool  # `optimizer` steps in the trainer, in a ring or without a cluster
    is_async: bool
    buffer_rate: float  # the learning rate of buffers
    initial_state: ParameterStates  # the state of `optimizer` from its own steps or a checkpoint
    flattening: Flattening = field(default_factory=Flattening)

    @property
    def num_optimizers(self) -> int:
        """The number of the script's optimizers. Each takes a step with a batch."""
        return max(1, len(self.spec.members))

    @property
    def has_rounds(self) -> bool:
        """True if each step is a round of all trainers."""
        return not self.is_async and self.local is None

    def contribute(self, is_finite: bool) -> StepGradients | None:
        """Return the contribution of a step; None after a local step but the last."""
        if self.local is None:
            gradients = self.flattening.flatten(self.model.parameters)
        elif self.local.step():
            gradients, is_finite = self.local.outer_gradients(), True
        else:
            return None
        found = [] if self.is_stepped_here else read_hyper_parameters(self.spec, self.optimizer)
        buffers: list[HyperParameters] = [{"lr": self.buffer_rate} for _ in self.model.averages.groups]
        return StepGradients(gradients, Completion(0, [*found, *buffers]), is_finite)


def divide_work(session: Session, optimizer: Optimizer, outer: Optimizer | None, model: TrainedModel) -> DividedWork:
    """Return where an optimizer steps. Raises BadInput for one that no pserver can run, or for its state."""
    settings, rules = session.client.settings, session.client.joined.consistency
    stepped, local, is_stepped_here = optimizer, None, rules.is_ring or settings.strategy == "local"
    if settings.local_steps > 0:
        stepped = _make_outer(session, model) if outer is None else outer
        check_outer(optimizer, stepped)
        local = LocalSteps(optimizer, model.parameters, settings.local_steps)
    return DividedWork(
        model,
        stepped,
        spec=(describe_local_optimizer if is_stepped_here else describe_optimizer)(stepped),
        local=local,
        is_stepped_here=is_stepped_here,
        is_async=rules.is_async,
        # In asynchronous modes each step of N trainers moves the mean by an N-th of the way.
        buffer_rate=1 / session.world_size if rules.is_async else 1.0,
        initial_state={} if is_stepped_here else _read_own_state(stepped, model),
    )


def _read_own_state(optimizer: Optimizer, model: TrainedModel) -> ParameterStates:
    members = members_of(optimizer).values()
    found = [own_state(describe_optimizer(member), member, model.names) for member in members]
    return {name: state for states in found for name, state in states.items()}


def _make_outer(session: Session, model: TrainedModel) -> Optimizer:
    # Without an average, N trainers would move the parameters N times as far.
    rate = 1 / session.client.joined.world_size if session.client.joined.consistency.is_async else 1.0
    return torch.optim.SGD(list(model.parameters.values()), lr=rate)
