"""The resumption of a recorded run with new processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.runtime.checkpoints import Manifest

from .record import RunRecord


@dataclass(frozen=True, slots=True)
class Resumption:
    """The recorded state of a resumed run, in case processes of the recorded run still live.

    If such a process reports before `until`, when the leases end, the recorded state is restored. If the recorded run
    had failed, the run after it begins with the checkpoint `beginning`; None: with initial values.
    """

    saved: RunRecord
    until: float
    beginning: Manifest | None


def await_trainers(run: RunRecord, *, is_async: bool) -> RunRecord:
    """Return the run as it waits for all of its trainers, even those that were done."""
    ranks = [rank for rank in run.trainers if run.num_trainers is None or rank < run.num_trainers]
    members = dict(run.membership.members)
    # A trainer that was done is a member again, so that the first trainer to return does not continue alone.
    # In asynchronous modes its start follows from the pservers' state instead.
    if not is_async:
        members = {rank: run.trainers[rank].incarnation for rank in ranks} | members
    if run.state != "gathering":
        run = run.update(state="training", source=None)
    for rank in ranks:
        why = f"trainer {rank} must be started again"
        run = run.with_trainers([rank], state="lost", why=why, is_awaited=True, is_resumed=True, round=0)
    return run.update(
        failure=None,
        membership=replace(run.membership, members=members),
        trainers={rank: run.trainers[rank] for rank in ranks},
    )
