"""A trainer makes all pservers clip one gradient by its global norm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ps_protocol.errors import Conflict, NormChanged
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.requests import Pull
from trainer_client.client import round_results
from trainer_client.client.round_results import NormAgreement, finish_rounds

from ...raising import raises_code

pytestmark = pytest.mark.clip

Answers = Sequence[ShardNorm | None]


class Pservers:
    """Pservers that answer with the norms of their shards, and refuse a pull with the norm of another gradient."""

    def __init__(self, *answers: Answers) -> None:
        self.answers = list(answers)  # one after the other; the last one stays
        self.num_asked = 0

    @property
    def now(self) -> Answers:
        return self.answers[min(self.num_asked, len(self.answers)) - 1]

    async def ask(self) -> Answers:
        self.num_asked += 1
        await asyncio.sleep(0)
        return self.now

    async def get(self, index: int, norm: AgreedNorm | None) -> float | None:
        await asyncio.sleep(0)
        own = self.now[index]
        if norm is not None and (own is None or not norm.own.is_same(own)):
            raise NormChanged("it is another one")
        return None if norm is None else norm.total

    async def bring_to_all(self, agreement: NormAgreement) -> list[float | None]:
        def get_of(index: int):
            return agreement.bring(index, lambda norm: self.get(index, norm))

        return await asyncio.gather(*(get_of(index) for index in range(len(self.now))))


def norms(contributions: str, *squares: float) -> list[ShardNorm]:
    return [ShardNorm(contributions, one) for one in squares]


@pytest.mark.parametrize(
    ("answers", "total", "num_asked"),
    [
        ([norms("a", 9.0, 16.0)], 25.0, 1),
        ([[*norms("before", 9.0), *norms("after", 1.0)], norms("after", 3.0, 1.0)], 4.0, 2),  # the members changed
        ([[None, None]], None, 1),
        ([[ShardNorm("a", 1.0), None]], None, 1),  # the round is over, and its norm is not known
    ],
)
async def test_all_pservers_are_asked_until_they_name_one_gradient(
    answers: list[Answers], total: float | None, num_asked: int
) -> None:
    pservers = Pservers(*answers)
    agreement = NormAgreement(pservers.ask)
    assert await pservers.bring_to_all(agreement) == [total, total]
    assert pservers.num_asked == num_asked
    assert agreement.norm == (None if total is None else total**0.5)


async def test_a_gradient_that_changed_after_its_norm_was_read_is_asked_for_again() -> None:
    pservers = Pservers(norms("a", 9.0, 16.0))
    agreement = NormAgreement(pservers.ask)
    assert await agreement.bring(0, lambda norm: pservers.get(0, norm)) == 25.0
    pservers.answers.append(norms("a", 9.0, 7.0))  # it has restarted, and rounds otherwise
    pservers.num_asked += 1
    brought = []

    async def get(norm: AgreedNorm | None) -> float | None:
        brought.append(norm)
        return await pservers.get(1, norm)

    assert await agreement.bring(1, get) == 16.0
    assert [norm and norm.own.sum_of_squares for norm in brought] == [16.0, 7.0]


async def test_pservers_that_never_agree_are_asked_a_limited_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_results, "PAUSE_SECONDS", 0.0)
    pservers = Pservers([*norms("a", 1.0), *norms("b", 1.0)])
    with pytest.raises(NormChanged, match="disagree about the trainers"):
        await NormAgreement(pservers.ask).bring(0, lambda norm: pservers.get(0, norm))
    assert pservers.num_asked == round_results.MAX_ASKED


async def test_an_error_of_the_run_ends_the_agreement() -> None:
    async def ask() -> Answers:
        raise Conflict("it is no member any more", code="stale_trainer")

    with raises_code("stale_trainer"):
        await NormAgreement(ask).bring(0, lambda norm: Pservers(norms("a", 1.0)).get(0, norm))


class OpenRounds:
    """A pserver that applies one round after the other, each once it has its norm."""

    def __init__(self, applied: int, square: float) -> None:
        self.applied = applied
        self._square = square

    async def norm(self, pull: Pull) -> ShardNorm | None:
        round_, norm = pull.round, pull.norm
        assert round_ <= self.applied + 1, f"would wait for ever for round {self.applied + 1}"
        own = ShardNorm(f"round {round_}", self._square)
        if norm is not None and round_ > self.applied:
            assert (norm.own, norm.total) == (own, 25.0)
            self.applied = round_
        return own


@pytest.mark.parametrize(
    ("max_delay", "last", "applied"), [(0, 4, (2, 3)), (0, 2, (0, 1)), (2, 9, (3, 6)), (1, 4, (0, 0))]
)
async def test_open_rounds_are_finished_before_the_next_one(
    max_delay: int, last: int, applied: tuple[int, int]
) -> None:
    pservers = [OpenRounds(applied[0], 9.0), OpenRounds(applied[1], 16.0)]
    await finish_rounds(pservers, last, max_delay)
    assert [pserver.applied for pserver in pservers] == [last - 1] * 2
