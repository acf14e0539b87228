"""Several optimizers in one run, such as the two of a GAN: each steps its own parameters, as in one process."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import gradpost
from gradpost import Session
from trainer_client.testing import LocalCluster

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
