"""Several optimizers in one run, such as the two of a GAN: each steps its own parameters, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import gradpost
from ps_protocol.errors import BadInput, BadModel
from trainer_client import Session
from trainer_client.optimizer.named_optimizers import NamedOptimizer
from trainer_client.testing import LocalCluster

from .conftest import StartCluster
from .training import assert_identical, run_all, seeded, step_with

pytestmark = pytest.mark.cluster


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


KINDS = {
    "sync": {},
    "two trainers": {"trainers": 2},
    "ring": {"strategy": "ring", "trainers": 2},
    "local": None,
}


@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.ring] * (kind == "ring")) for kind in KINDS])
def run_gan(request: pytest.FixtureRequest, shared_cluster: StartCluster) -> Callable[..., list[Any]]:
    """Run work on every trainer of a run, all with the same gradients."""
    settings = KINDS[request.param]
    if settings is None:

        def run_here(work: Callable[[Session], Any], **arguments: Any) -> list[Any]:
            with Session(strategy="local", **arguments) as session:
                return [work(session)]

        return run_here
    cluster = shared_cluster(**{"trainers": 1, "on_trainer_loss": "fail", **settings})
    return lambda work, **arguments: run_all(cluster, work, **arguments)


def test_a_gan_has_the_bits_of_one_process(run_gan: Callable[..., list[Any]]) -> None:
    expected = Gan()
    expected.train()

    def work(session: Session) -> None:
        gan = Gan()
        gan.wrap(session)
        gan.train()
        gan.assert_like(expected)

    run_gan(work)


def test_a_checkpoint_of_one_process_continues_in_a_run(alone: LocalCluster) -> None:
    saved = Gan()
    saved.train()
    model = {name: tensor.clone() for name, tensor in saved.model.state_dict().items()}
    states = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in saved.optimizers.items()}
    saved.train(4, 2)

    def work(session: Session) -> None:
        gan = Gan()
        gan.model.load_state_dict(model)
        gan.optimizers["D"].load_state_dict(states["D"])  # either before or after it is wrapped
        gan.wrap(session)
        gan.optimizers["G"].load_state_dict(states["G"])
        gan.train(4, 2)
        gan.assert_like(saved)

    run_all(alone, work)


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


def test_what_several_optimizers_cannot_do_is_refused(session: Session) -> None:
    weight, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    with pytest.raises(BadModel, match=r"wrap_optimizers\(D=optimizer_d"):
        gradpost.wrap_optimizers(session=session)
    with pytest.raises(BadModel, match="'one' and 'two' have the same parameter"):
        gradpost.wrap_optimizers(session=session, one=SGD([weight], lr=1.0), two=SGD([weight], lr=1.0))
    matrix = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(BadInput, match="Muon cannot run on a pserver"):
        gradpost.wrap_optimizers(session=session, one=torch.optim.Muon([matrix]), two=SGD([weight], lr=1.0))
    wrapped = SGD([weight], lr=1.0)
    one, two = gradpost.wrap_optimizers(session=session, one=wrapped, two=SGD([other], lr=1.0))
    assert isinstance(one, NamedOptimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((weight * 2).sum()).backward()
    with pytest.raises(BadModel, match="Use bfloat16"):
        scaler.step(one)
    with pytest.raises(BadModel, match="is wrapped"):
        wrapped.step()
    with pytest.raises(BadModel, match="cannot be added"):
        two.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    weight.grad = None
    step_with(two, other)
    assert (weight[0].item(), other[0].item()) == (0.0, -1.0)


@pytest.mark.parametrize("arguments", [{"overlap": True}, {"local_steps": 2}], ids=str)
def test_steps_that_concern_all_parameters_are_refused(alone: LocalCluster, arguments: dict[str, Any]) -> None:
    def work(session: Session) -> None:
        with pytest.raises(BadModel, match="several optimizers need mode sync"):
            Gan().wrap(session)

    run_all(alone, work, **arguments)
