"""The work of a system in a round, passed to its processes as one argument."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal, Self, TypeAlias

import numpy as np
import torch

Address: TypeAlias = tuple[str, int]

LEARNING_RATE = 0.1
WIDTH = 32  # of an embedding
NUM_BATCHES = 20  # of a trainer, which repeats them
ZIPF_EXPONENT = 1.05
GRADIENT = 1e-3  # of every element and the trainer of rank 0; the others' are multiples of it


@dataclass(frozen=True)
class Work:
    """The float32 tensors that each trainer pushes and pulls, and the numbers of trainers and servers."""

    elements: tuple[int, ...]  # of each tensor
    optimizer: Literal["sgd", "adam"] = "sgd"
    num_trainers: int = 2
    num_servers: int = 2
    is_exact: bool = True  # the result is known,
    rounding: float = 0.0  # up to this relative error
    forward_seconds: float = 0.0  # of emulated computation in a round
    backward_seconds: float = 0.0
    num_warm_up: int = 10  # rounds that are not measured
    batch: int = 0  # ids a trainer looks up in each tensor, an embedding table; 0: the gradients are dense

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def moved_bytes(self) -> int:
        """The float32 bytes that all trainers push and pull in a round: of tables, touched rows and their ids."""
        return self.count_touched_bytes() if self.batch else 2 * self.num_trainers * self.num_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors in float32."""
        return 4 * sum(self.elements)

    @cache  # noqa: B019 - a few works, whose tables may have millions of rows
    def count_touched_bytes(self) -> int:
        """Return the bytes of the rows that the trainers' batches touch, and of a 4-byte id for each, in a round.

        A trainer pushes the rows of its own batch, and pulls those of all batches.
        """
        batches = torch.stack([self.make_batches(rank) for rank in range(self.num_trainers)])
        num_pushed = sum(len(ids.unique()) for ids in batches.flatten(0, 2))
        num_pulled = self.num_trainers * sum(len(ids.unique()) for ids in batches.movedim(0, 2).flatten(0, 1))
        return 4 * (WIDTH + 1) * (num_pushed + num_pulled) // NUM_BATCHES

    def make_batches(self, rank: int) -> torch.Tensor:
        """Return the ids of a trainer's batches, (NUM_BATCHES, tables, batch) int64, Zipf-distributed.

        Popular rows lie anywhere in a table, at the same places for all trainers.
        """
        batches = []
        for table, num_elements in enumerate(self.elements):
            num_rows = num_elements // WIDTH
            places = np.random.default_rng(table).permutation(num_rows)
            shares = np.cumsum(np.arange(1, num_rows + 1) ** -ZIPF_EXPONENT)
            chosen = np.random.default_rng((rank, table)).random((NUM_BATCHES, self.batch)) * shares[-1]
            batches.append(places[np.searchsorted(shares, chosen)])
        return torch.from_numpy(np.stack(batches, axis=1))

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Self:
        members = json.loads(text)
        return cls(**{**members, "elements": tuple(members["elements"])})

    def make_gradients(self, rank: int) -> list[torch.Tensor]:
        return [torch.full((num_elements,), GRADIENT * (rank + 1)) for num_elements in self.elements]

    def check(self, values: list[torch.Tensor], num_rounds: int) -> None:
        """Raise unless these values are those after exactly so many steps from zero.

        Adam's step with a constant gradient is the learning rate.
        """
        if not self.is_exact:
            return
        step = 1.0 if self.optimizer == "adam" else GRADIENT * (1 + self.num_trainers) / 2
        expected = torch.tensor(-LEARNING_RATE * step * num_rounds)
        for tensor in values:
            sample = tensor.flatten()[:: max(1, tensor.numel() // 1000)].float()
            tolerance = self.rounding + 0.3 / num_rounds
            torch.testing.assert_close(sample, expected.expand_as(sample), rtol=tolerance, atol=0)


def parse_address(text: str) -> Address:
    """Return the host and the port.

    >>> parse_address("127.0.0.1:5000")
    ('127.0.0.1', 5000)
    """
    host, _, port = text.partition(":")
    return host, int(port)


def read_arguments(description: str | None) -> argparse.Namespace:
    """Parse the arguments of a peer's program: `--role server --index 0 --at 127.0.0.1:5000 --work JSON`."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--role", choices=["server", "trainer", "all"], required=True)
    arguments.add_argument("--index", type=int, default=0)
    arguments.add_argument("--at", type=parse_address, nargs="+", required=True, help="of the processes of one role")
    arguments.add_argument("--work", type=Work.load, required=True)
    arguments.add_argument("--transport", default="", help="of a peer that has several")
    return arguments.parse_args()
