"""A synchronous run on one pserver: what it counts, answers and refuses, and how each wait ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict, NotReady, RoundPending, RoundTimeout, StalePserver, StaleRun, TrainerLost
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.membership import Controls, Membership, PserverRegistered
from ps_protocol.requests import (
    BARRIER_HEADER,
    MAX_WAIT_SECONDS,
    SKIPPED_KEY,
    VERDICT_HEADER,
    WAIT_HEADER,
    Pull,
)
from ps_protocol.vocabulary import BufferSpec
from services.pserver.durable.update_log import UpdateLog
from services.pserver.inspection import make_heartbeat
from services.pserver.run import sync_run
from services.pserver.shard import reply as reply_module

from ...raising import raises_code
from .support import (
    Bench,
    Upload,
    begin_push,
    bench,
    decode,
    encode,
    failing,
    hold,
    initial_values,
    keep_busy,
    refused,
    unchanged,
    until,
)

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


async def test_the_end_of_an_abandoned_change_of_members_applies_nothing():
    async with bench() as b:
        for rank in (0, 1):
            await b.push(rank, 1)
        await b.barrier(0, 1)
        await b.freeze(2)
        with pytest.raises(RoundPending, match="the coordinator, in the middle of a change of members"):
            await b.get(0, 1, wait_seconds=0)
        await b.barrier(1, 1)  # is held
        assert (await b.freeze(3)).counted == {1: (0,)}
        await b.change_members(2, {0: 1, 1: 1})
        assert b.run.schedule.is_frozen
        await refused("conflict", b.freeze(2))
        await b.change_members(3, {0: 1, 1: 1})
        assert await b.get(0, 1)
        assert b.run.schedule.history.participants == {1: (0, 1)}


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


@pytest.mark.parametrize("max_delay", [0, 1])
async def test_a_reply_keeps_its_bytes_while_it_is_read(max_delay: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reply_module, "LARGE_BYTES", 1)  # the values are borrowed, as those of a large shard
    async with bench(consistency=Consistency(max_delay=max_delay)) as b:
        reply = await b.run.get(b.fence(0, 0), Pull(0, wait_seconds=1))
        before = b"".join(reply.parts)
        with reply.reading():
            for rank in (0, 1):
                await b.push(rank, 1)
                await b.barrier(rank, 1)
            await asyncio.sleep(0.05)
            assert b"".join(reply.parts) == before
        assert decode(await b.get(0, 1))[1]["round"] == "1"


async def test_a_get_may_carry_the_contribution_and_its_barrier():
    async def step(
        b: Bench, rank: int, round_: int, blocks: Any = None, verdict: str = "finite", **metadata: str
    ) -> bytes:
        body = encode(b.contribution(rank, round_) if blocks is None else blocks, {**b.completion(), **metadata})
        headers = {WAIT_HEADER: "10", BARRIER_HEADER: "batch", VERDICT_HEADER: verdict, "content-type": CONTENT_TYPE}
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
        for reply in await asyncio.gather(step(b, 0, 1), step(b, 1, 1, verdict="nonfinite")):
            assert json.loads(decode(reply)[1][SKIPPED_KEY]) == [1]


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


@pytest.mark.parametrize(("endpoint", "num_pieces"), [("push", 1), ("push", 4), ("initial", 4)])
async def test_a_client_that_goes_away_in_its_body_changes_nothing_and_returns_the_buffer(endpoint, num_pieces):
    async with bench(initial=endpoint == "push") as b:
        body = encode(b.contribution(0, 1), b.completion())
        upload = Upload(body[: len(body) // 2], num_pieces=num_pieces, ends=False)
        round_ = 1 if endpoint == "push" else 0
        await unchanged(b, "malformed_frame", b.call(endpoint, b.fence(0, round_), body, upload=upload))
        assert await b.settle_used_bytes(0) == 0


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


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("nonfinite", "values"),
    [
        pytest.param("reject", (float("-inf"), 0.0), id="not checked by its client"),
        pytest.param("skip_round", (3e38, 3e38), id="overflow of the sum"),
    ],
)
async def test_a_sum_that_is_not_finite_fails_the_run_before_it_is_logged(
    tmp_path: Path, nonfinite: str, values: tuple[float, float], max_grad_norm: float | None
) -> None:
    settings: dict[str, Any] = {"nonfinite": nonfinite, "max_grad_norm": max_grad_norm}
    settings |= {"state_dir": tmp_path, "durability": "log"}
    async with bench(**settings) as b:
        digest = b.run.shard.digest()
        for rank, value in enumerate(values):
            blocks = b.contribution(rank, 1)
            blocks["p2.block0"][63] = value
            await b.push(rank, 1, blocks)
            await b.barrier(rank, 1)
        with raises_code("non_finite_update", match=r"in the update of block 'p2.block0'"):
            await (b.get(0, 1) if max_grad_norm is None else b.norm(0, 1))
        assert b.run.shard.digest() == digest
        assert b.run.failure.code == "non_finite_update"
    async with bench(incarnation=2, **settings) as b:
        assert b.run.round == 0


async def test_round_timeout_names_the_missing_trainer():
    async with bench(patience_seconds=0.1) as b:
        await b.push(0, 1)
        begin = asyncio.get_running_loop().time()
        with pytest.raises(RoundTimeout, match=r"trainer 1 did not reach the batch barrier of round 1") as caught:
            await b.get(0, 1, wait_seconds=20, with_barrier=True)
        assert caught.value.facts == {"missing": [1], "round": 1}
        assert 0.1 <= asyncio.get_running_loop().time() - begin < 2
        # A late trainer is let in: the coordinator alone ends a run.
        await b.push(1, 1)
        await b.barrier(1, 1)
        assert decode(await b.get(0, 1))[1]["round"] == "1"


async def test_round_timeout_names_the_trainer_that_owes_the_initial_values():
    async with bench(initial=False, patience_seconds=0.6) as b:
        with pytest.raises(NotReady, match="initial values") as pending:
            await b.get(1, 0, wait_seconds=0.01)
        assert pending.value.facts == {"waiting_for": "trainer 0"}
        await unchanged(b, "not_ready", b.push(0, 1))
        await asyncio.sleep(0.4)
        value = initial_values()["p0"]
        await b.call("initial", b.fence(0, 0), encode({"p0.block0": value}))  # it is slow, but it goes on
        with pytest.raises(NotReady):
            await b.get(1, 0, wait_seconds=0.4)
        with pytest.raises(RoundTimeout, match="trainer 0") as caught:
            await b.get(1, 0, wait_seconds=20)
        assert caught.value.facts["missing"] == [0]


async def test_a_failure_installed_by_the_coordinator_wakes_all_waiters():
    async with bench(3) as b:
        for rank in (0, 1):
            await b.push(rank, 1)
        gets = [asyncio.create_task(b.get(rank, 1, with_barrier=True)) for rank in (0, 1)]
        await asyncio.sleep(0)
        gets.append(asyncio.create_task(b.get(0, 1, names=["p1.block0"])))
        await asyncio.sleep(0.01)
        failure = TrainerLost("trainer 2 was lost", ranks=[2]).to_problem()
        begin = asyncio.get_running_loop().time()
        await b.change_members(2, {0: 1, 1: 1}, failure=failure)
        errors = await asyncio.gather(*gets, return_exceptions=True)
        assert asyncio.get_running_loop().time() - begin < 1
        assert [(e.code, str(e)) for e in errors] == [("trainer_lost", "trainer 2 was lost")] * 3
        assert len(set(map(id, errors))) == 3  # one shared exception would keep the frames of all requests
        for request in (b.push(1, 1), b.barrier(1, 1), b.get(1, 0), b.call("initial", b.fence(0, 0), encode({}))):
            await unchanged(b, "trainer_lost", request)
        assert b.run.failure.__traceback__ is None  # it would keep the requests' memory
        await b.change_members(3, {}, failure=TrainerLost("trainer 0 was lost").to_problem())
        with pytest.raises(TrainerLost, match="trainer 2"):  # the first failure stands
            await b.get(0, 1)


@pytest.mark.parametrize("code", ["stale_trainer", "stale_run"])
async def test_a_get_ends_when_its_trainer_is_removed_or_its_run_replaced(code):
    async with bench() as b:
        await b.push(1, 1)
        get = asyncio.create_task(b.get(1, 1, with_barrier=True))
        await asyncio.sleep(0.01)
        await (b.change_members(2, {0: 1}) if code == "stale_trainer" else b.install_next_run())
        await asyncio.wait_for(refused(code, get), 1)
        del get
        assert await b.settle_used_bytes(0) == 0


async def test_a_late_installation_of_a_replaced_run_does_not_bring_it_back():
    async with bench() as b:
        await b.install_next_run()
        with pytest.raises(StaleRun):
            await b.pserver.install_run(b.install)
        assert b.run.installed.run == "run2"
        with pytest.raises(StalePserver):
            await b.install_next_run("run3", incarnation=9)
        assert b.run.installed.run == "run2"


async def test_the_same_installation_again_changes_nothing_but_brings_newer_members():
    async with bench() as b:
        await b.push(0, 1)
        digest = await b.digest()
        await b.pserver.install_run(b.install)
        assert await b.digest() == digest
        await b.pserver.install_run(b.install.model_copy(update={"number": 9, "membership": Membership({0: 1})}))
        assert b.run.schedule.members == {0: 1}
        other = replace(b.install.plan, buffers=(BufferSpec("mean", (2,), "F32", 0),))
        with pytest.raises(Conflict):
            await b.pserver.install_run(b.install.model_copy(update={"plan": other}))
        await b.change_members(9, {0: 1, 1: 1})  # the number came with the installation
        assert b.run.schedule.members == {0: 1}


async def test_a_round_of_a_paused_run_waits_for_an_administrator_and_for_no_trainer():
    async with bench(patience_seconds=0.1) as b:
        await b.freeze(2)
        await b.change_members(2, {0: 1, 1: 1}, controls=(Controls(since=1, is_paused=True),))
        for rank in (0, 1):
            await b.push(rank, 1)
            await b.barrier(rank, 1)
        refusal = await refused("round_pending", b.get(0, 1, wait_seconds=0.2))
        assert refusal.text == "round 1 waits for an administrator, who has paused the run"
        assert b.run.late == ((), 0.0)
        await b.freeze(3)
        await b.change_members(3, {0: 1, 1: 1})
        assert decode(await b.get(0, 1))[1]["round"] == "1"


async def test_an_apply_that_fails_ends_every_wait():
    async with bench() as b:
        b.run.shard.apply = failing(RuntimeError("out of memory"))
        await b.push(0, 1)
        await b.push(1, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        await asyncio.sleep(0.01)
        await b.barrier(1, 1)
        with raises_code("apply_failed", match=r"pserver 0 failed in round 1: out of memory"):
            await asyncio.wait_for(get, 2)
        with raises_code("apply_failed"):
            await b.push(0, 2)
        assert b.run.schedule.applying is not None  # no checkpoint is made of it


async def test_a_round_that_cannot_be_logged_is_not_stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(2, state_dir=tmp_path, durability="log") as b:
        digest = b.run.shard.digest()
        with monkeypatch.context() as patch:
            patch.setattr(UpdateLog, "append", failing(OSError("No space left on device")))
            for rank in (0, 1):
                await b.push(rank, 1)
                await b.barrier(rank, 1)
            refusal = await refused("round_pending", b.get(0, 1, wait_seconds=0.1))
            assert refusal.text == "round 1 waits for the disk of pserver 0: No space left on device"
            assert b.run.shard.digest() == digest
        assert decode(await b.get(0, 1))[1]["round"] == "1"


@pytest.mark.parametrize(
    ("what", "refusal"), [("append", "log round 1"), ("begin_segment", "begin a snapshot after round 1")]
)
async def test_a_log_that_hangs_is_reported_and_fails_the_run_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, refusal: str
) -> None:
    monkeypatch.setattr(sync_run, "STALLED_SECONDS", 0.0)
    options: dict[str, Any] = {"durability": "log", "patience_seconds": 0.2, "checkpoint_rounds": 1}
    async with bench(2, state_dir=tmp_path, **options) as b:
        _, may_go_on = hold(monkeypatch, UpdateLog, what)
        for rank in (0, 1):
            await b.push(rank, 1)
        get = asyncio.create_task(b.get(0, 1, with_barrier=True))
        assert not make_heartbeat(b.pserver).is_stalled
        await b.barrier(1, 1)
        await until(lambda: make_heartbeat(b.pserver).is_stalled)
        with raises_code("storage_failed", match=f"cannot {refusal}: the disk does not answer"):
            await get
        may_go_on.set()
