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
only its members. With `log` a trainer reports the number of its newest round, in the synchronous mode only, where a
wrong choice ends in a rollback.

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
- `log`: L sends its reply and ends. The trainer reports less, and S is promoted. Then the reply arrives: with its
  report a trainer refuses later replies. A report from before the end of L or of its lease proves nothing.
- `log`: L answers the freeze and continues as incarnation 2 without a lease. The late answer to a heartbeat of
  incarnation 1 renews it, and S is promoted: a lease belongs to one incarnation.
- `replicated`: L and S are cut off from the coordinator, which removes S and promotes F after the lease. L has not
  received the removal and acknowledges what S holds: only the end of L allows a choice by reports.
- Asynchronous: L is cut off with contributions a, b that S lacks. S leads, acknowledges b, a, and loses its disk. L
  has as many updates, in another order. Or L accepts step 8 of a trainer whose steps 3 to 7 it lacks. So the checksum
  of a record must cover all records before it.
- Asynchronous: after a loss, trainers have received updates that no replica holds. They would rule out each of
  them: replies from before the loss do not count (`lost_at`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ...soaking import examples
from .replicated_run import COORDINATOR, Node, ReplicatedRun
from .replication import Rules

INDICES = st.integers(0, 11)


class Replication(RuleBasedStateMachine):
    """A replicated run under faults. See replicated_run.py for the events."""

    @initialize(
        is_async=st.booleans(), is_replicated=st.booleans(), continues=st.booleans(),
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
                self.run.send_heartbeat(shard, slot)()
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

    @rule(which=INDICES, answer_is_late=st.booleans())
    def send_heartbeat(self, which: int, answer_is_late: bool) -> None:
        self.run.late.append(self.run.send_heartbeat(*self._leading(which), answer_is_late=answer_is_late))

    @rule(which=INDICES, ticks=st.integers(1, 2))
    def delay_lease(self, which: int, ticks: int) -> None:
        self.run.send_heartbeat(*self._leading(which), answer_is_late=True)()
        self.run.now += ticks
        if self.run.late:
            self.run.late[-1]()

    @rule(ticks=st.integers(1, 4))
    def pass_time(self, ticks: int) -> None:
        self.run.now += ticks

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
        self.run.supervisor_reports(which % len(self.run.shards))
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

    @rule(which=INDICES, ticks=st.integers(0, 4))
    def fail_over_without_leader(self, which: int, ticks: int) -> None:
        """Replace a leader that trainers still reach."""
        self.push(which, everything=True)
        self.cut_leader(which)
        self.run.now += ticks
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
            assert len(set(process.log)) == len(process.log)
            if not self.run.rules.is_async:
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
            run.now += 4
            for shard in run.shards:
                run.supervisor_reports(shard)
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
        for shard in run.shards if run.rules.is_replicated else ():
            assert len(run.durable.replicas[shard].in_sync) == run.rules.num_standbys


TestReplication = Replication.TestCase
TestReplication.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)


def walk(seed: int, **fixed: int) -> None:
    """Draw more events than hypothesis does, with the weights of a run that works most of the time."""
    chance = random.Random(seed)
    faults = Replication()
    rules = {
        "is_async": chance.random() < 0.4, "is_replicated": chance.random() < 0.6, "continues": chance.random() < 0.5,
        "num_shards": chance.randint(1, 2), "num_standbys": chance.randint(1, 2), "num_trainers": chance.randint(1, 2),
    }  # fmt: skip
    faults.begin(**{**rules, **fixed})

    def which() -> int:
        return chance.randrange(12)

    actions: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: faults.work(chance.randint(1, 3))),
        (8, lambda: faults.push(which())),
        (8, lambda: faults.stream(which(), which())),
        (8, lambda: faults.reply(which())),
        (6, lambda: faults.receive(which(), chance.random() < 0.2)),
        (3, lambda: faults.send_heartbeat(which(), chance.random() < 0.5)),
        (2, lambda: faults.delay_lease(which(), chance.randint(1, 2))),
        (3, lambda: faults.pass_time(chance.randint(1, 4))),
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
        (2, lambda: faults.cut_leader(which())),
        (3, lambda: faults.fail_over_without_leader(which(), chance.randrange(5))),
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


def walk_often(num_walks: int, rules: Mapping[str, int]) -> None:
    for seed in range(num_walks):
        try:
            walk(seed, **rules)
        except Exception as error:
            error.add_note(f"walk({seed}, **{rules})")
            raise


def test_long_histories_of_faults() -> None:
    walk_often(examples(300), {})


def test_after_a_loss_only_replies_of_later_incarnations_count() -> None:
    faults = Replication()
    faults.begin(is_async=True, is_replicated=False, continues=True, num_shards=1, num_standbys=1, num_trainers=2)
    faults.work(3)
    for slot in (0, 1):
        faults.run.kill(0, slot, wiped=True)
        faults.run.start(0, slot)
    faults.change_members()
    assert faults.run.lost_at[0] == 2

    shard, leader = faults._leading(0)
    faults.run.send_heartbeat(shard, leader)()
    faults.run.push(0, shard, leader)
    faults.run.stream(shard, leader, 1 - leader)
    faults.run.reply(shard, leader)
    faults.run.receive(0)
    assert faults.run.acknowledged == [((0, 5),)]

    faults.run.kill(shard, leader, wiped=True)
    faults.run.start(shard, leader)
    faults.change_members()
    assert faults._leading(0) == (shard, 1 - leader)
    assert faults.run.lost_at[0] == 2
    faults.teardown()
