"""The leases of a run's trainers: heartbeats, losses by the policy, returns and time-outs. Pure, without a clock.

event                                  trainer                    state afterwards     awaited afterwards
------------------------------------   ------------------------   ------------------   ------------------
a process takes the rank               none, lost or failed       joined               as before
it declares its model                  joined, or lost            declared             until installed
the pservers have installed it         declared                   declared             no
it leaves as done                      present, or awaited        done                 no
it leaves as failed                    present, or done           failed               by the policy
its lease expires                      present                    lost                 by the policy
others waited for it too long: stuck   present                    lost                 by the policy
an administrator evicts it             present, or awaited        lost                 no
it sends a heartbeat                   lost, and not stuck        as before the loss   until installed
no barrier misses it any more          stuck                      declared             until installed
the rejoin time-out expires            awaited                    unchanged            no, or the run fails
the coordinator resumes the run        any                        lost                 yes

A trainer is present if it has joined or declared. The policy `wait` awaits a lost trainer. `continue` does so while
fewer than `min_trainers` are present. `fail` fails the run. A rank that was awaited stays so under each policy, if the
next process is lost before it declares. Without a plan no trainer is awaited, since its rank is free again, and a lost
trainer that has declared its model must be started again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ps_protocol.errors import Conflict, Ended, GradpostError, NotFound, RoundTimeout, TrainerLost
from ps_protocol.messages import Leave, TrainerHeartbeat
from ps_protocol.vocabulary import Rank, Round

from .pservers import PserverMember
from .record import TrainerState
from .run import Run, name_ranks


def note_heartbeat(run: Run, rank: Rank, message: TrainerHeartbeat, now: float) -> Run:
    """Renew a trainer's lease and store its progress and results. A trainer that was lost too soon returns."""
    trainer, record = run.member(rank, message.run, message.incarnation), run.record
    run = run.with_report(rank, seen_at=now, heartbeat=message.model_copy(update={"means": None}))
    first = record.membership.starts.get(rank, (record.base_round or 0) + 1)
    # An earlier round is not a round that this incarnation has received.
    if message.attempt == record.attempt and message.round >= first:
        record = record if record.has_trained else record.with_fields(has_trained=True)
        run = replace(run, record=record, newest_received=max(run.newest_received, message.round))
    is_back = trainer.state == "lost" and run.may_return(trainer) and not run.reports[rank].is_stuck
    return _return_trainer(run, rank) if is_back else run


def _return_trainer(run: Run, rank: Rank) -> Run:
    """Undo the loss of a trainer. It stays awaited until the pservers have installed it."""
    trainer = run.record.trainers[rank]
    record = run.record.with_trainers([rank], state="declared" if trainer.has_declared else "joined")
    if record.membership.members.get(rank) != trainer.incarnation:
        record = record.with_change()  # the pservers have not installed this incarnation
    return replace(run, record=record).with_report(rank, is_stuck=False).continue_without_lost()


def lose_trainer(run: Run, rank: Rank, failure: GradpostError, now: float, state: TrainerState = "lost") -> Run:
    """Apply the loss policy to a trainer that failed, was silent, or is stuck."""
    record, trainer, policy = run.record, run.record.trainers[rank], run.settings.loss_policy
    enough = len(record.members) - trainer.is_present >= run.settings.min_trainers
    is_newcomer = trainer.is_awaited and not trainer.has_declared  # the next process may take the awaited rank
    # Without a plan the rank is free again.
    is_awaited = (
        record.plan is not None
        and not record.is_over
        and (is_newcomer or policy == "wait" or (policy == "continue" and not enough))
    )
    run = _remove_member(run, rank, failure.detail, now, state=state, is_awaited=is_awaited)
    if record.plan is not None and policy == "fail" and not is_newcomer:
        run = run.fail(failure, now)
    return _finish_if_all_left(run, now)


def _remove_member(run: Run, rank: Rank, why: str, now: float, **fields: Any) -> Run:
    """Set the state of a trainer that is lost or failed."""
    fields = {"was_evicted": False, **fields, "why": why, "round": 0}
    return replace(run, record=run.record.with_trainers([rank], **fields).with_change()).with_report(rank, gone_at=now)


