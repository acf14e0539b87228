"""The events of the cluster: changes of its state, and the requests of administrators with their outcomes.

The newest `MAX_EVENTS` are held in memory, and of consecutive checkpoints the newest one; the log has all of them and
more. Requests and outcomes, which have `by`, are also lines of JSON in a file. A request is written before the change
begins. Without a later outcome of its id, the coordinator died meanwhile, or the change is under way. Ids also increase
over restarts, so that a client can continue after a lost connection.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from ps_protocol.fields import Message
from ps_protocol.vocabulary import PserverIndex, Rank, Round
from services.runtime.logs import get_logger
from services.runtime.storage import sync_folder

from .state.cluster import Cluster
from .state.pservers import PserverMember
from .state.record import TrainerRecord
from .state.replicas import Replica, Replicas
from .state.run import Run

log = get_logger()

FILE = "audit.jsonl"
MAX_EVENTS = 1000
EARLY_ROUNDS = 5  # of the others, after which the end of a trainer is reported as early

EventKind: TypeAlias = Literal["run", "pserver", "trainer", "rollback", "checkpoint", "change"]


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

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._events: list[Event] = []
        self._run: Run | None = None  # as of the last call, like `_pservers`
        self._pservers: Mapping[PserverIndex, PserverMember] = {}
        self._replicas: Mapping[PserverIndex, Replicas] = {}

    @property
    def newest_id(self) -> int:
        """The id of the newest event; 0 before the first."""
        return self._events[-1].id if self._events else 0

    def after(self, id_: int) -> list[Event]:
        """Return the events after this id, oldest first."""
        return [event for event in self._events if event.id > id_]

    def add(self, cluster: Cluster, kind: EventKind, text: str, by: str | None = None, **facts: Any) -> Event:
        """Add an event that the state of the cluster does not show."""
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
        if len(self._events) > MAX_EVENTS:  # requests are kept longest, since they explain the settings in force
            del self._events[next((i for i, one in enumerate(self._events) if one.by is None), 0)]
        return event

    def read(self) -> None:
        """Read the newest requests of earlier processes. Torn and foreign lines are skipped. Blocks. Raises OSError."""
        if not self._path.exists():
            return
        with self._path.open(errors="replace") as file:
            for line in deque(file, MAX_EVENTS):
                with suppress(ValidationError):
                    self._events.append(Event.model_validate_json(line))

    def write(self, event: Event) -> None:
        """Write the line of a request or an outcome. Blocks. Raises OSError."""
        is_new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # A line of its own, even after a torn one.
            size = os.fstat(fd).st_size
            is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            line = b"%s%s\n" % (b"\n" if is_torn else b"", event.model_dump_json().encode())
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, f"{self._path} has no room for a whole line: free disk space")
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            sync_folder(self._path.parent)

    def detect_changes(self, cluster: Cluster) -> None:
        """Add the changes since the last call."""
        run, last = cluster.run, self._run
        self._run = run
        before = last if last is not None and cluster.is_current(last) else None
        for kind, text, facts in self._changes(cluster, last, before):
            self.add(cluster, kind, text, **facts)
            if facts.get("state") in ("lost", "failed") and kind == "trainer":
                log.info(text, trainer=facts["trainer"])
        for rank in [] if before is None else _find_early_ends(before, run):
            left = f"{len(run.record.members)} of {len(run.record.trainers)} trainers"
            verb = "remains" if len(run.record.members) == 1 else "remain"
            log.warning(f"trainer {rank} is done (round {run.record.trainers[rank].round}); {left} {verb}")

    def _changes(
        self, cluster: Cluster, last: Run | None, before: Run | None
    ) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
        run, record = cluster.run, cluster.run.record
        yield from self._changed_pservers(cluster)
        yield from self._changed_replicas(cluster)
        yield from _changed_trainers({} if before is None else before.record.trainers, record.trainers)
        is_new = last is not None or record.state != "gathering"
        if is_new and (before is None or before.record.state != record.state):
            why = "" if record.failure is None else f": {record.failure.detail}"
            yield "run", f"run {record.name} is {record.state}{why}", {"state": record.state}
        if before is None:
            return
        if record.attempt != before.record.attempt:
            where = "with initial values" if record.base_round is None else f"after round {record.base_round}"
            why = f": {run.reason}" if run.reason else ""
            text = f"the run is rolled back and continues {where} (attempt {record.attempt}){why}"
            yield "rollback", text, {"resume": record.base_round, "attempt": record.attempt, "reason": run.reason}
        for round_ in sorted(set(run.record.checkpoints) - set(before.record.checkpoints)):
            yield "checkpoint", f"checkpoint of round {round_} is complete", {"round": round_}

    def _changed_pservers(self, cluster: Cluster) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
        before, registry = self._pservers, cluster.registry
        self._pservers = registry.known
        for index, member in self._pservers.items():
            known, incarnation, address = before.get(index), member.info.incarnation, member.info.address
            if known is not None and (known.info.incarnation, known.is_lost) == (incarnation, member.is_lost):
                continue
            change = f"at {address} is silent" if member.is_lost else f"has registered at {address}"
            if not member.is_lost and member.record.promoted_at == incarnation:
                change = f"is replaced by its standby at {address}"
            yield "pserver", f"pserver {index} {change}", {"pserver": index, "incarnation": incarnation}

    def _changed_replicas(self, cluster: Cluster) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
        before, self._replicas = self._replicas, cluster.registry.replicas
        if before is self._replicas:
            return
        for index, replicas in sorted(self._replicas.items()):
            was_in_sync = before[index].in_sync if index in before else frozenset[Replica]()
            changes = [(standby, "is in sync") for standby in replicas.in_sync - was_in_sync]
            lost = was_in_sync - replicas.in_sync - {replicas.leader}  # not if it was promoted
            changes += [(standby, "is no longer in sync") for standby in lost]
            for standby, change in sorted(changes):
                facts = {"pserver": index, "standby": standby, "in_sync": len(replicas.in_sync)}
                yield "pserver", f"a standby of pserver {index} {change} ({len(replicas.in_sync)} in sync)", facts


def _find_early_ends(before: Run, run: Run) -> list[Rank]:
    """Return the trainers that are done, if the others have just gone on without them for several rounds."""
    was, now = (max((one.reports[rank].round for rank in one.record.members), default=0) for one in (before, run))
    done = [trainer for trainer in run.record.trainers.values() if trainer.state == "done"]
    return [trainer.rank for trainer in done if was <= trainer.round + EARLY_ROUNDS < now]


def _changed_trainers(
    before: Mapping[Rank, TrainerRecord], now: Mapping[Rank, TrainerRecord]
) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
    for rank, trainer in sorted(now.items()):
        known, state, incarnation = before.get(rank), trainer.state, trainer.incarnation
        if known is not None and (known.incarnation, known.state) == (incarnation, state):
            continue
        described = {"joined": "has joined", "declared": "has declared its model", "done": "is done"}
        change = f"trainer {rank} {described.get(state, f'has {state}')}"
        text = change if state in described else trainer.why or change
        yield "trainer", text, {"trainer": rank, "incarnation": incarnation, "state": state}
