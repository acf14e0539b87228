"""Attack a pserver in every way while a good client measures its own latency.

    python -m benchmarks.attacks.measure [--seconds 5] [--only rapid_reset] [--report FILE.md]

Prints the table, and with `--report` writes it with hardware, versions and command.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from ..report import add_report_option, make_head, publish
from .arena import MIB, Verdict, open_arena
from .attacker import ATTACKS

TEXT = """\
What a good client notices (100 small gets a second) while a pserver is attacked from the same machine, what
happens to the pserver's memory, and what the attacker was told. The pserver serves one parameter of 16 MB;
slow clients have 2 s for headers and for the next part of a body, bodies 64 MiB."""

HEADER = """\
| attack | p99 before, ms | during | ratio | failed | memory, peak | kept | what happened |
|---|--:|--:|--:|--:|--:|--:|---|
"""


def row(verdict: Verdict) -> str:
    name = verdict.attack.replace("_", " ")
    state = "" if verdict.state_is_unchanged else "; **the state changed**"
    return (
        f"| {name} | {verdict.p99_before * 1000:.1f} | {verdict.p99_during * 1000:.1f} "
        f"| {verdict.p99_during / verdict.p99_before:.1f} | {verdict.num_failed} "
        f"| {verdict.grown_bytes / MIB:+.0f} MiB | {verdict.kept_bytes / MIB:+.0f} MiB | {verdict.outcome}{state} |\n"
    )


async def measure(only: Sequence[str], seconds: float) -> str:
    rows = ""
    async with open_arena() as arena:
        for name in ATTACKS:
            if not only or name in only:
                rows += row(verdict := await arena.judge(name, seconds))
                print(f"{name}: {verdict.outcome}", file=sys.stderr, flush=True)
    return rows


def describe(rows: str) -> str:
    packages = ("uvicorn", "httptools", "hpack", "h2")
    what = "\n".join(f"- *{name.replace('_', ' ')}*: {attack.__doc__}" for name, attack in ATTACKS.items())
    return f"{make_head('Attacks', TEXT, packages)}\n{HEADER}{rows}\n{what}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--only", action="append", default=[], choices=list(ATTACKS))
    add_report_option(parser)
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.only, arguments.seconds))
    publish(describe(rows), arguments.report)


if __name__ == "__main__":
    main()
