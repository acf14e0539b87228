"""Seconds a synchronous round: 100 MB of float32, 2 trainers, 2 pservers, SGD; beside torch.distributed.rpc over TCP.

    python -m benchmarks.sync_round [--repetitions 5] [--report FILE.md]

Both systems do the same work in processes of their own, in turn, so that a change of the machine's speed hits both.
A repetition's figure is the median of its rounds; the table shows the median and the range of the repetitions.
"""

from __future__ import annotations

import argparse
import functools
import json
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from trainer_client.testing import LocalCluster

from .report import PACKAGES, add_report_option, make_head, publish, spread_table

HERE = Path(__file__).parent
MARK = "RESULT "


def read_result(lines: list[str]) -> float:
    """Median seconds a round from the line that a measured program prints."""
    results = [line.partition(MARK)[2] for line in lines if MARK in line]
    if not results:
        raise SystemExit("a measured program printed no result:\n" + "\n".join(lines[-30:]))
    return statistics.median(json.loads(results[0])["seconds"])


def measure_gradpost(rounds: int, durability: str) -> float:
    with LocalCluster(pservers=2, trainers=2, durability=durability) as cluster:
        cluster.run_trainers([sys.executable, str(HERE / "trainer.py"), "--rounds", str(rounds)], timeout=300)
        assert cluster.summary().transport == "HTTP/2"
    return read_result(cluster.output)


def measure_torch_rpc_tcp(rounds: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "peers" / "torch_rpc.py"), "--tcp"]
    done = subprocess.run(
        [*command, "--port", str(port), "--rounds", str(rounds)], capture_output=True, text=True, timeout=300
    )
    return read_result((done.stdout + done.stderr).splitlines())


PEER = "torch.distributed.rpc over TCP (uv, basic)"
SYSTEMS: dict[str, Callable[[int], float]] = {
    "Gradpost, HTTP/2, nothing kept": functools.partial(measure_gradpost, durability="none"),
    "Gradpost, HTTP/2, with its log (the default)": functools.partial(measure_gradpost, durability="log"),
    PEER: measure_torch_rpc_tcp,
}


def make_report(figures: dict[str, list[float]]) -> str:
    text = (__doc__ or "").partition("\n\n")[0]
    ratios = {
        name: [ours / theirs for ours, theirs in zip(values, figures[PEER], strict=True)]
        for name, values in figures.items()
        if name != PEER
    }
    return (
        f"{make_head('One synchronous round', text, PACKAGES)}\n{spread_table(figures, 'seconds a round')}"
        f"\n{spread_table(ratios, 'ratio to the peer, pair by pair')}"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=10)
    add_report_option(arguments)
    options = arguments.parse_args()
    figures: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for repetition in range(options.repetitions):
        for name, measure in SYSTEMS.items():
            figures[name].append(measure(options.rounds))
            print(f"{repetition + 1}/{options.repetitions} {name}: {figures[name][-1]:.3f} s/round", flush=True)
    publish(make_report(figures), options.report)


if __name__ == "__main__":
    main()
