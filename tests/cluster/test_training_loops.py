"""Training loops as scripts have them: one trainer ends with the bits of torch.optim alone, several with the mean's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import Carrier
from .parity_model import assert_identical, run_trainers

pytestmark = pytest.mark.cluster

STEPS = 12
RATE = 0.02


@pytest.fixture(scope="module")
def lonely(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=1, **carrier, nonfinite="skip_round", min_block_size=50) as cluster:
        yield cluster


def make_model() -> nn.Module:
    """The same weights at each call, in any thread."""
    model = nn.Sequential(nn.Linear(20, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 20))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2, generator=generator)
    return model


def adamw(model: nn.Module) -> Optimizer:
    """As the pservers step it."""
    return torch.optim.AdamW(model.named_parameters(), lr=RATE, fused=True)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=RATE, momentum=0.9, fused=True)


def loss_of(model: nn.Module, step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * part + step)
    inputs = torch.randn(8, 20, generator=generator)
    loss: Tensor = (model(inputs) - inputs.flip(1)).square().mean()
    return loss


# ---------------------------------------------------------------------- loops

Loop = Callable[[nn.Module, Optimizer], None]


def plain(model: nn.Module, optimizer: Optimizer, loss_of: Callable[..., Tensor] = loss_of) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def accumulating(model: nn.Module, optimizer: Optimizer, first_part: int = 0) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(4):
            (loss_of(model, step, first_part + part) / 4).backward()
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
    """With torch's own GradScaler. After an overflow in the first step torch's fused SGD has an undefined momentum."""
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


def compiled(model: nn.Module, optimizer: Optimizer, backend: str = "aot_eager") -> None:
    plain(torch.compile(model, backend=backend), optimizer)  # type: ignore[arg-type]


LOOPS: dict[str, Any] = {
    "plain": plain,
    "accumulating": accumulating,
    "clipping norms": clipping_norms,
    "clipping values": clipping_values,
    "closures": with_closures,
    "bfloat16": pytest.param(in_bfloat16, marks=pytest.mark.amp),
    "float16": pytest.param(in_float16, marks=pytest.mark.amp),
    "compiled": pytest.param(compiled, marks=pytest.mark.extended),
    "compiled for this machine": pytest.param(
        partial(compiled, backend="inductor"),
        marks=[pytest.mark.soak, pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")],
    ),
}
OPTIMIZERS = [adamw, pytest.param(momentum, marks=pytest.mark.soak)]


def train(loop: Loop, make_optimizer: Callable[[nn.Module], Optimizer], session: Session | None) -> dict[str, Tensor]:
    model = make_model()
    optimizer = make_optimizer(model)
    loop(model, optimizer if session is None else RemoteOptimizer(optimizer, session=session))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_the_bits_are_those_of_one_process(
    lonely: LocalCluster, loop: Loop, make_optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    [actual] = run_trainers(lonely.address, [partial(train, loop, make_optimizer)])
    assert_identical(actual, train(loop, make_optimizer, None))


def test_accumulated_gradients_of_two_trainers_are_their_mean(carrier: Carrier) -> None:
    def work(session: Session) -> dict[str, Tensor]:
        return train(partial(accumulating, first_part=4 * session.rank), momentum, session)

    with LocalCluster(pservers=2, trainers=2, **carrier, min_block_size=50, on_trainer_loss="fail") as cluster:
        one, other = run_trainers(cluster.address, [work, work])
    assert_identical(one, other)
    model = make_model()
    optimizer = momentum(model)
    for step in range(STEPS):
        gradients = []
        for rank in range(2):
            optimizer.zero_grad()
            for part in range(4):
                (loss_of(model, step, 4 * rank + part) / 4).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, mine, theirs in zip(model.parameters(), *gradients, strict=True):
            assert mine is not None
            assert theirs is not None
            parameter.grad = (mine + theirs) * 0.5
        optimizer.step()
    assert_identical(one, dict(model.state_dict()))


# ---------------------------------------------------------------------- schedules


def warm_up_then_cosine(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 4)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[4])


SCHEDULES: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "one cycle, momenta too": lambda it: lr_scheduler.OneCycleLR(it, max_lr=0.1, total_steps=STEPS + 1),
    "cosine": lambda it: lr_scheduler.CosineAnnealingLR(it, T_max=STEPS),
    "warm restarts": lambda it: lr_scheduler.CosineAnnealingWarmRestarts(it, T_0=5),
    "plateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, factor=0.5, patience=1),
    "lambda": lambda it: lr_scheduler.LambdaLR(it, lambda step: 0.9**step),
    "warm-up, then cosine": warm_up_then_cosine,
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_change_the_rates_of_the_pservers(
    lonely: LocalCluster, name: str, make_optimizer: Callable[[nn.Module], Optimizer]
) -> None:
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

    [actual] = run_trainers(lonely.address, [partial(train, loop, make_optimizer)])
    assert_identical(actual, train(loop, make_optimizer, None))
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 2
