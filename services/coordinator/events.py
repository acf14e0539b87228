"""The events of the cluster, found by comparing its state with the state before.

The newest `MAX_EVENTS` are held in memory; the log has all of them and more. Ids also increase over restarts, so that
a client can continue after a lost connection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from pydantic import Field

from ps_protocol.fields import Message
from ps_protocol.messages import RunState
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

from .state.cluster import Cluster
from .state.record import TrainerState

MAX_EVENTS = 1000

EventKind: TypeAlias = Literal["run", "pserver", "trainer", "rollback", "checkpoint", "change"]


class Event(Message):
    """One event of the cluster."""

    id: int
    at: float = Field(description="time of the event, in seconds since 1970, by the coordinator's clock")
    kind: EventKind
    run: str
    round: Round
    text: str
    facts: dict[str, Any] = Field(default={}, description="values that the text contains, for programs")


class Events:
    """The newest events. `detect_changes` must be called whenever the cluster may have changed."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._run: tuple[str, RunState] | None = None
        self._attempt = 0
        self._pservers: dict[PserverIndex, tuple[Incarnation, bool]] = {}
        self._trainers: dict[Rank, tuple[Incarnation, TrainerState]] = {}
        self._checkpoints: set[Round] = set()

    @property
    def newest_id(self) -> int:
        """The id of the newest event; 0 before the first."""
        return self._events[-1].id if self._events else 0

    def after(self, id_: int) -> list[Event]:
        """Return the events after this id, oldest first."""
        return [event for event in self._events if event.id > id_]

    def add(self, cluster: Cluster, kind: EventKind, text: str, **facts: Any) -> Event:
        """Add an event that the state of the cluster does not show."""
        now = time.time()
        event = Event(
            id=max(self.newest_id + 1, int(now * 1000)),
            at=now,
            kind=kind,
            run=cluster.run.record.name,
            round=max(cluster.rounds, default=0),
            text=text,
            facts=facts,
        )
        self._events.append(event)
        return event

    def detect_changes(self, cluster: Cluster) -> None:
        """Add the changes since the last call."""
        for kind, text, facts in self._changes(cluster):
            self.add(cluster, kind, text, **facts)

    def _changes(self, cluster: Cluster) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
        run, before = cluster.run, self._run
        self._run = run.record.name, run.record.state
        if before is None or before[0] != run.record.name:
            self._attempt, self._trainers, self._checkpoints = run.record.attempt, {}, set(run.complete_checkpoints)
        yield from self._changed_pservers(cluster)
        yield from self._changed_trainers(cluster)
        if self._run != before and (before is not None or run.record.state != "gathering"):
            why = "" if run.record.failure is None else f": {run.record.failure.detail}"
            yield "run", f"run {run.record.name} is {run.record.state}{why}", {"state": run.record.state}
        if run.record.attempt != self._attempt:
            self._attempt = run.record.attempt
            where = "with initial values" if run.record.resume is None else f"after round {run.record.resume}"
            why = f": {run.reason}" if run.reason else ""
            text = f"the run is rolled back and continues {where} (attempt {run.record.attempt}){why}"
            yield (
                "rollback",
                text,
                {"resume": run.record.resume, "attempt": run.record.attempt, "reason": run.reason},
            )
        checkpoints = set(run.complete_checkpoints)
        for round_ in sorted(checkpoints - self._checkpoints):
            yield "checkpoint", f"checkpoint of round {round_} is complete", {"round": round_}
        self._checkpoints = checkpoints

    def _changed_pservers(self, cluster: Cluster) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
        registry = cluster.registry
        now = {index: (member.info.incarnation, True) for index, member in registry.members.items()}
        now |= {index: (member.info.incarnation, False) for index, member in registry.lost.items()}
        for index, (incarnation, is_present) in sorted(now.items()):
            if self._pservers.get(index) == (incarnation, is_present):
                continue
            address = (registry.members if is_present else registry.lost)[index].info.address
            text = (
                f"pserver {index} has registered at {address}"
                if is_present
                else f"pserver {index} at {address} is silent"
            )
            yield "pserver", text, {"pserver": index, "incarnation": incarnation}
        self._pservers = now

    def _changed_trainers(self, cluster: Cluster) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
        now = {rank: (trainer.incarnation, trainer.state) for rank, trainer in cluster.run.record.trainers.items()}
        for rank, (incarnation, state) in sorted(now.items()):
            if self._trainers.get(rank) == (incarnation, state):
                continue
            trainer = cluster.run.record.trainers[rank]
            described = {"joined": "has joined", "declared": "has declared its model", "done": "is done"}
            change = f"trainer {rank} {described.get(state, f'has {state}')}"
            text = change if state in described else trainer.why or change
            yield "trainer", text, {"trainer": rank, "incarnation": incarnation, "state": state}
        self._trainers = now
