"""The program of each process of two hosts under torchrun: one run after the other.

    torchrun … host_script.py FOLDER NAME…

Each NAME is in `WORK` below. What it returns is saved as FOLDER/NAME-RANK.pt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ps_protocol.errors import BadModel, GradpostError, ModelMismatch, NonFiniteGradient
from tests.cluster.test_engines import follow_contract
from tests.cluster.training import (
    NET_STEPS,
    Parameters,
    Wait,
    make_optimizer,
    make_parameters,
    set_gradients,
    start_everywhere,
    step_with,
    train_net,
    train_remotely,
)
from trainer_client import GradScaler, RemoteOptimizer, Session, connect
from trainer_client.engines.host import HostLeader


def late(session: Session, **arguments: Any) -> dict[str, Tensor]:
    found = train_net(session, **arguments)
    assert session.round == NET_STEPS
    if session.host is None or session.host.is_leader:  # to the others it may be that of the next run already
        assert session.summary().rounds == NET_STEPS
    assert session.mode == "sync"
    return found


def streaming(session: Session) -> dict[str, Tensor]:
    """Wait in the first layer's backward for a bucket of the others, which goes on to the pservers at once."""
    model = nn.ModuleList([nn.Linear(30, 30) for _ in range(4)])
    optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, overlap=True)
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


def clipped(session: Session) -> dict[str, Tensor]:
    """Return the norm of the aggregated gradient, which every process knows."""
    parameters = make_parameters()
    optimizer = RemoteOptimizer(make_optimizer("AdamW", parameters, local=False), max_grad_norm=1e9)
    norms = []
    for step in range(3):
        set_gradients(parameters, step, session.rank)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return {"norms": torch.tensor(norms)}


def unequal(session: Session) -> dict[str, Tensor]:
    """Train with sets of gradients of its own in each process; `bias` has none anywhere in some steps."""
    return train_remotely(
        "AdamW", session, contributor=session.rank, before_step=partial(drop_gradients, rank=session.rank), steps=6
    )


def drop_gradients(step: int, parameters: Parameters, rank: int) -> None:
    if rank == step % 4:
        parameters["wide"].grad = None
    if rank != 3:
        parameters["scale"].grad = None


def scaled(session: Session, **arguments: Any) -> dict[str, Tensor]:
    """Train with our GradScaler, whose scale is that of all processes."""
    model = nn.Linear(4, 2)
    optimizer = RemoteOptimizer(
        torch.optim.SGD(model.named_parameters(), lr=0.5), nonfinite="skip_round", bucket_bytes=4, **arguments
    )
    scaler = GradScaler(optimizer, "cpu", init_scale=1024.0, growth_interval=2)
    biases, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        factor = 1e38 if session.rank == 3 and step == 3 else 1.0
        scales.append(scaler.get_scale())
        scaler.scale((model(torch.ones(1, 4)) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        biases.append(model.bias.detach().clone())
    return {"biases": torch.stack(biases), "scales": torch.tensor(scales)}


def kept(session: Session) -> dict[str, Tensor]:
    """Save and load in every process, as libraries do; only one of a host has slots."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0, momentum=0.5))
    optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        step_with(optimizer, weight)
    saved = optimizer.state_dict()
    assert (saved["state"] != {}) == (session.rank % 2 == 0)
    if session.rank == 0:  # which has the lowest rank's
        saved["state"][0]["momentum_buffer"].zero_()
    optimizer.load_state_dict(saved)
    step_with(optimizer, weight)
    return {"weight": weight.detach()}


def sharing(session: Session) -> dict[str, Tensor]:
    """Train beside a process group of the script, of all processes."""
    dist.init_process_group("gloo")
    weight = nn.Parameter(torch.zeros(3))
    optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0))
    total = torch.ones(1)
    for _ in range(3):
        step_with(optimizer, weight, value=float(session.rank))
        dist.all_reduce(total)
    dist.destroy_process_group()
    return {"weight": weight.detach(), "total": total}


def refused(session: Session) -> dict[str, Tensor]:
    """Push a NaN, which is refused for all processes of the host; corrected, it may be tried again."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0))
    told = 0
    for round_ in (1, 2, 3):
        weight.grad = torch.full((4,), float(round_))
        if session.rank == 3 and round_ == 2:
            weight.grad[1] = float("nan")
        try:
            optimizer.step()
        except NonFiniteGradient as error:
            assert "trainer 1" in str(error)  # noqa: PT017
            told += 1
            weight.grad.fill_(float(round_))
            optimizer.step()
        assert optimizer.round == round_
    return {"weight": weight.detach(), "told": torch.tensor(told)}


def broken_off(session: Session) -> dict[str, Tensor]:
    """Fail a step of the second host after its push; then another gradient is refused, and the same one is not."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0))
    pull, errors = session.client.pull, []

    async def fail(*_: Any, **__: Any) -> Any:
        session.client.pull = pull
        raise GradpostError("an unexpected error")

    if session.rank == 2:
        session.client.pull = fail
    for gradient in (1.0, 2.0, 1.0) if session.rank >= 2 else (1.0,):
        weight.grad = torch.full((4,), gradient)
        try:
            optimizer.step()
        except GradpostError as error:
            errors.append(str(error))
    if session.rank >= 2:
        assert errors[0] == "an unexpected error"
        assert errors[1].endswith("this one is another. The script has to end, and may be started again")
    return {"weight": weight.detach()}


def pulling(session: Session) -> dict[str, Tensor]:
    model = nn.Linear(4, 2)
    try:
        RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, overlap=True, overlap_pulls=True)
    except BadModel as error:
        assert "overlap_pulls is for trainers that are one process" in str(error)  # noqa: PT017
        return {}
    raise AssertionError("it was not refused")


def averaging(session: Session) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
    with torch.no_grad():
        model[1].running_mean.fill_(session.rank)
    (sum(p.sum() for p in model.parameters()) * 0).backward()
    optimizer.step()
    return dict(model.named_buffers())


def different(session: Session) -> dict[str, Tensor]:
    model = nn.Linear(4, 2 + session.rank % 2)
    try:
        RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    except ModelMismatch as error:
        assert "process 1 of this host is about to train something else than process 0: parameters" in str(error)  # noqa: PT017
        return {}
    raise AssertionError("it was not refused")


def delayed(session: Session) -> dict[str, Tensor]:
    return train_remotely("AdamW", session, contributor=session.rank, steps=6)


FUNCTIONS = (late, streaming, clipped, unequal, scaled, kept, sharing, refused, broken_off, pulling)
WORK = {
    **{function.__name__: function for function in (*FUNCTIONS, averaging, different, delayed)},
    "early": partial(late, overlap=True),
    "scaled_early": partial(scaled, overlap=True),
    "start": start_everywhere,
    "contract": follow_contract,
}


def play(environment: Mapping[str, str], folder: Path, names: Sequence[str]) -> None:
    """Run all of these in this process, one after the other."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    for name in names:
        with connect(bucket_bytes=2000) as session:
            torch.save(WORK[name](session), folder / f"{name}-{session.rank}.pt")


if __name__ == "__main__":
    play({}, Path(sys.argv[1]), sys.argv[2:])
