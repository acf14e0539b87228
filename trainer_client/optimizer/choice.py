"""The choice of a step engine: `check_combination`, then `divide_work`, then `start_engine`, then `make_state`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.optimizers import HyperParameters, OptimizerSpec
from ps_protocol.requests import Completion

from ..engines.engine import StepEngine, StepGradients
from ..engines.host import HostFollower, HostLeader
from ..engines.local import LocalEngine
from ..engines.local_steps import LocalSteps, check_outer
from ..engines.model_tensors import TrainedModel, check_alike, describe_model, log_names
from ..engines.pserver import PserverEngine
from ..engines.ring import RingEngine
from ..engines.ring_group import Group
from ..engines.torch_state import ParameterStates, own_state
from ..session.collectives import choose_device
from ..session.session import Session
from ..transport.tensors import Flattening
from .parameter_watch import check_model
from .wrapped_optimizer import describe_local_optimizer, describe_optimizer, read_hyper_parameters
from .wrapped_state import StateInTrainer, StateOnPservers, WrappedState


def check_combination(session: Session, model: TrainedModel, *, has_outer: bool) -> None:
    """Raise BadModel for settings, arguments and a model of a RemoteOptimizer that do not work together."""
    settings, rules = session.client.settings, session.client.joined.consistency
    local, pulls = settings.local_steps > 0, settings.overlap_pulls
    refused = (
        (rules.is_ring and (local or pulls), "local_steps and overlap_pulls need pservers, and the strategy is ring"),
        (
            not local and (has_outer or settings.outer_is_set),
            "an outer optimizer (outer, outer_lr, …) needs local_steps",
        ),
        (
            local and settings.overlap,
            "local_steps cannot be used with overlap: the pushed change is known only after the last local step",
        ),
        (
            local and rules.max_delay > 0,
            "local_steps cannot be used with max_delay: a delayed pull would overwrite the local steps since then",
        ),
        (
            rules.is_async and settings.overlap and settings.max_grad_norm is not None,
            "max_grad_norm cannot be used with overlap in asynchronous modes, where a trainer clips its whole gradient "
            "before it sends any: set overlap=False",
        ),
        (
            pulls and model.module is None,
            "overlap_pulls needs RemoteOptimizer(…, model=model), whose modules wait for parameters",
        ),
        (pulls and not settings.overlap, "overlap_pulls needs overlap=True"),
        (
            pulls and session.host is not None,
            "overlap_pulls needs trainers of one process: the other processes of this host wait for parameters in "
            "step(). Use overlap alone, or one_trainer_per_host=False",
        ),
        (
            pulls and rules.max_delay > 0,
            "overlap_pulls cannot be used with max_delay, whose pulls run beside the computation anyway",
        ),
        (
            session.client.is_declared,
            "a session has one RemoteOptimizer, which takes the parameters of all models, as groups. To make another, "
            "as when a notebook's cell runs again, call session.close() or optimizer.session.close() first",
        ),
    )
    for is_refused, reason in refused:
        if is_refused:
            raise BadModel(reason)
    if not local:
        check_model(model.module, model.parameters.values())


@dataclass(frozen=True)
class DividedWork:
    """The model and the optimizers of a script, and where they step."""

    model: TrainedModel
    optimizer: Optimizer  # steps on the pservers; in a ring on each trainer
    spec: OptimizerSpec
    local: LocalSteps | None  # before each of its steps
    is_stepped_here: bool  # `optimizer` steps in the trainer, in a ring or without a cluster
    is_async: bool
    mean_rate: float | None  # the learning rate of the means of buffers; None if there are none
    initial_state: ParameterStates  # the state of `optimizer` from its own steps or a checkpoint
    flattening: Flattening = field(default_factory=Flattening)

    @property
    def is_wrapped_stepping(self) -> bool:
        """True if the wrapped optimizer steps in the trainer."""
        return self.is_stepped_here or self.local is not None

    @property
    def shares_rounds(self) -> bool:
        """True if every step is a round of all trainers, which have its outcome in common."""
        return not self.is_async and self.local is None

    def contribute(self, is_finite: bool, scaler: list[HyperParameters]) -> StepGradients | None:
        """Return the contribution of a step, with the state of a GradScaler; None after a local step but the last."""
        if self.local is None:
            gradients = self.flattening.flatten(self.model.parameters)
        elif self.local.step():
            gradients, is_finite = self.local.outer_gradients(), True
        else:
            return None
        found = [] if self.is_stepped_here else read_hyper_parameters(self.spec, self.optimizer)
        means: list[HyperParameters] = [] if self.mean_rate is None else [{"lr": self.mean_rate}]
        return StepGradients(gradients, Completion(0, [*found, *means, *scaler]), is_finite)


def divide_work(session: Session, optimizer: Optimizer, outer: Optimizer | None, model: TrainedModel) -> DividedWork:
    """Return where an optimizer steps. Raises BadInput for one that no pserver can run, or for its state."""
    settings, rules = session.client.settings, session.client.joined.consistency
    stepped, local, is_stepped_here = optimizer, None, rules.is_ring or settings.strategy == "local"
    if settings.local_steps > 0:
        stepped = _make_outer(session, model) if outer is None else outer
        check_outer(optimizer, stepped)
        local = LocalSteps(optimizer, model.parameters, settings.local_steps)
    # In asynchronous modes each step of N trainers moves the mean by an N-th of the way.
    mean_rate = 1 / session.world_size if rules.is_async else 1.0
    return DividedWork(
        model,
        stepped,
        spec=describe_local_optimizer(stepped) if rules.is_ring else describe_optimizer(stepped),
        local=local,
        is_stepped_here=is_stepped_here,
        is_async=rules.is_async,
        mean_rate=mean_rate if model.averages.means else None,
        initial_state={} if is_stepped_here else own_state(describe_optimizer(stepped), stepped, model.names),
    )


def _make_outer(session: Session, model: TrainedModel) -> Optimizer:
    settings, joined = session.client.settings, session.client.joined
    # Without an average, N trainers would move the parameters N times as far.
    mean = 1 / joined.world_size if joined.consistency.is_async else 1.0
    return torch.optim.SGD(
        list(model.parameters.values()),
        lr=mean if settings.outer_lr is None else settings.outer_lr,
        momentum=settings.outer_momentum,
        nesterov=settings.outer_nesterov,
    )


class StartedEngine(NamedTuple):
    """The engine of a process, and the engine that uses the pservers: the same engine, or that of a host's leader."""

    engine: StepEngine
    pserver: PserverEngine | None  # None without pservers, and in the processes of a host that only follow


