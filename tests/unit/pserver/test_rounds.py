"""The synchronous round as a state machine: arbitrary interleavings against a model of a few lines, and the holes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from ps_protocol.errors import ContributionConflict, ContributionMissing, FutureRound, GradpostError, StaleTrainer
from ps_protocol.grad_scalers import ScalerState
from ps_protocol.norms import ShardNorm
from services.pserver.rounds import Apply, Measure, Rounds

NAMES = ("a", "b", "c")
NUM_BLOCKS = len(NAMES)
LAMBDAS = ([{"lr": 0.1}], [{"lr": 0.2}])

# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Push:
    """One bucket on its way: identity, content, and what its metadata says (None: it is not the last one)."""

    rank: int
    incarnation: int
    round: int
    blocks: tuple[tuple[str, str], ...]
    said: tuple[int, Any] | None  # the number of blocks and the hyper-parameters


@dataclass(frozen=True)
class Barrier:
    kind: str  # "batch" or "fetch"
    rank: int
    incarnation: int
    round: int


@dataclass
class Staged:
    blocks: dict[str, str] = field(default_factory=dict)
    said: tuple[int, Any] | None = None

    @property
    def is_complete(self) -> bool:
        return self.said is not None and self.said[0] == len(self.blocks)


@dataclass
class Model:
    """What the protocol says, in its own words. Every event returns its answer, or the class of its refusal."""

    members: dict[int, int]
    clips: bool = False
    applied: int = 0
    is_measuring: bool = False  # complete, and waits for somebody who brings the global norm
    is_applying: bool = False
    staged: dict[int, Staged] = field(default_factory=dict)
    batch: set[int] = field(default_factory=set)  # whose batch barrier of round applied + 1 is in
    fetched: set[int] = field(default_factory=set)  # who is known to have read version `applied`

    def admit(self, event: Push | Barrier) -> str | type[GradpostError]:
        if (event.rank, event.incarnation) not in self.members.items():
            return StaleTrainer
        if event.round > self.applied + 1:
            return FutureRound
        return "open" if event.round == self.applied + 1 else "already_applied"

    def push(self, push: Push) -> int | str | type[GradpostError]:
        if (admission := self.admit(push)) != "open":
            return admission
        before = self.staged.get(push.rank, Staged())
        together = [*before.blocks.items(), *push.blocks]
        said = {s for s in (_frozen(before.said), _frozen(push.said)) if s is not None}
        has_two_values = len(set(together)) > len(dict(together))
        has_too_many = any(len(dict(together)) > number for number, _ in said)
        if has_two_values or has_too_many or len(said) > 1:
            return ContributionConflict
        self.staged[push.rank] = Staged(dict(together), before.said or push.said)
        self.fetched.add(push.rank)
        return len(dict(together)) - len(before.blocks)

    def barrier(self, barrier: Barrier) -> str | type[GradpostError]:
        admission = self.admit(barrier)
        if isinstance(admission, type):
            return admission
        if barrier.kind == "fetch":
            if admission == "open":
                return FutureRound  # it was never applied, so nothing was read
            if barrier.round == self.applied:
                self.fetched.add(barrier.rank)
        elif admission == "open":
            if not self.staged.get(barrier.rank, Staged()).is_complete:
                return ContributionMissing
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


def _frozen(said: tuple[int, Any] | None) -> tuple[int, str] | None:
    return None if said is None else (said[0], repr(said[1]))


def payload(rank: int, incarnation: int, round_: int, name: str) -> str:
    """The one value that this identity should have."""
    return f"{name} of trainer {rank}.{incarnation} in round {round_}"


# ---------------------------------------------------------------- the machine


NOBODY = 9
ranks = st.integers(0, 3)
identities = st.tuples(
    st.sampled_from([0, 1, 2, 3, 0, 1, 2, 3, NOBODY]),
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
    contributions = {
        rank: (dict(c.blocks), c.num_blocks, repr((c.hyper_parameters, c.grad_scaler)))
        for rank, c in rounds.contributions.items()
    }
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
        self.counted: list[Barrier] = []
        self.proofs: set[tuple[int, int, int]] = set()  # (rank, incarnation, version) that was surely read
        self.applies: list[Apply[str]] = []

    # ------------------------------------------------------------ events

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
        """What it still owes, or the first of it; without this rule few rounds would ever be applied."""
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
        assert self.rounds.norm_agreed() is measured
        self.model.is_measuring = False
        self._begin_apply(measured)

    @precondition(lambda self: self.model.is_applying)
    @rule()
    def apply_ends(self) -> None:
        self.rounds.round_applied()
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

    # ------------------------------------------------------------ what must hold

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
        assert {r: c.blocks for r, c in rounds.contributions.items()} == {r: s.blocks for r, s in model.staged.items()}
        assert rounds.missing == sorted(set(model.members) - model.batch)
        assert f"Round {rounds.open} [" in repr(rounds)

    @invariant()
    def every_round_is_applied_once(self) -> None:
        assert [apply.round for apply in self.applies] == list(range(1, len(self.applies) + 1))
        assert len(self.applies) == self.model.applied + self.model.is_applying

    def _check_order(self, order: Apply[str] | Measure[str] | None) -> None:
        """Called after every event that was accepted, with the model already where the event led."""
        assert (order is not None) == self.model.must_go_on()
        if order is None:
            return
        assert isinstance(order, Measure) == self.model.clips
        if isinstance(order, Measure):
            assert order.apply is self.rounds.measuring
            self._check_apply(order.apply)
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
        barriers = [b for b in self.counted if b.kind == "batch" and b.round == apply.round]
        for rank, contribution in zip(apply.ranks, apply.contributions, strict=True):
            assert any((b.rank, b.incarnation) == (rank, members[rank]) for b in barriers), "no batch barrier"
            assert apply.round == 1 or (rank, members[rank], apply.round - 1) in self.proofs, "no fetch barrier"
            staged = self.model.staged[rank]
            assert staged.is_complete
            assert contribution.blocks == staged.blocks
            assert (contribution.num_blocks, contribution.hyper_parameters) == staged.said
        lowest = self.model.staged[min(members)]
        assert apply.hyper_parameters == (lowest.said or ())[1]
        assert apply.identity == (apply.round, tuple(sorted(members.items())), ())

    # ------------------------------------------------------------ helpers

    def _identity(self, drawn: tuple[int, int, int]) -> tuple[int, int, int]:
        """Relative to what is current: a rank, how many lives off, how many rounds off."""
        rank, lives_off, rounds_off = drawn
        rank = len(self.lives) if rank == NOBODY else rank % len(self.lives)
        return rank, max(1, self.lives.get(rank, 1) + lives_off), max(0, self.model.applied + 1 + rounds_off)

    def _make_push(self, identity: Any, content: Any) -> Push:
        rank, incarnation, round_ = self._identity(identity)
        names, said, suffix, numbers = content
        blocks = tuple((name, payload(rank, incarnation, round_, name) + suffix) for name in names)
        return Push(rank, incarnation, round_, blocks, None if said is None else (said, numbers))

    def _deliver(self, event: Push | Barrier) -> None:
        self.sent.append(event)
        if isinstance(event, Push):
            answer = self._expect(self.model.push(event), lambda: self._push(event))
            if isinstance(answer, int):
                self._prove(event)
            return
        order: list[Apply[str] | Measure[str] | None] = []

        def barrier() -> str:
            arrived = getattr(self.rounds, f"{event.kind}_barrier_arrived")
            order.append(arrived(event.rank, event.incarnation, event.round))
            return "open" if event.round == self.model.applied + 1 else "already_applied"

        answer = self._expect(self.model.barrier(event), barrier)
        if not isinstance(answer, type):
            self.counted.append(event)
            self._prove(event)
            self._check_order(order[0])

    def _prove(self, event: Push | Barrier) -> None:
        is_fetch = isinstance(event, Barrier) and event.kind == "fetch"
        self.proofs.add((event.rank, event.incarnation, event.round if is_fetch else event.round - 1))

    def _push(self, push: Push) -> int | str:
        """What the shell does when the last byte is in."""
        if self.rounds.admit(push.rank, push.incarnation, push.round) == "already_applied":
            return "already_applied"
        number, numbers = push.said or (None, None)
        return self.rounds.blocks_arrived(push.rank, dict(push.blocks), number, numbers)

    def _expect(self, expected: Any, act: Callable[[], Any], *, changes: bool = True) -> Any:
        """Compare answers. A refusal, and what must not change anything, leaves everything as it was."""
        before = snapshot(self.rounds)
        try:
            answer = act()
        except GradpostError as error:
            answer = type(error)
        assert answer == expected
        if isinstance(expected, type) or not changes:
            assert snapshot(self.rounds) == before, "a refused event changed something"
        return expected

    def _change_members(self, members: dict[int, int]) -> None:
        self.model.change_members(members)
        self._check_order(self.rounds.members_changed(members))

    def _what_it_owes(self, rank: int) -> list[Push]:
        """The pushes that make a member's contribution complete, given what it has staged and said."""
        model, round_ = self.model, self.model.applied + 1
        if rank not in model.members:
            return []
        staged = model.staged.get(rank, Staged())
        said = staged.said or (NUM_BLOCKS, LAMBDAS[0])
        free = [name for name in (*NAMES, "d", "e") if name not in staged.blocks]
        owed = free[: said[0] - len(staged.blocks)]
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
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------- one by one


