"""A misuse of a model or of optimizers is refused with the way out, and training continues.

Requests that a service refuses are in bad_requests.py, and settings that exclude each other in the unit tests.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import gradpost
from gradpost import RemoteOptimizer, Session
from ps_protocol.errors import BadInput, BadModel
from trainer_client.testing import LocalCluster

from .training import assert_identical, run_all, seeded, step_with, wrap_model

pytestmark = pytest.mark.cluster

# ---------------------------------------------------------------------- at the wrap


class Queue(nn.Module):
    """A model with float, integer and 64-bit buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("queue", torch.eye(4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))


def wrap_buffers(**choices: str) -> Callable[[Session], object]:
    return lambda session: wrap_model(session, Queue(), buffers=choices)


def wrap_weight(weight: nn.Parameter, **arguments: Any) -> Callable[[Session], object]:
    return lambda session: RemoteOptimizer(SGD([("weight", weight)], lr=1.0), session=session, **arguments)


def wrap_several(**optimizers: Optimizer) -> Callable[[Session], object]:
    return lambda session: gradpost.wrap_optimizers(session=session, **optimizers)


def wrap_half_a_state(session: Session) -> None:
    optimizer = torch.optim.Adam([("weight", weight := nn.Parameter(torch.zeros(4)))])
    optimizer.state[weight] = {"step": torch.tensor(1.0)}
    RemoteOptimizer(optimizer, session=session)


WEIGHT, OTHER = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, 4))
WRAPS: dict[str, Callable[[Session], object]] = {
    "'weight' is on meta, for which PyTorch has no streams": wrap_weight(nn.Parameter(torch.zeros(4, device="meta"))),
    "'weight' is torch.complex64": wrap_weight(nn.Parameter(torch.ones(2, dtype=torch.cfloat))),
    "must have the parameters of the inner one": wrap_weight(WEIGHT, local_steps=2, outer=SGD([OTHER], lr=1.0)),
    "'queu' matches no buffer that is exchanged": wrap_buffers(queu="leave"),
    "'pointer' matches no buffer that is exchanged": wrap_buffers(pointer="lowest_rank"),
    "'first' is no choice for buffers 'queue'; use average, lowest_rank or leave": wrap_buffers(queue="first"),
    "buffers need model=model": wrap_weight(WEIGHT, buffers={"queue": "leave"}),
    "state of 'weight' does not fit Adam: it lacks exp_avg, exp_avg_sq": wrap_half_a_state,
    "wrap_optimizers(D=optimizer_d": wrap_several(),
    "'one' and 'two' have the same parameter": wrap_several(one=SGD([WEIGHT]), two=SGD([WEIGHT])),
    "Muon cannot run on a pserver": wrap_several(one=torch.optim.Muon([OTHER]), two=SGD([WEIGHT])),
}


@pytest.mark.parametrize("said", WRAPS)
def test_what_cannot_be_wrapped_is_refused(session: Session, said: str) -> None:
    with pytest.raises(BadInput, match=re.escape(said)):
        WRAPS[said](session)


def test_an_optimizer_that_needs_a_closure_is_refused_everywhere() -> None:
    with (
        Session(strategy="local") as session,
        pytest.raises(BadInput, match="LBFGS evaluates a closure several times"),
    ):
        RemoteOptimizer(torch.optim.LBFGS([WEIGHT]), session=session)


# ---------------------------------------------------------------------- later


