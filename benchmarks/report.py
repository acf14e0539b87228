"""What the reports have in common: where it was measured and with what, and how numbers are summed up."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ("torch", "uvicorn", "httpx", "hpack", "fastapi")  # that carry a round


def describe_hardware() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{os.cpu_count()} cores, {cpu}, {platform.system()} {platform.machine()}"


def make_head(title: str, text: str, packages: Sequence[str], *notes: str, where: str = "on loopback") -> str:
    """Title, what was measured, where and with what; `notes` are further points. The program was run by `python -m`."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=, changed", "--exclude=*"], capture_output=True, text=True, cwd=HERE
    )
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    spec = sys.modules["__main__"].__spec__
    assert spec is not None
    points = (
        f"date: {datetime.date.today()}, commit {commit.stdout.strip()}",
        f"hardware: {describe_hardware()}; all processes on this machine, {where}",
        f"versions: Python {platform.python_version()}, {versions}",
        *notes,
        f"command: `{' '.join(['python -m', spec.name.removesuffix('.__main__'), *sys.argv[1:]])}`",
    )
    return "\n".join([f"# {title}", "", text, "", *(f"- {point}" for point in points), ""])


def describe_disk() -> str:
    """The kind of file system on which temporary state is kept, as a note."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", tempfile.gettempdir()], capture_output=True, text=True)
    return f"file system of the services' state: {kind.stdout.strip() or 'unknown'}"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all values does not exceed.

    >>> quantile([4, 1, 3, 2], 0.5), quantile([4, 1, 3, 2], 0.99)
    (2, 4)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread_table(rows: Mapping[str, Sequence[float]], unit: str) -> str:
    """Median, p99 and range of each row's values. With fewer than 100 values p99 is the largest one."""
    lines = [f"| {unit} | n | median | p99 | range |", "|---|--:|--:|--:|--:|"]
    for name, values in rows.items():
        lines.append(
            f"| {name} | {len(values)} | {statistics.median(values):.3g} | {quantile(values, 0.99):.3g} "
            f"| {min(values):.3g} – {max(values):.3g} |"
        )
    return "\n".join(lines) + "\n"


def add_report_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", type=Path, help="write the Markdown report there too")


def publish(report: str, path: Path | None) -> None:
    print(report)
    if path is not None:
        path.write_text(report)
