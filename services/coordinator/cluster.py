"""The cluster: its pservers and the run they serve, one after another. Pure: the caller brings the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ps_protocol.errors import NotReady, PserverLost, RoundTimeout, RunOver, UnsupportedProtocol
from ps_protocol.messages import (
    InstallMembers,
    InstallRun,
    JoinTrainer,
    Leave,
    PlanReady,
    PserverHeartbeat,
    PserverHeartbeatReply,
    PserverInfo,
    PserverRegistered,
    RegisterPserver,
    TrainerJoined,
)
from ps_protocol.vocabulary import PROTOCOL_VERSION, Incarnation, PserverIndex, Rank, Round

from .pservers import PserverRegistry
from .run import Run, RunDefaults


class Cluster:
    """Decides who takes part; the shell around it carries the decisions to the pservers."""

    def __init__(
        self,
        num_pservers: int,
        defaults: RunDefaults,
        *,
        lease_seconds: float,
        exit_when_done: bool,
        name_run: Callable[[], str],
    ) -> None:
        self.registry = PserverRegistry(num_pservers, lease_seconds)
        self.lease_seconds = lease_seconds
        self.exit_when_done = exit_when_done
        self._defaults = defaults
        self._name_run = name_run
        self._trainer_incarnations: dict[Rank, Incarnation] = {}
        self._run_incarnations: dict[PserverIndex, Incarnation] = {}  # of the pservers that hold the run
        self._recorded_run = ""
        self._told_to_stop: set[PserverIndex] = set()
        self.run = self._new_run()

    def _new_run(self) -> Run:
        return Run(self._name_run(), self._defaults, self._trainer_incarnations)

    # ------------------------------------------------------------------ pservers

    def register_pserver(self, request: RegisterPserver, now: float) -> PserverRegistered:
        """Let a pserver in. One that comes back during a run has lost its shard, which ends the run."""
        _check_protocol(request.protocol)
        answer = self.registry.register(request, now)
        if (
            self.run.plan is not None
            and not self.run.is_over
            and answer.incarnation != self._run_incarnations[answer.index]
        ):
            self.run.fail(
                PserverLost(f"pserver {answer.index} was restarted and lost its shard", pserver=answer.index), now
            )
        return answer

    def pserver_heartbeat(self, index: PserverIndex, message: PserverHeartbeat, now: float) -> PserverHeartbeatReply:
        """Renew a pserver's lease; fails the run if its barrier has waited beyond the round time-out."""
        self.registry.heartbeat(index, message, now)
        if message.run == self.run.name and message.waiting_seconds > self._defaults.round_timeout_seconds:
            self._fail_for_timeout(message.round + 1, message.missing, now)
        stop = self.exit_when_done and self.run.is_deserted and self._recorded_run == self.run.name
        if stop:
            self._told_to_stop.add(index)
        return PserverHeartbeatReply(members_number=self.run.number, stop=stop, exit_code=self.exit_code)

    def _fail_for_timeout(self, round_: Round, missing: Sequence[Rank], now: float) -> None:
        if missing:
            names = ", ".join(f"trainer {rank}" for rank in missing)
            limit = self._defaults.round_timeout_seconds
            owed = f"reach the batch barrier of round {round_}"
            if self._defaults.consistency.is_async:
                owed = "take the step that others wait for"
            text = f"{names} did not {owed} within the round time-out of {limit:g} s, though alive"
            self.run.fail(RoundTimeout(text, missing=list(missing)), now)

    # ------------------------------------------------------------------ trainers

    def join_trainer(self, request: JoinTrainer, now: float) -> TrainerJoined:
        """Let a trainer into the run that is gathering; a new run begins when the last one is deserted."""
        _check_protocol(request.protocol)
        self.run.check_expectations(request)  # waiting for another run would not help
        known = any(t.instance == request.instance and t.is_here for t in self.run.trainers.values())
        if not known and self.run.is_over:
            if self.exit_when_done:
                raise RunOver(f"run {self.run.name} is over and this cluster serves no other (--exit-when-done)")
            if not self.run.is_deserted:
                raise NotReady(
                    f"run {self.run.name} is over, but not all of its trainers have left",
                    waiting_for=", ".join(f"trainer {rank} to leave" for rank in sorted(self.run.members)),
                )
            self.run = self._new_run()
        elif not known and self.run.plan is not None:
            raise NotReady(f"run {self.run.name} is under way", waiting_for=f"run {self.run.name} to end")
        trainer = self.run.join(request, now)
        return TrainerJoined(
            run=self.run.name,
            rank=trainer.rank,
            world_size=self._defaults.num_trainers,
            incarnation=trainer.incarnation,
            consistency=self._defaults.consistency,
            lease_seconds=self.lease_seconds,
            round_timeout_seconds=self._defaults.round_timeout_seconds,
        )

    def leave_trainer(self, rank: Rank, message: Leave, now: float) -> None:
        """A trainer goes. If it fails because it waited too long for others, it is those who ended the run."""
        self.run.member(rank, message.run, message.incarnation)
        if message.outcome == "failed" and self.run.plan is not None:
            for pserver in self.registry.members.values():
                # The pserver has told the trainer of the time-out before its next heartbeat tells us.
                waits = pserver.run == self.run.name and pserver.waiting_seconds > 0 and rank not in pserver.missing
                waited = pserver.waiting_seconds + now - pserver.seen_at
                if waits and waited > self._defaults.round_timeout_seconds:
                    self._fail_for_timeout(pserver.round + 1, pserver.missing, now)
        self.run.leave(rank, message, now)

    # ------------------------------------------------------------------ the start of a run

    @property
    def waiting_for(self) -> list[str]:
        """What keeps the run from starting, in words; empty once it trains or is over."""
        if self.run.state != "gathering":
            return []
        absent = [i for i in range(self.registry.num_pservers) if i not in self.registry.members]
        waits = [f"pserver {index}" for index in absent]
        for rank in self.run.missing_ranks:
            joined = rank in self.run.trainers
            waits.append(f"trainer {rank} to declare its model" if joined else f"trainer {rank}")
        return waits or ["the pservers to install the plan"]

    def start_run_if_complete(self) -> bool:
        """Make the plan as soon as everybody is here; the installations must then be carried out."""
        run = self.run
        if run.state != "gathering" or run.plan is not None:
            return False
        if not (self.registry.is_complete and run.is_declared):
            return False
        run.start(self.registry.num_pservers)
        self._run_incarnations = {i: m.info.incarnation for i, m in self.registry.members.items()}
        return True

    def installation(self, index: PserverIndex) -> InstallRun:
        """What pserver `index` must be told to serve the run."""
        run = self.run
        assert run.plan is not None
        declaration = run.trainers[run.uploader].declaration
        assert declaration is not None
        return InstallRun(
            run=run.name,
            attempt=0,
            plan=run.plan.to_json(),
            incarnation=self._run_incarnations[index],
            consistency=self._defaults.consistency,
            nonfinite=declaration.nonfinite or self._defaults.nonfinite,
            round_timeout_seconds=self._defaults.round_timeout_seconds,
            uploader=run.uploader,
            number=run.number,
            members=run.members,
        )

    def members_message(self) -> InstallMembers:
        """The run's current members or failure, for all pservers."""
        run = self.run
        failure = run.failure.to_problem() if run.failure else None
        return InstallMembers(run=run.name, number=run.number, members=run.members, failure=failure)

    def plan_ready(self) -> PlanReady | None:
        """What a trainer needs to begin, once training has begun."""
        run = self.run
        if run.plan is None or run.state == "gathering":
            return None
        pservers: list[PserverInfo] = [m.info for _, m in sorted(self.registry.members.items())]
        return PlanReady(
            run=run.name,
            attempt=0,
            plan=run.plan.to_json(),
            pservers=tuple(pservers),
            uploader=run.uploader,
        )

    # ------------------------------------------------------------------ time and end

    def renew_leases(self, now: float) -> None:
        """Start everybody's lease anew, since heartbeats could not be heard."""
        for pserver in self.registry.members.values():
            pserver.seen_at = now
        for trainer in self.run.trainers.values():
            trainer.seen_at = now

    def expire(self, now: float) -> None:
        """Act on leases that have run out."""
        for lost in self.registry.expire(now):
            if self.run.plan is not None:
                age = now - lost.seen_at
                self.run.fail(
                    PserverLost(
                        f"pserver {lost.info.index} at {lost.info.address} was lost: no heartbeat for {age:.1f} s "
                        f"(lease {self.lease_seconds:g} s)",
                        pserver=lost.info.index,
                    ),
                    now,
                )
        self.run.expire(now, self.lease_seconds)

    def run_recorded(self) -> None:
        """The summary of the deserted run has been taken, so its pservers may exit."""
        self._recorded_run = self.run.name

    @property
    def may_exit(self) -> bool:
        """With --exit-when-done: the run is over and every living pserver knows it."""
        return self.exit_when_done and self.run.is_deserted and self.registry.members.keys() <= self._told_to_stop

    @property
    def exit_code(self) -> int:
        """0 unless the run failed."""
        return 1 if self.run.state == "failed" else 0


def _check_protocol(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise UnsupportedProtocol(
            "the other side speaks another version of the protocol", expected=PROTOCOL_VERSION, actual=version
        )
