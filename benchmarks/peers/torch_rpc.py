"""A round on `torch.distributed.rpc`: each server has a part of the tensors.

After https://docs.pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html: gradients go to the servers by
`rpc_async`, a server steps once all trainers' are in, parameters come back as the result.
"""

from __future__ import annotations

import argparse
import os
import threading
from typing import TypeAlias

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from benchmarks.comparison.paced import take_rounds
from benchmarks.comparison.work import LEARNING_RATE, Work, read_arguments

Values: TypeAlias = list[Tensor]

PIECE = 1 << 20  # elements


class Server:
    """A shard that sums the gradients of a round, and steps when it has all of them."""

    def __init__(self, work: Work, index: int) -> None:
        tensors = [torch.zeros(num_elements) for num_elements in work.elements]
        self.values = part_of(tensors, index, work.num_servers)
        self.num_trainers = work.num_trainers
        self.lock = threading.Lock()
        self.gradients: Values = []
        self.num_arrived = 0
        self.pending: torch.futures.Future[Values] = torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution
    def step(gradients: Values) -> torch.futures.Future[Values]:
        self = _server
        with self.lock:
            if self.gradients:
                torch._foreach_add_(self.gradients, gradients)
            else:
                self.gradients = gradients
            self.num_arrived += 1
            pending = self.pending
            if self.num_arrived == self.num_trainers:
                torch._foreach_add_(self.values, self.gradients, alpha=-LEARNING_RATE / self.num_trainers)
                self.gradients, self.num_arrived, self.pending = [], 0, torch.futures.Future()
                pending.set_result(self.values)
        return pending


_server: Server


def part_of(tensors: Values, index: int, num_servers: int) -> Values:
    """Return a server's part of all tensors, in pieces, which rpc sends faster than many small tensors or a large one.

    Each piece has its own memory, as rpc copies a view of half a tensor or less in each round.
    """
    part = torch.cat(tensors).chunk(num_servers)[index]
    return [piece.clone() for piece in part.split(PIECE)]


def train(work: Work, rank: int) -> None:
    gradients = work.make_gradients(rank)
    values = torch.zeros(sum(work.elements))
    parts = [part_of(gradients, index, work.num_servers) for index in range(work.num_servers)]
    into = [part.split(PIECE) for part in values.chunk(work.num_servers)]

    def one_round() -> None:
        replies = [rpc.rpc_async(f"server{i}", Server.step, args=(part,), timeout=0) for i, part in enumerate(parts)]
        for destinations, reply in zip(into, replies, strict=True):
            torch._foreach_copy_(destinations, reply.wait())

    take_rounds(work, rank, one_round, lambda: [values])


def main() -> None:
    global _server
    options: argparse.Namespace = read_arguments(__doc__)
    work: Work = options.work
    torch.set_num_threads(1)
    host, port = options.at[0]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    if options.role == "server":
        _server = Server(work, options.index)
    transports = {"_transports": ["uv"], "_channels": ["basic"]} if options.transport == "tcp" else {}
    rpc.init_rpc(
        f"{options.role}{options.index}",
        rank=options.index + (work.num_servers if options.role == "trainer" else 0),
        world_size=work.num_servers + work.num_trainers,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=120, **transports),
    )
    if options.role == "trainer":
        train(work, options.index)
    rpc.shutdown()


if __name__ == "__main__":
    main()
