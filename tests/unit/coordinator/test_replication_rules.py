"""Each rule of replication is necessary: without it the model of test_replication_model.py finds a violation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest

from services.coordinator.state.replicas import Replica, Replicas

from . import replicated_run
from .replicated_run import ReplicatedRun
from .replication import Process, Trainer
from .test_replication_model import walk_often


def promote_any(replicas: Replicas, num_updates: Mapping[Replica, int]) -> Replica | None:
    return max(num_updates, key=lambda replica: num_updates[replica], default=None)


def acknowledge_at_once(process: Process, length: int) -> bool:
    return not process.is_stopped and process.refused < process.incarnation


def confirm_at_once(process: Process, standby: Replica) -> tuple[int, int] | None:
    return (process.incarnation, process.number) if standby in process.waits_for else None


def set_any_replicas(process: Process, replicas: Replicas) -> None:
    process.number, process.waits_for = replicas.number, replicas.waits_for


def name_by_place(run: ReplicatedRun, shard: int, slot: int) -> Replica:
    return f"{shard}.{slot}.0"


def admit_at_once(run: ReplicatedRun, shard: int, slot: int) -> None:
    """Admit a standby that has caught up before its leader waits for it."""
    replicas, leader, standby = run.durable.replicas[shard], run.find_leader(shard), run.reach(shard, slot)
    if standby and leader and leader.held.get(standby.instance, -1) >= leader.acknowledged and standby is not leader:
        joining = replicas.begin_joining(standby.instance)
        run.set_replicas(shard, joining.admit(standby.instance, joining.incarnation, joining.number))


class Sabotage(NamedTuple):
    """A function that breaks a rule."""

    target: object
    name: str
    broken: Callable[..., object]


SABOTAGES = {
    "a standby outside the in-sync set is promoted": Sabotage(replicated_run, "choose_leader", promote_any),
    "an update is acknowledged before a standby holds it": Sabotage(Process, "may_acknowledge", acknowledge_at_once),
    "a standby joins before it has caught up": Sabotage(Process, "confirm", confirm_at_once),
    "a standby is a member before the leader waits for it": Sabotage(ReplicatedRun, "admit", admit_at_once),
    "a late message removes a standby at the leader": Sabotage(Process, "set_replicas", set_any_replicas),
    "a restarted member stays a member": Sabotage(ReplicatedRun, "name_process", name_by_place),
    "trainers accept old replies after their report": Sabotage(Trainer, "refuse", lambda *_: None),
    "a fence is withdrawn": Sabotage(ReplicatedRun, "find_fenced", lambda _: None),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_the_model_requires_each_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, broken = SABOTAGES[name]
    monkeypatch.setattr(target, attribute, broken)
    with pytest.raises(AssertionError):
        walk_often(4000)
