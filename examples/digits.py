"""A small convolutional network on scikit-learn's handwritten digits, trained on a parameter server.

    gradpost up --pservers 2 --trainers 2 -- python examples/digits.py

Three lines differ from training in one process; they are marked (1), (2) and (3). Outside of `gradpost up` the script
finds its cluster by GRADPOST_COORDINATOR and its place by RANK.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradpost


def make_model() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(48 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def choose_device(rank: int) -> torch.device:
    """One GPU for each trainer of this machine, as far as there are any."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")


def load_data(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    """1,437 images of 8x8 pixels to train on and 360 that are held out; the same split everywhere."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    parts = train_test_split(inputs, torch.tensor(labels), test_size=0.2, random_state=0, stratify=labels)
    parts = [part.to(device) for part in parts]
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


@torch.no_grad()
def measure_accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    inputs, labels = data.tensors
    return (model(inputs).argmax(1) == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="of each trainer")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)  # several trainers share this machine
    session = gradpost.connect()  # (1) rank and world size; waits for its place in the run
    torch.manual_seed(options.seed)
    device = choose_device(session.rank)
    train, held_out = load_data(device)
    sampler = DistributedSampler(train, session.world_size, session.rank, seed=options.seed)  # (2) its part of the data
    loader = DataLoader(train, options.batch_size, sampler=sampler)

    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=options.lr, weight_decay=0.01)
    optimizer = gradpost.RemoteOptimizer(optimizer, model=model)  # (3) step() happens on the pservers
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.epochs * len(loader))

    # Started again, or resumed: data and schedule continue after the rounds that are in the parameters.
    for epoch, batches in optimizer.epochs(loader, options.epochs, schedule=schedule):
        losses: list[float] = []
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss: Tensor = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        if losses:
            mean = sum(losses) / len(losses)
            session.report(loss=mean)
            if session.rank == 0:
                print(f"epoch {epoch + 1:2} of {options.epochs}  loss {mean:.4f}")

    accuracy = measure_accuracy(model, held_out)
    session.report(accuracy=accuracy)
    print(f"accuracy on {len(held_out)} held-out images: {accuracy:.4f}")
    print(optimizer.summary().line())


if __name__ == "__main__":
    main()
