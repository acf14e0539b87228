"""The same round on `torch.distributed.rpc`: two servers, two trainers, one half of the tensor each.

After https://docs.pytorch.org/tutorials/intermediate/rpc_param_server_tutorial.html: gradients go to the servers by
`rpc_async`, a server steps once all trainers' are in, parameters come back as the result.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

NUM_SERVERS = 2
NUM_TRAINERS = 2
LEARNING_RATE = 0.1


class Server:
    """One shard: sums the gradients of a round and steps when the last one is here."""

    def __init__(self, elements: int) -> None:
        self.values = torch.zeros(elements)
        self.lock = threading.Lock()
        self.gradient: torch.Tensor | None = None
        self.arrived = 0
        self.pending: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution
    def step(server: rpc.RRef[Server], gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        self = server.local_value()
        with self.lock:
            self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)
            self.arrived += 1
            pending = self.pending
            if self.arrived == NUM_TRAINERS:
                self.values.add_(self.gradient, alpha=-LEARNING_RATE / NUM_TRAINERS)
                self.gradient, self.arrived, self.pending = None, 0, torch.futures.Future()
                pending.set_result(self.values)
        return pending


def run_trainer(rank: int, options: argparse.Namespace, results: mp.SimpleQueue) -> None:
    # The first trainer that asks makes a server's state, the other one finds it there.
    servers = [
        rpc.remote(f"server{i}", get_server, args=(options.elements // NUM_SERVERS,)) for i in range(NUM_SERVERS)
    ]
    gradient = torch.full((options.elements,), 1e-3 * (rank + 1))
    parts = gradient.chunk(NUM_SERVERS)
    values = torch.zeros(options.elements)
    seconds = []
    for _ in range(options.warmup + options.rounds):
        begin = time.perf_counter()
        replies = [
            rpc.rpc_async(server.owner(), Server.step, args=(server, part), timeout=0)
            for server, part in zip(servers, parts, strict=True)
        ]
        for destination, reply in zip(values.chunk(NUM_SERVERS), replies, strict=True):
            destination.copy_(reply.wait())
        seconds.append(time.perf_counter() - begin)
    expected = -LEARNING_RATE * 1.5e-3 * (options.warmup + options.rounds)
    assert torch.allclose(values[:: options.elements // 100], torch.tensor(expected), rtol=1e-3), "wrong result"
    if rank == 0:
        results.put(seconds[options.warmup :])


_server: Server | None = None
_server_lock = threading.Lock()


def get_server(elements: int) -> Server:
    global _server
    with _server_lock:
        if _server is None:
            _server = Server(elements)
        return _server


def run_process(index: int, options: argparse.Namespace, results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(options.port)
    rank = index - NUM_SERVERS
    name = f"server{index}" if rank < 0 else f"trainer{rank}"
    backend = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=120)
    if options.tcp:
        backend = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=8, rpc_timeout=120, _transports=["uv"], _channels=["basic"]
        )
    rpc.init_rpc(name, rank=index, world_size=NUM_SERVERS + NUM_TRAINERS, rpc_backend_options=backend)
    if rank >= 0:
        run_trainer(rank, options, results)
    rpc.shutdown()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--elements", type=int, default=25_000_000)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--warmup", type=int, default=3)
    arguments.add_argument("--port", type=int, required=True, help="a free port for the rendezvous")
    arguments.add_argument("--tcp", action="store_true", help="over TCP instead of the default transports")
    options = arguments.parse_args()
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_process, args=(options, results), nprocs=NUM_SERVERS + NUM_TRAINERS)
    print("RESULT " + json.dumps({"seconds": results.get()}), flush=True)


if __name__ == "__main__":
    main()
