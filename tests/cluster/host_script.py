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

from ps_protocol.errors import GradpostError, ModelMismatch
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
from trainer_client import GradScaler, RemoteOptimizer, Session, connect
from trainer_client.engines.collective.host import HostLeader

ROUNDING = 1e-5


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


def clipped(session: Session) -> dict[str, Tensor]:
    """Compare the norm of the aggregated gradient, which every process knows."""
    parameters = make_parameters()
    optimizer = RemoteOptimizer(make_optimizer("AdamW", parameters, local=False), max_grad_norm=1e9)
    for step in range(3):
        set_gradients(parameters, step, session.rank)
        optimizer.step()
        means = [mean.reshape(-1) for mean in mean_gradients(make_parameters(), step) if mean is not None]
        torch.testing.assert_close(optimizer.grad_norm, float(torch.cat(means).norm()), rtol=ROUNDING, atol=ROUNDING)
    return values(parameters)


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


def scaled(session: Session, *, delay: int = 0, **arguments: Any) -> dict[str, Tensor]:
    """Train with our GradScaler, whose scale is that of all processes."""
    model = nn.Linear(4, 2)
    optimizer = wrap_model(session, model, lr=0.5, nonfinite="skip_round", bucket_bytes=4, **arguments)
    scaler = GradScaler(optimizer, "cpu", init_scale=1024.0, growth_interval=2)
    biases, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        factor = 1e38 if session.rank == 3 and step == 3 else 1.0
        scales.append(scaler.get_scale())
        scaler.scale((model(torch.ones(1, 4)) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        biases.append(model.bias[0].item())
    # With a delay, what becomes of a round counts so many steps later.
    assert scales == [1024.0] * delay + [1024.0, 1024.0, 2048.0, 2048.0, 1024.0, 1024.0][: 6 - delay]
    if delay == 0:
        torch.testing.assert_close(torch.tensor(biases).diff(), torch.tensor([-0.5, -0.5, 0.0, -0.5, -0.5]))
    return {"biases": torch.tensor(biases)}


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


def broken_off(session: Session) -> dict[str, Tensor]:
    """Fail a step of the second host after its push; then another gradient is refused, and the same one is not."""
    weight, optimizer = wrap_weight(session, 4)
    pull, errors = session.client.pservers.pull, []

    async def fail(*_: Any, **__: Any) -> Any:
        session.client.pservers.pull = pull
        raise GradpostError("an unexpected error")

    if session.rank == 2:
        session.client.pservers.pull = fail
    for gradient in (1.0, 2.0, 1.0) if session.rank >= 2 else (1.0,):
        weight.grad = torch.full((4,), gradient)
        try:
            optimizer.step()
        except GradpostError as error:
            errors.append(str(error))
    if session.rank >= 2:
        assert errors[0] == "an unexpected error"
        assert errors[1].endswith("differs from the new gradient. Restart the script")
    assert weight.tolist() == [-1.0] * 4
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
    "every process knows the norm of the aggregated gradient": clipped,
    "processes may have different gradients": unequal,
    "all start from the same buffers": start,
    "the scale is the same in all processes": scaled,
    "the scale is the same with overlap": partial(scaled, overlap=True),
    "a script's own process group stays its own": sharing,
    "another gradient after a step that failed is refused for the host": broken_off,
    "different models are refused in all processes": different,
    "all processes get the mean of the first processes' buffers": averaging,
}
WORK = {**IN_SYNC, "delayed": delayed, "scaled with delay": partial(scaled, delay=1)}


def play(environment: Mapping[str, str], folder: Path, names: Sequence[str]) -> None:
    """Run all of these in this process, one after the other."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    for name in names:
        with connect(bucket_bytes=2000) as session:
            torch.save(WORK[name](session), folder / f"{name}-{session.rank}.pt")
