"""A standby that is promoted has the bits of its leader, in memory and on its disk, and no file is read for it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Scope

from ps_protocol import routes
from ps_protocol.errors import StaleRun
from ps_protocol.membership import PserverRegistered
from ps_protocol.standbys import FenceStandby
from services.pserver.durable import disk, snapshots, storage, update_log
from services.pserver.durable.disk import Disk
from services.pserver.following import follower as following
from services.pserver.following import leader as leading

from ..durable.support import cut
from ..support import bench, failing, refused, until
from ..test_replication import KINDS, play, play_and_write
from .support import Standby, following_bench, promote

FENCE = FenceStandby(run="run1", attempt=0, incarnation=1)
PROMOTED = PserverRegistered(index=0, incarnation=2, lease_seconds=10)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_promoted_standby_has_the_bits_of_its_leader_and_restores_them(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"nonfinite": "skip_round", **KINDS[kind]}
    async with following_bench(tmp_path, **options) as (b, standby):
        await play(b, 1, 3)
        await standby.catch_up()
        with monkeypatch.context() as patch:
            for owner, name in (
                (snapshots, "read_file"),
                (storage, "replay_update"),
                (update_log, "read_records"),
                (disk.Disk, "find_place"),
            ):
                patch.setattr(owner, name, failing(AssertionError("a promotion reads no file")))
            promotion = promote(standby)
            other = await promotion.__aenter__()
        replies = []
        for one in (b, other):
            await play(one, 4, 8)
            replies.append(await one.get(0, one.run.round))
        assert other.run.shard.digest() == b.run.shard.digest()
        assert other.run.schedule.copy_history() == b.run.schedule.copy_history()
        assert other.run.storage.newest_update == b.run.storage.newest_update
        assert replies[0].rpartition(b"}")[2] == replies[1].rpartition(b"}")[2]
        digest, history = b.run.shard.digest(), b.run.schedule.copy_history()
        await promotion.__aexit__(None, None, None)
    own = Disk(tmp_path)
    own.open(0)
    assert (own.folder.path.name, own.previous_incarnation) == ("pserver-0-1", 2)
    own.close()
    async with bench(2, state_dir=tmp_path, incarnation=3, durability="log", **options) as again:
        assert (again.run.shard.digest(), again.run.schedule.copy_history()) == (digest, history)


async def test_the_first_version_of_a_promoted_standby_is_pulled_whole(tmp_path: Path) -> None:
    async with following_bench(tmp_path, **KINDS["deltas"]) as (b, standby):
        await standby.catch_up()
        await b.play_rounds(1, 3)
        await standby.catch_up()
        async with promote(standby) as other:
            delta, whole = [await one.get(0, 3, have=2) for one in (b, other)]
            assert len(whole) > len(delta)
            await other.play_round(4)
            assert len(await other.get(0, 4, have=3)) < len(whole)


@pytest.mark.parametrize("kind", ["clipped", "deltas"])
@pytest.mark.parametrize("is_torn", [False, True])
async def test_the_folder_of_a_standby_alone_restores_what_it_has_logged(
    tmp_path: Path, kind: str, is_torn: bool
) -> None:
    options = {"nonfinite": "skip_round", **KINDS[kind]}
    async with following_bench(tmp_path, **options) as (b, standby):
        await play(b, 1, 3)
        await standby.catch_up()
        await play(b, 4, 7)
        await standby.catch_up()
        newest = standby.replica.round
        if not is_torn:
            digest = b.run.shard.digest()
        [segment] = (standby.replica.storage.log.folder).glob("*.log")
    shutil.rmtree(tmp_path / "pserver-0")
    if is_torn:
        cut(segment)
    async with bench(2, state_dir=tmp_path, durability="log", **options) as again:
        if is_torn:
            assert again.run.shard.version == newest - 1
        else:
            assert (again.run.shard.version, again.run.shard.digest()) == (newest, digest)


async def test_a_standby_writes_snapshots_and_keeps_its_log_short(tmp_path: Path) -> None:
    async with following_bench(tmp_path, checkpoint_rounds=2, keep_checkpoints=1) as (b, standby):
        await standby.catch_up()
        for round_ in range(1, 8):
            await play_and_write(b, round_, round_)
            await standby.catch_up()
            await standby.replica.writer.wait_for_writes()
        assert standby.replica.storage.find_restorable() == [(4, 7)]
        digest = b.run.shard.digest()
    shutil.rmtree(tmp_path / "pserver-0")
    async with bench(2, state_dir=tmp_path, durability="log") as again:
        assert (again.run.shard.version, again.run.shard.digest()) == (7, digest)


async def test_a_torn_copy_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 2)
        await standby.catch_up()
        with monkeypatch.context() as patch:
            patch.setattr(snapshots, "write_file", failing(OSError("No space left on device")))
            standby.replica.chain = "0" * 32
            standby.name_leader(incarnation=2)
            b.run.installed = b.run.installed.model_copy(update={"incarnation": 2})
            await until(lambda: standby.has_failed("cannot write its copy of pserver 0: No space left"))
            assert standby.follower.replica is None
            other = Disk(tmp_path / "other")
            shutil.copytree(tmp_path / "pserver-0-1", tmp_path / "other" / "pserver-0")
            other.open(0)
            assert other.held is None
            other.close()
        await standby.catch_up()


async def test_an_update_that_cannot_be_logged_is_logged_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        replica = standby.replica
        log = replica.storage.log
        with monkeypatch.context() as patch:
            patch.setattr(log, "append_frame", failing(OSError("No space left on device")))
            await b.play_round(1)
            await until(lambda: standby.has_failed("cannot log an update of pserver 0: No space left"))
            assert (replica.round, log.tail.round) == (0, 0)
        await standby.catch_up()
        assert standby.replica is replica


# ---------------------------------------------------------------------- the fence


async def test_a_fence_is_answered_once_all_that_was_confirmed_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following_bench(tmp_path, durability="replicated") as (b, standby):
        await standby.catch_up()
        log, may_write = standby.replica.storage.log, threading.Event()
        append = log.append_frame

        def append_later(*args: Any) -> None:
            assert may_write.wait(10)
            append(*args)

        monkeypatch.setattr(log, "append_frame", append_later)
        monkeypatch.setattr("services.pserver.shard.shard.SMALL_ELEMENTS", 0)  # the write blocks its thread only
        await b.play_rounds(1, 2)
        await until(lambda: standby.confirmed and standby.confirmed[-1].round == 2)
        fence = asyncio.create_task(standby.promotion.fence(FENCE))
        await until(lambda: standby.follower.is_fenced)
        assert (fence.done(), standby.replica.round) == (False, 0)
        may_write.set()
        assert (await fence).held.rounds.applied == 2


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_a_comparison_with_a_lost_leader_keeps_what_was_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(following, "COMPARED_UPDATES", 1)
    comparing, may_end = asyncio.Event(), asyncio.Event()

    async def read_digests(*_: Any) -> Any:
        comparing.set()
        await may_end.wait()
        raise httpx.ReadError("the leader has died")

    async with following_bench(tmp_path, durability="replicated") as (b, standby):
        await standby.catch_up()
        monkeypatch.setattr(leading.Leader, "read_digests", read_digests)
        await b.play_round(1)
        await comparing.wait()
        await b.play_round(2)
        await until(lambda: standby.confirmed[-1].round == 2)
        if how == "dies":
            may_end.set()
        assert (await asyncio.wait_for(standby.promotion.fence(FENCE), 1)).held.rounds.applied == 2


async def test_a_standby_that_cannot_log_what_it_has_confirmed_refuses_the_fence_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_confirmed = threading.Event()

    def fail(*_: Any) -> None:
        assert is_confirmed.wait(10)
        raise OSError("No space left on device")

    monkeypatch.setattr("services.pserver.shard.shard.SMALL_ELEMENTS", 0)  # the write blocks its thread only
    async with following_bench(tmp_path, durability="replicated") as (b, standby):
        await standby.catch_up()
        with monkeypatch.context() as patch:
            patch.setattr(standby.replica.storage.log, "append_frame", fail)
            await b.play_round(1)
            await until(lambda: standby.confirmed and standby.confirmed[-1].round == 1)
            is_confirmed.set()
            await until(lambda: sum("No space left" in failure for failure in standby.failures) > 2)
            assert [held.round for held in standby.confirmed].count(1) == 1  # not again before it has written one
            late = await refused("not_ready", standby.promotion.fence(FENCE))
            assert "lacks an update that it has confirmed" in str(late)
        assert (await standby.promotion.fence(FENCE)).held.rounds.applied == 1
        lead_again(standby, 2)  # the leader has not died
        await standby.catch_up()


async def test_a_fenced_standby_confirms_and_applies_nothing_until_a_later_incarnation_is_named(tmp_path: Path) -> None:
    async with following_bench(tmp_path, durability="replicated") as (b, standby):
        await standby.catch_up()
        await b.play_rounds(1, 2)
        await standby.catch_up()
        await until(lambda: standby.confirmed and standby.confirmed[-1].round == 2)
        request = await standby.promotion.fence(FENCE)
        assert (request.instance, request.index, request.previous) == (standby.pserver.instance, 0, 1)
        assert request.held.rounds.applied == 2
        num_confirmed = len(standby.confirmed)
        await b.play_rounds(3, 4)
        await until(lambda: standby.has_failed("incarnation 1 of pserver 0 is fenced"))
        standby.name_leader()
        assert await standby.promotion.fence(FENCE) == request
        assert (standby.replica.round, len(standby.confirmed)) == (2, num_confirmed)
        lead_again(standby, 2)
        await standby.catch_up()
        await until(lambda: standby.confirmed[-1].round == 4)
        assert standby.count("copies") == 1
        late = await refused("stale_pserver", standby.promotion.fence(FENCE))
        assert late.facts["current"] == 2
        await refused("stale_pserver", standby.promotion.promote(PROMOTED))


def lead_again(standby: Standby, incarnation: int) -> None:
    """Name the next incarnation of the leader, which continues its run."""
    run = standby.b.run
    run.installed = run.installed.model_copy(update={"incarnation": incarnation})
    standby.name_leader(incarnation=incarnation)


async def test_a_replica_is_of_another_incarnation_once_its_stream_is_accepted(tmp_path: Path) -> None:
    is_refused = True

    def pretend(scope: Scope, message: Message) -> Message:
        is_answer = scope["path"] == routes.UPDATES and message["type"] == "http.response.start"
        return {**message, "headers": [(b"gradpost-incarnation", b"3")]} if is_answer and is_refused else message

    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        await b.play_round(1)
        await standby.catch_up()
        standby.change = pretend
        lead_again(standby, 2)
        await until(lambda: standby.has_failed("the pserver has another incarnation now (expected 2; actual 3)"))
        assert (await standby.promotion.fence(FENCE)).previous == 1
        is_refused = False
        await until(lambda: standby.replica.installed.incarnation == 2)
        request = await standby.promotion.fence(FENCE.model_copy(update={"incarnation": 2}))
        assert request.previous == 2


async def test_a_fenced_replica_without_the_updates_of_a_later_incarnation_is_copied_again(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_round(1)
        await standby.catch_up()
        await standby.promotion.fence(FENCE)
        standby.replica.chain = "0" * 32  # of an update that the leader does not have
        lead_again(standby, 2)
        await until(lambda: standby.count("copies") == 2)
        await standby.catch_up()


async def test_a_fence_waits_for_the_update_that_may_be_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.pserver.shard.shard.SMALL_ELEMENTS", 0)  # the compute thread applies updates
    async with following_bench(tmp_path, durability="replicated") as (b, standby):
        await standby.catch_up()
        apply, go = standby.replica.apply, asyncio.Event()

        async def apply_later(*arguments: Any) -> None:
            await go.wait()
            await apply(*arguments)

        monkeypatch.setattr(standby.replica, "apply", apply_later)
        await b.play_round(1)
        await until(lambda: standby.confirmed and standby.confirmed[-1].round == 1)
        fencing = asyncio.create_task(standby.promotion.fence(FENCE))
        await asyncio.sleep(0)
        assert not fencing.done()
        go.set()
        request = await fencing
        assert request.held.rounds.applied == 1


@pytest.mark.parametrize("change", [{"run": "run2"}, {"attempt": 1}])
async def test_a_fence_of_another_run_changes_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        await refused("not_ready", standby.promotion.fence(FENCE.model_copy(update=change)))
        await refused("stale_pserver", standby.promotion.promote(PROMOTED))  # without a fence
        await b.play_round(1)
        await standby.catch_up()
        assert not standby.failures


async def test_a_standby_without_a_replica_cannot_be_fenced(tmp_path: Path) -> None:
    async with following_bench(tmp_path, initial=False) as (_, standby):
        await refused("not_ready", standby.promotion.fence(FENCE))
        await refused("not_ready", standby.promotion.promote(PROMOTED))


async def test_a_promotion_is_repeated_without_effect(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_round(1)
        await standby.catch_up()
        async with promote(standby) as other:
            await other.play_round(2)
            await standby.promotion.promote(PROMOTED)
            assert standby.promoted == [PROMOTED]
            await other.play_round(3)
            await refused("stale_pserver", standby.promotion.promote(PROMOTED.model_copy(update={"incarnation": 3})))
            await refused("stale_pserver", standby.promotion.fence(FENCE))
            assert other.run.round == 3


async def test_a_promotion_that_meets_a_full_disk_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_round(1)
        await standby.catch_up()
        request = await standby.promotion.fence(FENCE)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write_file", failing(OSError("No space left on device")))
            await refused("storage_failed", standby.promotion.promote(PROMOTED))
        assert (await standby.promotion.fence(FENCE), standby.follower.is_released) == (request, False)
        async with promote(standby) as other:
            assert (other.run.round, standby.pserver.disk.previous_incarnation) == (1, 2)
            await other.play_round(2)


async def test_a_promoted_standby_goes_back_to_the_rounds_of_its_own_files(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 2)
        digest = b.run.shard.digest()
        await standby.catch_up()
        await b.play_rounds(3, 6)
        await standby.catch_up()
        await standby.promotion.fence(FENCE)
        await standby.promotion.promote(PROMOTED)
        await standby.stop()
        pserver = standby.pserver
        [(first, last)] = await pserver.find_restorable("run1", 2)  # from the copy and the log
        assert (first <= 2, last) == (True, 6)
        install = b.install.model_copy(update={"incarnation": 2, "restore": 2, "attempt": 1, "number": 5})
        await pserver.install_run(install)
        assert (pserver.run.shard.version, pserver.run.shard.digest()) == (2, digest)
        await pserver.run.close(StaleRun("the test is over"))


# ---------------------------------------------------------------------- confirmations


async def test_a_confirmation_that_fails_is_sent_again(tmp_path: Path) -> None:
    async with following_bench(tmp_path, durability="replicated") as (_, standby):

        async def fail() -> int:
            return 503

        standby.answers += [fail, fail]
        await until(lambda: len(standby.confirmed) == 3)


async def test_a_fence_ends_the_stream_and_the_repetition_of_a_confirmation(tmp_path: Path) -> None:
    async with following_bench(tmp_path, durability="replicated") as (_, standby):
        go = asyncio.Event()

        async def fail_later() -> int:
            await go.wait()
            return 503

        standby.answers.append(fail_later)
        await until(lambda: standby.confirmed)
        await standby.promotion.fence(FENCE)
        go.set()
        await until(lambda: standby.has_failed("incarnation 1 of pserver 0 is fenced"))  # later than the repetition
        assert len(standby.confirmed) == 1


async def test_a_standby_can_be_stopped_while_an_update_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        with monkeypatch.context() as patch:
            patch.setattr(standby.replica, "apply", failing(MemoryError()))
            await b.play_round(1)
            await until(lambda: standby.follower.replica is None)
        async with asyncio.timeout(5):
            await standby.stop()
