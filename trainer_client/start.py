"""The start of a run: the declaration of the model, and the initial values in the script's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.optimizers import OptimizerSpec
from ps_protocol.vocabulary import ParameterSpec

from .buffer_averages import BufferAverages
from .collectives import choose_device
from .host.follower import FollowerSteps
from .host.leader import LeaderSteps
from .local_steps import LocalSteps
from .model_tensors import describe_model
from .optimizer_state.remote import RemoteOptimizerState
from .ring.group import Group
from .ring.steps import RingSteps
from .session import Session
from .steps import Steps
from .tensors import wire_dtype

AnySteps: TypeAlias = Steps | RingSteps | LeaderSteps | FollowerSteps


class TrainedModel(NamedTuple):
    """The tensors of a model that take part in a run, by name."""

    parameters: Mapping[str, Tensor]
    averages: BufferAverages
    stored: Mapping[str, Tensor]  # pulled once: other buffers, and frozen parameters
    aliases: Mapping[str, str]  # further names of tied tensors


def start_steps(
    session: Session,
    model: TrainedModel,
    optimizer: Optimizer,
    spec: OptimizerSpec,
    local: LocalSteps | None,
    state: RemoteOptimizerState | None,
) -> AnySteps:
    """Declare the model, wait for all trainers and pservers, and take the values that the run begins with."""
    named, averages, stored_tensors, aliases = model
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    parameters = [ParameterSpec(name, tuple(p.shape), wire_dtype(name, p), groups[id(p)]) for name, p in named.items()]
    parameters += averages.specs(group=len(optimizer.param_groups))
    stored = [(name, tuple(t.shape), wire_dtype(name, t)) for name, t in stored_tensors.items()]

    def declare() -> Steps | RingSteps:
        client, is_ring = session.client, session.client.joined.consistency.is_ring
        group = Group(session, choose_device(named)) if is_ring else None
        rendezvous = None if group is None else group.offer()
        declared = spec.with_means() if averages.means else spec
        session.io.run(client.declare(parameters, declared, stored, aliases, rendezvous))
        if group is None:
            steps = Steps(session, named, stored_tensors, local, averages)
            assert state is not None  # there are pservers
            state.begin(steps, leads=session.host is not None)
            return steps
        group.open(client.rendezvous)
        ring = RingSteps(session, named, stored_tensors, optimizer, group, averages)
        session.join_others = ring.join_others
        return ring

    if (host := session.host) is None:
        return declare()
    num_local_steps, device = session.client.settings.local_steps, choose_device(named).type
    digests = describe_model(parameters, stored, spec, local_steps=num_local_steps, device=device)
    if host.is_leader:
        return LeaderSteps(session, host, named, averages, stored_tensors, digests, declare)
    follower = FollowerSteps(session, host, named, averages, stored_tensors, digests, local)
    if state is not None:
        state.begin(None)
    return follower
