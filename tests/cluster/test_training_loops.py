"""Training loops, hooks and changes of the wrapped optimizer work as with torch.optim, or are refused."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradpost import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import assert_identical, run_all, seeded, values, wrap_weight

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


def clipping_norms(model: nn.Module, optimizer: Optimizer) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()


def adversarial(model: nn.Module, optimizer: Optimizer) -> None:
    """Step one half of the model while the graph of a pass through the other half stays in use, as a GAN does."""
    assert isinstance(model, nn.Sequential)
    generator, critic = model[:2], model[2:]
    for step in range(STEPS):
        optimizer.zero_grad()
        made = generator(torch.randn(8, 20, generator=torch.Generator().manual_seed(step)))
        critic(made.detach()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        critic(made).mean().backward()
        for parameter in critic.parameters():
            parameter.grad = None
        optimizer.step()


def in_float16(model: nn.Module, optimizer: Optimizer) -> None:
    """Train with torch's own GradScaler. An overflow in the first step would leave torch's fused SGD no momentum."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=3)
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
    one_cycle(torch.compile(model, backend="aot_eager"), optimizer)


def one_cycle(model: nn.Module, optimizer: Optimizer) -> None:
    """Train with a schedule that changes rates and momenta."""
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()


LOOPS: dict[str, Any] = {
    "one cycle": one_cycle,
    "adversarial": adversarial,
    "clipping norms": clipping_norms,
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


# ---------------------------------------------------------------------- the wrapped optimizer

Wrap = Callable[[Optimizer], Optimizer]
Train = Callable[[Wrap], Any]


@pytest.fixture(scope="module", params=["ps", pytest.param("ring", marks=[pytest.mark.ring, pytest.mark.extended])])
def ps_or_ring(request: pytest.FixtureRequest, shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(trainers=1, strategy=request.param)


def check_like_torch(cluster: LocalCluster, train: Train) -> None:
    """Train with and without a RemoteOptimizer, and compare what `train` returns."""

    def train_remotely(session: Session) -> Any:
        return train(lambda optimizer: RemoteOptimizer(optimizer, session=session))

    assert run_all(cluster, train_remotely) == [train(lambda optimizer: optimizer)]


def take_steps(optimizer: Optimizer, *weights: nn.Parameter, num_steps: int = 3) -> None:
    for step in range(num_steps):
        for place, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 3.0 + step + 10 * place)
        optimizer.step()


def test_step_hooks_run_once(ps_or_ring: LocalCluster) -> None:
    def train(wrap: Wrap) -> tuple[list[str], list[float]]:
        called = []

        def clip(optimizer: Optimizer, args: object, kwargs: object) -> None:
            called.append("pre")
            nn.utils.clip_grad_norm_(weight, 1.0)

        weight = nn.Parameter(torch.zeros(8))
        inner = torch.optim.SGD([("weight", weight)], lr=1.0)
        inner.register_step_pre_hook(clip)
        scheduler = torch.optim.lr_scheduler.ConstantLR(inner, factor=0.5)  # it would warn of another step()
        optimizer = wrap(inner)
        inner.register_step_post_hook(lambda *_: called.append(f"post {weight[0].item():.3f}"))
        handles = [
            register_optimizer_step_pre_hook(lambda *_: called.append("global pre")),
            register_optimizer_step_post_hook(lambda *_: called.append("global post")),
        ]
        try:
            for _ in range(4):
                take_steps(optimizer, weight, num_steps=1)
                scheduler.step()
        finally:
            for handle in handles:
                handle.remove()
        return called, weight.tolist()

    check_like_torch(ps_or_ring, train)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.SGD])