def start_engine(session: Session, work: DividedWork) -> StartedEngine:
    """Declare the model, wait for all trainers and pservers, and pull the values that the run begins with."""
    host, model = session.host, work.model
    device = choose_device(model.parameters)
    if host is None:
        return _start_trainer(session, work, device)
    parameters, stored = model.describe(work.optimizer)
    local_steps = session.client.settings.local_steps
    digests = describe_model(parameters, stored, work.spec, local_steps=local_steps, device=device.type)
    if not host.is_leader:
        return StartedEngine(HostFollower(session, host, model, digests, device, work.local), None)
    with host.reporting_failure():
        for process, line in enumerate(host.receive("model"), 1):
            check_alike(digests, line["model"], process)
        started = _start_trainer(session, work, device)
        return started._replace(engine=HostLeader(session, host, model, device, started.engine))


def _start_trainer(session: Session, work: DividedWork, device: torch.device) -> StartedEngine:
    """Declare the model, and return the engine of this trainer in its run."""
    client, model = session.client, work.model
    parameters, stored = model.describe(work.optimizer)
    spec = work.spec.with_means() if model.averages.means else work.spec
    group = Group(session, device) if client.joined.consistency.is_ring else None
    rendezvous = None if group is None else group.offer()
    session.io.run(client.declare(parameters, spec, stored, model.aliases, rendezvous))
    if group is not None:
        group.open(client.run.rendezvous)
        ring = RingEngine(session, model, work.optimizer, group)
        session.call_at_close(ring.join_others)
        return StartedEngine(ring, None)
    if work.is_stepped_here:
        return StartedEngine(LocalEngine(session, model, work.optimizer, work.local), None)
    log_names(client.log, model)
    engine = PserverEngine(session, model, work.local)
    if work.initial_state:
        engine.load_optimizer_state(work.initial_state)
    return StartedEngine(engine, engine)


def make_state(remote: Optimizer, wrapped: Optimizer, work: DividedWork, started: StartedEngine) -> WrappedState:
    """Return the `state` that a RemoteOptimizer shows."""
    if work.initial_state:
        work.optimizer.state.clear()  # the run has the state now
    if work.is_wrapped_stepping:
        return StateInTrainer(remote, wrapped)
    return StateOnPservers(remote, work.spec, work.model.names, started.pserver)
