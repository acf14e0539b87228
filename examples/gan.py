"""A GAN that learns eight Gaussians on a circle, with an optimizer for each network.

    gradpost up --trainers 2 -- python examples/gan.py

Against training in one process, four lines are new; they are marked.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import gradpost


def make_network(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, num_outputs)
    )


def sample_real(count: int) -> Tensor:
    """Return points, (count, 2), around eight centres on a circle of radius 2."""
    angles = torch.randint(8, (count,)) * (2 * math.pi / 8)
    return 2 * torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def measure(points: Tensor) -> tuple[float, int]:
    """Return the share of points near a centre, and the number of centres that have such points."""
    angles = torch.arange(8) * (2 * math.pi / 8)
    distances, nearest = torch.cdist(points, 2 * torch.stack([angles.cos(), angles.sin()], dim=1)).min(dim=1)
    is_near = distances < 0.4
    return is_near.double().mean().item(), len(nearest[is_near].unique())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128, help="of each trainer")
    options = parser.parse_args()

    torch.set_num_threads(1)  # several trainers share this machine
    session = gradpost.connect()  # new
    torch.manual_seed(session.rank)  # new: each trainer has its own samples
    generator, discriminator, bce = make_network(8, 2), make_network(2, 1), nn.BCEWithLogitsLoss()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    model = nn.ModuleDict({"D": discriminator, "G": generator})  # new: the names of the parameters, and the buffers
    optimizer_d, optimizer_g = gradpost.wrap_optimizers(model=model, D=optimizer_d, G=optimizer_g)  # new

    ones, zeros = torch.ones(options.batch_size, 1), torch.zeros(options.batch_size, 1)
    for _ in range(options.steps):
        optimizer_d.zero_grad()
        fake = generator(torch.randn(options.batch_size, 8))
        loss_d = bce(discriminator(sample_real(options.batch_size)), ones) + bce(discriminator(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = bce(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()

    with torch.no_grad():
        near, modes = measure(generator(torch.randn(2000, 8)))
    print(f"{near:.0%} of the points are near a centre, and {modes} of 8 centres have points")


if __name__ == "__main__":
    main()
