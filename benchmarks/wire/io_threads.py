"""One event loop for a trainer's tensors against several, each on a thread of its own with some of the pservers.

    python -m benchmarks.wire.io_threads [--elements 25000000] [--pservers 4] [--threads 0 1 2 4] [--rounds 5]
                                         [--report FILE.md]

Over loopback TCP, one trainer, the kinds in turn; with the defaults it takes some 4 minutes. 0 threads: the trainer's
own event loop carries the tensors, as ever. With others each request makes a hop between loops, which is a part of what
they cost; 1 shows how much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx
import torch
from torch import nn

from ps_http2.stream import Sink
from ps_protocol.messages import PserverInfo
from trainer_client import RemoteOptimizer, connect
from trainer_client.buckets import Payload
from trainer_client.client import ParameterClient
from trainer_client.exchange import Exchange
from trainer_client.io_thread import IoThread
from trainer_client.testing import LocalCluster

from ..report import PACKAGES, add_report_option, make_head, publish

WARM_UP, STEPS = 3, 12
TENSORS = 16
MEASURED = "measured: "

TEXT = """\
1 trainer and {pservers} pservers, each a process, over loopback TCP; {elements} float32 parameters, SGD, synchronous
mode, durability `none`. A step pushes all gradients and pulls all parameters; {steps} steps a run, {rounds} runs of
each kind in turn. **0** is how it is: the trainer's one event loop carries tensors and all else. With **1** and more,
others carry the tensors, each on a thread of its own, of some of the pservers; a request makes a hop there and one
back. Ratios are of neighbouring runs: median, and the range of all.
"""


class FarExchange(Exchange):
    """Sends and receives on another thread's loop; what a request is, and what becomes of it, stays on the caller's."""

    def __init__(self, client: ParameterClient, io: IoThread) -> None:
        self._io = io
        self._exchange = io.run(self._make(client))

    @staticmethod
    async def _make(client: ParameterClient) -> Exchange:
        return Exchange(client.settings.client_tls, None, http2=True)

    async def begin(
        self,
        method: str,
        url: httpx.URL,
        headers: Mapping[str, str],
        *,
        body: Payload = (),
        sink: Sink | None = None,
    ) -> httpx.Response:
        """See Exchange; the answer is whole."""

        async def exchange() -> httpx.Response:
            response = await self._exchange.begin(method, url, headers, body=body, sink=sink)
            try:
                content = b"".join([bytes(chunk) async for chunk in response.aiter_raw()])
            finally:
                await response.aclose()
            return httpx.Response(
                response.status_code,
                headers=response.headers,
                stream=httpx.ByteStream(content),
                request=response.request,
                extensions=response.extensions,
            )

        return await asyncio.wrap_future(self._io.start(exchange()))

    async def aclose(self) -> None:
        """See Exchange."""
        await asyncio.wrap_future(self._io.start(self._exchange.aclose()))


def spread_over(client: ParameterClient, num_threads: int) -> None:
    """Let so many threads carry the tensors; pservers take turns."""
    exchanges = [FarExchange(client, IoThread()) for _ in range(num_threads)]

    def choose(info: PserverInfo) -> Exchange:
        return exchanges[info.index % num_threads]

    client._bulk_client = choose  # type: ignore[method-assign]


def train(elements: int, num_threads: int) -> None:
    """A trainer of its own process."""
    torch.set_num_threads(1)
    session = connect()
    if num_threads:
        spread_over(session.client, num_threads)
    layers = nn.ParameterDict({f"layer{i}": nn.Parameter(torch.zeros(elements // TENSORS)) for i in range(TENSORS)})
    optimizer = RemoteOptimizer(torch.optim.SGD(layers.named_parameters(), lr=0.1))
    for parameter in layers.values():
        parameter.grad = torch.ones_like(parameter)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    assert all((parameter == parameter[0]).all() for parameter in layers.values())
    print(MEASURED + json.dumps(seconds[WARM_UP:]), flush=True)


def measure(options: argparse.Namespace) -> dict[int, list[float]]:
    """Medians of the seconds a step takes, of each run, by number of threads. Exits if a trainer fails."""
    found: list[float] = []
    is_there = threading.Event()

    def read(name: str, line: str) -> None:
        if line.startswith(MEASURED):
            found[:] = json.loads(line.removeprefix(MEASURED))
            is_there.set()

    medians: dict[int, list[float]] = {number: [] for number in options.threads}
    with LocalCluster(pservers=options.pservers, trainers=1, local_transport=False, on_line=read) as cluster:
        for _ in range(options.rounds):
            for number in options.threads:
                is_there.clear()
                arguments: list[Any] = ["--elements", options.elements, "--train", number]
                command = [sys.executable, "-m", "benchmarks.wire.io_threads", *map(str, arguments)]
                if cluster.run_trainers(command) != [0] or not is_there.wait(10):
                    sys.exit("\n".join(cluster.output))
                medians[number].append(statistics.median(found))
    return medians


def make_report(medians: Mapping[int, list[float]], options: argparse.Namespace) -> str:
    text = TEXT.format(pservers=options.pservers, elements=options.elements, steps=STEPS, rounds=options.rounds)
    head = make_head("One thread for a trainer's tensors, or several", text.strip(), PACKAGES)
    lines = ["\n| threads | seconds a step, median of runs | of the first |", "|--:|--:|--:|"]
    first = medians[options.threads[0]]
    for number, values in medians.items():
        ratios = sorted(value / base for value, base in zip(values, first, strict=True))
        middle = statistics.median(ratios)
        lines.append(
            f"| {number} | {statistics.median(values):.3f} | {middle:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] |"
        )
    return head + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000, help="parameters")
    parser.add_argument("--pservers", type=int, default=4)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[0, 1, 2, 4], help="the first is what others are over"
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    add_report_option(parser)
    options = parser.parse_args()
    if options.train is not None:
        train(options.elements, options.train)
    else:
        publish(make_report(measure(options), options), options.report)


if __name__ == "__main__":
    main()
