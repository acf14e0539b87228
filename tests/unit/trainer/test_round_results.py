"""Results of rounds on a trainer: the agreed norm, and errors of compressed pushes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.encodings import PIECE, TORCH_DTYPES
from ps_protocol.errors import NormChanged
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.requests import Pull
from ps_protocol.vocabulary import Block
from ps_protocol.wire_types import GROUP, WireTypes
from trainer_client.client import round_results
from trainer_client.client.error_feedback import ErrorFeedback, Remainder
from trainer_client.client.round_results import NormAgreement, finish_rounds
from trainer_client.transport.work import Work, together

from .driving import drive

Answers = Sequence[ShardNorm | None]


class Pservers:
    """Pservers that answer with the norms of their shards, and refuse a pull with the norm of another gradient."""

    def __init__(self, *answers: Answers) -> None:
        self.answers = list(answers)  # one after the other; the last one stays
        self.num_asked = 0

    @property
    def now(self) -> Answers:
        return self.answers[min(self.num_asked, len(self.answers)) - 1]

    def ask(self) -> Work[Answers]:
        self.num_asked += 1
        yield 0.0
        return self.now

    def get(self, index: int, norm: AgreedNorm | None) -> Work[float | None]:
        yield 0.0
        own = self.now[index]
        if norm is not None and (own is None or not norm.own.is_same(own)):
            raise NormChanged("it is another one")
        return None if norm is None else norm.total

    def bring_to_all(self, agreement: NormAgreement) -> Work[list[float | None]]:
        return together(agreement.bring(index, partial(self.get, index)) for index in range(len(self.now)))


def norms(contributions: str, *squares: float) -> list[ShardNorm]:
    return [ShardNorm(contributions, one) for one in squares]


@pytest.mark.clip
@pytest.mark.parametrize(
    ("answers", "total", "num_asked"),
    [
        ([norms("a", 9.0, 16.0)], 25.0, 1),
        ([[*norms("before", 9.0), *norms("after", 1.0)], norms("after", 3.0, 1.0)], 4.0, 2),  # the members changed
        ([[None, None]], None, 1),
        ([[ShardNorm("a", 1.0), None]], None, 1),  # the round is over, and its norm is not known
    ],
)
def test_all_pservers_are_asked_until_they_name_one_gradient(
    answers: list[Answers], total: float | None, num_asked: int
) -> None:
    pservers = Pservers(*answers)
    agreement = NormAgreement(pservers.ask)
    assert drive(pservers.bring_to_all(agreement)) == [total, total]
    assert pservers.num_asked == num_asked
    assert agreement.norm == (None if total is None else total**0.5)


@pytest.mark.clip
def test_a_gradient_that_changed_after_its_norm_was_read_is_asked_for_again() -> None:
    pservers = Pservers(norms("a", 9.0, 16.0))
    agreement = NormAgreement(pservers.ask)
    assert drive(agreement.bring(0, partial(pservers.get, 0))) == 25.0
    pservers.answers.append(norms("a", 9.0, 7.0))  # it has restarted, and rounds otherwise
    pservers.num_asked += 1
    brought = []

    def get(norm: AgreedNorm | None) -> Work[float | None]:
        brought.append(norm)
        return (yield from pservers.get(1, norm))

    assert drive(agreement.bring(1, get)) == 16.0
    assert [norm and norm.own.sum_of_squares for norm in brought] == [16.0, 7.0]


@pytest.mark.clip
def test_pservers_that_never_agree_are_asked_a_limited_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_results, "PAUSE_SECONDS", 0.0)
    pservers = Pservers([*norms("a", 1.0), *norms("b", 1.0)])
    with pytest.raises(NormChanged, match="disagree about the trainers"):
        drive(NormAgreement(pservers.ask).bring(0, partial(pservers.get, 0)))
    assert pservers.num_asked == round_results.MAX_ASKED


class OpenRounds:
    """A pserver that applies one round after the other, each once it has its norm."""

    def __init__(self, applied: int, square: float) -> None:
        self.applied = applied
        self._square = square

    def norm(self, pull: Pull) -> Work[ShardNorm | None]:
        yield 0.0
        round_, norm = pull.round, pull.norm
        assert round_ <= self.applied + 1, f"would wait for ever for round {self.applied + 1}"
        own = ShardNorm(f"round {round_}", self._square)
        if norm is not None and round_ > self.applied:
            assert (norm.own, norm.total) == (own, 25.0)
            self.applied = round_
        return own


@pytest.mark.clip
@pytest.mark.parametrize(
    ("max_delay", "last", "applied"), [(0, 4, (2, 3)), (0, 2, (0, 1)), (2, 9, (3, 6)), (1, 4, (0, 0))]
)
def test_open_rounds_are_finished_before_the_next_one(max_delay: int, last: int, applied: tuple[int, int]) -> None:
    pservers = [OpenRounds(applied[0], 9.0), OpenRounds(applied[1], 16.0)]
    drive(finish_rounds(pservers, last, max_delay))
    assert [pserver.applied for pserver in pservers] == [last - 1] * 2


# ---------------------------------------------------------------------- error feedback


SIZES = st.sampled_from([1, 2, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP + 3, PIECE, PIECE + GROUP + 5])


def encode(kind: str, gradient: Tensor, error: Tensor, topk: float = 0.1) -> list[Tensor]:
    """Encode with the error in `error`, and write the remaining error there."""
    remainder = Remainder(kind, len(gradient))
    remainder.kept.copy_(error)
    found = encode_with(kind, gradient, remainder, topk)
    remainder.resolve(is_applied=True)
    error.copy_(remainder.kept)
    return found


def encode_with(kind: str, gradient: Tensor, remainder: Remainder, topk: float = 0.1) -> list[Tensor]:
    tensors = WireTypes(push=kind, topk=topk).pushed("w.block0", "F32", len(gradient))
    found = [torch.full((count,), 77).to(TORCH_DTYPES[dtype]) for _, dtype, (count,) in tensors]
    remainder.encode(gradient, found)
    return found


def decode(kind: str, found: list[Tensor], num_elements: int) -> Tensor:
    """Decode by the definition of the types, without the code under test."""
    if kind == "int8":
        integers, scales = found
        return integers.float() * scales.repeat_interleave(GROUP)[:num_elements]
    values, indices = found
    return torch.zeros(num_elements).index_put((indices.long(),), values)


@settings(deadline=None)  # the first call of a kernel takes its time
@given(kind=st.sampled_from(["int8", "topk"]), size=SIZES, seed=st.integers(0, 99), exponent=st.integers(-20, 20))
def test_the_pushed_values_and_the_error_add_up_to_the_gradient(kind: str, size: int, seed: int, exponent: int) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    error = gradient.flip(0) / 8
    before = error.clone()
    pushed = decode(kind, encode(kind, gradient, error), size)
    torch.testing.assert_close(pushed + error, gradient + before, rtol=1e-6, atol=2.0 ** (exponent - 18))


def test_the_largest_elements_are_pushed_exactly_and_leave_no_error() -> None:
    gradient = torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3, 0.0, 0.0, 0.0, 0.0, 0.0])
    error = torch.zeros(10)
    values, indices = encode("topk", gradient, error, topk=0.2)
    assert (indices.tolist(), values.tolist()) == ([1, 3], [-5.0, 3.0])
    assert error[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["int8", "topk"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_pushed_as_such_and_leaves_no_error(kind: str, bad: float) -> None:
    gradient, error = torch.ones(1000), torch.zeros(1000)
    gradient[700] = bad
    found = encode(kind, gradient, error)
    assert not all(bool(tensor.float().isfinite().all()) for tensor in found)
    assert bool(error.isfinite().all())


@pytest.mark.parametrize("kind", ["int8", "topk"])
@given(fates=st.lists(st.sampled_from(["applied", "skipped", "refused"]), max_size=12), seed=st.integers(0, 99))
@settings(deadline=None)
def test_a_push_that_is_not_applied_leaves_the_error_as_it_was(kind: str, fates: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    feedback, block, size = ErrorFeedback(), Block("w", 0, 0, 1000, 0), 1000
    undisturbed = Remainder(kind, size)
    for fate in fates:
        gradient = torch.randn(size, generator=generator)
        pushed = encode_with(kind, gradient, feedback.of(block, kind))
        if fate == "refused":  # and pushed again: what is staged already has to be the same
            again = encode_with(kind, gradient, feedback.of(block, kind))
            assert all(map(torch.equal, pushed, again))
        feedback.resolve(is_applied=fate != "skipped")
        if fate != "skipped":
            assert all(map(torch.equal, pushed, encode_with(kind, gradient, undisturbed)))
            undisturbed.resolve(is_applied=True)
    assert torch.equal(feedback.of(block, kind).kept, undisturbed.kept)
