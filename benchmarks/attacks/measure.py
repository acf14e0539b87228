"""Attack a pserver in every way while an honest client measures its own latency.

    python -m benchmarks.attacks.measure [--seconds 5] [--only rapid_reset] [--report FILE.md]

Prints the table, and with `--report` writes it with hardware, versions and command.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from ..report import make_head, make_parser, publish
from .arena import MIB, Verdict, open_arena
from .attacker import ATTACKS

TEXT = """\
The latency of an honest client (100 small pulls a second) while a pserver is attacked from the same machine, the
pserver's memory, and the answers to the attacker. The pserver serves one parameter of 16 MB; slow clients have 2 s for
headers and for the next part of a body, and bodies have at most 64 MiB."""

HEADER = """\
| attack | p99 before, ms | during | ratio | failed | memory, peak | kept | answers |
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
    packages = ("uvicorn", "h11", "hpack", "h2")
    attacks = "\n".join(f"- *{name.replace('_', ' ')}*: {attack.__doc__}" for name, attack in ATTACKS.items())
    return f"{make_head('Attacks', TEXT, packages)}\n{HEADER}{rows}\n{attacks}\n"


def main() -> None:
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--only", action="append", default=[], choices=list(ATTACKS))
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.only, arguments.seconds))
    publish(describe(rows), arguments.report)


if __name__ == "__main__":
    main()
