"""Training loops, hooks and changes of the wrapped optimizer work as with torch.optim, or are refused."""

from __future__ import annotations

import operator
import threading
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

from ps_protocol.errors import BadModel
from trainer_client import GradScaler, RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import assert_identical, run_all, seeded

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


def in_float16(model: nn.Module, optimizer: Optimizer, *, is_ours: bool = False) -> None:
    """Train with torch's own GradScaler, or with ours on a cluster.

    An overflow in the first step would leave torch's fused SGD no momentum.
    """
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=3)
    if is_ours and isinstance(optimizer, RemoteOptimizer):
        scaler = GradScaler(optimizer, "cpu", init_scale=2.0**13, growth_interval=3)
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
    "adversarial": adversarial,
    "clipping norms": clipping_norms,
    "float16": pytest.param(in_float16, marks=pytest.mark.amp),
    "float16, our scaler": pytest.param(partial(in_float16, is_ours=True), marks=pytest.mark.amp),
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


SCHEDULES: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "one cycle, momenta too": lambda it: lr_scheduler.OneCycleLR(it, max_lr=0.1, total_steps=STEPS + 1),
    "plateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, factor=0.5, patience=1),
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


# ---------------------------------------------------------------------- the wrapped optimizer

Wrap = Callable[[Optimizer], Optimizer]
Train = Callable[[Wrap], Any]


@pytest.fixture(scope="module", params=["ps", pytest.param("ring", marks=[pytest.mark.ring, pytest.mark.extended])])
def ps_or_ring(request: pytest.FixtureRequest, shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(trainers=1, strategy=request.param)


def check_like_torch(cluster: LocalCluster, train: Train, **arguments: Any) -> None:
    """Train with and without a RemoteOptimizer, and compare what `train` returns."""

    def train_remotely(session: Session) -> Any:
        return train(lambda optimizer: RemoteOptimizer(optimizer, session=session))

    assert run_all(cluster, train_remotely, **arguments) == [train(lambda optimizer: optimizer)]


def take_steps(optimizer: Optimizer, *weights: nn.Parameter, num_steps: int = 3) -> None:
    for step in range(num_steps):
        for place, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 3.0 + step + 10 * place)
        optimizer.step()


@pytest.mark.parametrize("local_steps", [0, 2])
def test_step_hooks_run_once(ps_or_ring: LocalCluster, local_steps: int) -> None:
    if local_steps and not ps_or_ring.status().pservers:
        pytest.skip("a ring has no local steps")

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

    check_like_torch(ps_or_ring, train, local_steps=local_steps)


