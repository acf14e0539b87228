"""The events of the cluster: changes of its state, and the outcomes of administrators' requests.

The newest `MAX_EVENTS` are held in memory, and of consecutive checkpoints the newest one; the log has all of them and
more. Ids also increase over restarts, so that a client can continue after a lost connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from pydantic import Field

from ps_protocol.fields import Message
from ps_protocol.vocabulary import Round
from services.runtime.logs import get_logger

from .state.cluster import Cluster
from .state.pservers import PserverMember, PserverRegistry
from .state.replicas import Replica, Replicas
from .state.run import Run

log = get_logger()

MAX_EVENTS = 1000
EARLY_ROUNDS = 5  # of the others, after which the end of a trainer is reported as early

EventKind: TypeAlias = Literal["run", "pserver", "trainer", "rollback", "checkpoint", "change"]
Change: TypeAlias = tuple[EventKind, str, dict[str, Any]]  # the fields of its event


class Event(Message):
    """One event of the cluster."""

    id: int
    at: float = Field(description="time of the event, in seconds since 1970, by the coordinator's clock")
    kind: EventKind
    run: str
    round: Round
    text: str
    by: str | None = Field(default=None, description="requests: `token` and the beginning of its digest, or `no token`")
    facts: dict[str, Any] = Field(default={}, description="values that the text contains, for programs")


class Events:
    """The newest events. `detect_changes` must be called whenever the cluster may have changed."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._seen: tuple[Run, PserverRegistry] | None = None  # by the last call of `detect_changes`

    @property
    def newest_id(self) -> int:
        """The id of the newest event; 0 before the first."""
        return self._events[-1].id if self._events else 0

    def after(self, id_: int) -> list[Event]:
        """Return the events after this id, oldest first."""
        return [event for event in self._events if event.id > id_]

    def add(self, cluster: Cluster, kind: EventKind, text: str, by: str | None = None, **facts: Any) -> Event:
        """Add an event, and log it if it is the outcome of a request, which has `by`."""
        now = time.time()
        event = Event(
            id=max(self.newest_id + 1, int(now * 1000)),
            at=now,
            kind=kind,
            run=cluster.run.record.name,
            round=max(cluster.rounds, default=0),
            text=text,
            by=by,
            facts=facts,
        )
        if kind == "checkpoint" and self._events and (self._events[-1].kind, self._events[-1].run) == (kind, event.run):
            self._events.pop()  # else the checkpoints of a small model would be all that is left
        self._events.append(event)
        if by is not None:
            log.info(text, by=by)
        del self._events[:-MAX_EVENTS]
        return event

    def detect_changes(self, cluster: Cluster) -> None:
        """Add the changes since the last call."""
        last, self._seen = self._seen, (cluster.run, cluster.registry)
        for kind, text, facts in _list_changes(last, *self._seen):
            self.add(cluster, kind, text, **facts)
            if kind == "trainer" and facts["state"] in ("lost", "failed"):
                log.info(text, trainer=facts["trainer"])
        if last is not None and cluster.is_current(last[0]):
            _warn_of_early_ends(last[0], cluster.run)


def _warn_of_early_ends(before: Run, run: Run) -> None:
    """Log trainers that are done, once the others have gone on without them for several rounds."""
    was, now = (max((one.reports[rank].round for rank in one.record.members), default=0) for one in (before, run))
    left = f"{len(run.record.members)} of {len(run.record.trainers)} trainers"
    verb = "remains" if len(run.record.members) == 1 else "remain"
    for trainer in run.record.trainers.values():
        if trainer.state == "done" and was <= trainer.round + EARLY_ROUNDS < now:
            log.warning(f"trainer {trainer.rank} is done (round {trainer.round}); {left} {verb}")


def _list_changes(last: tuple[Run, PserverRegistry] | None, run: Run, registry: PserverRegistry) -> Iterator[Change]:
    for index, member in registry.known.items():
        yield from _list_pserver_changes(None if last is None else last[1], registry.replicas[index], member)
    record, before = run.record, None if last is None or last[0].record.name != run.record.name else last[0].record
    for trainer in record.trainers.values():
        known = None if before is None else before.trainers.get(trainer.rank)
        if known is None or (known.incarnation, known.state) != (trainer.incarnation, trainer.state):
            described = {"joined": "has joined", "declared": "has declared its model", "done": "is done"}
            change = f"trainer {trainer.rank} {described.get(trainer.state, f'has {trainer.state}')}"
            text = change if trainer.state in described else trainer.why or change
            facts = {"trainer": trainer.rank, "incarnation": trainer.incarnation, "state": trainer.state}
            yield "trainer", text, facts
    is_new = last is not None or record.state != "gathering"
    if is_new and (before is None or before.state != record.state):
        why = "" if record.failure is None else f": {record.failure.detail}"
        yield "run", f"run {record.name} is {record.state}{why}", {"state": record.state}
    if before is None:
        return
    if record.attempt != before.attempt:
        where = "with initial values" if record.base_round is None else f"after round {record.base_round}"
        why = f": {run.reason}" if run.reason else ""
        text = f"the run is rolled back and continues {where} (attempt {record.attempt}){why}"
        yield "rollback", text, {"resume": record.base_round, "attempt": record.attempt, "reason": run.reason}
    for round_ in sorted(set(record.checkpoints) - set(before.checkpoints)):
        yield "checkpoint", f"checkpoint of round {round_} is complete", {"round": round_}


def _list_pserver_changes(last: PserverRegistry | None, replicas: Replicas, member: PserverMember) -> Iterator[Change]:
    index, incarnation, address = member.info.index, member.info.incarnation, member.info.address
    known = None if last is None else last.known.get(index)
    if known is None or (known.info.incarnation, known.is_lost) != (incarnation, member.is_lost):
        change = f"at {address} is silent" if member.is_lost else f"has registered at {address}"
        if not member.is_lost and member.record.promoted_at == incarnation:
            change = f"is replaced by its standby at {address}"
        yield "pserver", f"pserver {index} {change}", {"pserver": index, "incarnation": incarnation}
    was_in_sync = frozenset[Replica]() if last is None or known is None else last.replicas[index].in_sync
    changes = dict.fromkeys(replicas.in_sync - was_in_sync, "is in sync")
    lost = was_in_sync - replicas.in_sync - {replicas.leader}  # not if it was promoted
    for standby, change in sorted({**changes, **dict.fromkeys(lost, "is no longer in sync")}.items()):
        facts = {"pserver": index, "standby": standby, "in_sync": len(replicas.in_sync)}
        yield "pserver", f"a standby of pserver {index} {change} ({len(replicas.in_sync)} in sync)", facts
