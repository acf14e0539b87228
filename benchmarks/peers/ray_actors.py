"""A round on Ray: servers and trainers are actors, and tensors use the shared-memory object store.

After https://docs.ray.io/en/latest/ray-core/examples/plot_parameter_server.html, with two servers of one half each.
"""

from __future__ import annotations

import asyncio
import os

import numpy as np
import ray
import torch

from benchmarks.comparison.paced import CONTROL, take_rounds
from benchmarks.comparison.work import LEARNING_RATE, Work, read_arguments


@ray.remote(num_cpus=0)
class Server:
    """A shard that adds the gradients of a round, and steps when it has all of them."""

    def __init__(self, num_elements: int, num_trainers: int) -> None:
        self.values = np.zeros(num_elements, dtype=np.float32)
        self.num_trainers = num_trainers
        self.gradient: np.ndarray | None = None
        self.num_arrived = 0
        self.stepped = asyncio.Event()

    async def step(self, gradient: np.ndarray) -> np.ndarray:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient
        self.num_arrived += 1
        stepped = self.stepped
        if self.num_arrived == self.num_trainers:
            self.values = self.values - LEARNING_RATE / self.num_trainers * self.gradient
            self.gradient, self.num_arrived, self.stepped = None, 0, asyncio.Event()
            stepped.set()
        else:
            await stepped.wait()
        return self.values


@ray.remote(num_cpus=0)
class Trainer:
    """A trainer that takes rounds on request."""

    def __init__(self, rank: int, work: Work, servers: list[ray.actor.ActorHandle]) -> None:
        self.rank, self.work, self.servers = rank, work, servers

    def train(self) -> None:
        gradient = np.concatenate([tensor.numpy() for tensor in self.work.make_gradients(self.rank)])
        parts = np.array_split(gradient, len(self.servers))
        values = np.zeros_like(gradient)
        into = np.array_split(values, len(self.servers))

        def one_round() -> None:
            replies = [server.step.remote(part) for server, part in zip(self.servers, parts, strict=True)]
            for destination, reply in zip(into, ray.get(replies), strict=True):
                destination[:] = reply

        take_rounds(self.work, self.rank, one_round, lambda: [torch.from_numpy(values)])


def main() -> None:
    options = read_arguments(__doc__)
    work: Work = options.work
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=max(10**9, 12 * work.num_bytes), log_to_driver=False,
        runtime_env={"env_vars": {CONTROL: os.environ[CONTROL], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
    )  # fmt: skip
    sizes = [len(part) for part in np.array_split(np.empty(sum(work.elements)), work.num_servers)]
    servers = [Server.remote(size, work.num_trainers) for size in sizes]
    ray.get([Trainer.remote(rank, work, servers).train.remote() for rank in range(work.num_trainers)])
    ray.shutdown()


if __name__ == "__main__":
    main()
