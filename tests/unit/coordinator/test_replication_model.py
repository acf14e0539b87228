"""Standbys and fail-over in random walks: no acknowledged update is lost, and no two leaders acknowledge.

The durable in-sync set and the choice of the leader are those of the coordinator (`replicas.py`), and the numbers of
changes those of the pserver. Leaders, standbys, trainers, disks and the rest of the coordinator are abstract. A value
is the tuple of its updates. Each process may end, stop or lose its disk at any time, each pair may be cut off, and
messages may be lost or arrive late. A standby may lose the newest update that it has confirmed, and does not lead then.
The coordinator may restart between any two steps of a change. At the end all faults are over, and each trainer must
complete three more steps.

The services differ from the model in four points. The suspicion of a leader is durable before a standby is fenced, so
that no replica has to report what it refuses. Standbys are fenced one after another, and the first suitable one leads.
A restarted leader keeps its members and leads again, unless its log is shorter than it has reported; the model trusts
only its members. If no member is left, a reply that arrives late makes the run go back; the trainers of the model
refuse it.

The model has no deaths of trainers and no `max_delay` (see tests/unit/test_membership_changes.py), no reads by others
than trainers, and one process for each follower. A reply is checked and sent in one step.

What the model has found, with the shortest history. S and F are standbys, and the leader L has incarnation 1:

- S is a member and restarts. L ends, and S is promoted by its place: a member is one process.
- The coordinator adds S before L waits for it. L acknowledges an update that S lacks and ends: the leader waits first.
- S is removed, and joins again. The late message about its removal reaches L: the leader ignores older numbers.
- S has refused incarnation 1. The coordinator restarts and finds L alive: L waits for S for ever, so that a fence ends
  only with the next incarnation.
- A dead member under `wait` cannot return as itself: its successor replaces it when it is admitted or promoted.
- L acknowledges an update that all members held, after S has refused the stream and is promoted. This is harmless: the
  rule "the old leader can acknowledge nothing" holds for other updates.
- L and S are cut off from the coordinator, which removes S. L has not received the removal and acknowledges what S
  holds: without a member only a process with the folder of L may lead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.coordinator.state.replicas import Replica, Replicas

from ...soaking import examples
from . import replicated_run
from .replicated_run import COORDINATOR, Node, ReplicatedRun
from .replication import Process, Rules, Trainer

INDICES = st.integers(0, 11)


class Replication(RuleBasedStateMachine):
    """A replicated run under faults. See replicated_run.py for the events."""

    @initialize(
        continues=st.booleans(),
        num_shards=st.integers(1, 2), num_standbys=st.integers(1, 2), num_trainers=st.integers(1, 2),
    )  # fmt: skip
    def begin(self, **rules: Any) -> None:
        self.run = ReplicatedRun(Rules(**rules))
        self.change_members()
        self.work(1)
        self.join_standbys()

    def _place(self, which: int) -> tuple[int, int]:
        places = sorted(self.run.disks)
        return places[which % len(places)]

    def _leading(self, which: int) -> tuple[int, int]:
        """Return the place of the leader in force of a shard."""
        shard = which % len(self.run.shards)
        return shard, int(self.run.durable.replicas[shard].leader.split(".")[1])

    # ------------------------------------------------------------ undisturbed work

    @rule(num_rounds=st.integers(1, 3))
    def work(self, num_rounds: int) -> None:
        """Train, follow and answer, wherever processes reach each other."""
        for _ in range(num_rounds):
            self.push(num_rounds, everything=True)
            for shard, slot in self.run.disks:
                for to in self.run.slots:
                    self.run.stream(shard, slot, to)
            self.reply(0, everything=True)
            while self.run.replies:
                self.run.receive(0)

    @rule(which=INDICES)
    def push(self, which: int, everything: bool = False) -> None:
        for trainer in self.run.trainers[:: -1 if which % 2 else 1]:
            for number, place in enumerate(self.run.disks):
                if everything or (which + trainer.rank) % len(self.run.disks) == number:
                    self.run.push(trainer.rank, *place)

    @rule(which=INDICES, to=INDICES)
    def stream(self, which: int, to: int) -> None:
        shard, slot = self._place(which)
        self.run.stream(shard, slot, to % len(self.run.slots))

    @rule(which=INDICES)
    def reply(self, which: int, everything: bool = False) -> None:
        for place in self.run.disks if everything else [self._place(which)]:
            self.run.reply(*place)

    @rule(which=INDICES, lost=st.booleans())
    def receive(self, which: int, lost: bool) -> None:
        self.run.receive(which, lost=lost)

    @rule()
    def write_checkpoint(self) -> None:
        self.run.write_checkpoint()

    # ------------------------------------------------------------ the coordinator

    @rule(which=INDICES)
    def begin_joining(self, which: int) -> None:
        self.run.begin_joining(*self._place(which))

    @rule(which=INDICES)
    def notify_leader(self, which: int) -> None:
        self.run.notify_leader(which % len(self.run.shards))

    @rule(which=INDICES)
    def admit(self, which: int) -> None:
        self.run.admit(*self._place(which))

    @rule(which=INDICES)
    def remove(self, which: int) -> None:
        self.run.remove(*self._place(which))

    @rule(which=INDICES)
    def report_standbys(self, which: int) -> None:
        self.run.report_standbys(which % len(self.run.shards))

    @rule()
    def join_standbys(self) -> None:
        for step in (self.run.begin_joining, self.run.remove_dead, self.run.admit):
            for shard, slot in self.run.disks:
                step(shard, slot)
                self.run.notify_leader(shard)
                for source in self.run.slots:
                    for _ in range(3):
                        self.run.stream(shard, source, slot)

    @rule(which=INDICES)
    def suspect(self, which: int) -> None:
        self.run.suspect(which % len(self.run.shards))

    @rule(which=INDICES)
    def step_change(self, which: int) -> None:
        self.run.step_change(which)

    @rule()
    def change_members(self) -> None:
        for which in range(12):
            self.run.step_change(which)

    @rule(which=INDICES)
    def fail_over(self, which: int) -> None:
        self.run.suspect(which % len(self.run.shards))
        self.change_members()

    @rule()
    def restart_coordinator(self) -> None:
        self.run.restart_coordinator()

    @precondition(lambda self: self.run.late)
    @rule(which=INDICES)
    def late_message(self, which: int) -> None:
        self.run.late[which % len(self.run.late)]()

    # ------------------------------------------------------------ faults

    @rule(which=INDICES, kept=st.none() | st.integers(0, 2), wiped=st.booleans())
    def kill(self, which: int, kept: int | None, wiped: bool) -> None:
        self.run.kill(*self._place(which), kept=kept, wiped=wiped)

    @rule(which=INDICES, wiped=st.booleans())
    def kill_leader(self, which: int, wiped: bool) -> None:
        self.run.kill(*self._leading(which), wiped=wiped)

    @rule(which=INDICES, wiped=st.booleans())
    def lose_leader(self, which: int, wiped: bool) -> None:
        """Kill a leader whose replies are on their way, and fail over."""
        self.push(which, everything=True)
        self.reply(0, everything=True)
        self.kill_leader(which, wiped)
        self.fail_over(which)

    @rule(which=INDICES)
    def join_with_an_old_copy(self, which: int) -> None:
        shard, slot = self._place(which)
        self.run.kill(shard, slot, wiped=True)
        self.run.start(shard, slot)
        self.run.begin_joining(shard, slot)
        self.run.notify_leader(shard)
        self.run.admit(shard, slot)

    @rule(which=INDICES, kept=st.integers(0, 2))
    def lose_shard(self, which: int, kept: int) -> None:
        """Cut the power of all processes of a shard, whose replies are on their way."""
        shard, leader = self._leading(which)
        self.push(which, everything=True)
        for slot in self.run.slots:
            self.run.stream(shard, leader, slot)
        self.reply(0, everything=True)
        for slot in self.run.slots:
            self.run.kill(shard, slot, kept=kept)
            self.run.start(shard, slot)
        self.fail_over(which)

    @rule(which=INDICES)
    def start(self, which: int) -> None:
        self.run.start(*self._place(which))

    @rule(which=INDICES)
    def drop_held(self, which: int) -> None:
        if process := self.run.processes.get(self._place(which)):
            process.drop_held()

    @rule(which=INDICES)
    def stop_leader(self, which: int) -> None:
        if process := self.run.processes.get(self._leading(which)):
            process.is_stopped = True

    @rule(which=INDICES)
    def continue_process(self, which: int) -> None:
        if process := self.run.processes.get(self._place(which)):
            process.is_stopped = False

    @rule(which=INDICES, other=INDICES)
    def cut(self, which: int, other: int) -> None:
        nodes = self._nodes()
        one, two = nodes[which % len(nodes)], nodes[other % len(nodes)]
        if one != two:
            self.run.cuts.add(frozenset((one, two)))

    @rule(which=INDICES)
    def cut_leader(self, which: int) -> None:
        self.run.cuts.add(frozenset((COORDINATOR, ("pserver", *self._leading(which)))))

    @rule(which=INDICES)
    def fail_over_without_leader(self, which: int) -> None:
        """Replace a leader that trainers still reach."""
        self.push(which, everything=True)
        self.cut_leader(which)
        self.fail_over(which)
        self.reply(0, everything=True)

    def _nodes(self) -> list[Node]:
        pservers = [("pserver", *place) for place in self.run.disks]
        return [COORDINATOR, *pservers, *(("trainer", trainer.rank, 0) for trainer in self.run.trainers)]

    @rule()
    def heal(self) -> None:
        self.run.cuts.clear()

    # ------------------------------------------------------------ what must hold

    @invariant()
    def acknowledged_updates_are_in_force(self) -> None:
        for process in self.run.processes.values() if hasattr(self, "run") else ():
            replicas, acknowledged = self.run.durable.replicas[process.shard], self.run.acknowledged[process.shard]
            is_in_force = (process.instance, process.incarnation) == (replicas.leader, replicas.incarnation)
            if is_in_force and process.attempt == self.run.durable.attempt:
                assert process.log[: len(acknowledged)] == acknowledged, f"{process.instance} lost updates"

    @invariant()
    def members_hold_what_is_acknowledged(self) -> None:
        for process in self.run.processes.values() if hasattr(self, "run") else ():
            acknowledged = self.run.acknowledged[process.shard]
            is_member = process.instance in self.run.durable.replicas[process.shard].in_sync
            if is_member and process.attempt == self.run.durable.attempt and process.has_all_confirmed:
                assert process.log[: len(acknowledged)] == acknowledged, f"{process.instance} lacks updates"

    @invariant()
    def each_contribution_counts_once(self) -> None:
        for process in self.run.processes.values() if hasattr(self, "run") else ():
            assert [round_ for round_, _ in process.log] == list(range(1, len(process.log) + 1))

    def teardown(self) -> None:
        """Require three steps of each trainer once all faults are over."""
        if not hasattr(self, "run"):
            return
        run = self.run
        run.cuts.clear()
        for place in run.disks:
            if place in run.processes and not run.processes[place].has_all_confirmed:
                run.kill(*place)
            run.start(*place)
            run.processes[place].is_stopped = False
        for _ in range(6):
            for shard in run.shards:
                if run.find_leader(shard) is None:
                    run.suspect(shard)
            self.change_members()
            self.work(2)
            self.join_standbys()
        before = [trainer.step for trainer in run.trainers]
        self.work(12)
        self.acknowledged_updates_are_in_force()
        self.members_hold_what_is_acknowledged()
        self.each_contribution_counts_once()
        after = [trainer.step for trainer in run.trainers]
        assert all(new >= old + 3 for new, old in zip(after, before, strict=True)), (before, after)
        for shard in run.shards:
            assert len(run.durable.replicas[shard].in_sync) == run.rules.num_standbys


TestReplication = Replication.TestCase
TestReplication.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)


def walk(seed: int) -> None:
    """Draw more events than hypothesis does, with the weights of a run that works most of the time."""
    chance = random.Random(seed)
    faults = Replication()
    rules = {
        "continues": chance.random() < 0.5,
        "num_shards": chance.randint(1, 2), "num_standbys": chance.randint(1, 2), "num_trainers": chance.randint(1, 2),
    }  # fmt: skip
    faults.begin(**rules)

    def which() -> int:
        return chance.randrange(12)

    actions: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: faults.work(chance.randint(1, 3))),
        (8, lambda: faults.push(which())),
        (8, lambda: faults.stream(which(), which())),
        (8, lambda: faults.reply(which())),
        (6, lambda: faults.receive(which(), chance.random() < 0.2)),
        (1, faults.write_checkpoint),
        (6, lambda: faults.begin_joining(which())),
        (6, lambda: faults.notify_leader(which())),
        (6, lambda: faults.admit(which())),
        (2, lambda: faults.remove(which())),
        (6, lambda: faults.report_standbys(which())),
        (3, faults.join_standbys),
        (3, lambda: faults.suspect(which())),
        (8, lambda: faults.step_change(which())),
        (3, faults.change_members),
        (3, lambda: faults.fail_over(which())),
        (1, faults.restart_coordinator),
        (3, lambda: faults.run.late[which() % len(faults.run.late)]() if faults.run.late else None),
        (1, lambda: faults.kill(which(), chance.choice((None, None, 1, 2)), chance.random() < 0.3)),
        (2, lambda: faults.kill_leader(which(), chance.random() < 0.5)),
        (2, lambda: faults.lose_leader(which(), chance.random() < 0.5)),
        (1, lambda: faults.join_with_an_old_copy(which())),
        (1, lambda: faults.lose_shard(which(), chance.randrange(3))),
        (2, lambda: faults.cut_leader(which())),
        (3, lambda: faults.fail_over_without_leader(which())),
        (4, lambda: faults.start(which())),
        (2, lambda: faults.drop_held(which())),
        (2, lambda: faults.stop_leader(which())),
        (3, lambda: faults.continue_process(which())),
        (3, lambda: faults.cut(which(), which())),
        (2, faults.heal),
    ]  # fmt: skip
    for action in chance.choices([action for _, action in actions], [weight for weight, _ in actions], k=100):
        action()
        faults.acknowledged_updates_are_in_force()
        faults.members_hold_what_is_acknowledged()
        faults.each_contribution_counts_once()
    faults.teardown()


def walk_often(num_walks: int) -> None:
    for seed in range(num_walks):
        try:
            walk(seed)
        except Exception as error:
            error.add_note(f"walk({seed})")
            raise


def test_long_histories_of_faults() -> None:
    walk_often(examples(300))


# ---------------------------------------------------------------------- each rule is necessary


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
