"""Attack a pserver in every way, on both servers, while a good client measures what it notices.

    python -m benchmarks.attacks.measure [--seconds 5] [--only rapid_reset] [--report FILE.md]

Prints the table, and with `--report` writes it with hardware, versions and command.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from .arena import MIB, Verdict, open_arena
from .attacker import ATTACKS, names_for

HEADER = """\
| attack | server | p99 before, ms | during | ratio | failed | memory, peak | kept | what happened |
|---|---|--:|--:|--:|--:|--:|--:|---|
"""


def row(verdict: Verdict) -> str:
    name = verdict.attack.replace("_", " ")
    state = "" if verdict.state_is_unchanged else "; **the state changed**"
    return (
        f"| {name} | {verdict.server} | {verdict.p99_before * 1000:.1f} | {verdict.p99_during * 1000:.1f} "
        f"| {verdict.p99_during / verdict.p99_before:.1f} | {verdict.num_failed} "
        f"| {verdict.grown_bytes / MIB:+.0f} MiB | {verdict.kept_bytes / MIB:+.0f} MiB | {verdict.outcome}{state} |\n"
    )


async def measure(servers: Sequence[str], only: Sequence[str], seconds: float) -> str:
    rows = ""
    for server in servers:
        async with open_arena(server) as arena:
            for name in names_for(server):
                if not only or name in only:
                    rows += (text := row(await arena.judge(name, seconds)))
                    print(text, end="", flush=True)
    return rows


def describe(seconds: float, rows: str) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    packages = ("granian", "uvicorn", "httptools", "h2", "pyreqwest")
    what = "\n".join(f"- *{name.replace('_', ' ')}*: {attack.__doc__}" for name, attack in ATTACKS.items())
    return (
        "# Attacks\n\n"
        "What a good client notices (100 small gets a second) while a pserver is attacked from the same machine, what\n"
        "happens to the pserver's memory, and what the attacker was told. The pserver serves one parameter of 16 MB;\n"
        "slow clients have 2 s for headers and for the next part of a body, bodies and replies 64 MiB.\n\n"
        f"- date: {datetime.date.today()}, commit {commit}\n"
        f"- hardware: {os.cpu_count()} cores, {platform.system()} {platform.machine()}; attacker, pserver and client\n"
        "  on loopback of one machine, which was busy with other work: trust orders of magnitude, not digits\n"
        f"- versions: Python {platform.python_version()}, {', '.join(f'{p} {version(p)}' for p in packages)}\n"
        f"- command: `python -m benchmarks.attacks.measure --seconds {seconds:g}`\n\n"
        f"{HEADER}{rows}\n{what}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--server", action="append", choices=["granian", "uvicorn"])
    parser.add_argument("--only", action="append", default=[], choices=list(ATTACKS))
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    print(HEADER, end="")
    rows = asyncio.run(measure(arguments.server or ["granian", "uvicorn"], arguments.only, arguments.seconds))
    if arguments.report is not None:
        arguments.report.write_text(describe(arguments.seconds, rows))


if __name__ == "__main__":
    main()