def _finish_if_all_left(run: Run, now: float) -> Run:
    record = run.record
    goes_on = record.plan is None or record.members or record.awaited or record.is_over
    return run if goes_on else replace(run.with_change(state="finished"), ended_at=now)


def leave_run(run: Run, rank: Rank, message: Leave, now: float) -> Run:
    """Remove a trainer that is done, or apply the loss policy to one that failed.

    `failed` after `done` is sent by the launcher of the process, which has seen its exit code.
    """
    trainer, record = run.member(rank, message.run, message.incarnation), run.record
    was_lost_after_last_round = trainer.is_awaited and message.outcome == "done"
    has_failed_after_done = trainer.state == "done" and message.outcome == "failed" and not record.is_over
    if not (trainer.is_present or was_lost_after_last_round or has_failed_after_done):
        return run
    run = run.with_report(rank, heartbeat=run.reports[rank].heartbeat.model_copy(update={"round": message.round}))
    if message.outcome == "failed":
        reason = message.reason or "no reason was given"
        return lose_trainer(run, rank, TrainerLost(f"trainer {rank} failed: {reason}", ranks=[rank]), now, "failed")
    if record.state == "gathering" and record.plan is None:
        others = {other: t for other, t in record.trainers.items() if other != rank}
        return replace(run.with_change(trainers=others), reports={other: run.reports[other] for other in others})
    done = record.with_trainers([rank], state="done", is_awaited=False, round=message.round)
    run = replace(run, record=done.with_change())
    if message.attempt is not None and message.attempt < record.attempt:
        run = run.fail_for_lost_rounds(record.base_round or 0, message.round, now)
    return _finish_if_all_left(run, now)


def evict_trainer(run: Run, rank: Rank, now: float) -> Run:
    """Continue without a trainer. Another incarnation may join. Raises NotFound, Conflict (`cannot_evict`)."""
    record, trainer = run.record, run.record.trainers.get(rank)
    if trainer is None or not (trainer.is_present or trainer.is_awaited):
        raise NotFound(f"trainer {rank} is not a member of run {record.name}", members=sorted(record.members))
    others = len(record.members) - trainer.is_present
    needed = run.settings.min_trainers if run.settings.loss_policy == "continue" else 1
    if others < needed:
        raise Conflict(
            f"run {record.name} would have too few trainers without trainer {rank}; stop the run with: gradpost stop",
            code="cannot_evict", expected=f">= {needed}", actual=others,
        )  # fmt: skip
    why = f"trainer {rank} was evicted by an administrator"
    return _remove_member(run, rank, why, now, state="lost", is_awaited=False, was_evicted=True)


# ---------------------------------------------------------------- time


def expire_trainers(run: Run, now: float, lease_seconds: float) -> Run:
    """Mark trainers with an expired lease as lost, and fail the run for those that did not return in time."""
    for rank in run.record.members:
        age = now - run.reports[rank].seen_at
        if age > lease_seconds:
            text = f"trainer {rank} was lost: no heartbeat for {age:.1f} s (lease {lease_seconds:g} s)"
            run = lose_trainer(run, rank, TrainerLost(text, ranks=[rank]), now)
    limit = run.settings.rejoin_timeout_seconds
    for trainer in run.record.awaited:
        if now - run.reports[trainer.rank].gone_at <= limit:
            continue
        run = replace(run, record=run.record.with_trainers([trainer.rank], is_resumed=False)).continue_without_lost()
        if run.record.trainers[trainer.rank].is_awaited:
            text = f"{trainer.why}; it did not come back within the rejoin time-out of {limit:g} s"
            run = run.fail(TrainerLost(text, ranks=[trainer.rank]), now)
    return _expire_declarations(run, now)


