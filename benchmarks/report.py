"""The common parts of all reports: hardware, versions, command line and statistics."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import signal
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
    """Return title, text, date, hardware, versions, `notes` and command of a program that was run by `python -m`."""
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
    """Return a note with the kind of file system of temporary state."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", tempfile.gettempdir()], capture_output=True, text=True)
    return f"file system of the services' state: {kind.stdout.strip() or 'unknown'}"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of all values does not exceed.

    >>> quantile([4, 1, 3, 2], 0.5), quantile([4, 1, 3, 2], 0.99)
    (2, 4)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread_table(rows: Mapping[str, Sequence[float]], unit: str) -> str:
    """Return a table of median, p99 and range of each row. With fewer than 100 values p99 is the largest one."""
    lines = [f"| {unit} | n | median | p99 | range |", "|---|--:|--:|--:|--:|"]
    for name, values in rows.items():
        lines.append(
            f"| {name} | {len(values)} | {statistics.median(values):.3g} | {quantile(values, 0.99):.3g} "
            f"| {min(values):.3g} – {max(values):.3g} |"
        )
    return "\n".join(lines) + "\n"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option `--report`. The description is printed as it is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="write the Markdown report there too")
    return parser


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP leave all `with` blocks of the main thread."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def publish(report: str, path: Path | None) -> None:
    print(report)
    if path is not None:
        path.write_text(report)