def complete(rounds: Rounds[str], rank: int, incarnation: int = 1) -> None:
    assert rounds.admit(rank, incarnation, rounds.open) == "open"
    rounds.blocks_arrived(rank, {"a": payload(rank, incarnation, rounds.open, "a")}, 1, LAMBDAS[0])


def apply_round(rounds: Rounds[str]) -> Apply[str]:
    applies = []
    for rank, incarnation in rounds.members.items():
        complete(rounds, rank, incarnation)
        applies.append(rounds.batch_barrier_arrived(rank, incarnation, rounds.open))
    [apply] = [a for a in applies if a is not None]
    assert applies[-1] is apply
    rounds.round_applied()
    return apply


def test_a_round_is_ordered_by_its_last_batch_barrier():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    assert repr(rounds) == "<Round 1 [batch barriers: 0 of 2 | waiting for: trainer 0, trainer 1]>"
    complete(rounds, 1)
    assert rounds.batch_barrier_arrived(1, 1, 1) is None
    assert repr(rounds) == "<Round 1 [batch barriers: 1 of 2 | waiting for: trainer 0]>"
    complete(rounds, 0)
    apply = rounds.batch_barrier_arrived(0, 1, 1)
    assert apply is not None
    assert apply.ranks == (0, 1)  # not the order of arrival
    assert [c.blocks["a"] for c in apply.contributions] == [payload(0, 1, 1, "a"), payload(1, 1, 1, "a")]
    assert repr(rounds) == "<Round 1 [applying | waiting for: nobody]>"
    rounds.round_applied()
    assert (rounds.applied, rounds.open, rounds.contributions) == (1, 2, {})


