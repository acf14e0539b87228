"""The model of a history: its invariants, and the violations of them.

The values of a block show which contributions are in it (see `trainer.py`), so the model does not rely on the services'
own reports or logs. The invariants of rounds are in `round_model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .diary import Record, in_order, name_of
from .round_model import check_rounds
from .setup import Setup

EXPELLED = "stale_trainer"  # the error of a trainer that the others have evicted


@dataclass
class History:
    """The operations of the trainers, and the faults of the cluster."""

    setup: Setup
    records: list[Record]
    disk_damaged: list[float] = field(default_factory=list)  # times of damage to a disk: a rollback may follow
    # By role or name: the times at which processes died or were cut off.
    lost: dict[str, list[float]] = field(default_factory=dict)

    def all_losses(self) -> list[tuple[str, float]]:
        """Return all names and roles with the times at which their processes may have been lost."""
        return [(name, at) for name, times in self.lost.items() for at in times]


def find_violations(history: History) -> list[str]:
    """Return a description of each violation."""
    records = in_order(history.records)
    found = [f"{r['what']}: {r['text']}" for r in records if r["what"] == "wrong answer"]
    found += _check_order(records) + _check_rollbacks(history, records)
    found += _check_expulsions(history, records)
    return found + check_rounds(history.setup, records)


def _check_order(records: list[Record]) -> list[str]:
    """Check that the versions that a trainer sees only grow, except after a rollback."""
    found = []
    newest: dict[int, Record] = {}
    for record in (r for r in records if "blocks" in r and r["what"] != "final"):
        before = newest.get(record["rank"])
        if before is not None and record["what"] != "back" and record["attempt"] == before["attempt"]:
            for name, (version, *_) in record["blocks"].items():
                if version < before["blocks"][name][0]:
                    found.append(f"{name_of(record)} saw version {version} of {name} after {before['blocks'][name][0]}")
        newest[record["rank"]] = record
    return found


def _check_expulsions(history: History, records: list[Record]) -> list[str]:
    """Check that a trainer is evicted only if it had a fault, and not because others are away."""
    found = []
    # By rank: the incarnation, the time of its last record, and that of the incarnation before.
    before: dict[int, tuple[int, float, float]] = {}
    for record in (r for r in records if "rank" in r):
        life, at, since = before.get(record["rank"], (0, 0.0, 0.0))
        before[record["rank"]] = record["life"], record["at"], since if life == record["life"] else at
        if record["what"] == "error" and record["kind"] == EXPELLED:
            since = before[record["rank"]][2]
            own = ("trainer", f"trainer {record['rank']}")
            if not any(name in own and since <= loss < record["at"] for name, loss in history.all_losses()):
                found.append(f"{name_of(record)} was evicted without a fault: {record['text']}")
    return found


def _check_rollbacks(history: History, records: list[Record]) -> list[str]:
    """Check that acknowledged rounds are lost only after damage to a disk or the loss of a trainer."""
    found, newest, at = [], {0: 0}, 0.0
    begun: dict[tuple[int, int, int], float] = {}  # by rank, incarnation and round
    settled = 0.0  # a step that began then has ended: processes lost before have been replaced
    for record in records:
        if record["what"] == "begin":
            begun[record["rank"], record["life"], record["round"]] = record["at"]
        if "blocks" not in record:
            continue
        attempt = record["attempt"]
        if attempt not in newest:
            lost = max(newest[max(newest)] - record["round"], 0)
            is_damaged = any(at < damage < record["at"] for damage in history.disk_damaged)
            lost_now = {name.split()[0] for name, at in history.all_losses() if settled < at < record["at"]}
            if not is_damaged and not ("trainer" in lost_now and lost <= 1 + history.setup.max_delay):
                found.append(f"the run was rolled back by {lost} rounds to {record['round']} without damage")
            at = record["at"]
        if record["what"] == "end":
            settled = max(settled, begun.get((record["rank"], record["life"], record["round"]), 0.0))
        newest[attempt] = max(newest.get(attempt, 0), record["round"])
    return found
