"""The choice of what steps where: `check_combination`, then `divide_work`, `start_engine` and `make_state`."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel, ModelMismatch
from ps_protocol.optimizers import (
    LOWEST_RANK,
    RULES,
    SPARSE_NUMBERS,
    HyperParameters,
    OptimizerSpec,
    check_sparse_numbers,
)
from ps_protocol.requests import Completion

from ..engines.engine import StepEngine, StepGradients
from ..engines.host import HostEngine
from ..engines.model_tensors import TrainedModel, digest_model, log_names
from ..engines.pserver import PserverEngine
from ..engines.ring import RingEngine
from ..engines.script_optimizers import CombinedOptimizer, LocalSteps, check_outer, members_of
from ..engines.torch_state import ParameterStates, full_groups, read_state
from ..session.collectives import Group, choose_device
from ..session.session import Session
from ..transport.tensors import Flattening
from .guard import ScriptGuard
from .wrapped_optimizer import RemoteState, describe_optimizer, read_hyper_parameters


def check_combination(session: Session, optimizer: Optimizer, model: TrainedModel, *, has_outer: bool) -> None:
    """Raise BadModel for settings, arguments and a model of a RemoteOptimizer that do not work together."""
    settings, rules = session.client.settings, session.client.joined.consistency
    local, pulls = settings.local_steps > 0, settings.overlap_pulls
    refused = (
        (rules.is_ring and (local or pulls), "local_steps and overlap_pulls need pservers, and the strategy is ring"),
        (not local and has_outer, "an outer optimizer needs local_steps"),
        (
            local and settings.overlap,
            "local_steps cannot be used with overlap: the pushed change is known only after the last local step",
        ),
        (
            local and rules.max_delay > 0,
            "local_steps cannot be used with max_delay: a delayed pull would overwrite the local steps since then",
        ),
        (
            local and bool(model.sparse),
            "local_steps do not support sparse gradients. Use local_steps=0, or create the Embedding with sparse=False",
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
            session.host is not None and rules.max_delay > 0,
            "max_delay needs trainers of one process: the other processes of this host wait for parameters in step(). "
            "Use one_trainer_per_host=False",
        ),
        (
            rules.is_async and LOWEST_RANK in model.averages.groups,
            "lowest_rank of buffers needs rounds, which asynchronous modes do not have. Use leave or average",
        ),
        (
            isinstance(optimizer, CombinedOptimizer)
            and (rules.is_async or rules.max_delay > 0 or local or settings.overlap),
            "several optimizers need mode sync or strategy ring, without max_delay, local_steps and overlap, which "
            "push or write parameters of one optimizer in a step of another. Use gradpost up --mode sync, without them",
        ),
        (
            session.client.is_declared,
            "a session has one RemoteOptimizer, for the parameters of all models; gradpost.wrap_optimizers wraps "
            "several optimizers. To begin again, as when a notebook's cell runs again, call session.close() or "
            "optimizer.session.close() first",
        ),
    )
    for is_refused, reason in refused:
        if is_refused:
            raise BadModel(reason)


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
    sparse_groups: frozenset[int]
    flattening: Flattening

    @property
    def num_optimizers(self) -> int:
        """The number of the script's optimizers. Each takes a step with a batch."""
        return max(1, len(self.spec.members))

    @property
    def has_rounds(self) -> bool:
        """True if each step is a round of all trainers."""
        return not self.is_async and self.local is None

    def read_numbers(self) -> list[HyperParameters]:
        """Return the hyperparameters for the pservers, if these step.

        Raises BadInput for those that sparse gradients do not allow.
        """
        numbers = [] if self.is_stepped_here else read_hyper_parameters(self.spec, self.optimizer)
        check_sparse_numbers(self.spec, self.sparse_groups, numbers or full_groups(self.optimizer))
        return numbers

    def contribute(self, parameters: Mapping[str, Tensor], is_finite: bool) -> StepGradients | None:
        """Return the contribution of a step of these parameters; None after a local step but the last."""
        if self.local is None:
            gradients = self.flattening.flatten(parameters)
        elif self.local.step():
            gradients, is_finite = self.local.outer_gradients(), True
        else:
            return None
        buffers: list[HyperParameters] = [{"lr": self.buffer_rate} for _ in self.model.averages.groups]
        return StepGradients(gradients, Completion(0, [*self.read_numbers(), *buffers]), is_finite)


