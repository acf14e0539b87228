"""What a run on one pserver counts, answers and refuses; named after the holes that docs/protocol.md closes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
import structlog
import torch
from starlette.requests import ClientDisconnect

from ps_protocol.errors import Conflict, RoundPending, TrainerLost
from ps_protocol.membership import Controls
from ps_protocol.messages import InstallMembers, PserverRegistered
from ps_protocol.routes import MEMBERS, WAIT_HEADER
from services.pserver import endpoints as endpoints_module
from services.pserver.app import make_pserver_app
from services.runtime.metrics import ServiceMetrics

from ...raising import raises_code
from .oracle import TorchOracle, assert_same_bits, average, make_options
from .refusals import begin_push, keep_busy, refused, unchanged
from .support import (
    GROUPS,
    PARAMETERS,
    Bench,
    Upload,
    bench,
    decode,
    encode,
    gradients_of,
    initial_values,
)

pytestmark = pytest.mark.asyncio

JSON = {"content-type": "application/json"}


async def test_fence_again_after_the_last_byte_round_applied_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.play_round(1)
        digest = await b.digest()
        halfway.go.set()
        assert (await late)["status"] == "already_applied"
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0


async def test_fence_again_after_the_last_byte_run_replaced_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.install_next_run()
        digest = await b.digest()
        halfway.go.set()
        await refused("stale_run", late)
        del late
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0


async def test_fence_again_after_the_last_byte_pserver_registered_anew_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.pserver.adopt_identity(PserverRegistered(index=0, incarnation=2, lease_seconds=10))
        halfway.go.set()
        await refused("stale_pserver", late)
        del late
        assert await b.settle_used_bytes(0) == 0


async def test_fence_again_after_the_last_byte_member_removed_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.change_members(2, {0: 1})
        digest = await b.digest()
        halfway.go.set()
        await refused("stale_trainer", late)
        del late
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0


async def freeze_half_a_round(b: Bench) -> None:
    """Both trainers have pushed, and one barrier is counted."""
    for rank in (0, 1):
        await b.push(rank, 1)
    await b.barrier(0, 1)
    await b.freeze(2)


async def test_the_end_of_a_change_that_was_given_up_for_a_later_one_sets_nobody_going():
    """It comes when the later one has begun: this pserver alone would apply the round with both."""
    async with bench() as b:
        await freeze_half_a_round(b)
        frozen = await b.freeze(3)
        assert frozen.counted == {1: (0,)}
        await b.barrier(1, 1)  # is held
        await b.change_members(2, {0: 1, 1: 1})
        assert b.run.rounds.is_frozen
        with pytest.raises(Conflict, match="is over"):
            await b.freeze(2)
        await b.change_members(3, {0: 1})
        assert await b.get(0, 1)
        assert b.run.rounds.history.participants == {1: (0,)}


async def test_a_pserver_whose_coordinator_died_in_a_change_says_so():
    async with bench() as b:
        await freeze_half_a_round(b)
        with pytest.raises(RoundPending, match="the coordinator, in the middle of a change of members"):
            await b.get(0, 1, wait_seconds=0)


async def test_fence_again_after_the_last_byte_member_replaced_by_its_next_life_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.change_members(2, {0: 1, 1: 2})
        digest = await b.digest()
        halfway.go.set()
        await refused("stale_trainer", late)
        assert await b.digest() == digest


async def test_fence_again_after_the_last_byte_run_failed_meanwhile():
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await b.change_members(2, {}, failure=TrainerLost("trainer 0 was lost").to_problem())
        halfway.go.set()
        await refused("trainer_lost", late)
        del late
        assert await b.settle_used_bytes(0) == 0


async def test_fence_again_after_the_check_for_nan_member_removed_meanwhile():
    """The check runs on the compute thread; whoever waits for it has not staged anything yet."""
    async with bench() as b:
        await b.push(1, 1, {})
        await b.push(0, 1)
        await b.barrier(0, 1)
        release = await keep_busy(b)
        push = asyncio.create_task(b.push(0, 1))  # a duplicate
        await asyncio.sleep(0.01)
        await b.change_members(2, {1: 1})
        await release()
        with raises_code("stale_trainer"):
            await push


async def test_gets_of_a_round_are_answered_with_exactly_that_version_until_the_next_is_applied():
    async with bench() as b:
        first = await b.play_round(1)
        assert [await b.get(rank, 1) for rank in (0, 1, 0, 1)] == [first] * 4
        await b.push(0, 2)
        await b.barrier(0, 2)
        assert await b.get(1, 1) == first  # trainer 1 is late
        await b.push(1, 2)
        await b.barrier(1, 2)
        second = await b.get(0, 2)
        assert decode(second)[1]["round"] == "2"
        error = await unchanged(b, "stale_round", b.get(1, 1))
        assert error.facts["current"] == 2
        await unchanged(b, "stale_round", b.get(1, 0))
        await unchanged(b, "future_round", b.get(1, 4))


async def test_a_get_of_some_blocks_is_of_that_version_too():
    async with bench() as b:
        values, _ = decode(await b.play_round(1))
        blocks, metadata = decode(await b.get(0, 1, names=["p3.block0", "p1.block0"]))
        assert metadata["round"] == "1"
        assert blocks.keys() == {"p1.block0", "p3.block0"}
        assert all(torch.equal(values[name], block) for name, block in blocks.items())

        # The next round is applied between the decision to answer and the reading of the values.
        await b.push(0, 2)
        await b.push(1, 2)
        await b.barrier(0, 2)
        release = await keep_busy(b)
        await b.barrier(1, 2)
        await asyncio.sleep(0.01)  # its apply is in the queue of the compute thread
        get = asyncio.create_task(b.get(0, 1, names=["p1.block0"]))
        await asyncio.sleep(0.01)
        await release()
        await refused("stale_round", get)


async def test_a_get_waits_for_all_batch_barriers():
    async with bench() as b:
        await b.push(0, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        await b.push(1, 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not get.done()
        assert b.run.rounds.missing == [1]
        await b.barrier(1, 1)
        assert decode(await get)[1]["round"] == "1"


async def test_hyper_parameters_of_the_lowest_rank_win_with_one_warning():
    others = [make_options("SGD", momentum=0.9, lr=7.0)]
    async with bench(3) as b:
        oracle = TorchOracle("SGD", PARAMETERS, GROUPS, initial_values())
        with structlog.testing.capture_logs() as lines:
            for round_ in (1, 2):
                for rank in (2, 1, 0):
                    await b.push(rank, round_, groups=others if rank else GROUPS)
                for rank in (2, 1, 0):
                    await b.barrier(rank, round_)
                values, _ = decode(await b.get(0, round_))
                oracle.step(average([gradients_of(rank, round_) for rank in range(3)]), GROUPS)
        for name, expected in oracle.parameters.items():
            assert_same_bits(values[f"{name}.block0"], expected.detach(), name)
        [line] = [line for line in lines if line["log_level"] == "warning"]
        assert (line["used"], line["ignored"]) == ("trainer 0", "trainer 1")
        assert b.metric("gradpost_hyper_parameter_disagreements_total") == 4  # two trainers in two rounds


async def test_contribution_missing():
    async with bench() as b:
        await b.play_round(1)
        await unchanged(b, "contribution_missing", b.barrier(0, 2))
        await b.push(0, 2, dict(list(b.contribution(0, 2).items())[:2]), last=False)
        error = await unchanged(b, "contribution_missing", b.barrier(0, 2))
        assert error.facts["actual"] == 2
        await unchanged(b, "contribution_missing", b.get(0, 2, with_barrier=True))
        await b.push(0, 2)
        assert (await b.barrier(0, 2))["missing"] == [1]


async def test_already_applied_whatever_the_bytes_are():
    async with bench() as b:
        await b.play_round(1)
        digest = await b.digest()
        forged = {name: tensor + 1 for name, tensor in b.contribution(0, 1).items()}
        for blocks in (None, forged, {}):
            assert (await b.push(0, 1, blocks))["status"] == "already_applied"
        assert (await b.barrier(0, 1)) == {"round": 2, "missing": [0, 1], "notice": ""}
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0
        await unchanged(b, "stale_trainer", b.push(0, 1, fence=b.fence(0, 1, trainer_incarnation=2)))


async def test_a_second_upload_of_initial_values_changes_nothing():
    async with bench() as b:
        reply = await b.play_round(1)
        digest = await b.digest()
        await b.upload_initial()
        assert await b.digest() == digest
        assert await b.get(0, 1) == reply
        await unchanged(b, "stale_trainer", b.call("initial", b.fence(1, 0), encode({})))
        await unchanged(b, "stale_trainer", b.call("initial", b.fence(0, 1), encode({})))


async def test_other_bytes_under_one_identity_are_a_conflict():
    async with bench() as b:
        await b.push(0, 1)
        forged = b.contribution(0, 1)
        forged["p3.block0"] = forged["p3.block0"] + 1
        await unchanged(b, "contribution_conflict", b.push(0, 1, forged))
        answer = await b.push(0, 1, {"p2.block0": b.contribution(0, 1)["p2.block0"]}, last=False)
        assert answer == {"status": "staged", "staged": 0, "duplicates": 1, "complete": True, "finite": True}


@pytest.mark.parametrize("endpoint", ["send", "initial"])
@pytest.mark.parametrize("num_pieces", [1, 4])
async def test_a_client_that_goes_away_in_its_body_changes_nothing_and_returns_the_buffer(endpoint, num_pieces):
    async with bench(initial=endpoint == "send") as b:
        body = encode(b.contribution(0, 1), b.completion())
        upload = Upload(body[: len(body) // 2], num_pieces=num_pieces, ends=False)
        round_ = 1 if endpoint == "send" else 0
        await unchanged(b, "malformed_frame", b.call(endpoint, b.fence(0, round_), body, upload=upload))
        assert await b.settle_used_bytes(0) == 0


async def test_a_client_that_is_cancelled_in_its_body_changes_nothing_and_returns_the_buffer():
    async with bench() as b:
        push, halfway = begin_push(b, 0, 1)
        await halfway.reached.wait()
        digest = await b.digest()
        assert b.pserver.pool.used_bytes > 0
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        del push
        assert await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0


@pytest.mark.parametrize("endpoint", ["get", "barrier"])
async def test_a_client_that_goes_away_before_its_request_is_complete_has_sent_no_barrier(endpoint):
    async with bench() as b:
        await b.push(0, 1)
        digest = await b.digest()
        headers = {"gradpost-barrier": "batch", WAIT_HEADER: "1"}
        upload = Upload(b"", ends=False)
        with pytest.raises(ClientDisconnect):
            await b.call(endpoint, b.fence(0, 1), headers=headers, upload=upload, num_bytes=20)
        assert await b.digest() == digest
        assert b.run.rounds.missing == [0, 1]


async def test_a_refused_get_has_not_counted_its_barrier():
    async with bench() as b:
        await b.push(0, 1)
        await unchanged(b, "unknown_block", b.get(0, 1, names=["nobody.block0"], with_barrier=True))
        await unchanged(b, "bad_header", b.get(0, 1, wait_seconds=-1, with_barrier=True))
        await unchanged(b, "bad_header", b.get(0, 1, wait_seconds=float("nan"), with_barrier=True))
        headers = {"gradpost-barrier": "fetch", WAIT_HEADER: "0"}
        await unchanged(b, "bad_header", b.call("get", b.fence(0, 1), headers=headers))


async def test_a_push_before_the_initial_values_is_not_ready():
    async with bench(initial=False) as b:
        await unchanged(b, "not_ready", b.push(0, 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_a_non_finite_gradient_is_refused_under_reject_and_staged_under_allow(value):
    async with bench() as b:
        blocks = b.contribution(0, 1)
        blocks["p2.block0"][63] = value
        error = await unchanged(b, "non_finite_gradient", b.push(0, 1, blocks))
        assert "trainer 0" in str(error)
        assert "p2.block0" in str(error)
        assert b.metric("gradpost_nonfinite_pushes_total") == 1
    async with bench(nonfinite="allow") as b:
        assert (await b.push(0, 1, blocks))["complete"]


@pytest.mark.parametrize("text", ["null", "[]", "{", "[[]]", "[{}]", '[{"lr": NaN}]', "[" * 100_000])
async def test_hyper_parameters_that_do_not_fit_are_refused(text):
    async with bench() as b:
        metadata = {**b.completion(), "hyper_parameters": text}
        body = encode(b.contribution(0, 1), metadata)
        await unchanged(b, "bad_hyper_parameters", b.call("send", b.fence(0, 1), body))


@pytest.mark.parametrize("text", ["-1", "1.0", "", "9" * 10, "٣"])
async def test_a_number_of_blocks_that_is_none_is_refused(text):
    async with bench() as b:
        body = encode({}, {**b.completion(), "num_blocks": text})
        await unchanged(b, "malformed_frame", b.call("send", b.fence(0, 1), body))


async def test_a_body_that_no_honest_push_could_fill_is_refused_before_it_is_received():
    async with bench() as b:
        taken: list[int] = []
        take = b.pserver.pool.acquire
        b.pserver.pool.acquire = lambda n: taken.append(n) or take(n)  # type: ignore[method-assign]
        await unchanged(b, "body_too_large", b.call("send", b.fence(0, 1), b"", num_bytes=200 * 1024 * 1024))
        await unchanged(b, "body_too_large", b.call("send", b.fence(0, 1), b"", num_bytes=10**15))
        assert taken == []


async def test_a_get_waits_no_longer_than_the_server_allows():
    async with bench() as b:
        await unchanged(b, "bad_header", b.get(0, 1, wait_seconds=endpoints_module.MAX_WAIT_SECONDS + 1))


async def test_controls_may_name_as_many_parameters_as_a_plan():
    """They travel with every change of members, and a refusal of one would end the run."""
    async with bench() as b:
        frozen = tuple(f"layers.{i}.{'x' * 40}.weight" for i in range(20_000))
        controls = Controls(since=1, frozen=frozen), Controls(since=2, frozen=frozen)
        message = InstallMembers(run="run1", number=2, membership=replace(b.install.membership, controls=controls))
        app = make_pserver_app(b.pserver, ServiceMetrics("pserver"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            answer = await http.put(MEMBERS, content=message.model_dump_json(), headers=JSON)
        assert (answer.status_code, b.run.membership.controls) == (204, controls)