class Script:
    """A script that has taken a step, and its wrapped optimizer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.weight = nn.Parameter(torch.zeros(8))
        self.inner = SGD([("weight", self.weight)], lr=1.0, momentum=0.5)
        self.optimizer = RemoteOptimizer(self.inner, session=session)
        self.group = self.optimizer.param_groups[0]
        step_with(self.optimizer, self.weight)

    def step(self) -> None:
        step_with(self.optimizer, self.weight)


@pytest.fixture
def script(alone: LocalCluster) -> Iterator[Script]:
    with Session(coordinator=alone.address, rank=0, world_size=1) as session:
        yield Script(session)


Patch = pytest.MonkeyPatch
Misuse = Callable[[Script, Patch], object]


def change_flag(script: Script, patch: Patch) -> None:
    patch.setitem(script.group, "maximize", True)
    script.step()


def replace_parameter(script: Script, patch: Patch) -> None:
    patch.setitem(script.group, "params", [nn.Parameter(torch.zeros(8))])
    script.step()


def add_parameter(script: Script, patch: Patch) -> None:
    patch.setitem(script.group, "params", [script.weight, nn.Parameter(torch.zeros(3))])
    script.step()


def change_state(script: Script, patch: Patch) -> None:
    patch.setitem(script.inner.state, script.weight, {"momentum_buffer": torch.zeros(8)})
    script.step()


GROUP = {"params": [nn.Parameter(torch.zeros(1))]}
MISUSES: dict[str, tuple[Misuse, str]] = {
    "a flag changes": (change_flag, "maximize of parameter group 0 was changed"),
    "a parameter is replaced": (replace_parameter, "start a new run"),
    "a parameter is added": (add_parameter, "start a new run"),
    "a group is added": (lambda it, _: it.inner.add_param_group(GROUP), "a parameter group cannot be added"),
    "state is changed": (change_state, "Before the first step, change what"),
    "state is cleared": (lambda it, _: it.optimizer.state.clear(), "Before the first step, change what"),
    "state is loaded late": (
        lambda it, _: it.optimizer.load_state_dict(it.optimizer.state_dict()), "before the first step only"),
    "state is loaded by the wrapped optimizer": (
        lambda it, _: it.inner.load_state_dict(it.optimizer.state_dict()), "of the RemoteOptimizer"),
    "the wrapped optimizer steps": (lambda it, _: it.inner.step(), "keep the result of RemoteOptimizer"),
    "a session has two optimizers": (lambda it, _: Script(it.session), "a session has one RemoteOptimizer"),
    **{
        f"it is copied by {make.__name__}": (lambda it, _, make=make: make(it.optimizer), "cannot be copied or pickled")
        for make in (copy.copy, copy.deepcopy, pickle.dumps)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_refused_and_training_continues(script: Script, monkeypatch: Patch, name: str) -> None:
    misuse, said = MISUSES[name]
    with monkeypatch.context() as patch, pytest.raises((BadModel, TypeError), match=said):
        misuse(script, patch)
    script.step()
    assert script.weight.tolist() == [-2.5] * 8


def test_an_overflow_that_could_not_skip_the_step_of_all_is_refused(script: Script) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(script.weight.sum()).backward()
    with pytest.raises(BadModel, match="Set GRADPOST_NONFINITE=skip_round, or use bfloat16"):
        scaler.step(script.optimizer)


def test_the_wrapped_optimizer_is_free_when_the_run_is_over(script: Script) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(script.inner, 1)
    assert schedule.optimizer is script.inner
    script.session.close()
    script.inner.step()
    assert script.weight.tolist() == [-2.0] * 8


def test_a_misuse_of_one_of_several_optimizers_is_refused(session: Session) -> None:
    weight, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    wrapped = SGD([weight], lr=1.0)
    one, two = gradpost.wrap_optimizers(session=session, one=wrapped, two=SGD([other], lr=1.0))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    with pytest.raises(BadModel, match="Use bfloat16"):
        scaler.step(one)
    with pytest.raises(BadModel, match="is wrapped"):
        wrapped.step()
    with pytest.raises(BadModel, match="cannot be added"):
        two.add_param_group(GROUP)
    step_with(two, other)
    assert (weight[0].item(), other[0].item()) == (0.0, -1.0)


# ---------------------------------------------------------------------- several optimizers


class Gan:
    """The two networks of a GAN and their optimizers, which are of different classes."""

    def __init__(self) -> None:
        generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.model = seeded(nn.ModuleDict({"D": discriminator, "G": generator}))
        self.optimizers: Mapping[str, Optimizer] = {
            "D": Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999), fused=True),
            "G": SGD(generator.parameters(), lr=0.05, momentum=0.9),
        }

    def wrap(self, session: Session) -> None:
        """Train in a run from now on."""
        wrapped = gradpost.wrap_optimizers(model=self.model, session=session, **self.optimizers)
        self.optimizers = {optimizer.name: optimizer for optimizer in wrapped}

    def train(self, first: int = 0, num_steps: int = 4) -> None:
        """Take steps as PyTorch's DCGAN tutorial does."""
        discriminator, generator, bce = self.model["D"], self.model["G"], nn.BCEWithLogitsLoss()
        for step in range(first, first + num_steps):
            random = torch.Generator().manual_seed(step)
            real, noise = torch.randn(6, 8, generator=random) + 1, torch.randn(6, 4, generator=random)
            self.optimizers["D"].zero_grad()
            bce(discriminator(real), torch.ones(6, 1)).backward()
            fake = generator(noise)
            bce(discriminator(fake.detach()), torch.zeros(6, 1)).backward()
            self.optimizers["D"].step()
            self.optimizers["G"].zero_grad()
            before = self.values("D")
            bce(discriminator(fake), torch.ones(6, 1)).backward()  # the discriminator has gradients, too
            self.optimizers["G"].step()
            assert_identical(self.values("D"), before)

    def values(self, part: str = "") -> dict[str, Tensor]:
        """Return a copy of the parameters and buffers."""
        tensors = self.model.state_dict().items()
        return {
            name: tensor.clone() for name, tensor in tensors if name.startswith(part) and tensor.is_floating_point()
        }

    def assert_like(self, other: Gan) -> None:
        """Check that values and optimizer states are those of another GAN, bit by bit."""
        assert_identical(self.values(), other.values())
        for name, optimizer in self.optimizers.items():
            actual, expected = optimizer.state_dict()["state"], other.optimizers[name].state_dict()["state"]
            assert actual.keys() == expected.keys()
            for index, slots in expected.items():
                assert_identical(actual[index], {key: slot for key, slot in slots.items() if slot is not None})


