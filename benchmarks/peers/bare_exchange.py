"""Our HTTP/2 with nothing above it: what a round costs without fences, checks, frames, retries and metrics.

A trainer pushes its part to each server in the request for the new values; a server steps once all trainers have asked.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np
import torch

from benchmarks.comparison.paced import take_rounds
from benchmarks.comparison.work import LEARNING_RATE, Address, Work, read_arguments
from ps_config.hosts import take_port
from ps_http2.asgi import receive_into
from ps_http2.polled_client import PolledTransport
from services.runtime.server import UvicornServer
from services.runtime.settings import ServiceSettings

from .raw_sockets import connect, part_of


class Server:
    """An ASGI application without a framework."""

    def __init__(self, work: Work, index: int) -> None:
        part = part_of(work, index)
        self._values = np.zeros(part.stop - part.start, dtype=np.float32)
        self._staged = [np.empty_like(self._values) for _ in range(work.num_trainers)]
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._stage(int(scope["path"][1:]), scope, receive)
        await self._wait()
        body = memoryview(self._values).cast("B")
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stage(self, rank: int, scope: Any, receive: Any) -> None:
        room, has_more = memoryview(self._staged[rank]).cast("B"), True
        while has_more:
            num_bytes, has_more = await receive_into(room, scope, receive)
            room = room[num_bytes:]

    async def _wait(self) -> None:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        if len(self._waiting) == len(self._staged):
            for other in self._staged[1:]:
                np.add(self._staged[0], other, out=self._staged[0])
            np.multiply(self._staged[0], LEARNING_RATE / len(self._staged), out=self._staged[0])
            np.subtract(self._values, self._staged[0], out=self._values)
            for waiting in self._waiting:
                waiting.set_result(None)
            self._waiting = []
        await answer


class Memory:
    """The sink of a reply, which the kernel writes to this memory."""

    def __init__(self, memory: memoryview) -> None:
        self._rest = memory

    def get_buffer(self) -> memoryview:
        return self._rest

    def buffer_updated(self, num_bytes: int) -> None:
        self._rest = self._rest[num_bytes:]

    def feed(self, data: memoryview) -> None:
        self._rest[: len(data)] = data
        self.buffer_updated(len(data))


async def serve(work: Work, index: int, at: list[Address]) -> None:
    with take_port(*at[index]) as bound:
        async with UvicornServer(Server(work, index), ServiceSettings(), bound):
            await asyncio.Event().wait()


def train(work: Work, rank: int, at: list[Address]) -> None:
    gradient = np.concatenate([tensor.numpy() for tensor in work.make_gradients(rank)])
    values = np.zeros_like(gradient)
    pushed, pulled = memoryview(gradient).cast("B"), memoryview(values).cast("B")
    parts = [slice(4 * part.start, 4 * part.stop) for part in (part_of(work, i) for i in range(work.num_servers))]
    urls = [f"http://{host}:{port}/{rank}" for host, port in at]
    for address in at:
        connect(address).close()  # waits until it listens
    transport = PolledTransport()

    def exchange() -> None:
        calls = [
            transport.begin("POST", url, [], (pushed[part],), Memory(pulled[part]))
            for url, part in zip(urls, parts, strict=True)
        ]
        while not all(call.is_done for call in calls):
            transport.wait(10.0)
        for call in calls:
            call.finish()

    take_rounds(work, rank, exchange, lambda: [torch.from_numpy(values)])
    transport.close()


def main() -> None:
    options: argparse.Namespace = read_arguments(__doc__)
    if options.role == "server":
        asyncio.run(serve(options.work, options.index, options.at))
    else:
        train(options.work, options.index, options.at)


if __name__ == "__main__":
    main()
