"""The leases of a run's trainers: heartbeats, losses by the policy, returns and time-outs. Pure, without a clock."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ps_protocol.errors import Conflict, Ended, GradpostError, NotFound, RoundTimeout, TrainerLost
from ps_protocol.messages import Leave, TrainerHeartbeat
from ps_protocol.vocabulary import Rank, Round

from .joining import agree_on_model, end_last_call
from .record import EVICTED, TrainerState
from .run import Run, name_ranks


def renew_lease(run: Run, rank: Rank, message: TrainerHeartbeat, now: float) -> Run:
    """Store a trainer's progress and results. A trainer that was lost too soon returns.

    Raises ModelMismatch if the other trainers have declared another model meanwhile.
    """
    trainer, record = run.member(rank, message.run, message.incarnation), run.record
    run = run.with_report(rank, seen_at=now, heartbeat=message)
    first = record.membership.starts.get(rank, (record.resume or 0) + 1)
    # An earlier round is only its starting point.
    if message.attempt == record.attempt and message.round >= first:
        record = record if record.has_trained else record.update(has_trained=True)
        run = replace(run, record=record, pulled=max(run.pulled, message.round))
    is_back = trainer.state == "lost" and run.may_return(trainer) and not run.reports[rank].is_stuck
    return _revive(run, rank) if is_back else run


def _revive(run: Run, rank: Rank) -> Run:
    """Undo the loss of a trainer. It stays awaited until the pservers have installed it."""
    trainer, record, mine = run.record.trainers[rank], run.record, run.reports[rank].declaration
    if trainer.declared and mine is not None:
        record = record.update(declaration=agree_on_model(run, rank, mine))
    record = record.with_trainers([rank], state="declared" if trainer.declared else "joined")
    if record.membership.members.get(rank) != trainer.incarnation:
        record = record.change()  # the pservers have not installed this incarnation
    return replace(run, record=record).with_report(rank, is_stuck=False).go_on_without_the_lost()


def lose_trainer(run: Run, rank: Rank, failure: GradpostError, now: float, state: TrainerState = "lost") -> Run:
    """Apply the loss policy to a trainer that is gone, or counts as gone."""
    record, trainer, policy = run.record, run.record.trainers[rank], run.settings.loss_policy
    enough = len(record.members) - trainer.is_present >= run.settings.min_trainers
    is_newcomer = trainer.is_awaited and not trainer.declared  # another process may take its rank
    # Without a plan the rank is free again.
    is_awaited = (
        record.plan is not None
        and not record.is_over
        and (is_newcomer or policy == "wait" or (policy == "continue" and not enough))
    )
    run = _mark_gone(run, rank, state, failure.detail, now, is_awaited=is_awaited)
    if record.plan is not None and policy == "fail" and not is_newcomer:
        run = run.fail(failure, now)
    return _end_if_deserted(run, now)


def _mark_gone(run: Run, rank: Rank, state: TrainerState, why: str, now: float, *, is_awaited: bool) -> Run:
    record = run.record.with_trainers([rank], state=state, why=why, is_awaited=is_awaited, round=0).change()
    return replace(run, record=record).with_report(rank, gone_at=now)


def _end_if_deserted(run: Run, now: float) -> Run:
    record = run.record
    goes_on = record.plan is None or record.members or record.awaited or record.is_over
    return run if goes_on else replace(run.change(state="finished"), ended_at=now)


def leave_run(run: Run, rank: Rank, message: Leave, now: float) -> Run:
    """Remove a trainer that is done, or apply the loss policy to one that failed.

    `failed` after `done` is sent by the launcher of the process, which has seen its exit code.
    """
    trainer, record = run.member(rank, message.run, message.incarnation), run.record
    returns_for_the_end = trainer.is_awaited and message.outcome == "done"  # it was lost after its last round
    has_failed_after_all = trainer.state == "done" and message.outcome == "failed" and not record.is_over
    if not (trainer.is_present or returns_for_the_end or has_failed_after_all):
        return run
    run = run.with_report(rank, heartbeat=run.reports[rank].heartbeat.model_copy(update={"round": message.round}))
    if message.outcome == "failed":
        reason = message.reason or "no reason was given"
        return lose_trainer(run, rank, TrainerLost(f"trainer {rank} failed: {reason}", ranks=[rank]), now, "failed")
    if record.state == "gathering" and record.plan is None:
        others = {other: t for other, t in record.trainers.items() if other != rank}
        return replace(run.change(trainers=others), reports={other: run.reports[other] for other in others})
    done = record.with_trainers([rank], state="done", is_awaited=False, round=message.round)
    run = replace(run, record=done.change())
    if message.attempt is not None and message.attempt < record.attempt:
        run = run.fail_for_lost_rounds(record.resume or 0, message.round, now)
    return _end_if_deserted(run, now)


def evict_trainer(run: Run, rank: Rank, now: float) -> Run:
    """Continue without a trainer. Another incarnation may join. Raises NotFound, Conflict (`cannot_evict`)."""
    record, trainer = run.record, run.record.trainers.get(rank)
    if trainer is None or not (trainer.is_present or trainer.is_awaited):
        raise NotFound(f"trainer {rank} is not a member of run {record.name}", members=sorted(record.members))
    others = len(record.members) - trainer.is_present
    needed = run.settings.min_trainers if run.settings.loss_policy == "continue" else 1
    if others < needed:
        raise Conflict(
            f"run {record.name} would have too few trainers without trainer {rank}",
            code="cannot_evict", expected=f">= {needed}", actual=others,
        )  # fmt: skip
    return _mark_gone(run, rank, "lost", f"trainer {rank} {EVICTED}", now, is_awaited=False)


# ---------------------------------------------------------------- time


def expire_trainers(run: Run, now: float, lease_seconds: float) -> Run:
    """Mark trainers with an expired lease as lost, and fail the run for those that did not return in time."""
    for rank in run.record.members:
        age = now - run.reports[rank].seen_at
        if age > lease_seconds:
            text = f"trainer {rank} was lost: no heartbeat for {age:.1f} s (lease {lease_seconds:g} s)"
            run = lose_trainer(run, rank, TrainerLost(text, ranks=[rank]), now)
    run = end_last_call(run, now)
    limit = run.settings.rejoin_timeout_seconds
    for trainer in run.record.awaited:
        if now - run.reports[trainer.rank].gone_at <= limit:
            continue
        run = replace(run, record=run.record.with_trainers([trainer.rank], is_resumed=False)).go_on_without_the_lost()
        if run.record.trainers[trainer.rank].is_awaited:
            text = f"{trainer.why}; it did not come back within the rejoin time-out of {limit:g} s"
            run = run.fail(TrainerLost(text, ranks=[trainer.rank]), now)
    return _expire_declarations(run, now)


def _expire_declarations(run: Run, now: float) -> Run:
    """Give up trainers that joined but did not declare a model within the round time-out."""
    limit, record = run.settings.round_timeout_seconds, run.record
    owed = f"joined, but did not declare a model within the round time-out of {limit:g} s"
    if record.plan is not None:
        for trainer in record.undeclared:
            if now - run.reports[trainer.rank].joined_at > limit:
                failure = TrainerLost(f"trainer {trainer.rank} {owed}", ranks=[trainer.rank])
                run = _give_up(run, trainer.rank, failure, now)
        return run
    all_joined = len(record.members) == record.num_trainers
    if record.is_over or not (record.num_declared and all_joined and run.missing_ranks):
        return replace(run, complete_since=None)
    if run.complete_since is None:
        return replace(run, complete_since=now)
    if now - run.complete_since <= limit:
        return run
    return run.fail(RoundTimeout(f"{name_ranks(run.missing_ranks)} {owed}", missing=run.missing_ranks), now)


def mark_stuck(run: Run, ranks: list[Rank], failure: GradpostError, now: float) -> Run:
    """Mark trainers as lost that others waited for until the round time-out, although they are alive.

    An incarnation that the pservers have not installed is skipped, since its predecessor is the missing one.
    """
    for rank in ranks:
        members = run.record.members
        if rank in members and members[rank] == run.record.membership.members.get(rank):
            run = _give_up(run, rank, failure, now)
    return run


def _give_up(run: Run, rank: Rank, failure: GradpostError, now: float) -> Run:
    return run if run.record.is_over else lose_trainer(run.with_report(rank, is_stuck=True), rank, failure, now)


def revive_stuck(run: Run, missing: Collection[Rank]) -> Run:
    """Restore stuck trainers that are no longer missing, unless their ranks were taken."""
    for trainer in run.record.awaited:
        if run.reports[trainer.rank].is_stuck and trainer.declared and trainer.rank not in missing:
            run = _revive(run, trainer.rank)
    return run


def time_out(run: Run, round_: Round, missing: Sequence[Rank], waiting_seconds: float, now: float) -> Run:
    """Mark trainers as stuck that others have waited for during the round time-out.

    It runs only while all pservers serve the run and the trainer can reach them.
    """
    limit, since = run.settings.round_timeout_seconds, max(now - waiting_seconds, run.unserved_at)
    reports = run.reports
    late = [rank for rank in missing if rank in reports and now - max(since, reports[rank].cut_off_at) > limit]
    if not late:
        return run
    owed = f"reach the batch barrier of round {round_}"
    if run.settings.consistency.is_async:
        owed = "complete the step that other trainers wait for"
    elif run.settings.consistency.is_ring:
        owed = f"contribute to round {round_} in the ring"
    text = f"{name_ranks(late)} did not {owed} within the round time-out of {limit:g} s, although alive"
    return mark_stuck(run, late, RoundTimeout(text, missing=late), now)


def check_ring(run: Run, message: TrainerHeartbeat, now: float) -> Run:
    """Fail the run if a trainer of a ring waits for one that left, or for one that does not progress.

    A trainer without batches does not count, since the script may do something else after its last batch.
    """
    round_, limit = message.round + 1, run.settings.round_timeout_seconds
    if not message.waiting_seconds or message.is_done:
        return run
    gone = [t.rank for _, t in sorted(run.record.trainers.items()) if t.state == "done" and t.round < round_]
    if gone:
        text = f"{name_ranks(gone)} left before round {round_}, and a ring requires all trainers"
        return run.fail(Ended(text, code="trainer_left", ranks=gone), now)
    if message.waiting_seconds <= limit:
        return run
    newest = {rank: run.reports[rank].heartbeat for rank in sorted(run.record.members)}
    missing = [rank for rank, heartbeat in newest.items() if not (heartbeat.waiting_seconds or heartbeat.is_done)]
    if missing:
        return time_out(run, round_, missing, message.waiting_seconds, now)
    text = f"all trainers waited in round {round_} for longer than the round time-out of {limit:g} s"
    return run.fail(RoundTimeout(f"{text}; check the network between them", missing=[]), now)
