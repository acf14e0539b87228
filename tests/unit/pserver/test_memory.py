"""The shard of a run that has ended is released before another is made: two of them may be more than there is."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.consistency import Consistency
from ps_protocol.errors import TrainerLost
from services.pserver.shard import Shard

from .oracle import make_options
from .support import Bench, bench

ADAM = [make_options("Adam", lr=0.01)]


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """What only the cyclic collector would release stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many other shards there are whenever one is made."""
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
    return counts


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


async def test_a_rollback_restores_into_the_memory_of_what_it_gives_up(tmp_path: Path, alive: list[int]) -> None:
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
