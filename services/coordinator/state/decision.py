"""The decision when members change: the rounds that each trainer contributes to, or a rollback, with its reason. Pure.

    freeze ──every pserver reports its applied rounds and contributions──► decide ──► install

For a trainer that left, each open round either contains its contribution or not. It is **in** if every pserver has
applied the round with it or holds all of it, and at least one has counted its barrier. It is **out** if no pserver has
applied the round with it. Otherwise, as when the trainer died between two pservers, the run rolls back to the round
before. Without a log no pserver can go back one round: the trainer is in that round on some pservers only.
In asynchronous modes a contribution counts alone (`decide_steps`): only the first steps of new trainers are decided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from ps_protocol.errors import Ended
from ps_protocol.fields import MAX_ORDINAL
from ps_protocol.membership import Controls, FrozenRounds, Membership
from ps_protocol.vocabulary import Incarnation, PserverIndex, Rank, Round

from .record import Decision
from .run import Run, name_ranks

Ranges: TypeAlias = list[tuple[Round, Round]]  # of rounds that a pserver can restore
# The incarnation and answer of each frozen pserver; None if it holds nothing that it could continue from by itself.
Answers: TypeAlias = Mapping[PserverIndex, tuple[Incarnation, FrozenRounds | None]]


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback to round `newest`, or to the newest round before it that all pservers can restore.

    With `is_asked` an administrator requested it: the run goes back to exactly this round, or the request is refused.
    """

    newest: Round
    reason: str = field(default="", compare=False, repr=False)
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why the run cannot be rolled back as an administrator requested."""

    reason: str


def decide_change(run: Run, targets: Mapping[Rank, Incarnation], answers: Answers) -> Decision | Rollback:
    """Return the next decision for a run, given the answers of all frozen pservers, or a rollback."""
    rounds = [answer for _, answer in answers.values() if answer is not None]
    lowest = min((answer.applied for answer in rounds), default=MAX_ORDINAL)  # without any, the newest checkpoint
    if run.rollback_to is not None:
        newest = min(lowest, run.rollback_to)
        return Rollback(newest, "an administrator requested it", is_asked=newest == run.rollback_to)
    for index, (incarnation, answer) in answers.items():
        if reason := _find_loss(run, targets, index, incarnation, answer):
            return Rollback(lowest, f"pserver {index} {reason}")
    rules = run.settings.consistency
    lost = run.newest_applied > max((answer.applied for answer in rounds), default=0) and not rules.is_async
    if lost and run.record.membership.members.items() - run.record.members.items():
        # The pserver that lost it may have served it, made of a contribution that no pserver has any more.
        return Rollback(lowest, f"no pserver has round {run.newest_applied} any more, and a trainer in it has left")
    take_over = {trainer.rank for trainer in run.record.trainers.values() if trainer.is_awaited}
    has_log = run.settings.log_durability != "none"
    decide_mode = decide_steps if rules.is_async else partial(decide_rounds, has_log=has_log)
    outcome = decide_mode(run.record.membership, targets, rounds, max_delay=rules.max_delay, take_over=take_over)
    if isinstance(outcome, Rollback):
        return outcome
    wanted, record = run.wanted_controls, run.record
    if wanted is not None:
        # All pservers are frozen, so that the controls can apply from the first round that none has applied.
        since = max(answer.applied for answer in rounds) + 1
        outcome = outcome.with_controls(wanted.model_copy(update={"since": since}), first=lowest + 1)
    reason = explain_change(record.membership, targets, wanted)
    return Decision(record.attempt, record.base_round, record.uploader, outcome, reason, wanted)


def explain_change(before: Membership, members: Mapping[Rank, Incarnation], wanted: Controls | None) -> str:
    """Return the reason for a decision without a rollback.

    >>> explain_change(Membership({0: 1, 1: 1}), {1: 2, 2: 1}, None)
    'trainer 1, trainer 2 joined; trainer 0 left'
    """
    joined = [rank for rank, incarnation in sorted(members.items()) if before.members.get(rank) != incarnation]
    left = sorted(before.members.keys() - members.keys())
    texts = [f"{name_ranks(ranks)} {verb}" for ranks, verb in ((joined, "joined"), (left, "left")) if ranks]
    if wanted is not None:
        texts.append("an administrator has set controls")
    return "; ".join(texts) or "a pserver must install the membership again"


def _find_loss(
    run: Run,
    targets: Mapping[Rank, Incarnation],
    index: PserverIndex,
    incarnation: Incarnation,
    answer: FrozenRounds | None,
) -> str:
    """Return what a pserver lost that the run cannot continue without; an empty text: nothing."""
    record = run.record
    if answer is None:
        return "holds nothing of the run"
    if not answer.is_readable and targets.get(record.uploader) != record.membership.members.get(record.uploader):
        return "does not have all initial values, and the trainer that uploads them is gone"
    if run.settings.consistency.is_async:
        return ""
    if answer.is_short:
        return f"has lost what it had logged after round {answer.applied}"
    # A trainer that received a lost round does not report it if it has left.
    if answer.applied < run.newest_confirmed:
        return f"is at round {answer.applied}, and a trainer has received round {run.newest_confirmed}"
    report = run.lost_rounds.get(index)
    if report and report.incarnation == incarnation and answer.applied <= report.restored:
        received = f"trainer {report.rank} has received round {report.received}"
        return f"came back with round {answer.applied}, and {received}"
    return ""


def decide_rollback(
    run: Run,
    targets: Mapping[Rank, Incarnation],
    wanted: Rollback,
    round_: Round | None,
    ranges: Mapping[PserverIndex, Ranges],
) -> Decision | Refusal | Ended:
    """Return the decision to begin the next attempt with `round_`, the newest that all pservers can restore.

    Without such a round the run begins again with initial values, unless it has trained.
    """
    record = run.record
    if wanted.is_asked and round_ != wanted.newest:
        return Refusal(f"not every pserver can restore round {wanted.newest}, see the pservers' logs")
    if wanted.is_asked and (obstacle := run.find_rollback_obstacle(wanted.newest)):
        return Refusal(obstacle)
    if round_ is None and (run.newest_applied > 0 or record.has_trained or record.base_round is not None):
        empty = [index for index, restorable in ranges.items() if not restorable]
        text = f"pservers {empty} have lost their shards" if empty else "no round can be restored by all pservers"
        return Ended(f"{text}; the pservers can restore {list(ranges.values())}", code="pserver_lost", pserver=empty)
    uploader = record.uploader if round_ is not None else min(targets, default=record.uploader)
    # The newest controls stay in effect.
    asked = run.wanted_controls
    standing = record.membership.controls[-1:] if asked is None else (asked,)
    since = 0 if asked is None else (round_ or 0) + 1
    controls = tuple(newest.model_copy(update={"since": since}) for newest in standing)
    membership = Membership(dict(targets), controls=controls)
    return Decision(record.attempt + 1, round_, uploader, membership, wanted.reason, asked)


def decide_rounds(
    before: Membership,
    members: Mapping[Rank, Incarnation],
    answers: Collection[FrozenRounds],
    *,
    max_delay: int = 0,
    take_over: Collection[Rank] = (),
    has_log: bool = True,
) -> Membership | Rollback:
    """Return the membership with new `members` in the synchronous mode, or a rollback.

    `answers` are those of all frozen pservers. A rank with another incarnation has left and joined. Trainers in
    `take_over` supply the open rounds that do not contain their rank; other new trainers begin after all rounds that
    are open on any pserver.

    >>> two = Membership({0: 1, 1: 1})
    >>> holds = FrozenRounds(applied=6, complete={7: (0, 1)}, counted={7: (1,)})
    >>> decide_rounds(two, {0: 1}, [holds, FrozenRounds(applied=7, participants={7: (0, 1)})])
    Membership(members={0: 1}, starts={}, sets={7: (0, 1), 8: (0,)}, verdicts={}, controls=())
    >>> lost = FrozenRounds(applied=6)
    >>> decide_rounds(two, {0: 1}, [lost, FrozenRounds(applied=7, participants={7: (0, 1)})])
    Rollback(newest=6, is_asked=False)
    >>> decide_rounds(two, {0: 1}, [lost, FrozenRounds(applied=7, participants={7: (0, 1)})], has_log=False).sets
    {7: (0,), 8: (0,)}
    """
    newest_applied = max(answer.applied for answer in answers)
    first, last = min(answer.applied for answer in answers) + 1, newest_applied + 1 + max_delay
    if last - first > 2 * max_delay + 1:
        text = f"a pserver is at round {first - 1} and another at round {newest_applied}"
        return Rollback(first - 1, f"{text}: no trainer still holds the contributions in between")
    staying = {rank for rank, incarnation in members.items() if before.members.get(rank) == incarnation}
    joining = members.keys() - staying
    sets: dict[Round, set[Rank]] = {}
    for round_ in range(first, last + 1):
        sets[round_] = {rank for rank in staying if before.starts.get(rank, 1) <= round_}
        for rank in before.ranks() - sets[round_]:  # a trainer that left may have contributed
            if not before.has_claim(rank, round_):
                continue
            if _is_in(rank, round_, answers):
                sets[round_].add(rank)
            elif rank in staying or (has_log and any(_has_applied_with(rank, round_, answer) for answer in answers)):
                return Rollback(round_ - 1, f"the contribution of trainer {rank} to round {round_} is lost")
    if not members:  # without trainers no round may be applied without a contribution
        newest = max([last - 1 - max_delay, *(round_ for round_, ranks in sets.items() if ranks)])
        sets = {round_: ranks for round_, ranks in sets.items() if round_ <= newest}
    # A waiting trainer may not have received its start.
    starts = {rank: before.starts[rank] for rank in staying if rank in before.starts}
    for rank in joining:
        # A round that a pserver has applied without it is not open everywhere.
        open_to_it = [r for r in sets if r > newest_applied and rank not in sets[r]] if rank in take_over else []
        starts[rank] = min(open_to_it, default=last + 1)
        for round_ in range(starts[rank], last + 1):
            sets[round_].add(rank)
    verdicts: dict[Round, set[Rank]] = {}
    for answer in answers:
        for round_, ranks in answer.verdicts.items():
            # It may be that of a predecessor, which does not count from the start of its successor on. A trainer
            # that stays sends its own verdict to every pserver.
            judged = {rank for rank in ranks if rank in sets.get(round_, ()) and round_ < starts.get(rank, last + 1)}
            if judged:
                verdicts.setdefault(round_, set()).update(judged)
    return Membership(dict(members), starts, _as_tuples(sets), _as_tuples(verdicts), before.controls)


def decide_steps(
    before: Membership,
    members: Mapping[Rank, Incarnation],
    answers: Collection[FrozenRounds],
    *,
    max_delay: int = 0,
    take_over: Collection[Rank] = (),
) -> Membership:
    """Return the membership with new `members` in asynchronous modes, where contributions count one by one.

    A new trainer in `take_over` begins with the oldest step that a pserver does not have from its rank. Other new
    trainers begin with the slowest present one, so that no trainer has to wait for them.

    >>> answers = [FrozenRounds(applied=9, opens={0: 6, 1: 5}), FrozenRounds(applied=8, opens={0: 6, 1: 4})]
    >>> decide_steps(Membership({0: 1, 1: 1}), {0: 1, 1: 2}, answers, take_over=[1]).starts
    {1: 4}
    >>> decide_steps(Membership({0: 1}), {0: 1, 1: 2}, answers).starts
    {1: 6}
    """

    def first_step(rank: Rank) -> Round:
        opens = [max(answer.opens.get(rank, 1), before.starts.get(rank, 1)) for answer in answers]
        # A trainer is at most 1 + max_delay steps further on one pserver than on another, unless a pserver lost steps.
        return max(min(opens), max(opens) - 1 - max_delay)

    staying = {rank for rank, incarnation in members.items() if before.members.get(rank) == incarnation}
    starts = {rank: before.starts[rank] for rank in staying if rank in before.starts}
    slowest = min(map(first_step, staying), default=1)
    for rank in sorted(members.keys() - staying):
        starts[rank] = first_step(rank) if rank in take_over else max(first_step(rank), slowest)
    return Membership(dict(members), starts, controls=before.controls)


def _as_tuples(sets: Mapping[Round, Collection[Rank]]) -> dict[Round, tuple[Rank, ...]]:
    return {round_: tuple(sorted(ranks)) for round_, ranks in sets.items()}


def _is_in(rank: Rank, round_: Round, answers: Collection[FrozenRounds]) -> bool:
    is_counted = False
    for answer in answers:
        is_applied = _has_applied_with(rank, round_, answer)
        if not is_applied and rank not in answer.complete.get(round_, ()):
            return False
        is_counted = is_counted or is_applied or rank in answer.counted.get(round_, ())
    return is_counted


def _has_applied_with(rank: Rank, round_: Round, answer: FrozenRounds) -> bool:
    return round_ <= answer.applied and rank in answer.participants.get(round_, ())


def newest_common(newest: Round, ranges: Collection[Collection[tuple[Round, Round]]]) -> Round | None:
    """Return the newest round up to `newest` that lies in a range of every pserver.

    >>> newest_common(9, [[(8, 12), (0, 5)], [(0, 7)]])
    5
    """
    candidates = {min(last, newest) for restorable in ranges for _, last in restorable}
    for candidate in sorted(candidates, reverse=True):
        is_everywhere = all(any(first <= candidate <= last for first, last in restorable) for restorable in ranges)
        if candidate >= 0 and is_everywhere:
            return candidate
    return None
