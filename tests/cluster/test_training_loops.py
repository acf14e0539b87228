"""Training loops as scripts have them: one trainer ends with the bits of torch.optim alone, several with the mean's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import assert_close, assert_identical, run_all, seeded, values
from .training_script import load_images

pytestmark = pytest.mark.cluster
STEPS = 12
RATE = 0.02


@pytest.fixture(scope="module")
def alone(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(trainers=1, nonfinite="skip_round", min_block_size=50)


def make_model() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(20, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 20)))


def loss_of(model: nn.Module, step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * part + step)
    inputs = torch.randn(8, 20, generator=generator)
    loss: Tensor = (model(inputs) - inputs.flip(1)).square().mean()
    return loss


Loop = Callable[[nn.Module, Optimizer], None]


def plain(model: nn.Module, optimizer: Optimizer, loss_of: Callable[..., Tensor] = loss_of) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def accumulating(model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(4):
            (loss_of(model, step, part) / 4).backward()
        optimizer.step()


def clipping_norms(model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()


def clipping_values(model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


def with_closures(model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss.item()

        assert optimizer.step(closure) is not None


def in_bfloat16(model: nn.Module, optimizer: Optimizer) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, step)

    plain(model, optimizer, loss)


def in_float16(model: nn.Module, optimizer: Optimizer) -> None:
    """Train with torch's own GradScaler. An overflow in the first step would leave torch's fused SGD no momentum."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss * float("inf") if step == 9 else loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
    model.register_buffer("scale", torch.tensor(scaler.get_scale()))


def compiled(model: nn.Module, optimizer: Optimizer) -> None:
    plain(torch.compile(model, backend="aot_eager"), optimizer)


LOOPS: dict[str, Any] = {
    "plain": plain,
    "accumulating": accumulating,
    "clipping norms": clipping_norms,
    "clipping values": clipping_values,
    "closures": with_closures,
    "bfloat16": pytest.param(in_bfloat16, marks=pytest.mark.amp),
    "float16": pytest.param(in_float16, marks=pytest.mark.amp),
    "compiled": pytest.param(compiled, marks=pytest.mark.extended),
}


def train(loop: Loop, session: Session | None) -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=RATE, fused=True)
    loop(model, optimizer if session is None else RemoteOptimizer(optimizer, session=session))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_the_bits_are_those_of_one_process(alone: LocalCluster, loop: Loop) -> None:
    [actual] = run_all(alone, partial(train, loop))
    assert_identical(actual, train(loop, None))


def warm_up_then_cosine(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 4)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[4])


SCHEDULES: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "one cycle, momenta too": lambda it: lr_scheduler.OneCycleLR(it, max_lr=0.1, total_steps=STEPS + 1),
    "plateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, factor=0.5, patience=1),
    "warm-up, then cosine": warm_up_then_cosine,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_change_the_rates_of_the_pservers(alone: LocalCluster, name: str) -> None:
    rates: list[list[float]] = []

    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        schedule = SCHEDULES[name](optimizer)
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            # A plateau is what a metric has come to: one that gets better and then worse.
            schedule.step(*([abs(step - 3.0)] if name == "plateau" else []))
            seen.append(optimizer.param_groups[0]["lr"])
        rates.append(seen)

    [actual] = run_all(alone, partial(train, loop))
    assert_identical(actual, train(loop, None))
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 2


def test_an_ordinary_script_trains_as_it_does_alone(own_cluster: StartCluster) -> None:
    """A model, a DataLoader, a schedule and real images: three trainers end where one process with all images does."""
    torch.manual_seed(0)
    begin = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    images, labels = (tensor[:900] for tensor in load_images())

    def train(session: Session | None) -> dict[str, Tensor]:
        rank, world_size = (0, 1) if session is None else (session.rank, session.world_size)
        sampler = DistributedSampler(TensorDataset(images, labels), world_size, rank, shuffle=False)
        loader = DataLoader(sampler.dataset, 90 // world_size, sampler=sampler)
        model = copy.deepcopy(begin)
        optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
        if session is not None:
            optimizer = RemoteOptimizer(optimizer, model=model, session=session)
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        for _ in range(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                schedule.step()
        return values(model)

    expected = train(None)
    for together in run_all(own_cluster(trainers=3, on_trainer_loss="fail"), train):
        assert_close(together, expected, rtol=0, atol=2e-5)
