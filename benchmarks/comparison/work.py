"""The work of a system in a round, passed to its processes as one argument."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Literal, Self, TypeAlias

import torch

Address: TypeAlias = tuple[str, int]

LEARNING_RATE = 0.1
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

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def moved_bytes(self) -> int:
        """The float32 bytes that all trainers push and pull in a round."""
        return 2 * self.num_trainers * self.num_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors in float32."""
        return 4 * sum(self.elements)

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