def test_a_barrier_that_is_sent_twice_counts_once():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    complete(rounds, 0)
    assert rounds.batch_barrier_arrived(0, 1, 1) is None
    assert rounds.batch_barrier_arrived(0, 1, 1) is None
    assert rounds.missing == [1]


def test_a_barrier_that_is_repeated_while_its_round_is_applied_orders_no_second_apply():
    rounds: Rounds[str] = Rounds({0: 1})
    complete(rounds, 0)
    assert rounds.batch_barrier_arrived(0, 1, 1) is not None
    assert rounds.batch_barrier_arrived(0, 1, 1) is None


def test_a_late_batch_barrier_of_an_applied_round_does_not_count_for_the_open_one():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    apply_round(rounds)
    complete(rounds, 0)
    assert rounds.batch_barrier_arrived(0, 1, 1) is None
    assert rounds.missing == [0, 1]


@pytest.mark.parametrize("said", [None, (3, LAMBDAS[0])])
def test_contribution_missing_until_it_is_complete(said):
    rounds: Rounds[str] = Rounds({0: 1})
    with pytest.raises(ContributionMissing, match="trainer 0"):
        rounds.batch_barrier_arrived(0, 1, 1)
    rounds.blocks_arrived(0, {"a": "1", "b": "2"}, *(said or (None, None)))
    with pytest.raises(ContributionMissing) as caught:
        rounds.batch_barrier_arrived(0, 1, 1)
    assert caught.value.facts["actual"] == 2
    assert rounds.batch_barriers == set()
    rounds.blocks_arrived(0, {"c": "3"}, 3, LAMBDAS[0])
    assert rounds.batch_barrier_arrived(0, 1, 1) is not None


