"""Rounds that wait for a global norm on one pserver: the norm, clipped steps, and what ends every wait."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.errors import ContributionMissing, NormChanged, RoundPending, RoundTimeout, StaleRound, TrainerLost
from ps_protocol.membership import Controls, Membership
from ps_protocol.norms import AgreedNorm, ShardNorm
from ps_protocol.requests import NORM_HEADER, NormAnswer

from ...raising import raises_code
from .oracle import TorchOracle, assert_same_bits, average
from .support import (
    GROUPS,
    PARAMETERS,
    Bench,
    assert_equals_oracle,
    bench,
    decode,
    gradients_of,
    initial_values,
    keep_busy,
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


async def test_a_step_is_clipped_by_the_norm_over_all_pservers() -> None:
    async with bench(**CLIPS) as b:
        answer = await measure(b)
        mean = average([gradients_of(0, 1), gradients_of(1, 1)])
        assert answer.sum_of_squares == pytest.approx(squares_of(mean), rel=1e-12)
        assert b.run.round == 0  # nothing is stepped before a trainer brings the sum
        norm = agreed(answer, others=1000.0)
        values, metadata = decode(await b.get(0, 1, norm=norm))
        assert metadata["round"] == "1"
        oracle = TorchOracle("SGD", PARAMETERS, GROUPS, initial_values())
        coefficient = 0.5 / (math.sqrt(norm.total) + 1e-6)
        oracle.step({name: gradient * coefficient for name, gradient in mean.items()}, GROUPS)
        assert_equals_oracle(values, oracle)


async def test_any_trainer_may_finish_the_round_and_all_get_it() -> None:
    async with bench(**CLIPS) as b:
        norm = agreed(await measure(b))
        waiting = asyncio.create_task(b.get(0, 1))  # it has no norm, and waits for another's
        await asyncio.sleep(0.01)
        assert not waiting.done()
        [one, two, three] = await asyncio.gather(b.get(1, 1, norm=norm), b.get(0, 1, norm=norm), waiting)
        assert one == two == three
        assert await b.norm(1, 1) == await b.norm(0, 1, with_barrier=False)  # it is told afterwards, too
        assert (await b.norm(0, 1)).sum_of_squares == norm.own.sum_of_squares
        assert await b.get(0, 1, norm=norm) == one


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
        release = await keep_busy(b)  # while it is being applied with the right one
        right = asyncio.create_task(b.get(1, 1, norm=norm))
        await asyncio.sleep(0.01)
        assert b.run.schedule.applying
        with pytest.raises(NormChanged):
            await b.get(0, 1, norm=other)
        await release()
        version = await right
        assert await b.get(0, 1, norm=other) == version  # it is ignored once the round is over


async def test_requests_with_a_norm_that_do_not_fit_are_refused_and_count_nothing() -> None:
    async with bench(**CLIPS) as b:
        await b.push(0, 1)
        await unchanged(b, "contribution_missing", b.norm(1, 1))
        with raises_code("stale_trainer"):
            await b.norm(0, 1, trainer_incarnation=2)
        for text in ("", "digest", "digest nan -1.0", "digest 2.0 1.0"):
            request = b.call("pull", b.fence(0, 1), headers={NORM_HEADER: text, "gradpost-barrier": "batch"})
            await unchanged(b, "bad_header", request)
        for kind in ("fetch", "both"):
            request = b.call("norm", b.fence(0, 1), headers={"gradpost-barrier": kind})
            await unchanged(b, "bad_header", request)


async def test_a_run_that_does_not_clip_has_no_norms() -> None:
    async with bench(1) as b:
        await b.push(0, 1)
        await unchanged(b, "mode_mismatch", b.norm(0, 1))
        assert await b.get(0, 1, with_barrier=True, norm=AgreedNorm(ShardNorm("a", 1.0), 2.0))
    async with bench(1, consistency=Consistency(mode="async")) as b:
        with raises_code("mode_mismatch", match="does not clip"):
            await b.norm(0, 1)


async def test_gradients_that_are_not_finite_are_clipped_as_torch_does() -> None:
    async with bench(1, nonfinite="allow", **CLIPS) as b:
        blocks = b.contribution(0, 1)
        blocks["p1.block0"] = torch.full((5,), math.nan)
        await b.push(0, 1, blocks)
        answer = await b.norm(0, 1)
        assert math.isnan(answer.sum_of_squares)
        values, _ = decode(await b.get(0, 1, norm=agreed(answer)))
        assert all(bool(block.isnan().all()) for block in values.values())


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


async def test_members_that_change_while_it_is_being_measured_are_measured_again() -> None:
    async with bench(**NEVER) as b:
        for rank in (0, 1):
            await b.push(rank, 1)
        release = await keep_busy(b)
        asked = asyncio.create_task(b.norm(0, 1))
        await b.barrier(1, 1)
        await asyncio.sleep(0.01)
        assert b.run.schedule.measuring
        await b.freeze(2)
        await b.change_members(2, {0: 1})
        await release()
        answer = await asked
        assert answer.sum_of_squares == pytest.approx(squares_of(gradients_of(0, 1)))
        assert await b.get(0, 1, norm=agreed(answer))


async def test_a_parameter_that_is_frozen_meanwhile_makes_another_norm_on_all_pservers() -> None:
    async with bench(**NEVER) as b:
        before = await measure(b)
        for number, frozen in ((2, "p3"), (3, "on_another_pserver")):
            await b.freeze(number)
            controls = (Controls(since=1, frozen=(frozen,)),)
            await b.change_members(number, {0: 1, 1: 1}, controls=controls)
            answer = await b.norm(0, 1)
            assert answer.contributions != before.contributions
        assert answer.sum_of_squares == before.sum_of_squares
        with pytest.raises(NormChanged):
            await b.get(0, 1, norm=agreed(before))
        assert await b.get(0, 1, norm=agreed(answer))


async def test_frozen_parameters_are_not_part_of_the_norm() -> None:
    async with bench(1, **NEVER) as b:
        b.run.membership = Membership({0: 1}, controls=(Controls(since=1, frozen=("p1", "p3")),))
        answer = await measure(b, ranks=(0,))
        stepped = {name: gradient for name, gradient in gradients_of(0, 1).items() if name in ("p0", "p2")}
        assert answer.sum_of_squares == pytest.approx(squares_of(stepped))
        blocks, _ = decode(await b.get(0, 1, norm=agreed(answer)))
        assert_same_bits(blocks["p1.block0"], initial_values()["p1"], "p1")


async def test_a_round_that_is_skipped_is_agreed_on_and_steps_nothing() -> None:
    async with bench(nonfinite="skip_round", **CLIPS) as b:
        for rank in (0, 1):
            await b.push(rank, 1)
        verdict = {"gradpost-barrier": "batch", "gradpost-verdict": "nonfinite"}
        await b.call("barrier", b.fence(0, 1), headers=verdict)
        answer = await b.norm(1, 1)
        assert answer.sum_of_squares == 0.0
        values, metadata = decode(await b.get(1, 1, norm=agreed(answer)))
        assert metadata["skipped_for"] == "[0]"
        for name, value in initial_values().items():
            assert_same_bits(values[f"{name}.block0"], value, name)


async def test_a_norm_waits_for_the_end_of_a_pause() -> None:
    async with bench(1, **NEVER) as b:
        await measure(b, ranks=(0,))
        for number, is_paused in ((2, True), (3, False)):
            await b.freeze(number)
            controls = (Controls(since=1, is_paused=is_paused),)
            await b.change_members(number, {0: 1}, controls=controls)
            if is_paused:
                with pytest.raises(RoundPending, match="an administrator, who has paused the run"):
                    await b.norm(0, 1, wait_seconds=0)
        assert await b.get(0, 1, norm=agreed(await b.norm(0, 1)))


async def test_a_norm_waits_for_all_trainers_until_the_run_ends() -> None:
    async with bench(3, **CLIPS) as b:
        await b.push(0, 1)
        with pytest.raises(RoundPending, match="round 1 waits for trainers 1, 2"):
            await b.norm(0, 1, wait_seconds=0.05)
        asked = asyncio.create_task(b.norm(0, 1))
        await asyncio.sleep(0.01)
        await b.change_members(2, {}, failure=TrainerLost("trainer 1 was lost").to_problem())
        with pytest.raises(TrainerLost):
            await asked


async def test_all_trainers_owe_a_norm_that_is_missing() -> None:
    async with bench(round_timeout_seconds=0.1, **CLIPS) as b:
        answer = await measure(b)
        with pytest.raises(RoundPending, match="round 1 waits for its global norm"):
            await b.get(0, 1, wait_seconds=0)
        with pytest.raises(RoundTimeout, match="trainers 0, 1 did not send the global norm of round 1"):
            await b.get(0, 1, wait_seconds=20)
        assert await b.get(1, 1, norm=agreed(answer))  # a late norm still counts


async def test_a_client_that_asked_for_a_norm_or_brought_it_may_disconnect() -> None:
    async with bench(1, **CLIPS) as b:
        await b.push(0, 1)
        asked = asyncio.create_task(b.norm(0, 1))
        release = await keep_busy(b)
        await asyncio.sleep(0.01)
        asked.cancel()
        await release()
        await asyncio.gather(asked, return_exceptions=True)
        norm = agreed(await b.norm(0, 1, with_barrier=False))
        brought = asyncio.create_task(b.get(0, 1, norm=norm))
        release = await keep_busy(b)
        await asyncio.sleep(0.01)
        brought.cancel()
        await release()
        await asyncio.gather(brought, return_exceptions=True)
        assert decode(await b.get(0, 1))[1]["round"] == "1"


async def test_norms_of_overwritten_rounds_are_forgotten() -> None:
    async with bench(1, **NEVER) as b:
        for round_ in (1, 2, 3):
            await b.get(0, round_, norm=agreed(await measure(b, round_, ranks=(0,))))
        assert b.run.schedule.history.norms.keys() == {3}
        assert (await b.norm(0, 1)).sum_of_squares is None
        with pytest.raises(StaleRound):
            await b.get(0, 1)


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
