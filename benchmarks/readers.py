"""The cost of inspection: rounds a second while clients request statistics, as a ratio to those without clients.

    python -m benchmarks.readers [--clients 20] [--megabytes 100] [--repetitions 5] [--report FILE.md]

Both are measured in turn, in one run, so that a change of the machine's speed affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

from ps_config.certificates import TlsFiles
from trainer_client.transport.exchange import Exchange

from .faults.observed import ObservedCluster
from .report import PACKAGES, make_head, make_parser, publish, spread_table

ROOT = Path(__file__).parents[1]
TENSORS = 160
WARM_UP_ROUNDS = 20

TEXT = """\
{clients} clients in a separate process each request the statistics of a parameter from the coordinator once a second,
while 2 trainers and 2 pservers train {megabytes:g} MB of parameters in {tensors} tensors (synchronous, Adam, durability
none, {compute_ms:.0f} ms of emulated computation in a step), everything on the same cores. `own`: each client requests
another tensor; `same`: all request the same. A **ratio** is rounds a second during {seconds:g} s of requests to those
during the {seconds:g} s before them.
"""


async def read(address: str, names: list[str], seconds: float) -> list[float]:
    """Request each of these names once a second, and return the seconds of each request.

    The trainers' client is used, as httpx would take 2 ms of the cluster's processor time for each request.
    """
    took = []
    http = Exchange(TlsFiles(), None, http2=True)

    async def request(name: str, offset: float) -> None:
        await asyncio.sleep(offset)
        while (begin := time.monotonic()) < until:
            response, _ = await asyncio.wait_for(http.send("GET", f"{address}/v1/statistics/{name}", {}), 60)
            assert response.is_success
            took.append(time.monotonic() - begin)
            await asyncio.sleep(max(0.0, begin + 1 - time.monotonic()))

    until = time.monotonic() + seconds
    try:
        await asyncio.gather(*(request(name, index / len(names)) for index, name in enumerate(names)))
    finally:
        await http.aclose()
    return took


def run_readers(arguments: list[str]) -> None:
    """Run the clients' process: print that it is ready, wait for a line, and print the seconds of each request."""
    address, seconds, *names = arguments
    print("ready", flush=True)
    sys.stdin.readline()
    print(*(f"{one:.6f}" for one in asyncio.run(read(address, names, float(seconds)))), flush=True)


def measure(observed: ObservedCluster, names: list[str], seconds: float) -> tuple[float, list[float]]:
    """Return the ratio, and the seconds of each request."""
    command = [sys.executable, "-m", "benchmarks.readers", "--read", observed.cluster.address, str(seconds), *names]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the readers did not start")
        before = observed.num_steps(0)
        time.sleep(seconds)
        between, began = observed.num_steps(0), time.monotonic()
        output, _ = process.communicate("begin\n")
        rate = (observed.num_steps(0) - between) / (time.monotonic() - began)
    if process.returncode:
        raise RuntimeError("the readers failed")
    return rate / ((between - before) / seconds), [float(one) for one in output.split()]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=100.0, help="of parameters")
    parser.add_argument("--compute-seconds", type=float, default=0.0, help="of a step, emulated")
    parser.add_argument("--seconds", type=float, default=10.0, help="of requests, and of the time before them")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--read", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        return run_readers(options.read)
    text = TEXT.format(
        clients=options.clients, megabytes=options.megabytes, tensors=TENSORS, seconds=options.seconds,
        compute_ms=1000 * options.compute_seconds,
    )  # fmt: skip
    arguments = ["--elements", str(int(options.megabytes * 250_000)), "--tensors", str(TENSORS)]
    arguments += ["--compute-seconds", str(options.compute_seconds)]
    ratios: dict[str, list[float]] = {"own": [], "same": []}
    took: dict[str, list[float]] = {"own": [], "same": []}
    with ObservedCluster(arguments, pservers=2, trainers=2, durability="none", lease_seconds=30) as observed:
        observed.wait_for_steps([0, 1], number=WARM_UP_ROUNDS)
        for repetition in range(options.repetitions):
            for kind in ratios:
                names = [f"weight{index % TENSORS if kind == 'own' else 0}" for index in range(options.clients)]
                ratio, answers = measure(observed, names, options.seconds)
                ratios[kind].append(ratio)
                took[kind] += answers
                print(
                    f"{repetition + 1}/{options.repetitions}, {kind}: {ratio:.3f} of the rounds, "
                    f"{len(answers)} answers, {statistics.median(answers):.3f} s each",
                    flush=True,
                )
        rate = observed.steps[-1].round / (observed.steps[-1].at - observed.steps[0].at)
    report = make_head("The cost of inspection", text, PACKAGES, f"about {rate:.2f} rounds a second")
    report += "\n" + spread_table(ratios, "ratio of rounds a second") + "\n" + spread_table(took, "seconds an answer")
    publish(report, options.report)
    return None


if __name__ == "__main__":
    main()
