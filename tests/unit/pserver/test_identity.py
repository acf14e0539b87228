"""A pserver between registrations and runs: what it restores, what it reports, and the memory that it releases."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ps_protocol.consistency import Consistency
from ps_protocol.errors import Conflict, NotReady, StaleRun, TrainerLost, TryAgain
from ps_protocol.membership import Freeze, PserverRegistered
from services.pserver.durable.disk import Disk
from services.pserver.durable.storage import RunStorage
from services.pserver.metrics import PserverMetrics
from services.pserver.pserver import Pserver
from services.pserver.shard.shard import Shard

from .oracle import make_options
from .support import LIMITS, Bench, bench, failing, hold


async def test_a_run_that_comes_before_the_identity_is_on_the_disk_waits_for_it_and_stays(tmp_path, monkeypatch):
    async with bench() as b:
        b.pserver.disk = disk = Disk(tmp_path)
        has_begun, may_go_on = hold(monkeypatch, disk, "write_incarnation")
        answer = PserverRegistered(index=0, incarnation=2, lease_seconds=10)
        registering = asyncio.create_task(b.pserver.adopt_identity(answer))
        await asyncio.to_thread(has_begun.wait, 10)
        installing = asyncio.create_task(b.install_next_run(incarnation=2, durability="log"))
        await asyncio.sleep(0.05)  # it does not use the disk meanwhile
        assert not installing.done()
        may_go_on.set()
        await asyncio.gather(registering, installing)
        assert b.run.installed.run == "run2"
        assert disk.folder is not None
        assert disk.folder.identity.run == b.run.installed


async def test_a_change_of_members_waits_for_a_run_that_is_being_opened(tmp_path, monkeypatch):
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_round(1)
        install = b.install.model_copy(update={"restore": 1, "number": 2})
        await b.pserver.open_folder(0)
        is_open, may_go_on = hold(monkeypatch, b.pserver.disk, "open_run", after=True)
        installing = asyncio.create_task(b.pserver.install_run(install))
        await asyncio.to_thread(is_open.wait, 10)
        freezing = asyncio.create_task(b.freeze(3))
        asking = asyncio.create_task(b.pserver.find_restorable(install.run))
        await asyncio.sleep(0.05)
        assert not freezing.done()
        may_go_on.set()
        frozen, ranges = await asyncio.gather(freezing, asking)
        await installing
        assert frozen.applied == 1
        assert ranges == [(0, 1)]


async def test_held_rounds_are_reported_before_the_pserver_is_registered(tmp_path: Path) -> None:
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_round(1)
        await b.pserver.open_folder(0)
        b.pserver.index = None
        assert await b.pserver.find_restorable(b.install.run) == [(0, 1)]
        with pytest.raises(NotReady, match="not registered yet"):
            await b.pserver.find_restorable("another run")
        b.pserver.index = 0
        await b.pserver.install_run(b.install.model_copy(update={"restore": 1, "number": 2}))


async def test_a_late_installation_does_not_restore_a_held_run(tmp_path: Path) -> None:
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_round(1)
        await b.pserver.open_folder(0)
        late = b.install.model_copy(update={"restore": 1, "number": 2})
        assert (await b.freeze(3)).applied == 1
        with pytest.raises(Conflict, match="is over"):
            await b.pserver.install_run(late)
        with pytest.raises(NotReady):
            assert b.pserver.run
        await b.pserver.install_run(late.model_copy(update={"number": 3}))
        assert b.run.round == 1


async def test_a_freeze_of_another_attempt_ends_the_changes_before_it(tmp_path: Path) -> None:
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_round(1)
        late = b.install.model_copy(update={"restore": 0, "attempt": 1, "number": 2})
        with pytest.raises(StaleRun):
            await b.pserver.freeze(Freeze(run=b.install.run, attempt=1, number=3))
        with pytest.raises(Conflict, match="is over"):
            await b.pserver.install_run(late)
        assert b.run.installed.attempt == 0
        await b.pserver.install_run(late.model_copy(update={"number": 3}))
        assert b.run.installed.attempt == 1


async def test_a_pserver_that_has_not_read_its_folder_answers_try_again(tmp_path: Path) -> None:
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_round(1)
    next_life = Pserver(b.compute, PserverMetrics(CollectorRegistry(), b.compute), LIMITS, disk=Disk(tmp_path))
    freeze = Freeze(run=b.install.run, attempt=0, number=2)
    for ask in (next_life.freeze(freeze), next_life.find_restorable(b.install.run)):
        with pytest.raises(TryAgain, match="has not opened its state folder") as refusal:
            await ask
        assert not isinstance(refusal.value, NotReady)  # which is what one says that holds nothing
    await next_life.open_folder(0)
    assert (await next_life.freeze(freeze)).applied == 1


async def test_a_run_that_could_not_be_opened_is_still_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_round(1)
        await b.pserver.open_folder(0)
        assert b.pserver.disk is not None
        assert b.pserver.disk.folder is not None

        with monkeypatch.context() as patch:
            patch.setattr(b.pserver.disk.folder, "write_identity", failing(OSError("no space left on device")))
            with pytest.raises(TryAgain, match="cannot open the state of the run: no space left"):
                await b.pserver.install_run(b.install.model_copy(update={"restore": 1, "number": 2}))
        assert (await b.freeze(3)).applied == 1
        await b.pserver.install_run(b.install.model_copy(update={"restore": 1, "number": 3}))
        assert b.run.round == 1
        await b.play_round(2)


async def test_a_run_that_could_not_go_back_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(state_dir=tmp_path, durability="log") as b:
        await b.play_rounds(1, 3)
        back = b.install.model_copy(update={"restore": 2, "attempt": 1, "number": 2})

        with monkeypatch.context() as patch:
            patch.setattr(RunStorage, "restore", failing(OSError("input/output error")))
            with pytest.raises(TryAgain, match="cannot open the state of the run"):
                await b.pserver.install_run(back)
            with pytest.raises(TryAgain, match="cannot read its state"):
                await b.pserver.find_restorable(b.install.run)
        assert await b.pserver.find_restorable(b.install.run) == [(0, 3)]
        with pytest.raises(StaleRun):
            await b.pserver.freeze(Freeze(run=b.install.run, attempt=1, number=3))
        await b.pserver.install_run(back.model_copy(update={"number": 3}))
        assert b.run.round == 2


ADAM = [make_options("Adam", lr=0.01)]


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of other shards whenever one is made; what only the cyclic collector would release stays."""
    gc.collect()
    gc.disable()
    shards: weakref.WeakSet[Shard] = weakref.WeakSet()
    counts = []
    init = Shard.__init__

    def watched(self: Shard, *arguments: Any) -> None:
        deadline = time.monotonic() + 2
        while shards and time.monotonic() < deadline:  # a thread may be about to forget what it has worked on
            time.sleep(0.001)
        counts.append(len(shards))
        init(self, *arguments)
        shards.add(self)

    monkeypatch.setattr(Shard, "__init__", watched)
    yield counts
    gc.enable()