def test_an_empty_contribution_takes_part_once_it_says_so():
    rounds: Rounds[str] = Rounds({0: 1})
    rounds.blocks_arrived(0, {}, None, None)
    with pytest.raises(ContributionMissing):
        rounds.batch_barrier_arrived(0, 1, 1)
    rounds.blocks_arrived(0, {}, 0, LAMBDAS[0])
    apply = rounds.batch_barrier_arrived(0, 1, 1)
    assert apply is not None
    assert apply.contributions[0].blocks == {}


def test_a_bucket_is_only_packaging():
    rounds: Rounds[str] = Rounds({0: 1})
    assert rounds.blocks_arrived(0, {"a": "1", "b": "2"}, None, None) == 2
    assert rounds.blocks_arrived(0, {"b": "2", "c": "3"}, 3, LAMBDAS[0]) == 1
    assert rounds.blocks_arrived(0, {"a": "1", "b": "2", "c": "3"}, 3, LAMBDAS[0]) == 0


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ({"a": "other", "z": "9"}, (None, None)),
        ({"z": "9"}, (None, None)),  # more blocks than it said
        ({}, (1, LAMBDAS[0])),  # another number, smaller
        ({}, (3, LAMBDAS[0])),  # and larger
        ({}, (2, LAMBDAS[1])),  # other numbers for the optimizer: each pserver could keep another one of them
        ({}, (2, LAMBDAS[0], 1, ScalerState(0, 8.0, 0))),  # a GradScaler that was not there before
    ],
)
def test_other_content_under_one_identity_is_a_conflict_and_stages_nothing(blocks, said):
    rounds: Rounds[str] = Rounds({0: 1})
    rounds.blocks_arrived(0, {"a": "1", "b": "2"}, 2, LAMBDAS[0])
    before = snapshot(rounds)
    with pytest.raises(ContributionConflict, match="trainer 0"):
        rounds.blocks_arrived(0, blocks, *said)
    assert snapshot(rounds) == before


def test_a_refused_message_of_the_open_round_does_not_prove_the_last_fetch():
    rounds: Rounds[str] = Rounds({0: 1})
    apply_round(rounds)
    rounds.admit(0, 1, 2)
    with pytest.raises(ContributionMissing):
        rounds.batch_barrier_arrived(0, 1, 2)
    assert rounds.fetch_barriers == set()


def test_any_accepted_message_of_the_next_round_implies_the_fetch_barrier():
    rounds: Rounds[str] = Rounds({0: 1})
    apply_round(rounds)
    complete(rounds, 0)
    assert rounds.fetch_barriers == {0}


def test_a_fetch_barrier_of_a_round_that_was_not_applied_is_refused():
    rounds: Rounds[str] = Rounds({0: 1})
    with pytest.raises(FutureRound, match="nothing of it was fetched"):
        rounds.fetch_barrier_arrived(0, 1, 1)
    rounds.fetch_barrier_arrived(0, 1, 0)  # version 0 can be read, too
    assert rounds.fetch_barriers == {0}


def test_who_leaves_takes_back_what_it_staged_and_lets_the_others_go_on():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1, 2: 1})
    for rank in (0, 1, 2):
        complete(rounds, rank)
    rounds.batch_barrier_arrived(0, 1, 1)
    rounds.batch_barrier_arrived(1, 1, 1)
    apply = rounds.members_changed({1: 1, 2: 1})
    assert apply is None
    apply = rounds.members_changed({1: 1})
    assert apply is not None
    assert apply.ranks == (1,)
    assert rounds.members_changed({}) is None  # an empty set applies nothing, and the apply goes on
    assert rounds.applying is apply
    rounds.round_applied()
    assert rounds.applied == 1


def test_what_is_being_applied_stays_when_its_trainer_leaves():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    complete(rounds, 0)
    complete(rounds, 1)
    rounds.batch_barrier_arrived(0, 1, 1)
    apply = rounds.batch_barrier_arrived(1, 1, 1)
    assert rounds.members_changed({0: 1}) is None
    assert rounds.applying is apply
    assert apply is not None
    assert [c.blocks for c in apply.contributions] == [{"a": payload(r, 1, 1, "a")} for r in (0, 1)]


