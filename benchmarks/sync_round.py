"""Seconds a synchronous round: 100 MB of float32, 2 trainers, 2 pservers, SGD; beside torch.distributed.rpc over TCP.

    python benchmarks/sync_round.py [--repetitions 5] [--report FILE.md]

Both systems do the same work in processes of their own, in turn, so that a change of the machine's speed hits both.
A repetition's figure is the median of its rounds; the table shows the median and the range of the repetitions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from trainer_client.testing import LocalCluster

HERE = Path(__file__).parent
MARK = "RESULT "


def read_result(lines: list[str]) -> float:
    """Median seconds a round from the line that a measured program prints."""
    results = [line.partition(MARK)[2] for line in lines if MARK in line]
    if not results:
        raise SystemExit("a measured program printed no result:\n" + "\n".join(lines[-30:]))
    return statistics.median(json.loads(results[0])["seconds"])


def measure_gradpost(rounds: int) -> float:
    with LocalCluster(pservers=2, trainers=2) as cluster:
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


SYSTEMS: dict[str, Callable[[int], float]] = {
    "Gradpost, HTTP/2": measure_gradpost,
    "torch.distributed.rpc over TCP (uv, basic)": measure_torch_rpc_tcp,
}


def describe_hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{os.cpu_count()} cores, {cpu}, {platform.system()} {platform.machine()}"


def make_report(figures: dict[str, list[float]], options: argparse.Namespace) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    packages = ("torch", "granian", "httpx", "pyreqwest", "fastapi")
    ours, theirs = figures.values()
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rows = [
        f"| {name} | {statistics.median(values):.3f} | {min(values):.3f} – {max(values):.3f} |"
        for name, values in figures.items()
    ]
    return "\n".join(
        [
            "# One synchronous round",
            "",
            (__doc__ or "").split("\n\n")[0],
            "",
            f"- date: {datetime.date.today()}, commit {commit.stdout.strip()}",
            f"- hardware: {describe_hardware()}; everything on loopback of one machine, which is shared and noisy",
            f"- versions: Python {platform.python_version()}, "
            + ", ".join(f"{name} {version(name)}" for name in packages),
            "- command: `python benchmarks/sync_round.py "
            f"--repetitions {options.repetitions} --rounds {options.rounds}`",
            "",
            "| system | median s/round | range over repetitions |",
            "|---|---|---|",
            *rows,
            "",
            f"Ratio in the same run, pair by pair: median {statistics.median(ratios):.2f}, "
            f"range {min(ratios):.2f} – {max(ratios):.2f}.",
            "",
        ]
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--report", type=Path, help="write the Markdown report there too")
    options = arguments.parse_args()
    figures: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for repetition in range(options.repetitions):
        for name, measure in SYSTEMS.items():
            figures[name].append(measure(options.rounds))
            print(f"{repetition + 1}/{options.repetitions} {name}: {figures[name][-1]:.3f} s/round", flush=True)
    report = make_report(figures, options)
    print(report)
    if options.report is not None:
        options.report.write_text(report)


if __name__ == "__main__":
    main()
