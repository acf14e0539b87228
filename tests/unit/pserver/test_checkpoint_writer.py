"""Checkpoints of named rounds are written in turn, and a pserver's own checkpoints keep its log short."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import StaleRun, StorageFailed, TryAgain
from ps_protocol.membership import Membership, WantCheckpoint
from ps_protocol.messages import PserverHeartbeatReply
from services.pserver.durable import storage
from services.pserver.durable.update_log import list_segments
from services.runtime.checkpoints import round_folder
from services.runtime.storage import CheckpointStorage

from .durable.support import complete_checkpoint
from .support import Bench, bench, encode, failing, hold, initial_values, until

LOGGED: Any = {"durability": "log", "checkpoint_rounds": 100}


class SlowPlace:
    """Writes only when it may, and remembers how many have written at once."""

    def __init__(self, b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.most = 0
        self.writing: set[str] = set()
        self.twice: list[str] = []
        place: CheckpointStorage = b.run.storage._place
        write = place.write

        def write_slowly(name: str, chunks: Iterable[bytes]) -> None:
            if name in self.writing:
                self.twice.append(name)
            self.writing.add(name)
            self.most = max(self.most, len(self.writing))
            assert self.may_write.wait(10)
            write(name, chunks)
            self.writing.discard(name)

        monkeypatch.setattr(place, "write", write_slowly)


def want(b: Bench, round_: int, *, is_over: bool = False) -> asyncio.Task[None]:
    message = WantCheckpoint(run=b.install.run, round=round_, is_over=is_over)
    return asyncio.create_task(b.pserver.want_checkpoint(message))


async def test_the_last_one_waits_for_the_one_that_is_being_written(tmp_path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        place = SlowPlace(b, monkeypatch)
        await want(b, 2)
        await b.play_rounds(1, 3)
        last = want(b, 3, is_over=True)
        await asyncio.sleep(0.05)
        assert not last.done()
        place.may_write.set()
        await asyncio.wait_for(last, 5)
        assert {2, 3} <= b.run.storage.checkpoints.keys()


async def test_a_last_one_that_cannot_be_written_is_no_success(tmp_path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        await b.play_round(1)
        monkeypatch.setattr(b.run.storage._place, "write", failing(OSError("no space left on device")))
        with pytest.raises(StorageFailed, match="no checkpoint of the last round, 1"):
            await want(b, 1, is_over=True)


async def test_a_repeated_request_writes_once_and_another_one_is_retried(tmp_path, monkeypatch):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        place = SlowPlace(b, monkeypatch)
        await b.play_round(1)
        await asyncio.gather(*(want(b, 1) for _ in range(3)))
        with pytest.raises(TryAgain, match="the checkpoint of round 1 is being written"):
            await want(b, 2)
        assert b.pserver.make_heartbeat().coming_checkpoints == (1,)
        place.may_write.set()
        await b.run.wait_for_writes()
        assert (place.most, place.twice) == (1, [])
        assert 1 in b.run.storage.checkpoints
        assert b.pserver.make_heartbeat().coming_checkpoints == ()
        assert b.metric("gradpost_checkpoint_failures_total") == 0


async def test_one_that_is_wanted_after_the_round_that_is_being_applied_is_made(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, **LOGGED) as b:  # a round that is logged is stepped on the compute thread
        has_stepped, may_go_on = hold(monkeypatch, b.run.executor, "_step", after=True)
        playing = asyncio.create_task(b.play_round(1))
        assert await asyncio.to_thread(has_stepped.wait, 10)
        wanted = want(b, 1)
        await asyncio.sleep(0.05)
        may_go_on.set()
        await asyncio.wait_for(asyncio.gather(playing, wanted), 10)
        await b.run.wait_for_writes()
        assert 1 in b.run.storage.checkpoints


async def test_one_that_is_wanted_while_another_is_about_to_be_written_is_refused(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        await want(b, 1)
        is_copying, may_go_on = hold(monkeypatch, b.run.storage, "snapshot")
        playing = asyncio.create_task(b.play_round(1))
        assert await asyncio.to_thread(is_copying.wait, 10)
        with pytest.raises(TryAgain, match="the checkpoint of round 1 is being written"):
            await want(b, 2)
        may_go_on.set()
        await asyncio.wait_for(playing, 10)
        await b.run.wait_for_writes()
        assert b.pserver.make_heartbeat().coming_checkpoints == ()


async def test_a_round_that_was_passed_while_the_place_was_busy_does_not_come_any_more(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        place = SlowPlace(b, monkeypatch)
        await b.play_round(1)
        await want(b, 2)
        await want(b, 1)
        await b.play_round(2)
        place.may_write.set()
        await b.run.wait_for_writes()
        assert (b.pserver.make_heartbeat().coming_checkpoints, sorted(b.run.storage.checkpoints)) == ((), [0, 1])


async def test_of_several_rounds_that_are_named_the_last_one_counts(tmp_path: Path):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        for named in (2, 5, 3):
            await want(b, named)
        assert b.pserver.make_heartbeat().coming_checkpoints == (3,)
        await b.play_rounds(1, 5)
        await b.run.wait_for_writes()
        assert sorted(b.run.storage.checkpoints) == [0, 3]
        assert b.pserver.make_heartbeat().coming_checkpoints == ()


@pytest.mark.parametrize("error", [OSError("no space left on device"), MemoryError()])
async def test_a_checkpoint_that_failed_is_not_coming_any_more(tmp_path: Path, monkeypatch, error: Exception):
    async with bench(state_dir=tmp_path, **LOGGED) as b:
        await want(b, 1)
        monkeypatch.setattr(b.run.storage._place, "write", failing(error))
        b.pserver.heartbeat_is_due.clear()
        await b.play_round(1)
        await b.run.wait_for_writes()
        assert b.pserver.heartbeat_is_due.is_set()
        assert b.pserver.make_heartbeat().coming_checkpoints == ()


@pytest.mark.parametrize("place_hangs", [False, True])
async def test_without_named_rounds_and_beside_a_place_that_hangs_the_log_stays_short(
    tmp_path: Path, monkeypatch, place_hangs: bool
):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        place = SlowPlace(b, monkeypatch)
        if place_hangs:
            await want(b, 2)
        for round_ in range(1, 31):
            await b.play_round(round_)
            await b.run.writer.wait_for_writes("folder")
        assert sorted(b.run.storage.checkpoints) == [0]
        assert sorted(b.run.storage.own_checkpoints.rounds) == [28, 30]
        assert [segment.base for segment in list_segments(tmp_path / "pserver-0" / "log")] == [28, 30]
        digest = b.run.shard.digest()
        place.may_write.set()
        await b.run.wait_for_writes()
    async with bench(state_dir=tmp_path, durability="log", incarnation=2) as b:
        assert (b.run.round, b.run.shard.digest()) == (30, digest)


async def test_a_folder_that_takes_no_checkpoint_is_tried_again_after_an_interval(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=3) as b:
        tries = 0

        def refuse(*_: object) -> None:
            nonlocal tries
            tries += 1
            raise OSError("Input/output error")

        monkeypatch.setattr(storage, "write_file", refuse)
        for round_ in range(1, 10):
            await b.play_round(round_)
            await b.run.writer.wait_for_writes("folder")
        assert (tries, b.run.storage.own_checkpoints.rounds) == (3, ())
        monkeypatch.undo()
        await b.play_rounds(10, 12)
        await b.run.wait_for_writes()
        assert b.run.storage.own_checkpoints.rounds == (12,)


async def test_a_pserver_deletes_checkpoints_that_the_coordinator_does_not_need(tmp_path: Path):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        for round_ in (1, 2, 3, 4):
            if round_ % 2 == 0:
                await want(b, round_)
            await b.play_round(round_)
            await b.run.wait_for_writes()
        assert sorted(b.run.storage.checkpoints) == [0, 2, 4]
        heartbeat = b.pserver.make_heartbeat()
        b.pserver.handle_heartbeat_reply(PserverHeartbeatReply(complete=None), heartbeat)
        b.pserver.handle_heartbeat_reply(
            PserverHeartbeatReply(complete=(4, 2)), heartbeat.model_copy(update={"attempt": 1})
        )
        await b.run.wait_for_writes()
        assert sorted(b.run.storage.checkpoints) == [0, 2, 4]
        b.pserver.handle_heartbeat_reply(PserverHeartbeatReply(complete=(4, 2)), heartbeat)
        await b.run.wait_for_writes()
        assert sorted(b.run.storage.checkpoints) == [2, 4]


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_run_that_is_over_keeps_no_log(tmp_path: Path, is_told: bool):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        await b.play_rounds(1, 3)
        await want(b, 3, is_over=True)
        if is_told:
            b.pserver.handle_heartbeat_reply(PserverHeartbeatReply(complete=(3, 0)), b.pserver.make_heartbeat())
            await b.run.wait_for_writes()
        else:
            complete_checkpoint(b.run.storage._place, b.plan, b.run.storage.checkpoints[3])
            await b.run.stop()
        log = tmp_path / "pserver-0" / "log"
        assert sum(path.stat().st_size for path in log.iterdir()) == 0
        digest = b.run.shard.digest()
    async with bench(state_dir=tmp_path, durability="log", incarnation=2) as b:
        assert (b.run.round, b.run.shard.digest()) == (3, digest)


async def test_initial_values_of_an_attempt_that_was_given_up_do_not_stay(tmp_path: Path, monkeypatch):
    settings: dict[str, Any] = {"state_dir": tmp_path, "durability": "log"}
    async with bench(initial=False, **settings) as b:
        place, is_asked = SlowPlace(b, monkeypatch), asyncio.Event()
        names = {name: f"{name}.block0" for name in initial_values()}
        first = asyncio.create_task(b.upload_initial())
        await until(lambda: bool(place.writing))
        members = Membership({1: 1})
        other = b.install.model_copy(update={"attempt": 1, "number": 2, "uploader": 1, "membership": members})

        async def install() -> None:
            is_asked.set()
            await b.pserver.install_run(other)

        installing = asyncio.create_task(install())
        await is_asked.wait()
        place.may_write.set()
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
        await until(lambda: old.context.failure is not None)
        may_go_on.set()
        await installing
        with pytest.raises(StaleRun):
            await uploading
        assert b.run.storage._place.list(round_folder("run1", 0)) == []
