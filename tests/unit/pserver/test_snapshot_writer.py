"""Snapshots keep the log of a pserver short; those of named rounds are published one after another."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import TryAgain
from ps_protocol.membership import WantCheckpoint
from ps_protocol.messages import PserverHeartbeatReply
from services.pserver.durable import storage as run_storage
from services.pserver.durable.snapshot_writer import Publisher
from services.pserver.durable.update_log import list_segments
from services.pserver.inspection import make_heartbeat
from services.runtime.checkpoints import list_rounds, read_shard_file
from services.runtime.storage import LocalStorage

from .support import Bench, bench, failing

LOGGED: Any = {"durability": "log", "checkpoint_rounds": 100}


class SlowPlace:
    """A shared storage that copies only when it may, and remembers what it has copied at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_copy = threading.Event()
        self.copying: list[Path] = []
        self.copied: list[Path] = []
        patch.setattr(Publisher, "_copy", lambda _, path, name: self.copy(path))

    def copy(self, path: Path) -> None:
        self.copying.append(path)
        assert len(self.copying) == 1
        assert self.may_copy.wait(20)
        self.copying.remove(path)
        self.copied.append(path)


def want(b: Bench, round_: int, *, is_over: bool = False) -> asyncio.Task[None]:
    message = WantCheckpoint(run=b.install.run, round=round_, is_over=is_over)
    return asyncio.create_task(b.pserver.want_checkpoint(message))


def published(b: Bench) -> int | None:
    file = make_heartbeat(b.pserver).published
    return None if file is None else file.round


def coming(b: Bench) -> tuple[int, ...]:
    return make_heartbeat(b.pserver).coming_checkpoints


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_named_snapshot_is_published_where_the_coordinator_finds_it(tmp_path: Path, is_shared: bool):
    if is_shared:
        (tmp_path / "coordinator").mkdir()
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        await want(b, 2)
        await b.play_rounds(1, 3)
        await b.wait_until_published()
        file = make_heartbeat(b.pserver).published
        place = LocalStorage(tmp_path / "checkpoints")
        assert (file.round, list_rounds(place, "run1")) == (2, [2, 0] if is_shared else [])
        if is_shared:
            assert read_shard_file(place, "run1", file) == b.run.storage.read_snapshot(2)


@pytest.mark.parametrize("step", ["write", "publish"])
async def test_one_that_fails_is_made_again_on_request(tmp_path, monkeypatch, step):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        await b.play_round(1)
        with monkeypatch.context() as patch:
            error = failing(OSError("no space left on device"))
            patch.setattr(*((run_storage, "write_file", error) if step == "write" else (Publisher, "_copy", error)))
            await want(b, 1, is_over=True)
            await b.wait_until_published()
        assert (published(b), b.metric("gradpost_checkpoint_failures_total")) == (0, 1)
        await want(b, 1, is_over=True)
        await b.wait_until_published()
        assert published(b) == 1


async def test_a_repeated_request_publishes_once_and_another_one_is_retried(tmp_path, monkeypatch):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        place = SlowPlace(monkeypatch)
        await b.play_round(1)
        await asyncio.gather(*(want(b, 1) for _ in range(3)))
        with pytest.raises(TryAgain, match="the checkpoint of round 1 is being written"):
            await want(b, 2)
        assert coming(b) == (1,)
        place.may_copy.set()
        await b.wait_until_published()
        await want(b, 1)
        assert (published(b), coming(b), len(place.copied)) == (1, (), 1)
        assert b.metric("gradpost_checkpoint_failures_total") == 0


async def test_of_several_rounds_that_are_named_the_last_one_counts(tmp_path: Path):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        for named in (2, 5, 3):
            await want(b, named)
        assert coming(b) == (3,)
        await b.play_rounds(1, 5)
        await b.wait_until_published()
        assert (published(b), coming(b), b.run.storage.rounds) == (3, (), [3, 0])


@pytest.mark.parametrize("place_hangs", [False, True])
async def test_without_named_rounds_and_beside_a_storage_that_hangs_the_log_stays_short(
    tmp_path: Path, monkeypatch, place_hangs: bool
):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        place = SlowPlace(monkeypatch)
        if place_hangs:
            await want(b, 2)
        for round_ in range(1, 31):
            await b.play_round(round_)
            await b.run.writer.wait_for_writes()
        assert b.run.storage.rounds == [30, 28, 26]
        assert [segment.base for segment in list_segments(tmp_path / "pserver-0" / "log")] == [26, 28, 30]
        assert (published(b), coming(b)) == (0, (2,) if place_hangs else ())
        digest = b.run.shard.digest()
        place.may_copy.set()
        await b.wait_until_published()
    async with bench(state_dir=tmp_path, durability="log", incarnation=2) as b:
        assert (b.run.round, b.run.shard.digest()) == (30, digest)


async def test_a_log_that_reaches_its_limit_in_bytes_is_reported_and_shortened(tmp_path: Path):
    async with bench(state_dir=tmp_path, **LOGGED, max_log_bytes=16_000) as b:
        sizes = []
        for round_ in range(1, 41):
            await b.play_round(round_)
            await b.run.writer.wait_for_writes()
            sizes.append(b.run.storage.log.num_bytes)
            assert make_heartbeat(b.pserver).is_log_long == (sizes[-1] >= 8000)
        assert 8000 < max(sizes) < 16_000
        assert len(b.run.storage.rounds) > 1
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        await b.play_round(41)
        assert not make_heartbeat(b.pserver).is_log_long  # without a limit


async def test_a_run_that_is_over_keeps_no_log(tmp_path: Path):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        await b.play_rounds(1, 3)
        await want(b, 3, is_over=True)
        await b.wait_until_published()
        for complete in ((2, 0), (3, 2)):
            b.pserver.handle_heartbeat_reply(PserverHeartbeatReply(complete=complete), make_heartbeat(b.pserver))
            await b.run.stop()
            logs = (tmp_path / "pserver-0" / "log").glob("*.log")
            assert (sum(path.stat().st_size for path in logs) > 0) == (complete == (2, 0))
        assert b.run.storage.rounds == [3]
        digest = b.run.shard.digest()
    async with bench(state_dir=tmp_path, durability="log", incarnation=2) as b:
        assert (b.run.round, b.run.shard.digest()) == (3, digest)
