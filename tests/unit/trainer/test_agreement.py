"""What a trainer does until all pservers have the norm of one and the same gradient."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ps_protocol.errors import Conflict, NormChanged
from ps_protocol.norms import AgreedNorm, ShardNorm
from trainer_client import agreement
from trainer_client.agreement import NormAgreement, finish_rounds

from ...raising import raises_code

pytestmark = [pytest.mark.asyncio, pytest.mark.clip]

Answers = Sequence[ShardNorm | None]


class Pservers:
    """What each of them has now, and answers; a get that brings another norm is refused."""

    def __init__(self, *answers: Answers) -> None:
        self._answers = list(answers)  # one after the other; the last one stays
        self.num_asked = 0
        self.brought: list[AgreedNorm | None] = []

    @property
    def now(self) -> Answers:
        return self._answers[min(self.num_asked, len(self._answers)) - 1]

    async def ask(self) -> Answers:
        self.num_asked += 1
        await asyncio.sleep(0)
        return self.now

    async def get(self, index: int, norm: AgreedNorm | None) -> float | None:
        await asyncio.sleep(0)
        own = self.now[index]
        if norm is not None and (own is None or not norm.own.is_same(own)):
            raise NormChanged("it is another one")
        self.brought.append(norm)
        return None if norm is None else norm.total

    async def bring_to_all(self, agreement: NormAgreement) -> list[float | None]:
        def get_of(index: int):
            return agreement.bring(index, lambda norm: self.get(index, norm))

        return await asyncio.gather(*(get_of(index) for index in range(len(self.now))))


def of(contributions: str, *squares: float) -> list[ShardNorm]:
    return [ShardNorm(contributions, one) for one in squares]


async def test_all_are_asked_once_and_each_is_brought_the_sum() -> None:
    pservers = Pservers(of("a", 9.0, 16.0))
    agreement = NormAgreement(pservers.ask)
    assert await pservers.bring_to_all(agreement) == [25.0, 25.0]
    assert pservers.num_asked == 1
    assert agreement.norm == 5.0


async def test_norms_from_before_and_after_a_change_of_members_are_asked_for_again() -> None:
    pservers = Pservers([*of("before", 9.0), *of("after", 1.0)], of("after", 3.0, 1.0))
    agreement = NormAgreement(pservers.ask)
    assert await pservers.bring_to_all(agreement) == [4.0, 4.0]
    assert pservers.num_asked == 2
    assert agreement.norm == 2.0


async def test_a_gradient_that_is_another_one_when_its_norm_is_brought_is_asked_for_again_by_one_of_the_gets() -> None:
    pservers = Pservers(of("a", 9.0, 16.0))
    agreement = NormAgreement(pservers.ask)
    first = await agreement.bring(0, lambda norm: pservers.get(0, norm))
    assert first == 25.0
    pservers._answers.append(of("a", 9.0, 7.0))  # it has come back, and rounds otherwise
    pservers.num_asked += 1
    brought = []

    async def get(norm: AgreedNorm | None) -> float | None:
        brought.append(norm)
        return await pservers.get(1, norm)

    assert await agreement.bring(1, get) == 16.0
    assert [norm and norm.own.sum_of_squares for norm in brought] == [16.0, 7.0]


@pytest.mark.parametrize("first", [None, ShardNorm("a", 1.0)])
async def test_a_round_that_is_over_without_a_known_norm_needs_none(first: ShardNorm | None) -> None:
    pservers = Pservers([first, None])
    agreement = NormAgreement(pservers.ask)
    assert await pservers.bring_to_all(agreement) == [None, None]
    assert agreement.norm is None


async def test_pservers_that_never_agree_are_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PAUSE_SECONDS", 0.0)
    pservers = Pservers([*of("a", 1.0), *of("b", 1.0)])
    with pytest.raises(NormChanged, match="do not agree on whose gradients"):
        await NormAgreement(pservers.ask).bring(0, lambda norm: pservers.get(0, norm))
    assert pservers.num_asked == agreement.MAX_ASKED


async def test_what_ends_the_run_ends_the_agreement() -> None:
    async def ask() -> Answers:
        raise Conflict("it is no member any more", code="stale_trainer")

    pservers = Pservers(of("a", 1.0))
    with raises_code("stale_trainer"):
        await NormAgreement(ask).bring(0, lambda norm: pservers.get(0, norm))


class OpenRounds:
    """A pserver that waits for the norms of some rounds, one after the other, and has stepped those before."""

    def __init__(self, applied: int, square: float) -> None:
        self.applied = applied
        self._square = square

    async def norm(self, round_: int, *, norm: AgreedNorm | None = None) -> ShardNorm | None:
        assert round_ <= self.applied + 1, f"would wait for ever for round {self.applied + 1}"
        own = ShardNorm(f"round {round_}", self._square)
        if norm is not None and round_ > self.applied:
            assert (norm.own, norm.total) == (own, 25.0)
            self.applied = round_
        return own


@pytest.mark.parametrize(
    ("max_delay", "last", "applied"), [(0, 4, (2, 3)), (0, 2, (0, 1)), (2, 9, (3, 6)), (1, 4, (0, 0))]
)
async def test_who_comes_later_ends_the_rounds_before_its_own(
    max_delay: int, last: int, applied: tuple[int, int]
) -> None:
    pservers = [OpenRounds(applied[0], 9.0), OpenRounds(applied[1], 16.0)]
    await finish_rounds(pservers, last, max_delay)
    assert [pserver.applied for pserver in pservers] == [last - 1] * 2
