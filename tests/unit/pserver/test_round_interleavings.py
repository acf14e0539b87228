"""The synchronous round as a state machine: arbitrary interleavings against a model of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from ps_protocol.errors import GradpostError
from ps_protocol.membership import Membership
from ps_protocol.requests import Completion
from services.pserver.run.rounds import Apply, Rounds
from services.pserver.run.staging import Push as StagedPush

from ...soaking import examples

NAMES = ("a", "b", "c")
NUM_BLOCKS = len(NAMES)
LAMBDAS = ([{"lr": 0.1}], [{"lr": 0.2}])


@dataclass(frozen=True)
class Push:
    """One bucket on its way."""

    rank: int
    incarnation: int
    round: int
    blocks: tuple[tuple[str, str], ...]
    said: Completion | None


@dataclass(frozen=True)
class Barrier:
    kind: str  # "batch" or "fetch"
    rank: int
    incarnation: int
    round: int


@dataclass
class Staged:
    blocks: dict[str, str] = field(default_factory=dict)
    said: Completion | None = None

    @property
    def is_complete(self) -> bool:
        return self.said is not None and self.said.num_blocks == len(self.blocks)


class Refusal(str):
    """The code of an error."""


@dataclass
class Model:
    """A model of the protocol. Every event returns its answer, or the code of its refusal."""

    members: dict[int, int]
    clips: bool = False
    applied: int = 0
    is_measuring: bool = False  # complete, and waits for a get that brings the global norm
    is_applying: bool = False
    staged: dict[int, Staged] = field(default_factory=dict)
    batch: set[int] = field(default_factory=set)  # whose batch barrier of round applied + 1 is in
    fetched: set[int] = field(default_factory=set)  # who is known to have read version `applied`

    def admit(self, event: Push | Barrier) -> str | Refusal:
        if (event.rank, event.incarnation) not in self.members.items():
            return Refusal("stale_trainer")
        if event.round > self.applied + 1:
            return Refusal("future_round")
        return "open" if event.round == self.applied + 1 else "already_applied"

    def push(self, push: Push) -> int | str | Refusal:
        if (admission := self.admit(push)) != "open":
            return admission
        before = self.staged.get(push.rank, Staged())
        together = [*before.blocks.items(), *push.blocks]
        said = [one for one in (before.said, push.said) if one is not None]
        has_two_values = len(set(together)) > len(dict(together))
        has_too_many = any(len(dict(together)) > one.num_blocks for one in said)
        if has_two_values or has_too_many or said[:1] != said[-1:]:
            return Refusal("contribution_conflict")
        self.staged[push.rank] = Staged(dict(together), before.said or push.said)
        self.fetched.add(push.rank)
        return len(dict(together)) - len(before.blocks)

    def barrier(self, barrier: Barrier) -> str | Refusal:
        admission = self.admit(barrier)
        if isinstance(admission, Refusal):
            return admission
        if barrier.kind == "fetch":
            if admission == "open":
                return Refusal("future_round")  # it was never applied, so nothing was read
            if barrier.round == self.applied:
                self.fetched.add(barrier.rank)
        elif admission == "open":
            if not self.staged.get(barrier.rank, Staged()).is_complete:
                return Refusal("contribution_missing")
            self.batch.add(barrier.rank)
            self.fetched.add(barrier.rank)
        return admission

    def change_members(self, members: dict[int, int]) -> None:
        gone = {rank for rank in self.members if members.get(rank) != self.members[rank]}
        self.members = members
        self.staged = {rank: staged for rank, staged in self.staged.items() if rank not in gone}
        self.batch -= gone
        self.fetched -= gone
        self.is_measuring = False  # it may be another gradient now

    def must_go_on(self) -> bool:
        here, is_busy = set(self.members), self.is_applying or self.is_measuring
        return bool(here) and not is_busy and self.batch == here and self.fetched == here

    def finish_apply(self) -> None:
        self.applied += 1
        self.is_applying = False
        self.staged, self.batch, self.fetched = {}, set(), set()


def is_finite(rank: int, incarnation: int, round_: int) -> bool:
    """Return the verdict of this identity, the same for every pserver and in every repeated barrier."""
    return (rank + incarnation + round_) % 3 > 0


def payload(rank: int, incarnation: int, round_: int, name: str) -> str:
    """The one value that this identity should have."""
    return f"{name} of trainer {rank}.{incarnation} in round {round_}"


UNKNOWN = 9
ranks = st.integers(0, 3)
identities = st.tuples(
    st.sampled_from([0, 1, 2, 3, 0, 1, 2, 3, UNKNOWN]),
    st.sampled_from([0] * 8 + [-1, 1]),
    st.sampled_from([0] * 7 + [-1, 1, -2, 5]),
)
contents = st.tuples(
    st.lists(st.sampled_from(NAMES), unique=True),
    st.none() | st.sampled_from([NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS, 1, 0, 5]),  # how many blocks it says there are
    st.sampled_from(["", "", "", " forged"]),
    st.sampled_from([LAMBDAS[0], LAMBDAS[0], LAMBDAS[0], LAMBDAS[1]]),
)


def snapshot(rounds: Rounds[str]) -> Any:
    """Everything that it holds, copied."""
    contributions = {rank: (dict(c.blocks), repr(c.completion)) for _, rank, c in rounds.staged()}
    sets = set(rounds.batch_barriers), set(rounds.fetch_barriers)
    return dict(rounds.members), rounds.applied, rounds.measuring, rounds.applying, contributions, sets


class Interleavings(RuleBasedStateMachine):
    """Events in any order, each of them delivered once, several times, late, or never."""

    on_the_way = Bundle("on_the_way")  # pushes whose headers were let in and whose body is still being received

    @initialize(num_trainers=st.integers(1, 4), clips=st.booleans())
    def start(self, num_trainers: int, clips: bool) -> None:
        members = dict.fromkeys(range(num_trainers), 1)
        self.rounds: Rounds[str] = Rounds(members, clips=clips)
        self.model = Model(dict(members), clips)
        self.lives = dict(members)  # the newest incarnation of every rank that ever was
        self.sent: list[Push | Barrier] = []  # for replays
        self.applies: list[Apply[str]] = []

    @rule(rank=ranks, content=contents)
    def a_push_arrives(self, rank: int, content: Any) -> None:
        self._deliver(self._make_push((rank, 0, 0), content))

    @rule(target=on_the_way, identity=identities, content=contents)
    def a_push_begins(self, identity: Any, content: Any) -> Push:
        """Headers are checked; the body comes later, if at all."""
        push = self._make_push(identity, content)
        rank, incarnation, round_ = push.rank, push.incarnation, push.round
        self._expect(self.model.admit(push), lambda: self.rounds.admit(rank, incarnation, round_), changes=False)
        self.sent.append(push)
        return push

    @rule(push=consumes(on_the_way))
    def a_push_ends(self, push: Push) -> None:
        """The last byte is in: the fence is checked again, and the push counts or does not."""
        self._deliver(push)

    @rule(rank=ranks, num_pushes=st.sampled_from([9, 9, 1, 2]), with_barrier=st.booleans())
    def a_trainer_does_its_part(self, rank: int, num_pushes: int, with_barrier: bool) -> None:
        """Send the missing contributions, or the first of them; without this rule few rounds would be applied."""
        rank %= len(self.lives)
        for push in self._what_it_owes(rank)[:num_pushes]:
            self._deliver(push)
        if with_barrier:
            self._deliver(Barrier("batch", rank, self.lives[rank], self.model.applied + 1))

    @rule(kind=st.sampled_from(["batch", "batch", "fetch"]), identity=identities)
    def a_barrier_arrives(self, kind: str, identity: Any) -> None:
        self._deliver(Barrier(kind, *self._identity(identity)))

    @precondition(lambda self: self.sent)
    @rule(age=st.integers(0, 15))
    def something_arrives_again(self, age: int) -> None:
        """A duplicate, or a late one of an earlier round or life."""
        self._deliver(self.sent[-1 - age % len(self.sent)])

    @precondition(lambda self: self.model.is_measuring)
    @rule()
    def the_norm_is_brought(self) -> None:
        measured = self.rounds.measuring
        assert self.rounds.accept_norm() is measured
        self.model.is_measuring = False
        self._begin_apply(measured)

    @precondition(lambda self: self.model.is_applying)
    @rule()
    def apply_ends(self) -> None:
        self.rounds.finish_apply(self.rounds.history_after(self.rounds.applying))
        self.model.finish_apply()

    @precondition(lambda self: len(self.model.members) > 1)
    @rule(which=ranks)
    def a_trainer_leaves(self, which: int) -> None:
        members = dict(self.model.members)
        del members[sorted(members)[which % len(members)]]
        self._change_members(members)

    @precondition(lambda self: not self.model.is_applying)  # a joiner begins at the highest open round + 1
    @rule(rank=ranks)
    def a_new_life_takes_a_rank(self, rank: int) -> None:
        rank %= len(self.lives)
        self.lives[rank] += 1
        self._change_members({**self.model.members, rank: self.lives[rank]})

    @rule(last=ranks, leaves=st.booleans())
    def everybody_goes_on(self, last: int, leaves: bool) -> None:
        """Whatever happened: if all members do what they still owe, in any order, the next round is applied.

        The last of them may as well leave.
        """
        members = sorted(self.model.members)
        last %= len(members)
        self._drive_on(members[last + 1 :] + members[: last + 1], last_one_leaves=leaves and len(members) > 1)

    def teardown(self) -> None:
        if hasattr(self, "rounds"):
            self._drive_on(sorted(self.model.members))
            self._end_round()
            self.the_machine_is_where_the_model_is()

    @invariant()
    def the_machine_is_where_the_model_is(self) -> None:
        rounds, model = self.rounds, self.model
        assert rounds.members == model.members
        assert rounds.applied == model.applied
        assert rounds.open == model.applied + 1
        assert (rounds.measuring is not None) == model.is_measuring
        assert (rounds.applying is not None) == model.is_applying
        assert rounds.batch_barriers == model.batch
        assert rounds.fetch_barriers == model.fetched
        assert {r: c.blocks for _, r, c in rounds.staged()} == {r: s.blocks for r, s in model.staged.items()}
        assert rounds.missing == sorted(set(model.members) - model.batch)
        assert f"Round {rounds.open} [" in repr(rounds)

    @invariant()
    def every_round_is_applied_once(self) -> None:
        assert [apply.round for apply in self.applies] == list(range(1, len(self.applies) + 1))
        assert len(self.applies) == self.model.applied + self.model.is_applying

    def _check_order(self, order: Apply[str] | None) -> None:
        """Called after every event that was accepted, with the model already where the event led."""
        assert (order is not None) == self.model.must_go_on()
        if order is None:
            return
        assert (order is self.rounds.measuring) == self.model.clips
        if order is self.rounds.measuring:
            self._check_apply(order)
            self.model.is_measuring = True
        else:
            self._begin_apply(order)

    def _begin_apply(self, apply: Apply[str] | None) -> None:
        assert apply is not None
        assert apply is self.rounds.applying
        self._check_apply(apply)
        self.applies.append(apply)
        self.model.is_applying = True

    def _check_apply(self, apply: Apply[str]) -> None:
        members = self.model.members
        assert apply.ranks == tuple(sorted(members))
        for rank, contribution in zip(apply.ranks, apply.contributions, strict=True):
            staged = self.model.staged[rank]
            assert staged.is_complete
            assert contribution.blocks == staged.blocks
            assert (contribution.completion, contribution.incarnation) == (staged.said, members[rank])
        lowest = self.model.staged[min(members)]
        assert lowest.said is not None
        assert apply.hyper_parameters == lowest.said.hyper_parameters
        # Pservers that receive other events agree: a round is skipped for the verdicts of its contributions alone.
        skipped_for = tuple(rank for rank in sorted(members) if not is_finite(rank, members[rank], apply.round))
        assert apply.identity == (apply.round, tuple(sorted(members.items())), skipped_for)

    def _identity(self, drawn: tuple[int, int, int]) -> tuple[int, int, int]:
        """Relative to what is current: a rank, how many lives off, how many rounds off."""
        rank, lives_off, rounds_off = drawn
        rank = len(self.lives) if rank == UNKNOWN else rank % len(self.lives)
        return rank, max(1, self.lives.get(rank, 1) + lives_off), max(0, self.model.applied + 1 + rounds_off)

    def _make_push(self, identity: Any, content: Any) -> Push:
        rank, incarnation, round_ = self._identity(identity)
        names, said, suffix, numbers = content
        blocks = tuple((name, payload(rank, incarnation, round_, name) + suffix) for name in names)
        return Push(rank, incarnation, round_, blocks, None if said is None else Completion(said, numbers))

    def _deliver(self, event: Push | Barrier) -> None:
        self.sent.append(event)
        if isinstance(event, Push):
            self._expect(self.model.push(event), lambda: self._push(event))
            return
        order: list[Apply[str] | None] = []

        def barrier() -> str:
            identity = event.rank, event.incarnation, event.round
            if event.kind == "batch":
                order.append(self.rounds.count_batch_barrier(*identity, is_finite=is_finite(*identity)))
            else:
                order.append(self.rounds.count_fetch_barrier(*identity))
            return "open" if event.round == self.model.applied + 1 else "already_applied"

        answer = self._expect(self.model.barrier(event), barrier)
        if not isinstance(answer, Refusal):
            self._check_order(order[0])

    def _push(self, push: Push) -> int | str:
        """Do what the shell does after the last byte of a request."""
        if self.rounds.admit(push.rank, push.incarnation, push.round) == "already_applied":
            return "already_applied"
        return self.rounds.stage(push.rank, push.round, StagedPush(dict(push.blocks), push.said)).num_new

    def _expect(self, expected: Any, act: Callable[[], Any], *, changes: bool = True) -> Any:
        """Compare answers. A refusal, and what must not change anything, leaves everything as it was."""
        before = snapshot(self.rounds)
        try:
            answer = act()
        except GradpostError as error:
            answer = Refusal(error.code)
        assert answer == expected
        if isinstance(expected, Refusal) or not changes:
            assert snapshot(self.rounds) == before, "a refused event changed something"
        return expected

    def _change_members(self, members: dict[int, int]) -> None:
        self.model.change_members(members)
        self._check_order(self.rounds.install_members(Membership(members)))

    def _what_it_owes(self, rank: int) -> list[Push]:
        """The pushes that make a member's contribution complete, given what it has staged and said."""
        model, round_ = self.model, self.model.applied + 1
        if rank not in model.members:
            return []
        staged = model.staged.get(rank, Staged())
        said = staged.said or Completion(NUM_BLOCKS, LAMBDAS[0])
        free = [name for name in (*NAMES, "d", "e") if name not in staged.blocks]
        owed = free[: said.num_blocks - len(staged.blocks)]
        life = model.members[rank]
        blocks = [((name, payload(rank, life, round_, name)),) for name in owed]
        return [Push(rank, life, round_, b, None) for b in blocks] + [Push(rank, life, round_, (), said)]

    def _drive_on(self, order: list[int], *, last_one_leaves: bool = False) -> None:
        self._end_round()
        begun = self.model.applied
        assert self.rounds.applied == begun
        for rank in order:
            for push in self._what_it_owes(rank):
                self._deliver(push)
        for rank in order:
            if rank == order[-1] and last_one_leaves:
                self._change_members({r: i for r, i in self.model.members.items() if r != rank})
            elif rank not in self.model.batch:
                assert not self.model.is_applying
                self._deliver(Barrier("batch", rank, self.model.members[rank], begun + 1))
        assert self.rounds.measuring or self.rounds.applying, f"stuck: {self.rounds!r}"

    def _end_round(self) -> None:
        if self.model.is_measuring:
            self.the_norm_is_brought()
        if self.model.is_applying:
            self.apply_ends()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
