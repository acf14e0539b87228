"""A synchronous run on one pserver counts, answers and refuses requests, and replies with the outcomes of rounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import structlog
import torch
from starlette.requests import ClientDisconnect

from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict, RoundPending, TrainerLost
from ps_protocol.frames import CONTENT_TYPE, parse_frame
from ps_protocol.membership import Controls, InstallMembers, PserverRegistered
from ps_protocol.optimizers import HyperParameters
from ps_protocol.requests import (
    BARRIER_HEADER,
    HYPER_PARAMETERS_KEY,
    MAX_WAIT_SECONDS,
    SKIPPED_KEY,
    VERDICT_HEADER,
    WAIT_HEADER,
)
from ps_protocol.routes import MEMBERS
from services.pserver.app import make_pserver_app
from services.pserver.run import script_warnings
from services.pserver.shard.compensation import divide_rates
from services.pserver.shard.history import History
from services.runtime.metrics import ServiceMetrics

from ...raising import raises_code
from .oracle import TorchOracle, average, make_options
from .support import (
    GROUPS,
    PARAMETERS,
    Bench,
    Upload,
    assert_equals_oracle,
    begin_push,
    bench,
    decode,
    encode,
    gradients_of,
    initial_values,
    keep_busy,
    refused,
    unchanged,
)

JSON = {"content-type": "application/json"}


LOST = TrainerLost("trainer 0 was lost").to_problem()


@pytest.mark.parametrize(
    ("meanwhile", "code"),
    [
        (lambda b: b.play_round(1), "already_applied"),
        (lambda b: b.install_next_run(), "stale_run"),
        (
            lambda b: b.pserver.adopt_identity(PserverRegistered(index=0, incarnation=2, lease_seconds=10)),
            "stale_pserver",
        ),
        (lambda b: b.change_members(2, {0: 1}), "stale_trainer"),
        (lambda b: b.change_members(2, {0: 1, 1: 2}), "stale_trainer"),
        (lambda b: b.change_members(2, {}, failure=LOST), "trainer_lost"),
    ],
    ids=["round applied", "run replaced", "pserver registered again", "member removed", "next life", "run failed"],
)
async def test_a_push_is_checked_again_after_its_last_byte(meanwhile, code):
    async with bench() as b:
        late, halfway = begin_push(b, 1, 1)
        await halfway.reached.wait()
        await meanwhile(b)
        digest = None if code == "stale_pserver" else await b.digest()  # a pserver that registers again has no run
        halfway.go.set()
        if code == "already_applied":
            assert (await late)["status"] == code
        else:
            await refused(code, late)
        del late
        assert digest is None or await b.digest() == digest
        assert await b.settle_used_bytes(0) == 0


async def freeze_half_a_round(b: Bench) -> None:
    for rank in (0, 1):
        await b.push(rank, 1)
    await b.barrier(0, 1)
    await b.freeze(2)


async def test_the_end_of_an_abandoned_change_of_members_applies_nothing():
    async with bench() as b:
        await freeze_half_a_round(b)
        frozen = await b.freeze(3)
        assert frozen.counted == {1: (0,)}
        await b.barrier(1, 1)  # is held
        await b.change_members(2, {0: 1, 1: 1})
        assert b.run.schedule.is_frozen
        with pytest.raises(Conflict, match="is over"):
            await b.freeze(2)
        await b.change_members(3, {0: 1})
        assert await b.get(0, 1)
        assert b.run.schedule.history.participants == {1: (0,)}


async def test_a_get_in_an_unfinished_change_of_members_names_the_coordinator():
    async with bench() as b:
        await freeze_half_a_round(b)
        with pytest.raises(RoundPending, match="the coordinator, in the middle of a change of members"):
            await b.get(0, 1, wait_seconds=0)


async def test_a_push_is_checked_again_after_the_check_for_nan(monkeypatch):
    monkeypatch.setattr("services.pserver.run.read_pushes.QUICK_BYTES", 0)  # the check waits for the compute thread
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


async def test_a_get_may_carry_the_contribution_and_its_barrier():
    async def step(b: Bench, rank: int, round_: int, blocks: Any = None, **metadata: str) -> bytes:
        body = encode(b.contribution(rank, round_) if blocks is None else blocks, {**b.completion(), **metadata})
        headers = {WAIT_HEADER: "10", BARRIER_HEADER: "batch", "content-type": CONTENT_TYPE}
        return await b.call("pull", b.fence(rank, round_), body, headers=headers)

    async with bench() as plain, bench(nonfinite="skip_round") as b:
        expected = await plain.play_round(1)
        assert await asyncio.gather(step(b, 0, 1), step(b, 1, 1)) == [expected] * 2
        assert await step(b, 0, 1) == expected  # the same again
        with raises_code("unknown_block"):
            await step(b, 0, 2, {"none.block0": torch.zeros(1)})
        with raises_code("contribution_missing"):  # it announces a block more
            await step(b, 1, 2, num_blocks=str(len(b.plan.blocks) + 1))
        assert b.run.schedule.batch_barriers == set()
    async with bench(nonfinite="skip_round") as b:
        broken = {name: gradient * torch.nan for name, gradient in b.contribution(1, 1).items()}
        for reply in await asyncio.gather(step(b, 0, 1), step(b, 1, 1, broken)):
            assert json.loads(decode(reply)[1][SKIPPED_KEY]) == [1]


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
        assert_equals_oracle(values, oracle)
        [line] = [line for line in lines if line["log_level"] == "warning"]
        assert line["event"] == (
            f"lr of parameter group 0 is {GROUPS[0]['lr']} on trainer 0 and 7.0 on trainer 1, and all step with that "
            "of trainer 0. Set the same on all trainers"
        )
        assert b.metric("gradpost_hyper_parameter_disagreements_total") == 4  # two trainers in two rounds


@pytest.mark.parametrize(
    ("equal", "num_warnings"),
    [
        (range(1, 13), 1),
        (range(3, 13), 1),
        ([*range(1, 10), *range(11, 20)], 0),  # never ten in a row
        (range(11, 22), 0),  # not any more after ten rounds with other gradients
    ],
    ids=str,
)
async def test_trainers_that_push_the_same_gradients_are_named_once(equal: Sequence[int], num_warnings: int):
    async with bench(3) as b:
        with structlog.testing.capture_logs() as lines:
            for round_ in range(1, max(equal) + 1):
                for rank in range(3):
                    await b.push(rank, round_, b.contribution(min(rank, 1) if round_ in equal else rank, round_))
                for rank in range(3):
                    await b.barrier(rank, round_)
                for rank in range(3):
                    await b.get(rank, round_)
                    await b.barrier(rank, round_, kind="fetch")
        assert [line["event"] for line in lines if line["log_level"] == "warning"] == num_warnings * [
            "trainers 1 and 2 push the same gradients: does each read its own part of the data? "
            "(torch.utils.data.DistributedSampler)"
        ]


@pytest.mark.parametrize("num_blocks", [1, 100, 1000])
def test_the_search_for_script_warnings_reads_a_sample(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = bytearray()
    digest = SimpleNamespace(update=read.extend, digest=lambda: bytes(read))
    monkeypatch.setattr(script_warnings, "xxhash", SimpleNamespace(xxh3_128=lambda: digest))
    block = SimpleNamespace(bytes=lambda: [memoryview(bytes(range(256)) * 512)])
    assert script_warnings._digest({str(number): block for number in range(num_blocks)}) is not None
    assert 15_000 < len(read) <= script_warnings.SAMPLE_BYTES


@pytest.mark.parametrize(
    ("absent", "num_warnings"), [(range(1, 13), 1), (range(4, 14), 1), ((*range(1, 10), *range(11, 14)), 0)], ids=str
)
async def test_a_gradient_that_one_trainer_does_not_send_is_named_once(absent: Sequence[int], num_warnings: int):
    async with bench(2) as b:
        block = min(b.contribution(1, 1))
        with structlog.testing.capture_logs() as lines:
            for round_ in range(1, 14):
                sent = {
                    name: gradient
                    for name, gradient in b.contribution(1, round_).items()
                    if name != block or round_ not in absent
                }
                await b.push(0, round_)
                await b.call("push", b.fence(1, round_), encode(sent, b.completion(num_blocks=len(sent))))
                for rank in range(2):
                    await b.barrier(rank, round_)
                for rank in range(2):
                    await b.get(rank, round_)
                    await b.barrier(rank, round_, kind="fetch")
        assert [line["event"] for line in lines if line["log_level"] == "warning"] == num_warnings * [
            f"trainer 1 has sent no gradient of {block.partition('.block')[0]!r} in 10 rounds in which others had one: "
            "it is frozen on this trainer, or not used by its part of the model. The mean counts zeros for it; if that "
            "is not intended, freeze it on all trainers or on none"
        ]


async def test_a_push_of_an_applied_round_is_already_applied_whatever_its_bytes():
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


@pytest.mark.parametrize(
    ("name", "values", "dtype", "error"),
    [
        ("x.block0", torch.zeros(5), b'"F32"', "unknown_block"),
        ("p1", torch.zeros(5), b'"F32"', "unknown_block"),
        ("p1.block0", torch.zeros(1), b'"F32"', "wrong_shape"),
        ("p1.block0", torch.zeros(1, 5), b'"F32"', "wrong_shape"),
        ("p1.block0", torch.zeros(5), b'"I32"', "wrong_dtype"),
        ("mean", torch.zeros(3), b'"F32"', "wrong_shape"),
        ("mean", torch.zeros(2), b'"I32"', "wrong_dtype"),
    ],
)
async def test_initial_values_that_do_not_fit_are_refused(name, values, dtype, error):
    async with bench(initial=False, buffers=[("mean", (2,), "F32")]) as b:
        body = encode({name: values}).replace(b'"F32"', dtype)
        await unchanged(b, error, b.call("initial", b.fence(0, 0), body))


async def test_other_bytes_under_one_identity_are_a_conflict():
    async with bench() as b:
        await b.push(0, 1)
        forged = b.contribution(0, 1)
        forged["p3.block0"] = forged["p3.block0"] + 1
        await unchanged(b, "contribution_conflict", b.push(0, 1, forged))
        answer = await b.push(0, 1, {"p2.block0": b.contribution(0, 1)["p2.block0"]}, last=False)
        assert answer == {"status": "staged", "staged": 0, "duplicates": 1, "complete": True, "finite": True}


@pytest.mark.parametrize(("endpoint", "num_pieces"), [("push", 1), ("push", 4), ("initial", 4)])
async def test_a_client_that_goes_away_in_its_body_changes_nothing_and_returns_the_buffer(endpoint, num_pieces):
    async with bench(initial=endpoint == "push") as b:
        body = encode(b.contribution(0, 1), b.completion())
        upload = Upload(body[: len(body) // 2], num_pieces=num_pieces, ends=False)
        round_ = 1 if endpoint == "push" else 0
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


@pytest.mark.parametrize("endpoint", ["pull", "barrier"])
async def test_a_client_that_goes_away_before_its_request_is_complete_has_sent_no_barrier(endpoint):
    async with bench() as b:
        await b.push(0, 1)
        digest = await b.digest()
        headers = {"gradpost-barrier": "batch", WAIT_HEADER: "1"}
        upload = Upload(b"", ends=False)
        with pytest.raises(ClientDisconnect):
            await b.call(endpoint, b.fence(0, 1), headers=headers, upload=upload, num_bytes=20)
        assert await b.digest() == digest
        assert b.run.schedule.missing == [0, 1]


async def test_a_refused_request_counts_no_barrier():
    async with bench() as b:
        await b.push(0, 1)
        await b.push(1, 1, dict(list(b.contribution(1, 1).items())[:2]), last=False)
        for request in (b.barrier(1, 1), b.get(1, 1, with_barrier=True)):
            error = await unchanged(b, "contribution_missing", request)
            assert error.facts["actual"] == 2
        await unchanged(b, "unknown_block", b.get(0, 1, names=["unknown.block0"], with_barrier=True))
        for wait_seconds in (-1, float("nan"), MAX_WAIT_SECONDS + 1):
            await unchanged(b, "bad_header", b.get(0, 1, wait_seconds=wait_seconds, with_barrier=True))
        headers = {"gradpost-barrier": "fetch", WAIT_HEADER: "0"}
        await unchanged(b, "bad_header", b.call("pull", b.fence(0, 1), headers=headers))


async def test_a_non_finite_gradient_is_refused_under_reject_and_staged_under_allow():
    async with bench() as b:
        blocks = b.contribution(0, 1)
        blocks["p2.block0"][63] = float("-inf")
        error = await unchanged(b, "non_finite_gradient", b.push(0, 1, blocks))
        assert "trainer 0" in str(error)
        assert "p2.block0" in str(error)
        assert b.metric("gradpost_nonfinite_pushes_total") == 1
        assert "--nonfinite skip_round" in str(error)
    async with bench(nonfinite="allow") as b:
        assert (await b.push(0, 1, blocks))["complete"]


@pytest.mark.parametrize(
    ("code", "key", "texts"),
    [
        (
            "bad_hyper_parameters",
            "hyper_parameters",
            ["null", "[]", "{", "[[]]", "[{}]", '[{"lr": NaN}]', "[" * 100_000],
        ),
        ("malformed_frame", "num_blocks", ["-1", "1.0", "", "9" * 10, "٣"]),
    ],
)
async def test_metadata_that_does_not_fit_is_refused(code, key, texts):
    async with bench() as b:
        for text in texts:
            body = encode({}, {**b.completion(), key: text})
            await unchanged(b, code, b.call("push", b.fence(0, 1), body))


async def test_controls_may_name_as_many_parameters_as_a_plan():
    async with bench() as b:
        frozen = tuple(f"layers.{i}.{'x' * 40}.weight" for i in range(20_000))
        controls = Controls(since=1, frozen=frozen), Controls(since=2, frozen=frozen)
        message = InstallMembers(
            run="run1", attempt=0, number=2, membership=replace(b.install.membership, controls=controls)
        )
        app = make_pserver_app(b.pserver, ServiceMetrics("pserver"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            answer = await http.put(MEMBERS, content=message.model_dump_json(), headers=JSON)
        assert (answer.status_code, b.run.membership.controls) == (204, controls)
        assert "content-type" not in answer.headers


async def push_with_scaler(b: Bench, rank: int, round_: int, scaler: HyperParameters | None) -> None:
    metadata = b.completion()
    if scaler is not None:
        metadata[HYPER_PARAMETERS_KEY] = json.dumps([*json.loads(metadata[HYPER_PARAMETERS_KEY]), scaler])
    await b.call("push", b.fence(rank, round_), encode(b.contribution(rank, round_), metadata))


async def play_scaled(
    b: Bench, round_: int, *scalers: HyperParameters | None, bad: tuple[int, ...] = ()
) -> dict[str, str]:
    """One round of trainers with these GradScalers; the metadata of its version."""
    for rank, scaler in enumerate(scalers):
        await push_with_scaler(b, rank, round_, scaler)
    for rank in range(len(scalers)):
        verdict = {VERDICT_HEADER: "nonfinite"} if rank in bad else {}
        await b.call("barrier", b.fence(rank, round_), headers={BARRIER_HEADER: "batch", **verdict})
    return await metadata_of(b, round_)


async def metadata_of(b: Bench, round_: int) -> dict[str, str]:
    return dict(parse_frame(await b.get(0, round_)).metadata)


def scaler_state(after: int, scale: float = 1024.0) -> HyperParameters:
    return {"after": after, "scale": scale, "growth_tracker": after}


@pytest.mark.amp
async def test_replies_carry_the_scaler_state_of_the_lowest_rank() -> None:
    async with bench(nonfinite="skip_round") as b:
        assert "grad_scaler" not in await play_scaled(b, 1, None, None)
        assert "grad_scaler" not in await play_scaled(b, 2, None, scaler_state(1))
        told = await play_scaled(b, 3, scaler_state(2, 8.0), scaler_state(2, 16.0), bad=(1,))
        assert json.loads(told["grad_scaler"]) == scaler_state(2, 8.0)
        assert told["skipped_for"] == "[1]"
        assert not told.keys() & {"skipped_before"}
        assert "grad_scaler" not in await play_scaled(b, 4, None, None)


@pytest.mark.amp
async def test_a_state_that_does_not_fit_and_another_one_in_the_same_round_are_refused() -> None:
    async with bench() as b:
        for wrong in ({}, scaler_state(0, float("nan"))):
            await unchanged(b, "bad_hyper_parameters", push_with_scaler(b, 0, 1, wrong))
        await push_with_scaler(b, 0, 1, scaler_state(0))
        await push_with_scaler(b, 0, 1, scaler_state(0))
        for other in (None, scaler_state(0, 8.0)):
            await unchanged(b, "contribution_conflict", push_with_scaler(b, 0, 1, other))


@pytest.mark.amp
async def test_with_max_delay_replies_carry_the_outcomes_of_earlier_rounds() -> None:
    async with bench(nonfinite="skip_round", consistency=Consistency(max_delay=1)) as b:
        assert "skipped_before" not in await play_scaled(b, 1, None, None, bad=(0,))
        assert json.loads((await play_scaled(b, 2, None, None, bad=(0, 1)))["skipped_before"]) == {"1": [0]}
        told = await play_scaled(b, 3, None, None)
        assert "skipped_for" not in told
        assert json.loads(told["skipped_before"]) == {"2": [0, 1]}
        assert "skipped_before" not in await play_scaled(b, 4, None, None)


@pytest.mark.amp
@pytest.mark.parametrize("checkpoint_rounds", [1, 100])
async def test_a_restarted_pserver_replies_the_same_outcomes(tmp_path: Path, checkpoint_rounds: int) -> None:
    settings: dict[str, Any] = {
        "state_dir": tmp_path,
        "durability": "log",
        "nonfinite": "skip_round",
        "checkpoint_rounds": checkpoint_rounds,
        "consistency": Consistency(max_delay=1),
    }
    async with bench(**settings) as b:
        await play_scaled(b, 1, scaler_state(0), scaler_state(0), bad=(1,))
        told = await play_scaled(b, 2, scaler_state(1), scaler_state(1), bad=(0,))
        assert {"skipped_for", "skipped_before", "grad_scaler"} <= told.keys()
    async with bench(incarnation=2, **settings) as b:
        assert await metadata_of(b, 2) == told


@pytest.mark.amp
def test_outcomes_of_a_source_run_are_taken_over() -> None:
    history, source = History({9: (0,)}, {9: (0,)}), History({7: (0, 1)}, {7: (1,)}, {0: (1, 7)}, {}, scaler_state(6))
    history.adopt_outcomes(source)
    assert history == History({9: (0,)}, {9: (0,), 7: (1,)}, {}, {}, scaler_state(6))
    assert History.from_json(history.to_json()) == history


@pytest.mark.amp
def test_the_state_outlives_a_round_without_trainers_and_changes_of_the_rate() -> None:
    history, numbers = History(), [{"lr": 0.1}, scaler_state(6)]
    history.add_round(7, (0,), (), None, numbers, keep=1)
    history.add_round(8, (), (), keep=1)
    assert history.scaler == scaler_state(6)
    history.add_round(9, (0,), (), None, [{"lr": 0.1}], keep=1)
    assert history.scaler is None
    assert Controls(rates={0: 0.5}).override_rates(numbers) == [{"lr": 0.5}, scaler_state(6)]
    assert divide_rates(numbers, 2) == [{"lr": 0.05}]
