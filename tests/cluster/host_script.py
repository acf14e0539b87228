"""Runs of each process of two hosts, one after the other.

Each function checks what it finds. It returns what is the same in all processes, which is saved as FOLDER/NAME-RANK.pt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ps_protocol.errors import ModelMismatch
from tests.cluster.trainer_processes import NUM_HOSTS, PROCESSES, WORLD
from tests.cluster.training import (
    NET_STEPS,
    Parameters,
    Wait,
    assert_close,
    average,
    change_rates,
    make_optimizer,
    make_parameters,
    set_gradients,
    start_everywhere,
    step_with,
    train_net,
    train_remotely,
    values,
    wrap_model,
    wrap_weight,
)
from trainer_client import Session, connect
from trainer_client.engines.collective.host import HostLeader

ROUNDING = 1e-5


def late(session: Session, **arguments: Any) -> dict[str, Tensor]:
    found = train_net(session, max_grad_norm=1e9, **arguments)  # a limit that is never reached changes no bit
    assert session.client.results.grad_norm is not None  # every process knows the norm of the aggregated gradient
    assert session.round == NET_STEPS
    if session.host is None or session.host.is_leader:  # to the others it may be that of the next run already
        assert session.summary().rounds == NET_STEPS
    assert session.mode == "sync"
    return found


def streaming(session: Session) -> dict[str, Tensor]:
    """Wait in the first layer's backward for a bucket of the others, which goes on to the pservers at once."""
    model = nn.ModuleList([nn.Linear(30, 30) for _ in range(4)])
    optimizer = wrap_model(session, model, overlap=True)
    assert session.host
    collectives = session.host.collectives
    hidden = torch.ones(2, 30)
    for layer in model:
        hidden = layer(hidden)
        if layer is model[0]:
            hidden = Wait.apply(hidden, lambda: collectives.has_ended(0))
    hidden.sum().backward()
    if isinstance(optimizer._engine, HostLeader):
        assert optimizer._engine._num_handed_on > 0
    optimizer.step()
    return {}


def mean_gradients(
    parameters: Parameters, step: int, drop: Callable[..., None] = lambda *_, **__: None
) -> list[Tensor | None]:
    """Return the aggregated gradients of all processes, each of which drops some."""
    gradients = []
    for rank in range(WORLD):
        set_gradients(parameters, step, rank)
        drop(step, parameters, rank=rank)
        gradients.append([parameter.grad for parameter in parameters.values()])
    return average(gradients)


def unequal(session: Session) -> dict[str, Tensor]:
    """Train with sets of gradients of its own in each process; `bias` has none anywhere in some steps."""
    found = train_remotely(
        "AdamW", session, contributor=session.rank, before_step=partial(drop_gradients, rank=session.rank), steps=6
    )
    parameters = make_parameters()
    optimizer = make_optimizer("AdamW", parameters, local=True)
    for step in range(6):
        means = mean_gradients(parameters, step, drop_gradients)
        for parameter, mean in zip(parameters.values(), means, strict=True):
            parameter.grad = mean
        assert (parameters["bias"].grad is not None) == (step % 4 != 1)
        optimizer.step()
        change_rates(optimizer, step)
    assert_close(found, values(parameters), ROUNDING, ROUNDING)
    return found


def drop_gradients(step: int, parameters: Parameters, rank: int) -> None:
    if rank == step % 4:
        parameters["wide"].grad = None
    if rank != 3:
        parameters["scale"].grad = None


def start(session: Session) -> dict[str, Tensor]:
    found = start_everywhere(session)
    assert {tensor.double().mean().item() for tensor in found.values()} == {5.0, 1.0}
    return found


def sharing(session: Session) -> dict[str, Tensor]:
    """Train beside a process group of the script, of all processes."""
    dist.init_process_group("gloo")
    weight, optimizer = wrap_weight(session, 3)
    total = torch.ones(1)
    for _ in range(3):
        step_with(optimizer, weight, value=float(session.rank))
        dist.all_reduce(total)
    dist.destroy_process_group()
    assert weight.tolist() == [-4.5] * 3
    assert total.item() == WORLD**3
    return {}


def averaging(session: Session) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    optimizer = wrap_model(session, model, lr=0.0)
    with torch.no_grad():
        model[1].running_mean.fill_(session.rank)
    (sum(p.sum() for p in model.parameters()) * 0).backward()
    optimizer.step()
    # The mean of the first processes' buffers.
    assert model[1].running_mean.tolist() == [PROCESSES * (NUM_HOSTS - 1) / 2] * 2
    return {}


def different(session: Session) -> dict[str, Tensor]:
    model = nn.Linear(4, 2 + session.rank % 2)
    try:
        wrap_model(session, model)
    except ModelMismatch as error:
        assert "process 1 of this host differs from process 0 in parameters" in str(error)  # noqa: PT017
        return {}
    raise AssertionError("it was not refused")


def delayed(session: Session) -> dict[str, Tensor]:
    return train_remotely("AdamW", session, contributor=session.rank, steps=6)


IN_SYNC: dict[str, Callable[[Session], dict[str, Tensor]]] = {
    "the results are those of one process": late,
    "overlap changes no bit": partial(late, overlap=True),
    "buckets go on while backward runs": streaming,
    "processes may have different gradients": unequal,
    "all start from the same buffers": start,
    "a script's own process group stays its own": sharing,
    "different models are refused in all processes": different,
    "all processes get the mean of the first processes' buffers": averaging,
}
WORK = {**IN_SYNC, "delayed": delayed}


def play(environment: Mapping[str, str], folder: Path, names: Sequence[str]) -> None:
    """Run all of these in this process, one after the other."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    for name in names:
        with connect(bucket_bytes=2000) as session:
            torch.save(WORK[name](session), folder / f"{name}-{session.rank}.pt")
