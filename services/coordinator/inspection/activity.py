"""The state of the cluster and the activity of its members, as the coordinator knows them from heartbeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field

from ps_config.versions import installed_versions
from ps_protocol.fields import Message
from ps_protocol.messages import ClusterStatus, PserverStatus, Software, TrainerStatus
from ps_protocol.vocabulary import Mode, PserverIndex, Rank, Round

from ..activity import WINDOW_SECONDS, PserverReport, Sample, rate
from ..coordinator import Coordinator
from ..trainers import TrainerMember

LATE_SECONDS = 2.0  # heartbeats come once a second


class Rates(Message):
    """One sample a second of the newest five minutes, in columns; null for the first sample."""

    at: tuple[float, ...] = Field(description="seconds since 1970")
    rounds_per_second: tuple[float | None, ...]
    steps_per_second: tuple[float | None, ...] = Field(description="sum over all trainers")


class Barrier(Message):
    """The barrier with the longest wait, at a pserver or in the ring."""

    pserver: PserverIndex | None = Field(description="null: the barrier of a ring")
    round: Round
    arrived: tuple[Rank, ...]
    missing: tuple[Rank, ...]
    waiting_since: float = Field(description="seconds since 1970")


class PserverActivity(Message):
    """One pserver. Rates and means are over the newest five seconds; a mean without values is null."""

    index: PserverIndex
    round: Round
    num_blocks: int
    shard_bytes: int
    num_queued: int
    pushed_bytes: int
    pulled_bytes: int
    pushed_bytes_per_second: float | None
    pulled_bytes_per_second: float | None
    apply_seconds: float | None
    wait_seconds: float | None


class TrainerActivity(Message):
    """One trainer that sent a heartbeat in this run."""

    rank: Rank
    steps: Round
    steps_per_second: float | None
    has_contributed: bool = Field(description="to the newest round; asynchronous modes: in the newest five seconds")
    steps_behind: int | None = Field(description="asynchronous modes: distance to the fastest trainer")


class Activity(Message):
    """The answer of `GET /v1/activity`, from heartbeats, and at most a second late."""

    run: str
    attempt: int
    mode: Mode
    at: float = Field(description="seconds since 1970, by the coordinator's clock")
    round: Round
    participants: tuple[Rank, ...] = Field(
        description="synchronous mode: trainers with a contribution to the newest round"
    )
    rounds_per_second: float | None
    steps_per_second: float | None
    rates: Rates
    barrier: Barrier | None = Field(description="null: no barrier is incomplete")
    pservers: tuple[PserverActivity, ...]
    trainers: tuple[TrainerActivity, ...]
    staleness: tuple[tuple[float | None, int], ...] = Field(
        description="asynchronous modes: upper bounds (null for the last) and the updates up to each"
    )


def describe_activity(coordinator: Coordinator, wall: float) -> Activity:
    """Return the activity; `wall` is the time since 1970."""
    run, log = coordinator.cluster.run, coordinator.activity
    here = coordinator.cluster.registry.members
    newest = {index: heard[-1] for index, heard in sorted(log.pservers.items()) if index in here}
    samples = list(log.samples)
    last = samples[-1] if samples and run.state == "training" else None
    furthest = max(newest.values(), key=lambda heard: heard.round, default=None)
    participants = furthest.load.participants if furthest else ()
    round_, barrier = furthest.round if furthest else 0, _barrier(newest)
    if run.settings.consistency.is_ring:
        round_ = run.newest_round
        with_batches = (rank for rank, trainer in sorted(run.trainers.items()) if not trainer.is_done)
        participants = tuple(rank for rank in with_batches if rank in run.membership.members) if round_ else ()
        barrier = _barrier_in_ring(run.trainers, coordinator.now(), wall)
    return Activity(
        run=run.name,
        attempt=run.attempt,
        mode=run.mode,
        at=wall,
        round=round_,
        participants=participants,
        rounds_per_second=last.rounds_per_second if last else None,
        steps_per_second=last.steps_per_second if last else None,
        rates=_rates(samples),
        barrier=barrier if run.state == "training" else None,
        pservers=tuple(_pserver(index, list(log.pservers[index])) for index in newest),
        trainers=_trainers(coordinator, newest, participants),
        staleness=_staleness(list(newest.values())),
    )


def _rates(samples: Sequence[Sample]) -> Rates:
    return Rates(
        at=tuple(round(sample.wall, 3) for sample in samples),
        rounds_per_second=tuple(_short(sample.rounds_per_second) for sample in samples),
        steps_per_second=tuple(_short(sample.steps_per_second) for sample in samples),
    )


def _short(rate_: float | None) -> float | None:
    """Round a rate to three decimals: an answer contains hundreds."""
    return None if rate_ is None else round(rate_, 3)


def _barrier(newest: dict[PserverIndex, PserverReport]) -> Barrier | None:
    waiting = {index: heard for index, heard in newest.items() if heard.missing}
    if not waiting:
        return None
    index = max(waiting, key=lambda i: waiting[i].waiting_seconds)
    heard = waiting[index]
    return Barrier(
        pserver=index,
        round=heard.round + 1,
        arrived=heard.load.batch_barriers,
        missing=heard.missing,
        waiting_since=heard.wall - heard.waiting_seconds,
    )


def _barrier_in_ring(trainers: Mapping[Rank, TrainerMember], now: float, wall: float) -> Barrier | None:
    """Return the barrier of a ring, without trainers that are done or silent."""
    here = {rank: t for rank, t in sorted(trainers.items()) if t.is_here and not t.is_done}
    waiting = {rank: t for rank, t in here.items() if t.waiting_seconds and now - t.seen_at < LATE_SECONDS}
    if not waiting:
        return None
    round_ = 1 + max(trainer.round for trainer in waiting.values())
    missing = tuple(rank for rank, t in here.items() if rank not in waiting and t.round < round_)
    waited = max(trainer.waiting_seconds + now - trainer.seen_at for trainer in waiting.values())
    if not missing:
        return None
    return Barrier(pserver=None, round=round_, arrived=tuple(waiting), missing=missing, waiting_since=wall - waited)


def _pserver(index: PserverIndex, heard: Sequence[PserverReport]) -> PserverActivity:
    first, last = heard[0], heard[-1]
    a, b = first.load, last.load
    return PserverActivity(
        index=index,
        round=last.round,
        num_blocks=b.num_blocks,
        shard_bytes=b.shard_bytes,
        num_queued=b.num_queued,
        pushed_bytes=b.pushed_bytes,
        pulled_bytes=b.pulled_bytes,
        pushed_bytes_per_second=rate(a.pushed_bytes, b.pushed_bytes, first.at, last.at),
        pulled_bytes_per_second=rate(a.pulled_bytes, b.pulled_bytes, first.at, last.at),
        apply_seconds=_mean(b.apply_seconds - a.apply_seconds, b.num_applies - a.num_applies),
        wait_seconds=_mean(b.wait_seconds - a.wait_seconds, b.num_waits - a.num_waits),
    )


def _mean(total: float, number: int) -> float | None:
    return total / number if number else None


def _trainers(
    coordinator: Coordinator, newest: dict[PserverIndex, PserverReport], participants: Sequence[Rank]
) -> tuple[TrainerActivity, ...]:
    run, log = coordinator.cluster.run, coordinator.activity
    is_async = run.settings.consistency.is_async
    steps = {rank: trainer.round for rank, trainer in sorted(run.trainers.items())}
    for heard in newest.values():  # a pserver may know a step before the trainer's next heartbeat
        for rank, clock in heard.load.clocks.items():
            steps[rank] = max(steps.get(rank, 0), clock)
    fastest = max(steps.values(), default=0)
    found = []
    for rank, number in steps.items():
        heard_steps = log.trainers.get(rank)
        speed = None  # also for a silent trainer
        if heard_steps and run.state == "training" and heard_steps[-1][0] > coordinator.now() - WINDOW_SECONDS:
            speed = rate(heard_steps[0][1], heard_steps[-1][1], heard_steps[0][0], heard_steps[-1][0])
        found.append(
            TrainerActivity(
                rank=rank,
                steps=number,
                steps_per_second=speed,
                has_contributed=bool(speed) if is_async else rank in participants,
                steps_behind=fastest - number if is_async else None,
            )
        )
    return tuple(found)


def _staleness(newest: Sequence[PserverReport]) -> tuple[tuple[float | None, int], ...]:
    counts: dict[float | None, int] = {}
    for heard in newest:
        for bound, number in heard.load.staleness:
            counts[bound] = counts.get(bound, 0) + number
    return tuple(counts.items()) if any(counts.values()) else ()


def describe_status(coordinator: Coordinator) -> ClusterStatus:
    """Return the state of the cluster."""
    cluster, run, now = coordinator.cluster, coordinator.cluster.run, coordinator.now()
    plan = run.plan
    pservers = [member for _, member in sorted(cluster.registry.members.items())]
    return ClusterStatus(
        run=run.name,
        state=run.state,
        mode=run.mode,
        num_pservers=cluster.registry.num_pservers,
        num_trainers=run.sizes[0],
        waiting_for=tuple(cluster.waiting_for),
        prospects=(
            *filter(None, [cluster.pause]),
            *(f"{text}; the run fails in {left:.0f} s unless it comes back" for text, left in cluster.prospects(now)),
        ),
        failure=run.failure.to_problem() if run.failure else None,
        plan_digest=plan.digest if plan else None,
        num_parameters=len(plan.parameters) if plan else 0,
        parameter_bytes=plan.num_bytes if plan else 0,
        round=min(cluster.rounds, default=0),
        pservers=tuple(
            PserverStatus(
                index=member.info.index,
                address=member.info.address,
                http2=member.info.http2,
                incarnation=member.info.incarnation,
                round=member.round,
                missing=member.missing,
                waiting_seconds=member.waiting_seconds,
                heartbeat_age_seconds=now - member.seen_at,
                software=member.software,
            )
            for member in pservers
        ),
        trainers=tuple(
            TrainerStatus(
                rank=trainer.rank,
                incarnation=trainer.incarnation,
                round=trainer.round,
                state=trainer.state,
                heartbeat_age_seconds=now - trainer.seen_at,
                metrics_address=trainer.metrics_address,
                results=trainer.results,
                software=trainer.software,
                links=dict(trainer.links),
                unreachable=dict(trainer.unreachable),
                waiting_seconds=trainer.waiting_seconds,
                is_done=trainer.is_done,
            )
            for _, trainer in sorted(run.trainers.items())
        ),
        software=Software(**installed_versions()),
    )