def test_a_new_life_of_a_rank_starts_with_nothing_staged():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1})
    complete(rounds, 0)
    rounds.batch_barrier_arrived(0, 1, 1)
    rounds.members_changed({0: 2, 1: 1})
    with pytest.raises(StaleTrainer, match="trainer 0 incarnation 1"):
        rounds.admit(0, 1, 1)
    with pytest.raises(ContributionMissing):
        rounds.batch_barrier_arrived(0, 2, 1)
    assert rounds.missing == [0, 1]


# ---------------------------------------------------------------- clipping


def measured(rounds: Rounds[str]) -> Apply[str]:
    orders = []
    for rank, incarnation in rounds.members.items():
        complete(rounds, rank, incarnation)
        orders.append(rounds.batch_barrier_arrived(rank, incarnation, rounds.open))
    assert orders[:-1] == [None] * (len(orders) - 1)
    assert isinstance(orders[-1], Measure)
    return orders[-1].apply


@pytest.mark.clip
def test_a_round_that_is_clipped_is_applied_when_its_norm_is_known():
    rounds: Rounds[str] = Rounds({0: 1, 1: 1}, clips=True)
    apply = measured(rounds)
    assert repr(rounds) == "<Round 1 [measuring | waiting for: nobody]>"
    assert rounds.batch_barrier_arrived(0, 1, 1) is None
    assert rounds.norm_agreed() is apply
    assert (rounds.measuring, rounds.applying) == (None, apply)
    norm = ShardNorm("digest", 2.0)
    assert rounds.round_applied(norm) is None
    assert rounds.history.norms == {1: norm}


@pytest.mark.clip
def test_rounds_that_are_staged_ahead_are_measured_one_after_the_other():
    rounds: Rounds[str] = Rounds({0: 1}, 1, clips=True)
    first = measured(rounds)
    rounds.blocks_arrived(0, {"a": "2"}, 1, LAMBDAS[0], 2)
    assert rounds.batch_barrier_arrived(0, 1, 2) is None
    assert rounds.norm_agreed() is first
    second = rounds.round_applied()
    assert isinstance(second, Measure)
    assert second.apply.round == 2


@pytest.mark.clip
@pytest.mark.parametrize("members", [{0: 1, 1: 1}, {0: 1}, {0: 1, 1: 2}])
def test_a_freeze_forgets_what_was_measured_and_its_end_measures_again(members):
    rounds: Rounds[str] = Rounds({0: 1, 1: 1}, clips=True)
    before = measured(rounds)
    rounds.freeze()
    assert rounds.measuring is None
    order = rounds.members_changed(members)
    if members == {0: 1, 1: 2}:
        assert order is None
        complete(rounds, 1, 2)
        order = rounds.batch_barrier_arrived(1, 2, 1)
    assert isinstance(order, Measure)
    assert (order.apply.identity == before.identity) == (members == {0: 1, 1: 1})
    assert order.apply.identity[1] == tuple(members.items())


@pytest.mark.clip
def test_what_was_measured_with_a_lost_trainer_is_so_again_if_it_is_in_the_round():
    """Another pserver has applied it already, with the norm that everybody has agreed on."""
    rounds: Rounds[str] = Rounds({0: 1, 1: 1}, clips=True)
    before = measured(rounds)
    rounds.freeze()
    order = rounds.members_changed({0: 1}, sets={1: (0, 1)})
    assert isinstance(order, Measure)
    assert order.apply.identity == before.identity


@pytest.mark.clip
def test_a_round_that_is_decided_to_be_empty_has_no_norm():
    rounds: Rounds[str] = Rounds({0: 1}, clips=True)
    measured(rounds)
    rounds.freeze()
    apply = rounds.members_changed({1: 1}, starts={1: 2}, sets={1: ()})
    assert isinstance(apply, Apply)
    assert apply.ranks == ()
    assert rounds.round_applied() is None
    assert rounds.history.norms == {}


@pytest.mark.clip
def test_verdicts_belong_to_the_identity_of_what_is_measured():
    rounds: Rounds[str] = Rounds({0: 1}, clips=True)
    complete(rounds, 0)
    order = rounds.batch_barrier_arrived(0, 1, 1, is_finite=False)
    assert isinstance(order, Measure)
    assert order.apply.identity == (1, ((0, 1),), (0,))
