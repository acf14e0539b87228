"""The synchronous round as a pure state machine: it is given events and returns the orders that follow.

    pushes of round r ──► batch barriers of r = members ──► Apply(r) ──► gets of r ──► fetch barriers of r
                                       ▲                                                     │
                                       └───────────── r + 1 is applied only after ───────────┘

Where gradients are clipped, Apply(r) is measured first, and then waits for a request with the global norm.

Barriers are sets of ranks, so a repeated one counts once. While members change, between freeze and install, barriers
are held back: the new membership decides whether they count. Nothing here waits, knows a clock or touches a tensor: a
staged block is an opaque payload that can be compared with another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

from ps_protocol.errors import ContributionMissing, FutureRound, StaleRound, TryAgain
from ps_protocol.membership import FrozenRounds, Membership
from ps_protocol.norms import ShardNorm
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Incarnation, Rank, Round

from ..shard.shard_state import History
from .staging import Admission, Payload, Push, Staged, StagedContribution, admit, check_member


@dataclass(frozen=True, slots=True)
class Apply(Generic[Payload]):
    """An order to aggregate these contributions, given in rank order, and step the optimizer once.

    If it is `Rounds.measuring`, the requests for its norm are answered first, and `accept_norm` comes before the step.
    A round without contributions is passed over: its version is that of the round before.
    """

    round: Round
    ranks: tuple[Rank, ...]
    contributions: tuple[StagedContribution[Payload], ...]
    nonfinite: tuple[Rank, ...] = ()  # if any rank has NaN or infinity, the round steps nothing on every pserver

    @property
    def identity(self) -> tuple[Round, tuple[tuple[Rank, Incarnation], ...], tuple[Rank, ...]]:
        """The round, the contributing incarnations, and the ranks with NaN or infinity: the same on every pserver."""
        pairs = ((rank, staged.incarnation) for rank, staged in zip(self.ranks, self.contributions, strict=True))
        return self.round, tuple(pairs), self.nonfinite

    @property
    def hyper_parameters(self) -> list[HyperParameters]:
        """The hyperparameters of the lowest rank, which is the same rank on every pserver."""
        return self.contributions[0].hyper_parameters if self.contributions else []


@dataclass(slots=True)
class OpenRound(Generic[Payload]):
    """The state of one round that is not applied yet."""

    contributions: dict[Rank, StagedContribution[Payload]] = field(default_factory=dict)  # staged by each rank
    batch_barriers: set[Rank] = field(default_factory=set)
    nonfinite: set[Rank] = field(default_factory=set)  # ranks with NaN or infinity in their gradients
    decided: frozenset[Rank] | None = None  # the ranks of the round, once the coordinator has decided on them


class Rounds(Generic[Payload]):
    """The staged contributions and barriers of one pserver. `applied` is the newest applied round, `open` the next one.

    With `max_delay` = k contributions are also staged for the k rounds after the open one, each with barriers of its
    own. Rounds are applied strictly one after another.
    """

    def __init__(
        self,
        members: Mapping[Rank, Incarnation],
        max_delay: int = 0,
        *,
        applied: Round = 0,
        history: History | None = None,
        clips: bool = False,
    ) -> None:
        """With `clips` no round is applied before its global norm is known."""
        self.members = dict(members)
        self.max_delay = max_delay
        self.applied = applied
        self.history = history or History()  # the history of the newest k + 1 applied rounds
        self.measuring: Apply[Payload] | None = None  # the round that waits for its global norm
        self.applying: Apply[Payload] | None = None
        self.clips = clips
        self.is_frozen = False
        self.paused_from: Round | None = None  # no round from this one on is applied while the run is paused
        self._starts: dict[Rank, Round] = {}  # the first rounds of members that joined after round 1
        self._held: dict[tuple[Rank, Round], tuple[Incarnation, bool]] = {}  # batch barriers that arrived while frozen
        self._rounds: defaultdict[Round, OpenRound[Payload]] = defaultdict(OpenRound)
        self._fetched: dict[Rank, Round] = {}  # the newest version that each member is known to have read

    @property
    def open(self) -> Round:
        """The oldest round that pushes and batch barriers are for."""
        return self.applied + 1

    @property
    def reported_round(self) -> Round:
        """The open round, in logs and errors."""
        return self.open

    @property
    def batch_barriers(self) -> set[Rank]:
        """The ranks whose batch barrier of the open round has arrived."""
        return self._rounds[self.open].batch_barriers

    @property
    def fetch_barriers(self) -> set[Rank]:
        """The ranks that are known to have read the applied round."""
        return {rank for rank, version in self._fetched.items() if version >= self.applied}

    @property
    def missing(self) -> list[Rank]:
        """The ranks whose batch barrier of the open round is missing."""
        held = {rank for rank, round_ in self._held if round_ == self.open}
        return sorted(self.required(self.open) - self.batch_barriers - held)

    def required(self, round_: Round) -> frozenset[Rank]:
        """Return the ranks whose contributions an open round needs: a decided set, or all started members."""
        if (decided := self._rounds[round_].decided) is not None:
            return decided
        return frozenset(rank for rank in self.members if self._starts.get(rank, 1) <= round_)

    @property
    def is_paused(self) -> bool:
        """True if an administrator has paused the run before the open round."""
        return self.paused_from is not None and self.open >= self.paused_from

    def __repr__(self) -> str:
        state = f"batch barriers: {len(self.batch_barriers)} of {len(self.required(self.open))}"
        state = "measuring" if self.measuring else state
        state = "applying" if self.applying else "frozen" if self.is_frozen else "paused" if self.is_paused else state
        waiting = ", ".join(f"trainer {rank}" for rank in self.missing) or "no trainer"
        return f"<Round {self.open} [{state} | waiting for: {waiting}]>"

    def describe(self) -> dict[str, Any]:
        """Return the barriers of the open round and the contributions to the applied one."""
        return {
            "batch_barriers": tuple(sorted(self.batch_barriers)),
            "fetch_barriers": tuple(sorted(self.fetch_barriers)),
            "participants": self.history.participants.get(self.applied, ()),
        }

    def copy_history(self) -> History:
        """Return the history of the newest rounds."""
        return self.history.copy()

    def staged(self) -> Iterator[tuple[Round, Rank, StagedContribution[Payload]]]:
        """Yield all staged contributions, in order."""
        for round_, open_round in sorted(self._rounds.items()):
            for rank, contribution in sorted(open_round.contributions.items()):
                yield round_, rank, contribution

    def admit(self, rank: Rank, incarnation: Incarnation, round_: Round) -> Admission:
        """Return whether a message's round is open or already applied."""
        check_member(self.members, rank, incarnation)
        admission = admit(round_, self.open, self.open + self.max_delay)
        start = self._starts.get(rank, 1)
        if admission == "open" and round_ < start:
            raise StaleRound(f"trainer {rank} takes part from round {start} on", current=start)
        return admission

    def admit_get(self, rank: Rank, incarnation: Incarnation, round_: Round) -> None:
        """Check a pull of version `round_`. Raises Conflict or FutureRound. A joining trainer may pull open rounds."""
        check_member(self.members, rank, incarnation)
        admit(round_, self.open, max(self.open + self.max_delay, self._starts.get(rank, 1) - 1))

    def check_state(self, rank: Rank, incarnation: Incarnation, round_: Round, version: Round) -> None:
        """Raise an error unless optimizer state of `version` is that of a member's round.

        The next round is not applied before this trainer's barrier, so the state of the round can be read.
        """
        self.admit_get(rank, incarnation, round_)
        if version > round_:
            raise StaleRound(f"round {round_} has been overwritten", current=version)
        if version < round_:
            raise TryAgain(f"round {round_} is not applied on this pserver yet", current=version)

    def stage(self, rank: Rank, round_: Round, push: Push[Payload]) -> Staged:
        """Stage one admitted push: see `StagedContribution.stage`.

        A gradient proves the fetch of the version that it was computed on.
        """
        contributions = self._rounds[round_].contributions
        contribution = contributions.get(rank) or StagedContribution(incarnation=self.members.get(rank, 0))
        staged = contribution.stage(rank, round_, push)
        contributions[rank] = contribution
        if not push.slots:
            self._has_fetched(rank, round_ - 1 - self.max_delay)
        return staged

    def is_complete(self, rank: Rank, round_: Round) -> bool:
        """Return whether a trainer's whole contribution of an open round is staged."""
        contribution = self._rounds[round_].contributions.get(rank)
        return contribution is not None and contribution.is_complete

    def _has_fetched(self, rank: Rank, version: Round) -> None:
        self._fetched[rank] = max(self._fetched.get(rank, version), version)

    def count_batch_barrier(
        self, rank: Rank, incarnation: Incarnation, round_: Round, *, is_finite: bool = True
    ) -> Apply[Payload] | None:
        """Count a trainer's batch barrier and its verdict. Returns the order that it completes, if any."""
        if self.admit(rank, incarnation, round_) == "already_applied":
            return None
        if not self.is_complete(rank, round_):
            staged = self._rounds[round_].contributions.get(rank, StagedContribution())
            raise ContributionMissing(
                f"trainer {rank} has not pushed its whole contribution of round {round_} to this pserver",
                expected=staged.completion.num_blocks if staged.completion else "an unknown number of blocks",
                actual=len(staged.blocks),
            )
        if self.is_frozen:
            self._held[rank, round_] = incarnation, is_finite
            return None
        self._count(rank, round_, is_finite=is_finite)
        return self._start_apply()

    def _count(self, rank: Rank, round_: Round, *, is_finite: bool) -> None:
        open_round = self._rounds[round_]
        if not is_finite and rank not in open_round.batch_barriers:
            open_round.nonfinite.add(rank)
        open_round.batch_barriers.add(rank)
        self._has_fetched(rank, round_ - 1 - self.max_delay)

    def count_fetch_barrier(self, rank: Rank, incarnation: Incarnation, round_: Round) -> Apply[Payload] | None:
        """Count a trainer's fetch barrier of an applied round. Returns the order that it completes, if any."""
        if self.admit(rank, incarnation, round_) == "open":
            raise FutureRound(f"round {round_} must be applied before its fetch barrier", current=self.applied)
        self._has_fetched(rank, round_)
        return self._start_apply()

    # ------------------------------------------------------------------ members

    def hold(self) -> None:
        """Hold back every barrier from now on, so that no apply follows the running one, and `freeze` may come."""
        self.is_frozen = True

    def freeze(self) -> FrozenRounds:
        """Hold back every barrier from now on, and return the progress of all trainers. No apply may be running."""
        assert self.applying is None
        self.hold()
        self.measuring = None  # the members may change
        return FrozenRounds(
            applied=self.applied,
            participants=self.history.participants,
            complete=self._find_ranks(lambda each: (r for r, c in each.contributions.items() if c.is_complete)),
            counted=self._find_ranks(lambda each: each.batch_barriers),
            verdicts={**self.history.nonfinite, **self._find_ranks(lambda each: each.nonfinite)},
        )

    def _find_ranks(self, find: Callable[[OpenRound[Payload]], Iterable[Rank]]) -> dict[Round, tuple[Rank, ...]]:
        """Return the ranks that `find` returns for each open round, without rounds that have none."""
        found = ((round_, tuple(sorted(find(open_round)))) for round_, open_round in sorted(self._rounds.items()))
        return {round_: ranks for round_, ranks in found if ranks}

    def install_members(self, membership: Membership) -> Apply[Payload] | None:
        """Install a set of members and end the freeze. Returns the order that follows.

        Contributions of trainers that left stay in the rounds that were decided with them, and are dropped elsewhere.
        """
        before, members = self.members, membership.members
        self.members, self._starts = dict(members), membership.starts
        for open_round in self._rounds.values():
            open_round.decided = None
        for round_, ranks in membership.sets.items():
            if round_ > self.applied:
                self._rounds[round_].decided = frozenset(ranks)
        controls = membership.newest_controls
        self.paused_from = controls.since if controls.is_paused else None
        self.is_frozen, self.measuring = False, None
        for round_, ranks in membership.verdicts.items():
            if round_ > self.applied:
                self._rounds[round_].nonfinite.update(ranks)
        staged = {rank for each in self._rounds.values() for rank in (*each.contributions, *each.batch_barriers)}
        for rank in before.keys() | staged:  # a trainer that left long ago may have a contribution in a round
            if rank not in before or members.get(rank) != before[rank]:
                self._remove(rank)
        held, self._held = self._held, {}
        for (rank, round_), (incarnation, is_finite) in held.items():
            if members.get(rank) == incarnation and rank in self.required(round_):
                self._count(rank, round_, is_finite=is_finite)
        return self._start_apply()

    def _remove(self, rank: Rank) -> None:
        """Remove an incarnation of this rank. A newer one contributes from its start on."""
        self._fetched.pop(rank, None)
        start = self._starts.get(rank, 1) if rank in self.members else None
        for round_, open_round in self._rounds.items():
            stays = rank in (open_round.decided or ()) and (start is None or round_ < start)
            if stays and self.is_complete(rank, round_):
                open_round.batch_barriers.add(rank)
            elif not stays:
                open_round.contributions.pop(rank, None)
                open_round.batch_barriers.discard(rank)
                open_round.nonfinite.discard(rank)

    def accept_norm(self) -> Apply[Payload]:
        """Return the order to apply the measured round, whose global norm has arrived."""
        assert self.measuring is not None
        assert not self.is_frozen
        self.applying, self.measuring = self.measuring, None
        return self.applying

    def finish_apply(self, history: History) -> Apply[Payload] | None:
        """Make the applied round, after which this is the history, readable.

        Returns the order for the next round if that is complete.
        """
        assert self.applying is not None
        self.applied, self.history, self.applying = self.applying.round, history, None
        self._rounds.pop(self.applied, None)
        return self._start_apply()

    def history_after(self, apply: Apply[Payload], norm: ShardNorm | None = None) -> History:
        """Return the history after this round. `norm` is this shard's norm of it, for trainers that ask again."""
        history = self.history.copy()
        history.add_round(apply.round, apply.ranks, apply.nonfinite, norm, keep=self.max_delay + 1)
        return history

    def _start_apply(self) -> Apply[Payload] | None:
        if self.applying or self.measuring or self.is_frozen or self.is_paused or self.missing:
            return None
        open_round, ranks = self._rounds[self.open], tuple(sorted(self.required(self.open)))
        if not ranks and open_round.decided is None:
            return None  # there are no members; an empty set that was decided is applied
        # The remaining trainers have read the version that a round's gradients were computed on.
        needed = self.open - 1 - self.max_delay
        remaining = [rank for rank in ranks if rank in self.members and self._starts.get(rank, 1) <= self.open]
        if any(self._fetched.get(rank, -1) < needed for rank in remaining):
            return None
        contributions = tuple(open_round.contributions[rank] for rank in ranks)
        apply = Apply(self.open, ranks, contributions, tuple(sorted(open_round.nonfinite)))
        if self.clips and ranks:
            self.measuring = apply
        else:
            self.applying = apply
        return apply