@pytest.mark.parametrize(
    ("rules", "local_steps", "warning"),
    [
        ({}, 4, "the last 2 local steps of this trainer are not in the run"),
        pytest.param({"max_delay": 1}, 0, "this trainer holds the parameters of step 9", marks=pytest.mark.extended),
    ],
)
def test_a_trainer_that_leaves_without_its_last_steps_warns(
    shared_cluster: StartCluster,
    rules: dict[str, Any],
    local_steps: int,
    warning: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(session: Session, num_steps: int, *, waits: bool) -> None:
        weight = nn.Parameter(torch.zeros(8))
        inner = torch.optim.SGD([("weight", weight)], lr=1.0)
        optimizer = RemoteOptimizer(inner, session=session, local_steps=local_steps)
        take_steps(optimizer, weight, num_steps=num_steps - 1)
        if session.rank == 1:
            first_is_done.wait(60)  # so trainer 0 cannot have its last round before it has left `step`
        take_steps(optimizer, weight, num_steps=1)
        first_is_done.set()
        if waits:
            optimizer.synchronize()

    cluster, first_is_done = shared_cluster(trainers=2, **rules), threading.Event()
    run_all(cluster, partial(train, num_steps=10, waits=False))
    assert warning in capsys.readouterr().err
    run_all(cluster, partial(train, num_steps=8, waits=True))
    assert '"warning"' not in capsys.readouterr().err


@pytest.mark.parametrize("hooked", ["wrapped", "remote"])
def test_hooks_change_what_is_loaded(ps_or_ring: LocalCluster, hooked: str) -> None:
    def train(wrap: Wrap) -> tuple[list[str], list[float]]:
        called = []

        def reorder(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            called.append("load")
            return {**state_dict, "state": {0: state_dict["state"][1], 1: state_dict["state"][0]}}

        weights = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
        inner = torch.optim.SGD([("a", weights[0]), ("b", weights[1])], lr=1.0, momentum=0.9)
        optimizer = wrap(inner)
        hooks = inner if hooked == "wrapped" else optimizer
        hooks.register_load_state_dict_pre_hook(reorder)
        hooks.register_load_state_dict_post_hook(lambda remote: called.append(f"loaded {remote.param_groups[0]['lr']}"))
        hooks.register_state_dict_post_hook(lambda *_: called.append("save"))
        take_steps(optimizer, *weights)
        state_dict = optimizer.state_dict()
        state_dict["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(state_dict)
        take_steps(optimizer, *weights)
        return called, [weight[0].item() for weight in weights]

    check_like_torch(ps_or_ring, train)


def test_the_wrapped_optimizer_is_not_changed_behind_the_run(session: Session) -> None:
    weight = nn.Parameter(torch.zeros(8))
    inner = torch.optim.SGD([("weight", weight)], lr=1.0, momentum=0.9)
    optimizer = RemoteOptimizer(inner, session=session)
    take_steps(optimizer, weight)
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0]["lr"] = 0.5
    with pytest.raises(BadModel, match=r"call load_state_dict\(\) of the RemoteOptimizer"):
        inner.load_state_dict(state_dict)
    with pytest.raises(BadModel, match="a parameter group cannot be added"):
        inner.add_param_group({"params": [nn.Parameter(torch.zeros(8))]})
    optimizer.load_state_dict(state_dict)
    assert [group["lr"] for group in inner.param_groups] == [0.5]
    assert inner.param_groups is optimizer.param_groups


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
        set_optimizer_state_dict(model, optimizer, state_dict)
        take_steps(optimizer, model.weight, num_steps=1)
        assert optimizer.round == 4
        return {key: float(value) for key, value in optimizer.state_dict()["state"].get(0, {}).items() if key == "step"}

    assert run_all(ps_or_ring, train) == [{"step": 4.0} if cls is torch.optim.Adam else {}]


ASSIGNED: dict[str, Callable[[Any], object]] = {
    "param_groups": lambda optimizer: setattr(optimizer, "param_groups", [{**optimizer.param_groups[0], "lr": 0.05}]),
    "an entry of param_groups": lambda optimizer: operator.setitem(
        optimizer.param_groups, 0, {**optimizer.param_groups[0], "lr": 0.05}
    ),
    "state": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "no entries of state": lambda optimizer: optimizer.state.clear(),
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


CHANGES: dict[str, Callable[[Any, Tensor], object]] = {
    "set a slot": lambda state, weight: operator.setitem(state[weight], "momentum_buffer", torch.zeros_like(weight)),
    "set an entry": lambda state, weight: operator.setitem(state, weight, {}),
    "delete an entry": lambda state, weight: operator.delitem(state, weight),
    "pop an entry": lambda state, weight: state.pop(weight, None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_single_entries_of_the_state_count_or_are_refused(ps_or_ring: LocalCluster, name: str) -> None:
    change = CHANGES[name]

    def train(wrap: Wrap) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = wrap(torch.optim.SGD([("weight", weight)], lr=0.1, momentum=0.9))
        take_steps(optimizer, weight)
        assert optimizer.state[weight] is optimizer.state[weight]  # which is no change
        take_steps(optimizer, weight)
        state_dict = optimizer.state_dict()
        if isinstance(optimizer, RemoteOptimizer) and ps_or_ring.status().pservers:
            with pytest.raises(BadModel, match=r"give it to optimizer\.load_state_dict\(\)"):
                optimizer.step(lambda: change(optimizer.state, weight))
            optimizer.load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        else:
            change(optimizer.state, weight)
        take_steps(optimizer, weight)
        return weight.tolist()

    check_like_torch(ps_or_ring, train)
