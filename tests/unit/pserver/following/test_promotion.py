"""A promoted standby has the bits of its leader, in memory and on its disk; its reports decide when it leads again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Scope

from ps_protocol import routes
from ps_protocol.errors import Conflict, Forbidden, GradpostError, StorageFailed, Unauthenticated
from ps_protocol.membership import PserverRegistered
from ps_protocol.routes import REGISTER_PSERVER
from ps_protocol.standbys import FenceStandby, StandbyAnswer
from services.pserver import registration
from services.pserver.durable import disk, storage, update_log
from services.pserver.durable.disk import Disk, StateFolder
from services.pserver.registration import Registration
from services.pserver.run import sync_run
from services.pserver.settings import PserverSettings

from ..support import bench, failing, refused, until
from ..test_replication import KINDS, play
from .support import Standby, following_bench, promote

FENCE = FenceStandby(run="run1", attempt=0, incarnation=1)
PROMOTED = PserverRegistered(index=0, incarnation=2, lease_seconds=10)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_promoted_standby_has_the_bits_of_its_leader_and_restores_them(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_run, "DIGEST_ROUNDS", 2)
    options = {"nonfinite": "skip_round", **KINDS[kind]}
    async with following_bench(tmp_path, **options) as (b, standby):
        await standby.catch_up()
        await play(b, 1, 5)
        await standby.catch_up()
        assert (standby.count("copies"), standby.count("differences")) == (1, 0)
        with monkeypatch.context() as patch:
            for owner, name in (
                (storage, "read_file"),
                (storage, "replay_update"),
                (update_log, "read_records"),
                (disk.Disk, "find_place"),
            ):
                patch.setattr(owner, name, failing(AssertionError("a promotion reads no file")))
            promotion = promote(standby)
            other = await promotion.__aenter__()
        replies = []
        for one in (b, other):
            await play(one, 6, 8)
            replies.append(await one.get(0, one.run.round))
        assert other.run.shard.digest() == b.run.shard.digest()
        assert other.run.schedule.copy_history() == b.run.schedule.copy_history()
        assert other.run.storage.log.tail[::3] == b.run.storage.log.tail[::3]  # round and chain
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
        fence = asyncio.create_task(standby.pserver.fence(FENCE))
        await until(lambda: standby.follower.is_fenced)
        assert (fence.done(), standby.replica.round) == (False, 0)
        may_write.set()
        assert (await fence).held.rounds.applied == 2


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
            late = await refused("not_ready", standby.pserver.fence(FENCE))
            assert "lacks an update that it has confirmed" in str(late)
        assert (await standby.pserver.fence(FENCE)).held.rounds.applied == 1
        lead_again(standby, 2)  # the leader has not died
        await standby.catch_up()


async def test_a_fenced_standby_confirms_and_applies_nothing_until_a_later_incarnation_is_named(tmp_path: Path) -> None:
    async with following_bench(tmp_path, durability="replicated") as (b, standby):
        await standby.catch_up()
        await b.play_rounds(1, 2)
        await standby.catch_up()
        await until(lambda: standby.confirmed and standby.confirmed[-1].round == 2)
        request = await standby.pserver.fence(FENCE)
        assert (request.instance, request.index, request.previous) == (standby.pserver.instance, 0, 1)
        assert request.held.rounds.applied == 2
        num_confirmed = len(standby.confirmed)
        await b.play_rounds(3, 4)
        await until(lambda: standby.has_failed("incarnation 1 of pserver 0 is fenced"))
        standby.name_leader()
        assert await standby.pserver.fence(FENCE) == request
        assert (standby.replica.round, len(standby.confirmed)) == (2, num_confirmed)
        lead_again(standby, 2)
        await standby.catch_up()
        await until(lambda: standby.confirmed[-1].round == 4)
        assert standby.count("copies") == 1
        late = await refused("stale_pserver", standby.pserver.fence(FENCE))
        assert late.facts["current"] == 2
        await refused("stale_pserver", standby.pserver.promote(PROMOTED))


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
        assert (await standby.pserver.fence(FENCE)).previous == 1
        is_refused = False
        await until(lambda: standby.replica.installed.incarnation == 2)
        request = await standby.pserver.fence(FENCE.model_copy(update={"incarnation": 2}))
        assert request.previous == 2


@pytest.mark.parametrize("change", [{"run": "run2"}, {"attempt": 1}])
async def test_a_fence_of_another_run_changes_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        await refused("not_ready", standby.pserver.fence(FENCE.model_copy(update=change)))
        await refused("stale_pserver", standby.pserver.promote(PROMOTED))  # without a fence
        await b.play_round(1)
        await standby.catch_up()
        assert not standby.failures


async def test_a_standby_without_a_replica_cannot_be_fenced(tmp_path: Path) -> None:
    async with following_bench(tmp_path, initial=False) as (_, standby):
        await refused("not_ready", standby.pserver.fence(FENCE))
        await refused("not_ready", standby.pserver.promote(PROMOTED))


async def test_a_promotion_is_repeated_without_effect(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_round(1)
        await standby.catch_up()
        standby.name_leader(round=99)
        assert standby.follower.lag.rounds == 98
        async with promote(standby) as other:
            assert standby.follower.lag.rounds == 0  # for the metrics, which remain
            await other.play_round(2)
            await standby.pserver.promote(PROMOTED)
            assert standby.pserver.promoted == PROMOTED
            await other.play_round(3)
            await refused("stale_pserver", standby.pserver.promote(PROMOTED.model_copy(update={"incarnation": 3})))
            await refused("stale_pserver", standby.pserver.fence(FENCE))
            assert other.run.round == 3


async def test_a_promotion_that_meets_a_full_disk_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_round(1)
        await standby.catch_up()
        request = await standby.pserver.fence(FENCE)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write_file", failing(OSError("No space left on device")))
            await refused("storage_failed", standby.pserver.promote(PROMOTED))
        assert (await standby.pserver.fence(FENCE), standby.follower.is_released) == (request, False)
        async with promote(standby) as other:
            assert (other.run.round, standby.pserver.disk.previous_incarnation) == (1, 2)
            await other.play_round(2)


# ---------------------------------------------------------------------- confirmations


LEASE = 0.2
LOST: dict[str, Any] = {"incarnation": 2}


async def report(folder: Path, *answers: dict[str, Any] | GradpostError) -> tuple[bool, int]:
    """Send reports, which get these answers in turn, for 2 s. Returns whether the standby leads again, and its code."""
    num_reports, stop, leads = 0, asyncio.Event(), asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_reports
        if request.url.path == REGISTER_PSERVER:
            leads.set()
            stop.set()
            return httpx.Response(503)
        num_reports += 1
        fields = answers[(num_reports - 1) % len(answers)]
        if isinstance(fields, GradpostError):
            return httpx.Response(400, json=fields.to_problem())
        return httpx.Response(200, content=StandbyAnswer(lease_seconds=LEASE, **fields).model_dump_json())

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        standby = Standby(None, "", http, folder)  # type: ignore[arg-type]
        own = Registration(
            standby.pserver, PserverSettings(state_dir=folder, follow=0), http, lambda _: standby.follower
        )
        begun = asyncio.get_running_loop().time()
        task = asyncio.create_task(own.run(stop))
        await asyncio.wait({task}, timeout=2)
        if leads.is_set():
            assert asyncio.get_running_loop().time() - begun > LEASE + registration.FAIL_OVER_SECONDS
            assert standby.pserver.instance != standby.follower.instance
        stop.set()
        await task
        await standby.close()
    return leads.is_set(), own.exit_code


@pytest.mark.parametrize(
    ("incarnation", "locked", "answers", "leads"),
    [
        (2, False, [LOST], True),
        (1, False, [LOST], False),  # of an earlier leader
        (2, True, [LOST], False),  # its process lives
        (2, False, [{}], False),  # the pserver lives, or was never promoted
        (2, False, [LOST, {}], False),
        (2, False, [LOST, {"leader": "http://pserver:1", "incarnation": 2}], False),
    ],
)
async def test_which_standby_leads_again(
    tmp_path: Path,
    incarnation: int,
    locked: bool,
    answers: list[dict[str, Any]],
    leads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "FAIL_OVER_SECONDS", 0.2)
    monkeypatch.setattr(registration, "RETRY_SECONDS", 0.05)
    StateFolder(tmp_path, 0).close()
    folder = StateFolder(tmp_path, 0, 1)
    folder.write_identity(incarnation, None)
    if not locked:
        folder.close()
    assert await report(tmp_path, *answers) == (leads, 0)


@pytest.mark.parametrize(
    ("patience", "error", "exit_code"),
    [
        (1.0, Unauthenticated("no valid token"), 0),  # a new token reached the coordinator first
        (0.3, Unauthenticated("no valid token"), 1),
        (0.3, Forbidden("the scope is too narrow"), 1),
        (1.0, StorageFailed("the disk of the coordinator is full"), 0),
        (1.0, Conflict("there is no such pserver", code="world_mismatch"), 1),
    ],
)
async def test_which_answers_end_a_standby(
    tmp_path: Path, patience: float, error: GradpostError, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "TOKEN_WAIT_SECONDS", patience)
    monkeypatch.setattr(registration, "RETRY_SECONDS", 0.1)
    assert (await report(tmp_path, {}, *[error] * 8))[1] == exit_code
