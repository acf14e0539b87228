"""The end of `gradpost up`: a run in numbers."""

from __future__ import annotations

import json
from typing import Any

from ps_protocol.messages import RunSummary

from ..output import Column, print_json, print_line, print_table


def print_summary(summary: RunSummary, *, as_json: bool) -> None:
    """Print the tables and, last of all, the run's one line; or the JSON instead of both."""
    if as_json:
        print_json(summary_to_json(summary))
        return
    print_line()
    print_table(
        [Column(title, "right") for title in ("rounds", "seconds", "seconds a round", *sorted(summary.results))],
        [
            (
                f"{summary.rounds:,}",
                f"{summary.seconds:.1f}",
                f"{seconds_a_round(summary):.4f}",
                *(f"{value:.4g}" for _, value in sorted(summary.results.items())),
            )
        ],
    )
    if summary.shards:  # not with strategy ring
        print_table(
            [Column(title, "right") for title in ("pserver", "shard bytes", "pushed bytes", "pulled bytes")],
            [
                (str(shard.pserver), *(f"{n:,}" for n in (shard.shard_bytes, shard.pushed_bytes, shard.pulled_bytes)))
                for shard in summary.shards
            ],
        )
    print_line(summary.line())


def summary_to_json(summary: RunSummary) -> dict[str, Any]:
    """What `--json` prints: the summary, and what can be computed from it."""
    return {**json.loads(summary.model_dump_json()), "seconds_a_round": seconds_a_round(summary)}


def seconds_a_round(summary: RunSummary) -> float:
    """The mean; 0 without rounds."""
    return summary.seconds / summary.rounds if summary.rounds else 0.0
