"""Each rule of replication is necessary: without it the model of test_replication_model.py finds a violation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest

from services.coordinator.state.replicas import Candidate, Replica, Replicas

from . import replicated_run
from .replicated_run import COORDINATOR, ReplicatedRun
from .replication import LEASE, Process, Rules, Trainer
from .test_replication_model import Replication, walk_often


def promote_any(replicas: Replicas, candidates: Mapping[Replica, Candidate]) -> Replica | None:
    return max(candidates, key=lambda replica: candidates[replica].num_updates, default=None)


def acknowledge_at_once(process: Process, length: int, now: int, rules: Rules) -> bool:
    return not process.is_stopped and process.refused < process.incarnation


def confirm_at_once(process: Process, standby: Replica) -> tuple[int, int] | None:
    return (process.incarnation, process.number) if standby in process.waits_for else None


def set_any_replicas(process: Process, replicas: Replicas) -> None:
    process.number, process.waits_for = replicas.number, replicas.waits_for


def name_by_place(run: ReplicatedRun, shard: int, slot: int) -> Replica:
    return f"{shard}.{slot}.0"


def begin_lease_late(process: Process, incarnation: int, sent: int, now: int) -> None:
    if incarnation == process.incarnation:
        process.lease_until = now + LEASE


def keep_lease(process: Process, incarnation: int, sent: int, now: int) -> None:
    process.lease_until = max(process.lease_until, sent + LEASE)


def admit_at_once(run: ReplicatedRun, shard: int, slot: int) -> None:
    """Admit a standby that has caught up before its leader waits for it."""
    replicas, leader, standby = run.durable.replicas[shard], run.find_leader(shard), run.reach(shard, slot)
    if standby and leader and leader.held.get(standby.instance, -1) >= leader.acknowledged and standby is not leader:
        joining = replicas.begin_joining(standby.instance)
        run.set_replicas(shard, joining.admit(standby.instance, joining.incarnation, joining.number))


class Sabotage(NamedTuple):
    """A function that breaks a rule, and the settings of a run in which that shows soon."""

    target: object
    name: str
    broken: Callable[..., object]
    rules: Mapping[str, int]


REPLICATED = {"is_replicated": True}
LOG = {"is_replicated": False, "num_shards": 1}
ASYNC_LOG = {**LOG, "is_async": True}
SABOTAGES = {
    "a standby outside the in-sync set is promoted": Sabotage(replicated_run, "choose_leader", promote_any, REPLICATED),
    "an update is acknowledged before a standby holds it": Sabotage(
        Process, "may_acknowledge", acknowledge_at_once, REPLICATED
    ),
    "a standby joins before it has caught up": Sabotage(Process, "confirm", confirm_at_once, REPLICATED),
    "a standby is a member before the leader waits for it": Sabotage(ReplicatedRun, "admit", admit_at_once, REPLICATED),
    "a late message removes a standby at the leader": Sabotage(Process, "set_replicas", set_any_replicas, REPLICATED),
    "a restarted member stays a member": Sabotage(ReplicatedRun, "name_process", name_by_place, REPLICATED),
    "trainers report while the leader may acknowledge": Sabotage(ReplicatedRun, "has_ended", lambda *_: True, LOG),
    "trainers accept old replies after their report": Sabotage(Trainer, "refuse", lambda *_: None, LOG),
    "candidates are compared by the number of updates": Sabotage(
        replicated_run, "has_same", lambda log, update: len(log) >= len(update), ASYNC_LOG
    ),
    "a lease begins when its answer arrives": Sabotage(Process, "renew_lease", begin_lease_late, LOG),
    "a lease outlives its incarnation": Sabotage(Process, "renew_lease", keep_lease, LOG),
    "a fence is withdrawn": Sabotage(ReplicatedRun, "find_fenced", lambda _: None, REPLICATED),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_the_model_requires_each_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, broken, rules = SABOTAGES[name]
    monkeypatch.setattr(target, attribute, broken)
    with pytest.raises(AssertionError):
        walk_often(4000, rules)


def test_a_lease_does_not_end_a_leader_that_waits_for_standbys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator has removed the last member, but the leader has not received that and needs no lease."""
    monkeypatch.setattr(ReplicatedRun, "has_ended", lambda run, shard: run.now >= run.expires[shard])
    faults = Replication()
    faults.begin(is_async=False, is_replicated=True, continues=True, num_shards=1, num_standbys=2, num_trainers=1)
    faults.run.remove(0, 2)
    faults.run.notify_leader(0)
    faults.work(2)
    faults.push(0, everything=True)
    faults.run.cuts |= {frozenset((COORDINATOR, ("pserver", 0, slot))) for slot in (0, 1)}
    faults.run.remove(0, 1)
    faults.run.now += LEASE
    faults.fail_over(0)
    faults.run.stream(0, 0, 1)
    with pytest.raises(AssertionError, match="acknowledges another update"):
        faults.run.reply(0, 0)