def expire_pservers(run: Run, pservers: Iterable[PserverMember], now: float) -> Run:
    """Fail the run for pservers with an expired lease that cannot return, or did not return in time."""
    lease_seconds, limit = run.settings.lease_seconds, run.settings.rejoin_timeout_seconds
    lost = [member for member in pservers if member.is_lost]
    for member in lost if run.record.plan is not None else ():
        age = now - member.seen_at
        text = f"pserver {member.info.index} at {member.info.address} was lost: no heartbeat for {age:.1f} s"
        # Without checkpoints a shard is gone with its process, unless the pserver wrote it when it stopped.
        if not run.checkpoint_interval and not member.heartbeat.is_stopping:
            text = f"{text} (lease {lease_seconds:g} s)"
        elif age > limit:
            text = f"{text}, and it did not come back within the rejoin time-out of {limit:g} s"
        else:
            continue
        run = run.fail(Ended(text, code="pserver_lost", pserver=member.info.index), now)
    return run


def _expire_declarations(run: Run, now: float) -> Run:
    """Lose trainers that joined but did not declare a model within the round time-out."""
    limit = run.settings.round_timeout_seconds
    for rank, trainer in run.record.trainers.items():
        if trainer.state == "joined" and now - run.reports[rank].joined_at > limit:
            text = f"trainer {rank} joined, but did not declare a model within the round time-out of {limit:g} s"
            run = _lose_stuck(run, rank, TrainerLost(text, ranks=[rank]), now)
    return run


def lose_stuck_trainers(run: Run, ranks: list[Rank], failure: GradpostError, now: float) -> Run:
    """Lose trainers that others waited for until the round time-out, although they are alive.

    An incarnation that the pservers have not installed is skipped, since its predecessor is the missing one.
    """
    for rank in ranks:
        members = run.record.members
        if rank in members and members[rank] == run.record.membership.members.get(rank):
            run = _lose_stuck(run, rank, failure, now)
    return run


def _lose_stuck(run: Run, rank: Rank, failure: GradpostError, now: float) -> Run:
    return run if run.record.is_over else lose_trainer(run.with_report(rank, is_stuck=True), rank, failure, now)


def return_stuck_trainers(run: Run, missing: Collection[Rank]) -> Run:
    """Return stuck trainers that no barrier misses any more, unless other processes took their ranks."""
    for trainer in run.record.awaited:
        if run.reports[trainer.rank].is_stuck and trainer.has_declared and trainer.rank not in missing:
            run = _return_trainer(run, trainer.rank)
    return run


def time_out(run: Run, round_: Round, missing: Sequence[Rank], waiting_seconds: float, now: float) -> Run:
    """Lose trainers that others have waited for during the round time-out.

    It runs only while all pservers serve the run.
    """
    limit, late = run.settings.round_timeout_seconds, [rank for rank in missing if rank in run.reports]
    if not late or now - max(now - waiting_seconds, run.unserved_at) <= limit:
        return run
    owed = f"reach the batch barrier of round {round_}"
    if run.settings.consistency.is_async:
        owed = "complete the step that other trainers wait for"
    elif run.settings.consistency.is_ring:
        owed = f"contribute to round {round_} in the ring"
    advice = "raise --round-timeout-seconds if a step may take longer"
    text = f"{name_ranks(late)} did not {owed} within the round time-out of {limit:g} s, although alive ({advice})"
    return lose_stuck_trainers(run, late, RoundTimeout(text, missing=late), now)


def check_ring(run: Run, message: TrainerHeartbeat, now: float) -> Run:
    """Fail the run if a trainer of a ring waits for one that left, or for one that does not progress.

    A trainer without batches does not count, since the script may do something else after its last batch.
    """
    round_, limit = message.round + 1, run.settings.round_timeout_seconds
    if not message.waiting_seconds or message.is_done:
        return run
    departed = [t.rank for t in run.record.trainers.values() if t.state == "done" and t.round < round_]
    if departed:
        text = f"{name_ranks(departed)} left before round {round_}, and a ring requires all trainers"
        return run.fail(Ended(text, code="trainer_left", ranks=departed), now)
    if message.waiting_seconds <= limit:
        return run
    newest = {rank: run.reports[rank].heartbeat for rank in sorted(run.record.members)}
    missing = [rank for rank, heartbeat in newest.items() if not (heartbeat.waiting_seconds or heartbeat.is_done)]
    if missing:
        return time_out(run, round_, missing, message.waiting_seconds, now)
    text = f"all trainers waited in round {round_} for longer than the round time-out of {limit:g} s"
    return run.fail(RoundTimeout(f"{text}; check the network between them", missing=[]), now)