def test_distributed_checkpoints_take_no_step(ps_or_ring: LocalCluster, cls: Callable[..., Optimizer]) -> None:
    def train(session: Session) -> dict[str, Any]:
        model = nn.Linear(4, 1, bias=False)
        optimizer = RemoteOptimizer(cls(model.named_parameters(), lr=0.1), model=model, session=session)
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
        for round_ in range(1, 4):
            take_steps(optimizer, model.weight, num_steps=1)
            optimizer.zero_grad()
            state_dict = get_optimizer_state_dict(model, optimizer)
            assert optimizer.round == round_
        return {name: float(value) for name, value in state_dict["state"].get("weight", {}).items() if name == "step"}

    assert run_all(ps_or_ring, train) == [{"step": 3.0} if cls is torch.optim.Adam else {}]


ASSIGNED: dict[str, Callable[[Any], object]] = {
    "param_groups": lambda optimizer: setattr(optimizer, "param_groups", [{**optimizer.param_groups[0], "lr": 0.05}]),
    "an entry of param_groups": lambda optimizer: operator.setitem(
        optimizer.param_groups, 0, {**optimizer.param_groups[0], "lr": 0.05}
    ),
    "defaults": lambda optimizer: setattr(optimizer, "defaults", {**optimizer.defaults, "lr": 0.05}),
    "a hook": lambda optimizer: optimizer.register_step_pre_hook(
        lambda hooked, *_: operator.setitem(hooked.param_groups[0], "lr", 0.05)
    ),
}


@pytest.mark.parametrize("changed", ["wrapped", "remote"])
@pytest.mark.parametrize("name", ASSIGNED)
def test_what_a_script_assigns_to_either_optimizer_counts(ps_or_ring: LocalCluster, name: str, changed: str) -> None:
    def train(wrap: Wrap) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        inner = torch.optim.SGD([("weight", weight)], lr=0.1, momentum=0.9)
        optimizer = wrap(inner)
        take_steps(optimizer, weight)
        assigned, other = (inner, optimizer) if changed == "wrapped" else (optimizer, inner)
        ASSIGNED[name](assigned)
        shown = optimizer.state_dict()
        take_steps(optimizer, weight)
        other.param_groups[0]["lr"] *= 0.5  # as a scheduler does that holds it
        take_steps(optimizer, weight)
        return [*weight.tolist(), shown["param_groups"][0]["lr"], len(shown["state"])]

    check_like_torch(ps_or_ring, train)


def assign(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


@pytest.mark.ring
@pytest.mark.parametrize("change", [assign, lambda optimizer: optimizer.state.clear()], ids=["assigned", "cleared"])
def test_a_trainer_that_steps_itself_begins_again_without_state(
    shared_cluster: StartCluster, change: Callable[[Optimizer], None]
) -> None:
    def train(wrap: Wrap) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = wrap(torch.optim.SGD([("weight", weight)], lr=0.1, momentum=0.9))
        take_steps(optimizer, weight)
        change(optimizer)
        take_steps(optimizer, weight)
        return [*weight.tolist(), len(optimizer.state_dict()["state"])]

    check_like_torch(shared_cluster(trainers=1, strategy="ring"), train)


@pytest.mark.amp
def test_a_trainer_of_an_asynchronous_run_skips_alone(shared_cluster: StartCluster) -> None:
    def work(session: Session) -> list[float]:
        weight, optimizer = wrap_weight(session, 4)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=64.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32.0
        return weight.tolist()

    assert run_all(shared_cluster(trainers=1, mode="async"), work) == [[-2.0] * 4]


@pytest.mark.clip
def test_a_trainer_of_an_asynchronous_run_clips_its_own_gradient(shared_cluster: StartCluster) -> None:
    def train(session: Session | None) -> tuple[dict[str, Tensor], list[float]]:
        model, norms = make_model(), []
        optimizer: Any = torch.optim.AdamW(model.named_parameters(), lr=RATE, fused=True)
        if session is not None:
            optimizer = RemoteOptimizer(optimizer, session=session, max_grad_norm=0.3)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            norm = None if session else nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            norms.append(optimizer.grad_norm if norm is None else norm.item())
        return values(model), norms

    [(found, norms)] = run_all(shared_cluster(trainers=1, mode="async"), train)
    expected, expected_norms = train(None)
    assert_identical(found, expected)
    assert norms == expected_norms
