"""Rounds that wait for a global norm on one pserver: the norm, clipped steps, and what ends every wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ps_protocol.errors import ContributionMissing, NormChanged, RoundPending, RoundTimeout
from ps_protocol.membership import Controls
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.requests import NormAnswer

from ...raising import raises_code
from .oracle import assert_same_bits
from .support import (
    Bench,
    bench,
    decode,
    gradients_of,
    initial_values,
    unchanged,
)

pytestmark = pytest.mark.clip

CLIPS: Any = {"max_grad_norm": 0.5}
NEVER: Any = {"max_grad_norm": 1e9}


def agreed(answer: NormAnswer, others: float = 0.0) -> AgreedNorm:
    """With what other pservers have."""
    return AgreedNorm(ShardNorm(answer.contributions, answer.sum_of_squares), answer.sum_of_squares + others)


async def measure(b: Bench, round_: int = 1, ranks: tuple[int, ...] = (0, 1)) -> NormAnswer:
    for rank in ranks:
        await b.push(rank, round_)
    answers = await asyncio.gather(*(b.norm(rank, round_) for rank in ranks))
    assert len(set(map(repr, answers))) == 1
    return answers[0]


def squares_of(gradients: dict[str, Tensor]) -> float:
    return sum(float(gradient.double().square().sum()) for gradient in gradients.values())


@pytest.mark.parametrize(
    "change", [{"contributions": "another"}, {"sum_of_squares": 1e-30}], ids=["of others", "another sum"]
)
async def test_a_norm_of_another_gradient_steps_nothing(change: dict[str, Any]) -> None:
    async with bench(**CLIPS) as b:
        norm = agreed(await measure(b))
        other = AgreedNorm(norm.own._replace(**change), norm.total)
        refusal = await unchanged(b, "norm_changed", b.get(0, 1, norm=other))
        assert refusal.facts == {"round": 1}
        assert b.run.round == 0
        version = await b.get(1, 1, norm=norm)
        assert await b.get(0, 1, norm=other) == version  # it is ignored once the round is over


async def test_a_member_that_is_dropped_meanwhile_takes_its_part_of_the_norm_along() -> None:
    async with bench(**NEVER) as b:
        before = agreed(await measure(b))
        waiting = asyncio.create_task(b.get(0, 1))
        await asyncio.sleep(0)
        await b.freeze(2)
        stale = asyncio.create_task(b.get(0, 1, norm=before))  # a frozen pserver steps nothing, and says nothing
        frozen = asyncio.create_task(b.norm(0, 1))
        await asyncio.sleep(0.01)
        assert not stale.done()
        assert not frozen.done()
        await b.change_members(2, {0: 1})
        with pytest.raises(NormChanged):
            await stale
        after = await frozen
        assert after.contributions != before.own.contributions
        assert after.sum_of_squares == pytest.approx(squares_of(gradients_of(0, 1)))
        with raises_code("stale_trainer"):
            await b.get(1, 1, norm=agreed(after))
        assert decode(await b.get(0, 1, norm=agreed(after)))[1]["round"] == "1"
        assert await waiting
        assert b.run.schedule.history.participants == {1: (0,)}


async def test_a_frozen_parameter_is_not_stepped_and_makes_another_norm_on_all_pservers() -> None:
    async with bench(1, **NEVER) as b:
        known = [await measure(b, ranks=(0,))]
        for number, frozen in ((2, "on_another_pserver"), (3, "p1")):
            await b.freeze(number)
            await b.change_members(number, {0: 1}, controls=(Controls(since=1, frozen=(frozen,)),))
            known.append(await b.norm(0, 1))
        assert len({answer.contributions for answer in known}) == 3
        stepped = {name: gradient for name, gradient in gradients_of(0, 1).items() if name != "p1"}
        assert known[-1].sum_of_squares == pytest.approx(squares_of(stepped))
        await unchanged(b, "norm_changed", b.get(0, 1, norm=agreed(known[0])))
        blocks, _ = decode(await b.get(0, 1, norm=agreed(known[-1])))
        assert_same_bits(blocks["p1.block0"], initial_values()["p1"], "p1")


async def test_all_trainers_owe_a_norm_that_is_missing() -> None:
    async with bench(patience_seconds=0.1, **CLIPS) as b:
        answer = await measure(b)
        with pytest.raises(RoundPending, match="round 1 waits for its global norm"):
            await b.get(0, 1, wait_seconds=0)
        with pytest.raises(RoundTimeout, match="trainers 0, 1 did not send the global norm of round 1"):
            await b.get(0, 1, wait_seconds=20)
        assert await b.get(1, 1, norm=agreed(answer))  # a late norm still counts


@pytest.mark.parametrize("checkpoint_rounds", [0, 2])
async def test_a_restarted_pserver_has_the_norms_that_it_sent(tmp_path: Path, checkpoint_rounds: int) -> None:
    settings: Any = {"durability": "log", "checkpoint_rounds": checkpoint_rounds, **CLIPS}
    async with bench(state_dir=tmp_path, **settings) as b:
        for round_ in (1, 2):
            norm = agreed(await measure(b, round_))
            values = await b.get(0, round_, norm=norm)
        lost = await measure(b, 3)  # its norm was sent, and no trainer has brought it
    async with bench(state_dir=tmp_path, incarnation=2, **settings) as b:
        assert b.run.round == 2
        assert await b.get(1, 2) == values
        told = await b.norm(1, 2)
        assert ShardNorm(told.contributions, told.sum_of_squares or 0.0) == norm.own
        with pytest.raises(ContributionMissing):
            await b.get(0, 3, with_barrier=True, norm=agreed(lost))
        again = await measure(b, 3)
        assert again == lost  # the same bytes again, and the same sum
        assert decode(await b.get(0, 3, norm=agreed(lost)))[1]["round"] == "3"
