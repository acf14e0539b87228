"""The coordinator and the faults of the model of replication: see test_replication_model.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from services.coordinator.state.replicas import Replica, Replicas, choose_leader

from .replication import Disk, Durable, Log, Process, Reply, Rules, Trainer

Node: TypeAlias = tuple[str, int, int]
COORDINATOR: Node = ("coordinator", 0, 0)


@dataclass
class Change:
    """A change as the coordinator has it in memory."""

    number: int
    failing: frozenset[int]
    answers: dict[int, dict[Replica, Process]] = field(default_factory=dict)
    pending: tuple[dict[int, Replica], frozenset[int]] | None = None  # chosen leaders, and shards with lost updates
    to_install: set[int] | None = None


class ReplicatedRun:
    """A run with its faults. Each method is one event. A call reaches one process, or has no effect."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.slots = range(rules.num_standbys + 1)
        self.shards = range(rules.num_shards)
        self.num_processes = 0
        self.disks = {(shard, slot): Disk() for shard in self.shards for slot in self.slots}
        self.checkpoint = [Disk() for _ in self.shards]
        self.processes: dict[tuple[int, int], Process] = {}
        self.trainers = [Trainer(rank) for rank in range(rules.num_trainers)]
        self.cuts: set[frozenset[Node]] = set()
        self.replies: deque[Reply] = deque(maxlen=20)
        self.late: deque[Callable[[], object]] = deque(maxlen=20)  # messages that arrive once more, or late
        self.acknowledged: list[Log] = [() for _ in self.shards]
        self.promoted: list[Log] = [() for _ in self.shards]  # the log of each leader when it was chosen
        for key in self.disks:
            self.start(*key)
        leaders = tuple(Replicas(self.processes[shard, 0].instance) for shard in self.shards)
        self.durable = Durable(leaders)
        self.restart_coordinator()

    # ------------------------------------------------------------ faults

    def start(self, shard: int, slot: int) -> None:
        if (shard, slot) not in self.processes:
            disk, checkpoint, instance = self.disks[shard, slot], self.checkpoint[shard], self.name_process(shard, slot)
            if disk.attempt <= checkpoint.attempt and len(disk.log) < len(checkpoint.log):
                disk = checkpoint
            self.processes[shard, slot] = Process(shard, slot, instance, disk.log, disk.attempt, follows=disk.follows)

    def name_process(self, shard: int, slot: int) -> Replica:
        self.num_processes += 1
        return f"{shard}.{slot}.{self.num_processes}"

    def kill(self, shard: int, slot: int, *, kept: int | None = None, wiped: bool = False) -> None:
        """End a process. Power loss keeps a part of its log; a wiped one restores the newest checkpoint."""
        process = self.processes.pop((shard, slot), None)
        disk = self.disks[shard, slot]
        if process is not None:
            disk.log, disk.attempt, disk.follows = process.log, process.attempt, process.newest
        if kept is not None:
            disk.log = disk.log[: len(disk.log) - kept] if kept <= len(disk.log) else ()
        if wiped:
            self.disks[shard, slot] = replace(self.checkpoint[shard])

    def restart_coordinator(self) -> None:
        self.failing: set[int] = set()
        self.change: Change | None = None
        self.installed: dict[int, tuple[Replicas, int, int]] = {}

    def linked(self, one: Node, other: Node) -> bool:
        return frozenset((one, other)) not in self.cuts

    def reach(self, shard: int, slot: int, sender: Node = COORDINATOR) -> Process | None:
        process = self.processes.get((shard, slot))
        is_up = process is not None and not process.is_stopped and self.linked(sender, ("pserver", shard, slot))
        return process if is_up else None

    def find_leader(self, shard: int) -> Process | None:
        """Return the process of the leader in force if the coordinator reaches it."""
        leader = self.durable.replicas[shard].leader
        for slot in self.slots:
            process = self.reach(shard, slot)
            if process is not None and process.instance == leader:
                return process
        return None

    # ------------------------------------------------------------ trainers, streams

    def push(self, rank: int, shard: int, slot: int) -> None:
        trainer = self.trainers[rank]
        if self.linked(COORDINATOR, ("trainer", rank, 0)):
            trainer.follow(self.durable)
        process = self.reach(shard, slot, ("trainer", rank, 0))
        is_current = process and process.is_leading and process.attempt == trainer.attempt
        if process and is_current and shard not in trainer.received and trainer.may_address(process):
            process.push(rank, trainer.step, self.rules)

    def stream(self, shard: int, slot: int, to: int) -> None:
        leader, follower = self.reach(shard, slot, ("pserver", shard, to)), self.processes.get((shard, to))
        if leader and leader.is_leading and follower and slot != to and not follower.is_stopped:
            leader.stream_to(follower)

    def reply(self, shard: int, slot: int) -> None:
        """Answer what may be acknowledged. The replies are on their way from then on."""
        process = self.processes.get((shard, slot))
        if process is None or not process.is_leading:
            return
        for rank, step in sorted(process.requests):
            if step > len(process.log) or not process.may_acknowledge(step):
                continue
            process.requests.discard((rank, step))
            process.acknowledged = max(process.acknowledged, step)
            log = process.log[:step]
            if process.incarnation != self.durable.replicas[shard].incarnation:
                # All members held it before one of them refused the stream.
                is_old = process.attempt < self.durable.attempt
                assert is_old or self.promoted[shard][:step] == log, f"{process.instance} acknowledges another update"
            self.replies.append(Reply(rank, shard, process.incarnation, process.attempt, log))

    def receive(self, which: int, *, lost: bool = False) -> None:
        if not self.replies:
            return
        reply = self.replies[which % len(self.replies)]
        self.replies.remove(reply)
        is_received = not lost and self.trainers[reply.rank].receive(reply, self.rules.num_shards)
        if is_received and reply.attempt == self.durable.attempt:
            known = self.acknowledged[reply.shard]
            length = min(len(known), len(reply.log))
            assert known[:length] == reply.log[:length], "two leaders have acknowledged"
            self.acknowledged[reply.shard] = max(known, reply.log, key=len)

    def write_checkpoint(self) -> None:
        """Write what is acknowledged, while all leaders are there to write it."""
        leaders = [self.find_leader(shard) for shard in self.shards]
        if any(leader is None or leader.attempt < self.durable.attempt for leader in leaders):
            return
        length = min(map(len, self.acknowledged))
        for shard, log in enumerate(self.acknowledged):
            self.checkpoint[shard] = Disk(log[:length], self.durable.attempt, self.durable.replicas[shard].incarnation)

    # ------------------------------------------------------------ the in-sync set

    def set_replicas(self, shard: int, replicas: Replicas) -> None:
        before = self.durable.replicas
        self.durable = replace(self.durable, replicas=(*before[:shard], replicas, *before[shard + 1 :]))

    @staticmethod
    def have_same_place(one: Replica, other: Replica) -> bool:
        return one.rsplit(".", 1)[0] == other.rsplit(".", 1)[0]

    def find_predecessors(self, replicas: Replicas, instance: Replica) -> set[Replica]:
        return {other for other in replicas.waits_for - {instance} if self.have_same_place(instance, other)}

    def begin_joining(self, shard: int, slot: int) -> None:
        replicas, process = self.durable.replicas[shard], self.reach(shard, slot)
        if process is None or shard in self.failing:
            return
        if process.instance != replicas.leader and process.instance not in replicas.waits_for:
            self.set_replicas(shard, replicas.begin_joining(process.instance))

    def notify_leader(self, shard: int) -> None:
        leader, replicas = self.find_leader(shard), self.durable.replicas[shard]
        if leader is not None:
            self.late.append(lambda: leader.set_replicas(replicas))
            leader.set_replicas(replicas)

    def admit(self, shard: int, slot: int) -> None:
        leader, standby = self.find_leader(shard), self.processes.get((shard, slot))
        confirmed = leader.confirm(standby.instance) if leader and standby else None
        if confirmed is None or standby is None:
            return

        def arrive() -> None:
            replicas = self.durable.replicas[shard]
            if shard not in self.failing:
                lost = self.find_predecessors(replicas, standby.instance)
                self.set_replicas(shard, replicas.admit(standby.instance, *confirmed, lost=lost))

        self.late.append(arrive)
        arrive()

    def report_standbys(self, shard: int) -> None:
        """Let the leader report all its standbys at once, as its heartbeat does."""
        leader = self.find_leader(shard)
        if leader is None:
            return
        reached = (self.reach(shard, slot, ("pserver", shard, leader.slot)) for slot in self.slots)
        connected = {process.instance for process in reached if process and process.instance in leader.held}
        caught_up = {standby for standby in connected if leader.confirm(standby)}
        origin, number = (leader.instance, leader.incarnation, leader.attempt), leader.number

        def arrive() -> None:
            replicas, attempt = self.durable.replicas[shard], self.durable.attempt
            if shard in self.failing or (replicas.leader, replicas.incarnation, attempt) != origin:
                return
            continues = self.rules.continues
            self.set_replicas(shard, replicas.note_report(number, connected, caught_up, connected, continues=continues))

        self.late.append(arrive)
        arrive()

    def remove(self, shard: int, slot: int) -> None:
        """Remove what has run at a place; with replica_loss `wait` only what has not joined."""
        replicas = self.durable.replicas[shard]
        removable = replicas.waits_for if self.rules.continues else replicas.joining
        for instance in sorted(removable):
            if instance.startswith(f"{shard}.{slot}.") and shard not in self.failing:
                self.set_replicas(shard, self.durable.replicas[shard].remove(instance))

    def remove_dead(self, shard: int, slot: int) -> None:
        process, leader = self.processes.get((shard, slot)), self.durable.replicas[shard].leader
        if process is None or (process.instance not in self.durable.replicas[shard].waits_for | {leader}):
            self.remove(shard, slot)

    # ------------------------------------------------------------ freeze, decide, install

    def suspect(self, shard: int) -> None:
        """Begin a fail-over, which supersedes a change that is under way; the leader may be alive."""
        self.failing.add(shard)
        self.change = None

    def find_fenced(self) -> None:
        """Note shards whose incarnation a replica or a trainer refuses, and leaders that have restarted."""
        for shard, replicas in enumerate(self.durable.replicas):
            reached = [process for slot in self.slots if (process := self.reach(shard, slot))]
            others = (p.instance for p in reached if p.instance != replicas.leader)
            if any(self.have_same_place(instance, replicas.leader) for instance in others):
                self.failing.add(shard)  # another process has locked the folder
            trainers = [t for t in self.trainers if self.linked(COORDINATOR, ("trainer", t.rank, 0))]
            refused = [*(p.refused for p in reached), *(t.refused.get(shard, 0) for t in trainers)]
            if max(refused, default=0) >= replicas.incarnation:
                self.failing.add(shard)

    def step_change(self, which: int) -> None:
        """Do one step of a change. A crash of the coordinator may come between any two."""
        change = self.change
        if change is not None and not self.failing <= change.failing and change.to_install is None:
            change = self.change = None
        if change is None:
            self.find_fenced()
            if self.failing or any(self.installed.get(shard) != self.target(shard) for shard in self.shards):
                self.durable = replace(self.durable, number=self.durable.number + 1)
                self.change = Change(self.durable.number, frozenset(self.failing))
        elif change.to_install is not None:
            self._install(change, sorted(change.to_install)[which % len(change.to_install)])
        elif change.pending is not None:
            self._persist(change, *change.pending)
        else:
            for shard in self.shards:
                self._freeze(change, shard)
            self._decide(change)

    def target(self, shard: int) -> tuple[Replicas, int, int]:
        replicas = self.durable.replicas[shard]
        return replace(replicas, number=0, in_sync=frozenset(), joining=frozenset()), self.durable.attempt, 0

    def _freeze(self, change: Change, shard: int) -> None:
        replicas, durable, number = self.durable.replicas[shard], self.durable, change.number
        is_failing = shard in change.failing
        refused = replicas.incarnation if is_failing else None
        for slot in self.slots:
            process = self.reach(shard, slot)
            if process is None or (not is_failing and process.instance != replicas.leader):
                continue

            def arrive(process: Process = process) -> bool:
                return process.freeze(number, durable, refused=refused)

            answers = change.answers.setdefault(shard, {})
            if process.instance not in answers and arrive():
                answers[process.instance] = process
            self.late.append(arrive)

    def _find_received(self, shard: int) -> int | None:
        """Return the newest round that a trainer has received, None if a trainer is cut off. Later replies are late."""
        if not all(self.linked(COORDINATOR, ("trainer", trainer.rank, 0)) for trainer in self.trainers):
            return None
        for trainer in self.trainers:
            trainer.follow(self.durable)
            trainer.refuse(shard, self.durable.replicas[shard].incarnation)
        return max(trainer.find_received(shard) for trainer in self.trainers)

    def _decide(self, change: Change) -> None:
        chosen: dict[int, Replica] = {}
        lost: set[int] = set()
        for shard, replicas in enumerate(self.durable.replicas):
            answers = {
                instance: process
                for instance, process in change.answers.get(shard, {}).items()
                if self.processes.get((shard, process.slot)) is process
            }
            if shard not in change.failing:
                if replicas.leader not in answers:
                    return
                chosen[shard] = replicas.leader
                continue
            leader = choose_leader(replicas, {instance: len(process.log) for instance, process in answers.items()})
            if leader is None:
                received = self._find_received(shard) if len(answers) == len(self.slots) else None
                if received is None:
                    return  # a replica that has not answered may hold what is missing
                leader = next(instance for instance in answers if self.have_same_place(instance, replicas.leader))
                if len(answers[leader].log) < received:
                    lost.add(shard)
            chosen[shard] = leader
        change.pending = chosen, frozenset(lost)

    def _persist(self, change: Change, chosen: dict[int, Replica], lost: frozenset[int]) -> None:
        logs = {shard: change.answers[shard][leader].log for shard, leader in chosen.items()}
        for shard, log in logs.items():
            survives = log[: len(self.acknowledged[shard])] == self.acknowledged[shard]
            assert survives or shard in lost, f"shard {shard} loses {self.acknowledged[shard][len(log) :]}"
        for shard in change.failing:
            replicas, leader, self.promoted[shard] = self.durable.replicas[shard], chosen[shard], logs[shard]
            lost_ones = self.find_predecessors(replicas, leader)
            promoted = replicas.promote(leader, replicas.incarnation + 1)
            self.set_replicas(shard, replace(promoted, in_sync=promoted.in_sync - lost_ones))
        if lost:
            base = min(map(len, logs.values()))
            bases = (*self.durable.bases, base)
            self.durable = replace(self.durable, attempt=self.durable.attempt + 1, bases=bases)
            for shard in self.shards:
                self.acknowledged[shard] = self.acknowledged[shard][:base]
        change.to_install = set(self.shards)

    def _install(self, change: Change, shard: int) -> None:
        process, durable = self.find_leader(shard), self.durable
        if process is None:
            return
        self.late.append(lambda: process.install(change.number, durable))
        if process.install(change.number, durable):
            assert change.to_install is not None
            change.to_install.discard(shard)
            self.installed[shard] = self.target(shard)
        if not change.to_install:
            self.change = None
            self.failing -= change.failing
