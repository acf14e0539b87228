"""Checkpoints are written one after another, and none that was asked for is passed over in silence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.errors import StorageFailed, TryAgain
from ps_protocol.messages import WantCheckpoint
from services.runtime.places import Place

from .support import Bench, bench

pytestmark = pytest.mark.asyncio


class SlowPlace:
    """Writes only when it may, and remembers how many have written at once."""

    def __init__(self, b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.most = 0
        self.writing: set[str] = set()
        self.twice: list[str] = []
        place: Place = b.run.storage._place
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
        for round_ in (1, 2, 3):
            await b.play_round(round_)
        last = want(b, 3, is_over=True)
        await asyncio.sleep(0.05)
        assert not last.done()
        place.may_write.set()
        await asyncio.wait_for(last, 5)
        assert {2, 3} <= b.run.storage.checkpoints.keys()


async def test_a_last_one_that_cannot_be_written_is_no_success(tmp_path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        await b.play_round(1)

        def refuse(*_: object) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(b.run.storage._place, "write", refuse)
        with pytest.raises(StorageFailed, match="no checkpoint of the last round, 1"):
            await want(b, 1, is_over=True)


async def test_two_requests_at_once_write_one_after_another_and_a_third_comes_again(tmp_path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=100) as b:
        place = SlowPlace(b, monkeypatch)
        await b.play_round(1)
        answers = await asyncio.gather(*(want(b, 1) for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [type(None), type(None), TryAgain]
        place.may_write.set()
        await b.run.settle()
        assert (place.most, place.twice) == (1, [])
        assert 1 in b.run.storage.checkpoints
        assert b.metric("gradpost_checkpoint_failures_total") == 0


async def test_one_that_is_wanted_after_the_round_that_is_being_applied_is_made(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=100) as b:
        snapshot_if_due, has_decided, may_go_on = b.run._snapshot_if_due, threading.Event(), threading.Event()

        def decide(*arguments: Any) -> Any:
            found = snapshot_if_due(*arguments)
            has_decided.set()
            assert may_go_on.wait(10)
            return found

        monkeypatch.setattr(b.run, "_snapshot_if_due", decide)
        playing = asyncio.create_task(b.play_round(1))
        assert await asyncio.to_thread(has_decided.wait, 10)
        wanted = want(b, 1)
        await asyncio.sleep(0.05)
        may_go_on.set()
        await asyncio.wait_for(asyncio.gather(playing, wanted), 10)
        await b.run.settle()
        assert 1 in b.run.storage.checkpoints


async def test_as_many_are_promised_as_there_is_room_for(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=100) as b:
        place = SlowPlace(b, monkeypatch)
        await asyncio.gather(*(want(b, round_) for round_ in (1, 2, 2)))
        with pytest.raises(TryAgain):
            await want(b, 3)
        for round_ in (1, 2, 3):
            await b.play_round(round_)
        with pytest.raises(TryAgain):
            await want(b, 4)
        place.may_write.set()
        await b.run.settle()
        assert {1, 2} <= b.run.storage.checkpoints.keys()
        assert 3 not in b.run.storage.checkpoints


async def test_one_that_is_asked_for_by_its_round_is_made_beside_another(tmp_path: Path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log", checkpoint_rounds=2) as b:
        place = SlowPlace(b, monkeypatch)
        await want(b, 3)
        for round_ in (1, 2, 3, 4):
            await b.play_round(round_)
        place.may_write.set()
        await b.run.settle()
        assert {2, 3} <= b.run.storage.checkpoints.keys()
        assert 4 not in b.run.storage.checkpoints  # the disk is slower than the rounds