async def train(pserver: Bench) -> None:
    for round_ in (1, 2):
        if not pserver.install.consistency.is_async:
            await pserver.play_round(round_)
            continue
        await pserver.get(0, round_ - 1)
        await pserver.push(0, round_)
        await pserver.get(0, round_)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"max_delay": 1},
        {"mode": "async", "compensation": "dc"},
        *({"mode": "async", "read_consistency": read} for read in ("none", "block", "shard")),
    ],
)
async def test_the_next_run_begins_with_nothing_of_the_one_before(rules: dict[str, Any], alive: list[int]) -> None:
    async with bench(1, optimizer="Adam", groups=ADAM, consistency=Consistency(**rules)) as pserver:
        await train(pserver)
        pserver.install = await pserver.install_next_run()
        await pserver.upload_initial()
    assert alive == [0, 0]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_run_that_failed_is_released_like_any_other(mode: Any, alive: list[int]) -> None:
    async with bench(1, consistency=Consistency(mode=mode)) as pserver:
        await train(pserver)
        await pserver.change_members(2, {0: 1}, TrainerLost("trainer 0 was lost", ranks=[0]).to_problem())
        with pytest.raises(TrainerLost):
            await pserver.get(0, 2)
        pserver.install = await pserver.install_next_run()
        await pserver.upload_initial()
    assert alive == [0, 0]


async def test_a_rollback_restores_into_released_memory(tmp_path: Path, alive: list[int]) -> None:
    async with bench(1, optimizer="Adam", groups=ADAM, state_dir=tmp_path, durability="log") as pserver:
        await train(pserver)
        back = pserver.install.model_copy(update={"attempt": 1, "number": 2, "restore": 1})
        await pserver.pserver.install_run(back)
        assert pserver.run.round == 1
    assert alive == [0, 0]


async def test_a_pserver_that_has_come_back_restores_one_shard_at_a_time(tmp_path: Path, alive: list[int]) -> None:
    settings: Any = {"optimizer": "Adam", "groups": ADAM, "state_dir": tmp_path, "durability": "log"}
    await train_and_die(settings)
    gc.collect()
    async with bench(1, **settings, incarnation=2, restore=1, attempt=1, number=2) as pserver:
        assert pserver.run.round == 1
        for _ in range(2):
            await pserver.pserver.open_folder(0)
        await pserver.pserver.install_run(pserver.install)
    assert alive == [0, 0, 0, 0, 0]


async def train_and_die(settings: Any) -> None:
    async with bench(1, **settings) as pserver:
        await train(pserver)
