"""Snapshots keep the log of a pserver short; those of named rounds are published one after another."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import StaleRun, TryAgain
from ps_protocol.membership import Membership, WantCheckpoint
from ps_protocol.messages import PserverHeartbeatReply
from services.pserver.durable import snapshots
from services.pserver.durable.snapshot_writer import Publisher
from services.pserver.durable.update_log import list_segments
from services.runtime.checkpoints import list_rounds, read_shard_file
from services.runtime.storage import LocalStorage

from .support import Bench, bench, encode, failing, hold, initial_values, until

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
    file = b.pserver.make_heartbeat().published
    return None if file is None else file.round


def coming(b: Bench) -> tuple[int, ...]:
    return b.pserver.make_heartbeat().coming_checkpoints


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_named_snapshot_is_published_where_the_coordinator_finds_it(tmp_path: Path, is_shared: bool):
    if is_shared:
        (tmp_path / "coordinator").mkdir()
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        await want(b, 2)
        await b.play_rounds(1, 3)
        await b.wait_until_published()
        file = b.pserver.make_heartbeat().published
        place = LocalStorage(tmp_path / "checkpoints")
        assert (file.round, list_rounds(place, "run1")) == (2, [2, 0] if is_shared else [])
        if is_shared:
            assert read_shard_file(place, "run1", file) == b.run.storage.snapshots.read(2)


@pytest.mark.parametrize("step", ["write", "publish"])
async def test_one_that_fails_is_made_again_on_request(tmp_path, monkeypatch, step):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        await b.play_round(1)
        with monkeypatch.context() as patch:
            error = failing(OSError("no space left on device"))
            patch.setattr(*((snapshots, "write_file", error) if step == "write" else (Publisher, "_copy", error)))
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


async def test_one_that_is_wanted_after_the_round_that_is_being_applied_is_made(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, **LOGGED) as b:  # a round that is logged is stepped on the compute thread
        has_stepped, may_go_on = hold(monkeypatch, b.run, "_step", after=True)
        playing = asyncio.create_task(b.play_round(1))
        assert await asyncio.to_thread(has_stepped.wait, 10)
        wanted = want(b, 1)
        await asyncio.sleep(0.05)
        may_go_on.set()
        await asyncio.wait_for(asyncio.gather(playing, wanted), 10)
        await b.wait_until_published()
        assert published(b) == 1


async def test_one_that_is_wanted_while_another_is_copied_is_refused(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        await want(b, 1)
        is_copying, may_go_on = hold(monkeypatch, b.run.storage, "snapshot")
        playing = asyncio.create_task(b.play_round(1))
        assert await asyncio.to_thread(is_copying.wait, 10)
        with pytest.raises(TryAgain, match="the checkpoint of round 1 is being written"):
            await want(b, 2)
        may_go_on.set()
        await asyncio.wait_for(playing, 10)
        await b.wait_until_published()
        assert coming(b) == ()


async def test_of_several_rounds_that_are_named_the_last_one_counts(tmp_path: Path):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        for named in (2, 5, 3):
            await want(b, named)
        assert coming(b) == (3,)
        await b.play_rounds(1, 5)
        await b.wait_until_published()
        assert (published(b), coming(b), b.run.storage.rounds) == (3, (), [3, 0])


@pytest.mark.parametrize("error", [OSError("no space left on device"), MemoryError()])
async def test_a_checkpoint_that_failed_is_not_coming_any_more(tmp_path: Path, monkeypatch, error: Exception):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        await want(b, 1)
        monkeypatch.setattr(snapshots, "write_file", failing(error))
        b.pserver.heartbeat_is_due.clear()
        await b.play_round(1)
        await b.wait_until_published()
        assert b.pserver.heartbeat_is_due.is_set()
        assert (published(b), coming(b)) == (0, ())


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


async def test_a_storage_that_hangs_delays_no_registration_and_no_other_run(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        place = SlowPlace(monkeypatch)
        await want(b, 1)
        await b.play_round(1)
        await until(lambda: bool(place.copying))
        async with asyncio.timeout(5):
            held = await b.pserver.open_folder(0)
            await b.install_next_run(b.install.run, restore=held.rounds.applied, number=2)
            await b.play_round(2)
            with pytest.raises(TryAgain, match="a checkpoint of an earlier attempt or run is being written"):
                await want(b, 3)
            assert (published(b), coming(b)) == (None, (2,))  # so that the coordinator names no other round
            b.install = await b.install_next_run(number=1, restore=None)
            await b.upload_initial()
            await b.play_round(1)
        place.may_copy.set()
        await until(lambda: not place.copying)
        await want(b, 2)
        await b.play_round(2)
        await b.wait_until_published()
        assert published(b) == 2


async def test_a_named_snapshot_waits_for_one_that_is_being_written(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        is_writing, may_go_on = hold(monkeypatch, snapshots, "write_file")
        await b.play_rounds(1, 2)
        assert await asyncio.to_thread(is_writing.wait, 10)
        await want(b, 3)
        await b.play_rounds(3, 5)
        may_go_on.set()
        await b.wait_until_published()
        assert (published(b), b.run.storage.rounds) == (3, [3, 2, 0])


async def test_a_folder_that_takes_no_snapshot_is_tried_again_after_an_interval(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=3) as b:
        tries = 0

        def refuse(*_: object) -> None:
            nonlocal tries
            tries += 1
            raise OSError("Input/output error")

        monkeypatch.setattr(snapshots, "write_file", refuse)
        for round_ in range(1, 10):
            await b.play_round(round_)
            await b.run.writer.wait_for_writes()
        assert (tries, b.run.storage.rounds) == (3, [0])
        monkeypatch.undo()
        await b.play_rounds(10, 12)
        await b.wait_until_published()
        assert b.run.storage.rounds == [12, 0]


async def test_complete_checkpoints_of_this_attempt_are_kept(tmp_path: Path):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        heartbeat = b.pserver.make_heartbeat()
        for reply, sent in (
            (PserverHeartbeatReply(complete=(0,)), heartbeat),
            (PserverHeartbeatReply(complete=(2,)), heartbeat.model_copy(update={"attempt": 1})),
        ):
            b.pserver.handle_heartbeat_reply(reply, sent)
        for round_ in range(1, 11):
            await b.play_round(round_)
            await b.run.writer.wait_for_writes()
        assert b.run.storage.rounds == [10, 8, 6, 0]


async def test_a_run_that_is_over_keeps_no_log(tmp_path: Path):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        await b.play_rounds(1, 3)
        await want(b, 3, is_over=True)
        await b.wait_until_published()
        for complete in ((2, 0), (3, 2)):
            b.pserver.handle_heartbeat_reply(PserverHeartbeatReply(complete=complete), b.pserver.make_heartbeat())
            await b.run.stop()
            logs = (tmp_path / "pserver-0" / "log").glob("*.log")
            assert (sum(path.stat().st_size for path in logs) > 0) == (complete == (2, 0))
        assert b.run.storage.rounds == [3]
        digest = b.run.shard.digest()
    async with bench(state_dir=tmp_path, durability="log", incarnation=2) as b:
        assert (b.run.round, b.run.shard.digest()) == (3, digest)


async def test_initial_values_of_an_attempt_that_was_given_up_do_not_stay(tmp_path: Path, monkeypatch):
    settings: dict[str, Any] = {"state_dir": tmp_path, "durability": "log"}
    async with bench(initial=False, **settings) as b:
        is_writing, may_go_on = hold(monkeypatch, snapshots, "write_file")
        is_asked = asyncio.Event()
        names = {name: f"{name}.block0" for name in initial_values()}
        first = asyncio.create_task(b.upload_initial())
        assert await asyncio.to_thread(is_writing.wait, 10)
        members = Membership({1: 1})
        other = b.install.model_copy(update={"attempt": 1, "number": 2, "uploader": 1, "membership": members})

        async def install() -> None:
            is_asked.set()
            await b.pserver.install_run(other)

        installing = asyncio.create_task(install())
        await is_asked.wait()
        may_go_on.set()
        await installing
        with pytest.raises(StaleRun):
            await first
        values = {names[name]: 2 * value for name, value in initial_values().items()}
        await b.call("initial", b.fence(1, 0, attempt=1), encode(values))
        await b.push(1, 1, fence=b.fence(1, 1, attempt=1))
        await b.barrier(1, 1, attempt=1)
        await b.get(1, 1, attempt=1)
        digest = b.run.shard.digest()
    later: dict[str, Any] = {
        "attempt": 1,
        "uploader": 1,
        "membership": Membership({1: 1}),
        "number": 3,
        "incarnation": 2,
    }
    async with bench(**settings, **later) as b:
        assert (b.run.round, b.run.shard.digest()) == (1, digest)


async def test_initial_values_are_not_written_after_their_attempt_was_given_up(tmp_path: Path, monkeypatch):
    async with bench(initial=False, state_dir=tmp_path, durability="log") as b:
        old = b.run
        is_copying, may_go_on = hold(monkeypatch, old.storage, "snapshot")
        uploading = asyncio.create_task(b.upload_initial())
        assert await asyncio.to_thread(is_copying.wait, 10)
        other = b.install.model_copy(
            update={"attempt": 1, "number": 2, "uploader": 1, "membership": Membership({1: 1})}
        )
        installing = asyncio.create_task(b.pserver.install_run(other))
        await until(lambda: old.failure is not None)
        may_go_on.set()
        await installing
        with pytest.raises(StaleRun):
            await uploading
        assert b.run.storage.rounds == []
