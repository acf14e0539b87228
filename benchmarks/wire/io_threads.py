"""One event loop for a trainer's tensors, compared with several, each on its own thread for some of the pservers.

    python -m benchmarks.wire.io_threads [--elements 25000000] [--pservers 4] [--threads 0 1 2 4] [--rounds 5]
                                         [--report FILE.md]

Over loopback TCP with one trainer; with the defaults it takes 4 minutes. With 0 threads the trainer's event loop
transfers the tensors, as in the product. With others each request hops between loops; 1 shows the cost of that.
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
import psutil
import torch
from torch import nn

from ps_http2.stream import Sink
from ps_protocol.messages import PserverInfo
from trainer_client import RemoteOptimizer, connect
from trainer_client.client.buckets import FrameParts
from trainer_client.client.run_client import RunClient
from trainer_client.session.io_thread import IoThread
from trainer_client.testing import LocalCluster
from trainer_client.transport.exchange import Exchange, raw_parts

from ..report import PACKAGES, make_head, make_parser, publish

WARM_UP, STEPS = 3, 12
TENSORS = 16
MEASURED = "measured: "

TEXT = """\
1 trainer and {pservers} pservers, each a process, over loopback TCP; {elements} float32 parameters, SGD, synchronous
mode, durability `none`. A step pushes all gradients and pulls all parameters; {steps} steps a run, {rounds} runs of
each kind in turn. **0** is the product: one event loop for everything. With **1** and more, other loops
transfer the tensors, each on its own thread for some of the pservers; a request hops there and back. Medians of runs;
ratios are of neighbouring runs: median and range. The last column is the processor time of the busiest thread in a
step, which bounds the step from below.
"""


class FarExchange(Exchange):
    """An exchange that sends and receives on the event loop of another thread."""

    def __init__(self, client: RunClient, io: IoThread) -> None:
        self._io = io
        self._exchange = io.run(self._make(client))

    @staticmethod
    async def _make(client: RunClient) -> Exchange:
        return Exchange(client.settings.client_tls, None, http2=True)

    async def begin_request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        *,
        body: FrameParts = (),
        sink: Sink | None = None,
    ) -> httpx.Response:
        """See Exchange; the answer is whole."""

        async def exchange() -> httpx.Response:
            response = await self._exchange.begin_request(method, url, headers, body=body, sink=sink)
            try:
                content = b"".join([bytes(chunk) async for chunk in raw_parts(response)])
            finally:
                await response.aclose()
            return httpx.Response(
                response.status_code,
                headers=response.headers,
                stream=httpx.ByteStream(content),
                extensions=response.extensions,
            )

        return await asyncio.wrap_future(self._io.start(exchange()))

    async def aclose(self) -> None:
        """See Exchange."""
        await asyncio.wrap_future(self._io.start(self._exchange.aclose()))


def spread_over(client: RunClient, num_threads: int) -> None:
    """Distribute the pservers over so many threads."""
    exchanges = [FarExchange(client, IoThread()) for _ in range(num_threads)]

    def choose(info: PserverInfo) -> Exchange:
        return exchanges[info.index % num_threads]

    client._exchange_for = choose  # type: ignore[method-assign]


def train(elements: int, num_threads: int) -> None:
    """Run the trainer's process."""
    torch.set_num_threads(1)
    session = connect()
    if num_threads:
        spread_over(session.client, num_threads)
    layers = nn.ParameterDict({f"layer{i}": nn.Parameter(torch.zeros(elements // TENSORS)) for i in range(TENSORS)})
    optimizer = RemoteOptimizer(torch.optim.SGD(layers.named_parameters(), lr=0.1))
    for parameter in layers.values():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(WARM_UP):
        optimizer.step()
    before = computed_by_thread()
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    busiest = max(value - before.get(thread, 0.0) for thread, value in computed_by_thread().items())
    assert all((parameter == parameter[0]).all() for parameter in layers.values())
    print(MEASURED + json.dumps([statistics.median(seconds), busiest / STEPS]), flush=True)


def computed_by_thread() -> dict[int, float]:
    """Return the processor seconds of each thread of this process, except for the one that trains."""
    own = threading.get_native_id()
    return {one.id: one.user_time + one.system_time for one in psutil.Process().threads() if one.id != own}


def measure(options: argparse.Namespace) -> dict[int, list[tuple[float, float]]]:
    """Return seconds and the busiest thread's processor seconds of a step, of each run. Exits on failure."""
    found: list[float] = []
    is_there = threading.Event()

    def read(name: str, line: str) -> None:
        if line.startswith(MEASURED):
            found[:] = json.loads(line.removeprefix(MEASURED))
            is_there.set()

    runs: dict[int, list[tuple[float, float]]] = {number: [] for number in options.threads}
    with LocalCluster(pservers=options.pservers, trainers=1, local_transport=False, on_line=read) as cluster:
        for _ in range(options.rounds):
            for number in options.threads:
                is_there.clear()
                arguments: list[Any] = ["--elements", options.elements, "--train", number]
                command = [sys.executable, "-m", "benchmarks.wire.io_threads", *map(str, arguments)]
                if cluster.run_trainers(command) != [0] or not is_there.wait(10):
                    sys.exit("\n".join(cluster.output))
                runs[number].append((found[0], found[1]))
    return runs


def make_report(runs: Mapping[int, list[tuple[float, float]]], options: argparse.Namespace) -> str:
    text = TEXT.format(pservers=options.pservers, elements=options.elements, steps=STEPS, rounds=options.rounds)
    head = make_head("One thread for a trainer's tensors, or several", text.strip(), PACKAGES)
    lines = ["\n| threads | seconds a step | of the first | the busiest thread's |", "|--:|--:|--:|--:|"]
    first = [seconds for seconds, _ in runs[options.threads[0]]]
    for number, pairs in runs.items():
        all_seconds, busy = zip(*pairs, strict=True)
        ratios = sorted(seconds / base for seconds, base in zip(all_seconds, first, strict=True))
        ratio = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        lines.append(f"| {number} | {statistics.median(all_seconds):.3f} | {ratio} | {statistics.median(busy):.3f} |")
    return head + "\n".join(lines) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--elements", type=int, default=25_000_000, help="parameters")
    parser.add_argument("--pservers", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[0, 1, 2, 4], help="the first is the baseline")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.elements, options.train)
    else:
        publish(make_report(measure(options), options), options.report)


if __name__ == "__main__":
    main()
