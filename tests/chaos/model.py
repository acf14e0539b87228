"""Replays a history against what must hold, and says what does not.

The values of a block tell which contributions are in it (see `trainer.py`), so nothing needs to be believed: neither
what the services say of themselves, nor what they log. What holds in every mode is here, what holds of rounds in
`round_model.py`, of asynchronous steps in `step_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .diary import Record, in_order, name_of
from .draws import draw, seed_draws
from .round_model import check_rounds
from .setup import Setup
from .step_model import check_steps

EXPELLED = "stale_trainer"  # the error of a trainer without which the others have gone on


@dataclass
class History:
    """What happened: the operations of the trainers, and what was done to the cluster."""

    setup: Setup
    records: list[Record]
    disk_damaged: Sequence[float] = ()  # when something was taken from a disk: a rollback may follow
    lost: dict[str, list[float]] = field(default_factory=dict)  # by role or name: when processes died, or were cut off

    def losses(self, *names: str) -> list[float]:
        """Return when processes of these names may have been lost; a role stands for all of its processes."""
        return [at for name in names for at in self.lost.get(name, ())]


def find_violations(history: History) -> list[str]:
    """Everything that must not be, in words; nothing if all is well."""
    records = in_order(history.records)
    found = [f"{r['what']}: {r['text']}" for r in records if r["what"] == "wrong answer"]
    found += _check_order(records) + _check_rollbacks(history, records) + _check_draws(history.setup, records)
    found += _check_expulsions(history, records)
    check = check_rounds if history.setup.mode == "sync" else check_steps
    return found + check(history.setup, records)


def _check_order(records: list[Record]) -> list[str]:
    """The versions that a trainer sees only grow, except when it is told that the run went back."""
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
    """The others go on without a trainer only if something was done to it, not because others are away."""
    found = []
    before: dict[int, tuple[int, float, float]] = {}  # of each rank: life, its last record, that of the life before
    for record in (r for r in records if "rank" in r):
        life, at, since = before.get(record["rank"], (0, 0.0, 0.0))
        before[record["rank"]] = record["life"], record["at"], since if life == record["life"] else at
        if record["what"] == "error" and record["kind"] == EXPELLED:
            since = before[record["rank"]][2]
            losses = history.losses("trainer", f"trainer {record['rank']}")
            if not any(since <= loss < record["at"] for loss in losses):
                found.append(f"{name_of(record)} was expelled, and nothing had been done to it: {record['text']}")
    return found


def _check_draws(setup: Setup, records: list[Record]) -> list[str]:
    """The random numbers of a script depend on seed and step only: nothing else has drawn from its generators."""
    found = []
    for record in records:
        if "draws" in record:
            seed_draws(setup.seed, record["drawn_for"])
            if record["draws"] != (expected := draw()):
                numbers = f"drew {record['draws']} in step {record['drawn_for']}, not {expected}"
                found.append(f"{name_of(record)} {numbers}")
    return found


def _check_rollbacks(history: History, records: list[Record]) -> list[str]:
    """Acknowledged rounds are lost only if a disk was damaged, or a trainer was lost together with a pserver."""
    found, newest, at = [], {0: 0}, 0.0
    begun: dict[tuple[int, int, int], float] = {}
    settled = 0.0  # somebody has ended a step that was begun then: what was lost before has been replaced
    for record in records:
        if record["what"] == "begin":
            begun[record["rank"], record["life"], record["round"]] = record["at"]
        if "blocks" not in record:
            continue
        attempt = record["attempt"]
        if attempt not in newest:
            lost = max(newest[max(newest)] - record["round"], 0)
            is_damaged = any(at < damage < record["at"] for damage in history.disk_damaged)
            are_lost = [
                any(
                    settled < loss < record["at"]
                    for name in history.lost
                    if name.startswith(role)
                    for loss in history.lost[name]
                )
                for role in ("trainer", "pserver")
            ]
            if not is_damaged and not (all(are_lost) and lost <= 1 + history.setup.max_delay):
                found.append(f"the run went back by {lost} rounds to {record['round']}, and nothing was damaged")
            at = record["at"]
        if record["what"] == "end":
            settled = max(settled, begun.get((record["rank"], record["life"], record["round"]), 0.0))
        newest[attempt] = max(newest.get(attempt, 0), record["round"])
    return found