@pytest.mark.parametrize("strategy", ["ps", pytest.param("ring", marks=pytest.mark.ring)])
def test_a_gan_has_the_bits_of_one_process(pair: LocalCluster, ring: LocalCluster, strategy: str) -> None:
    expected = Gan()
    expected.train()

    def work(session: Session) -> None:
        gan = Gan()
        gan.wrap(session)
        gan.train()
        gan.assert_like(expected)

    run_all(ring if strategy == "ring" else pair, work)  # all trainers have the same gradients


def test_rates_and_parameters_have_the_names_of_the_optimizers(alone: LocalCluster) -> None:
    def work(session: Session) -> None:
        weights = {name: nn.Parameter(torch.zeros(4)) for name in "abc"}
        groups = [{"params": [("first", weights["b"])]}, {"params": [("second", weights["c"])]}]
        one, two = gradpost.wrap_optimizers(
            session=session, one=SGD([("first", weights["a"])], lr=1.0), two=Adagrad(groups, lr=1.0)
        )
        listed = httpx.get(f"{alone.address}/v1/parameters", trust_env=False).json()["parameters"]
        assert [(entry["name"], entry["optimizer"]) for entry in listed] == [
            ("one.first", "one"), ("two.first", "two"), ("two.second", "two"),
        ]  # fmt: skip
        url = f"{alone.address}/v1/controls/rate"
        answer = httpx.put(url, json={"rate": 0.25, "optimizer": "two", "group": 1}, trust_env=False)
        assert answer.is_success, answer.text
        step_with(one, weights["a"])
        step_with(two, weights["b"], weights["c"])
        assert [weight[0].item() for weight in weights.values()] == [-1.0, -1.0, -0.25]
        for bad in ({"optimizer": "three"}, {"optimizer": "one", "group": 1}):
            assert httpx.put(url, json={"rate": 0.5, **bad}, trust_env=False).status_code == 422

    run_all(alone, work)
