"""The choice of a step engine: `check_combination` of settings, then `start_engine`, then `make_state`."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.optimizers import LOWEST_RANK

from ..engines.collective.host import HostFollower, HostLeader
from ..engines.collective.ring import RingEngine
from ..engines.collective.ring_group import Group
from ..engines.combined_optimizer import CombinedOptimizer
from ..engines.engine import StepEngine
from ..engines.local import LocalEngine
from ..engines.model_tensors import TrainedModel, check_alike, describe_model, log_names
from ..engines.pserver import PserverEngine
from ..session.collectives import choose_device
from ..session.session import Session
from .divided_work import DividedWork
from .guard import ScriptGuard
from .wrapped_state import StateInTrainer, StateOnPservers, WrappedState


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
    if not local and model.module is not None:
        _check_embeddings(model.module, model.parameters.values())


def _check_embeddings(module: nn.Module, trained: Collection[Tensor]) -> None:
    identities = set(map(id, trained))
    for name, part in module.named_modules():
        has_max_norm = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
        if has_max_norm and id(part.weight) in identities:
            raise BadModel(
                f"module {name!r} has max_norm, which writes to its weight in each forward pass, and the next pull "
                "would overwrite that; normalise the vectors in forward instead, with torch.nn.functional.normalize"
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
    host.connect()
    first, *others = host.gather(digests)
    for process, theirs in enumerate(others, 1):
        check_alike(first, theirs, process)
    if not host.is_leader:
        return StartedEngine(HostFollower(session, host, model, device, work.local), None)
    with host.reporting_failure():
        started = _start_trainer(session, work, device)
    return started._replace(engine=HostLeader(session, host, model, device, started.engine))


def _start_trainer(session: Session, work: DividedWork, device: torch.device) -> StartedEngine:
    """Declare the model, and return the engine of this trainer in its run."""
    client, model = session.client, work.model
    parameters, stored = model.describe(work.optimizer)
    spec = work.spec.with_buffers(model.averages.groups)
    group = Group(session, device) if client.joined.consistency.is_ring else None
    rendezvous = None if group is None else group.offer()
    client.declare(parameters, spec, stored, model.aliases, rendezvous)
    if group is not None:
        group.open(client.run.rendezvous)
        ring = RingEngine(session, model, work.optimizer, group)
        session.finish = ring.join_others
        return StartedEngine(ring, None)
    if work.is_stepped_here:
        return StartedEngine(LocalEngine(session, model, work.optimizer, work.local), None)
    log_names(client.log, model)
    engine = PserverEngine(session, model, work.local)
    session.finish = engine.warn_of_last_steps
    if work.initial_state:
        engine.load_optimizer_state(model.parameters.keys(), work.initial_state)
    return StartedEngine(engine, engine)


def make_state(
    remote: Optimizer,
    wrapped: Optimizer,
    work: DividedWork,
    started: StartedEngine,
    session: Session,
    guard: ScriptGuard,
) -> WrappedState:
    """Return the `state` that a RemoteOptimizer shows."""
    if work.initial_state:
        work.optimizer.state.clear()  # the run has the state now
    if work.is_stepped_here or work.local is not None:
        return StateInTrainer(remote, wrapped)
    return StateOnPservers(remote, wrapped, work.spec, work.model.names, started.pserver, session, guard)
