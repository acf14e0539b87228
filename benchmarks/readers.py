"""What looking costs: rounds a second while clients ask for statistics, as a ratio to those while nobody looks.

    python -m benchmarks.readers [--clients 20] [--megabytes 100] [--repetitions 5] [--report FILE.md]

Both are measured in turn, in one run, so that a change of the machine's speed hits them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from ps_config.certificates import TlsFiles
from trainer_client.transport.exchange import Exchange

from .faults.observed import ObservedCluster
from .report import PACKAGES, add_report_option, make_head, publish, spread_table

ROOT = Path(__file__).parents[1]
TENSORS = 160
WARM_UP_ROUNDS = 20

TEXT = """\
{clients} clients in a process of their own ask the coordinator once a second each for the statistics of a parameter,
while 2 trainers and 2 pservers train {megabytes:g} MB of parameters in {tensors} tensors (synchronous, Adam, durability
none, {compute_ms:.0f} ms of emulated computation in a step), everything on the same cores. `own`: each client looks at
another tensor; `same`: all look at one. A **ratio** is rounds a second in {seconds:g} s of looking to those in the
{seconds:g} s before it, in which nobody looks.
"""


async def read(address: str, names: list[str], seconds: float) -> list[float]:
    """Ask once a second for each of these names; returns the seconds that each answer took.

    With a client that takes little of the cores, which are those of the cluster: httpx would take 2 ms a request.
    """
    took = []
    http = Exchange(TlsFiles(), None, http2=True)

    async def look(name: str, offset: float) -> None:
        await asyncio.sleep(offset)
        while (begin := time.monotonic()) < until:
            url = httpx.URL(f"{address}/v1/statistics/{name}")
            (await asyncio.wait_for(http.send("GET", url, {}), 60)).raise_for_status()
            took.append(time.monotonic() - begin)
            await asyncio.sleep(max(0.0, begin + 1 - time.monotonic()))

    until = time.monotonic() + seconds
    try:
        await asyncio.gather(*(look(name, index / len(names)) for index, name in enumerate(names)))
    finally:
        await http.aclose()
    return took


def run_readers(arguments: list[str]) -> None:
    """The other process: tells that it is ready, begins at a line, and prints what each answer took."""
    address, seconds, *names = arguments
    print("ready", flush=True)
    sys.stdin.readline()
    print(*(f"{one:.6f}" for one in asyncio.run(read(address, names, float(seconds)))), flush=True)


def measure(observed: ObservedCluster, names: list[str], seconds: float) -> tuple[float, list[float]]:
    """The ratio, and what each answer took."""
    command = [sys.executable, "-m", "benchmarks.readers", "--read", observed.cluster.address, str(seconds), *names]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:  # its imports are none of the looking
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the readers did not start")
        before = observed.num_steps(0)
        time.sleep(seconds)  # this is what is measured
        between, began = observed.num_steps(0), time.monotonic()
        output, _ = process.communicate("begin\n")
        rate = (observed.num_steps(0) - between) / (time.monotonic() - began)
    if process.returncode:
        raise RuntimeError("the readers failed")
    return rate / ((between - before) / seconds), [float(one) for one in output.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=100.0, help="of parameters")
    parser.add_argument("--compute-seconds", type=float, default=0.0, help="of a step, emulated")
    parser.add_argument("--seconds", type=float, default=10.0, help="of looking, and of not looking before it")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--read", nargs="+", help=argparse.SUPPRESS)
    add_report_option(parser)
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
    report = make_head("The cost of looking", text, PACKAGES, f"about {rate:.2f} rounds a second")
    report += "\n" + spread_table(ratios, "ratio of rounds a second") + "\n" + spread_table(took, "seconds an answer")
    publish(report, options.report)
    return None


if __name__ == "__main__":
    main()
