"""The choice of a step engine: settings that do not work together, and the engine that follows from the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.optimizers import OptimizerSpec

from ..collectives import choose_device
from ..model_tensors import TrainedModel, describe_model
from ..optimizer_state.remote import RemoteOptimizerState
from ..session import Session
from .engine import StepEngine
from .host import HostFollower, HostLeader
from .local_steps import LocalSteps, check_outer
from .pserver import PserverEngine
from .ring import RingEngine
from .ring_group import Group


def check_combination(session: Session, *, has_model: bool, has_outer: bool) -> None:
    """Raise BadModel for settings and arguments of a RemoteOptimizer that do not work together."""
    settings, rules = session.client.settings, session.client.joined.consistency
    local, pulls = settings.local_steps > 0, settings.overlap_pulls
    refused = (
        (rules.is_ring and (local or pulls), "local_steps and overlap_pulls need pservers, and the strategy is ring"),
        (
            not local and (has_outer or settings.outer_is_set),
            "an outer optimizer (outer, outer_lr, …) has work only with local_steps",
        ),
        (
            local and settings.overlap,
            "local_steps with overlap: what is pushed is there only when the last step has been taken",
        ),
        (
            local and rules.max_delay > 0,
            "local_steps with max_delay: what was stepped here meanwhile would be overwritten",
        ),
        (
            pulls and not has_model,
            "overlap_pulls needs RemoteOptimizer(…, model=model), whose modules wait for parameters",
        ),
        (pulls and not settings.overlap, "overlap_pulls needs overlap=True"),
        (
            pulls and session.host is not None,
            "overlap_pulls is for trainers that are one process: the others of this host wait for parameters in "
            "step(). Use overlap without it, or one_trainer_per_host=False",
        ),
        (pulls and rules.max_delay > 0, "overlap_pulls with max_delay: pulls come behind the computation already"),
    )
    for is_refused, reason in refused:
        if is_refused:
            raise BadModel(reason)


def divide_work(
    session: Session, optimizer: Optimizer, outer: Optimizer | None, parameters: Mapping[str, Tensor]
) -> tuple[Optimizer, LocalSteps | None]:
    """Return the optimizer that steps on the pservers, or in a ring, and the local steps before each of its steps."""
    settings, joined = session.client.settings, session.client.joined
    if settings.local_steps == 0:
        return optimizer, None
    if outer is None:
        # Without an average, N trainers would move the parameters N times as far.
        mean = 1 / joined.world_size if joined.consistency.is_async else 1.0
        outer = torch.optim.SGD(
            list(parameters.values()),
            lr=mean if settings.outer_lr is None else settings.outer_lr,
            momentum=settings.outer_momentum,
            nesterov=settings.outer_nesterov,
        )
    check_outer(optimizer, outer)
    return outer, LocalSteps(optimizer, parameters, settings.local_steps)


def start_engine(
    session: Session,
    model: TrainedModel,
    optimizer: Optimizer,
    spec: OptimizerSpec,
    local: LocalSteps | None,
    state: RemoteOptimizerState | None,
) -> StepEngine:
    """Declare the model, wait for all trainers and pservers, and return an engine with the values of the run's start.

    `state` is that of an optimizer that steps on the pservers.
    """
    client, host = session.client, session.host
    device = choose_device(model.parameters)
    parameters, stored = model.describe(optimizer)

    def declare() -> StepEngine:
        group = Group(session, device) if client.joined.consistency.is_ring else None
        rendezvous = None if group is None else group.offer()
        declared = spec.with_means() if model.averages.means else spec
        session.io.run(client.declare(parameters, declared, stored, model.aliases, rendezvous))
        if group is None:
            engine = PserverEngine(session, model, local)
            assert state is not None  # there are pservers
            state.begin(engine)
            return engine
        group.open(client.rendezvous)
        ring = RingEngine(session, model, optimizer, group)
        session.join_others = ring.join_others
        return ring

    if host is None:
        return declare()
    digests = describe_model(parameters, stored, spec, local_steps=client.settings.local_steps, device=device.type)
    if host.is_leader:
        return HostLeader(session, host, model, digests, device, declare)
    follower = HostFollower(session, host, model, digests, device, local)
    if state is not None:
        state.begin(None)
    return follower