def divide_work(session: Session, optimizer: Optimizer, outer: Optimizer | None, model: TrainedModel) -> DividedWork:
    """Return where an optimizer steps. Raises BadInput for one that no pserver can run, or for its state."""
    settings, rules = session.client.settings, session.client.joined.consistency
    stepped, local, is_stepped_here = optimizer, None, rules.is_ring or settings.strategy == "local"
    if settings.local_steps > 0:
        stepped = _make_outer(session, model) if outer is None else outer
        check_outer(optimizer, stepped)
        local = LocalSteps(optimizer, model.parameters, settings.local_steps)
    spec = describe_optimizer(stepped, steps_here=is_stepped_here)
    parameters = [each for each in model.describe(stepped)[0] if each.name in model.parameters]
    rules_of = {each.name: spec.rule(each.group) for each in parameters}
    return DividedWork(
        model,
        stepped,
        spec=spec,
        local=local,
        is_stepped_here=is_stepped_here,
        is_async=rules.is_async,
        # In asynchronous modes each step of N trainers moves the mean by an N-th of the way.
        buffer_rate=1 / session.world_size if rules.is_async else 1.0,
        initial_state={} if is_stepped_here else _read_own_state(stepped, model),
        sparse_groups=frozenset(each.group for each in parameters if each.is_sparse),
        flattening=Flattening(
            model.sparse,
            {name: rule for name, rule in rules_of.items() if rule in RULES and rule not in SPARSE_NUMBERS},
            *([] if is_stepped_here else [session.client.log.warning]),
        ),
    )


def _read_own_state(optimizer: Optimizer, model: TrainedModel) -> ParameterStates:
    found = [
        read_state(describe_optimizer(member), full_groups(member), model.names, member.state_dict())
        for member in members_of(optimizer).values()
        if member.state
    ]
    return {name: state for states in found for name, state in states.items()}


def _make_outer(session: Session, model: TrainedModel) -> Optimizer:
    # Without an average, N trainers would move the parameters N times as far.
    rate = 1 / session.client.joined.world_size if session.client.joined.consistency.is_async else 1.0
    return torch.optim.SGD(list(model.parameters.values()), lr=rate)


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
    digests = host.gather(digest_model(model, work.optimizer, work.spec, session.client.settings.local_steps, device))
    for process, digest in enumerate(digests):
        if digest != digests[0]:
            raise ModelMismatch(
                f"process {process} of this host differs from process 0 in its parameters, buffers, optimizer, device "
                "or local_steps. Run the same script with the same settings in both"
            )
    if not host.is_leader:
        return StartedEngine(HostEngine(session, host, model, device, None, work.local), None)
    with host.reporting_failure():
        started = _start_trainer(session, work, device)
    take_rows = {} if started.pserver is None else {"take_rows": started.pserver.take_rows}
    return started._replace(engine=HostEngine(session, host, model, device, started.engine, work.local, **take_rows))


def _start_trainer(session: Session, work: DividedWork, device: torch.device) -> StartedEngine:
    """Declare the model, and return the engine of this trainer in its run."""
    client, model = session.client, work.model
    parameters, stored = model.describe(work.optimizer)
    spec = work.spec.with_buffers(model.averages.groups)
    group, is_ring = Group(client, device), client.joined.consistency.is_ring
    client.declare(parameters, spec, stored, model.aliases, group.offer() if is_ring else None)
    if is_ring:
        group.open(client.run.rendezvous)
    if work.is_stepped_here:
        ring = RingEngine(session, model, work.optimizer, group, work.local)
        if is_ring:
            session.finish = ring.join_others
        return StartedEngine(ring, None)
    log_names(client.log, model)
    engine = PserverEngine(session, model, work.local)
    session.finish = engine.warn_of_last_steps
    if work.initial_state:
        engine.load_optimizer_state(model.parameters.keys(), work.initial_state)
    return StartedEngine(engine, engine)


def make_state(work: DividedWork, started: StartedEngine, session: Session, guard: ScriptGuard) -> RemoteState | None:
    """Return the state of an optimizer on the pservers; None for one that steps in the trainer."""
    if work.initial_state:
        work.optimizer.state.clear()  # the run has the state now
    if work.is_stepped_here or work.local is not None:
        return None
    return RemoteState(work.spec, work.model.names, started.pserver, session, guard)


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause garbage collection, which takes 40 % of a start with 20,000 parameters and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
