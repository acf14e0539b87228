"""Chains of two logs: equal after equal histories and different after others, whatever has happened to the files."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.errors import Conflict, UpdatesGone
from services.pserver.durable.log_reader import find_records, is_at_end
from services.pserver.durable.records import Record, parse_records
from services.pserver.durable.storage import RunStorage
from services.pserver.durable.update_log import LoggedUpdate, UpdateLog
from services.pserver.shard.history import History

from ....soaking import examples
from .support import (
    TWO_SHARDS,
    assert_restores,
    flip,
    new_shard,
    open_storage,
    play,
    reopen,
    segment,
    segment_bases,
    snapshot,
    step,
    train,
)

FIRST = "f" * 32
KEPT = 2  # checkpoints
Updates = tuple[int, ...]  # of rounds 1, 2, …


def write(log: UpdateLog, round_: int, number: int) -> None:
    log.append(LoggedUpdate(round_, (0,), [], None), [struct.pack("<f", number) * (1 + number)])


def get_number(record: Record) -> int:
    return int(struct.unpack_from("<f", record.data)[0])


class Side:
    """A log, with the updates that it should have and the chains that its checkpoints carry."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.updates: Updates = ()
        self.checkpoints = {0: FIRST}
        self.log = UpdateLog(folder, "log")
        self.log.begin_segment(0, FIRST)

    def tear(self) -> None:
        """End the process while the newest update is written."""
        segment, tail = self.log.positions[0], self.log.tail
        assert segment is not None
        assert tail is not None
        before = sum(record.end - record.begin for _, record in self.log.read_after(len(self.updates) - 1))
        os.truncate(segment.path, tail.end - before // 2)
        self.updates = self.updates[:-1]

    def restore(self, newest: int) -> None:
        """Restore a round as `RunStorage` does, and continue after it."""
        self.log.close()
        self.log = UpdateLog(self.folder, "log")
        self.checkpoints = {round_: chain for round_, chain in self.checkpoints.items() if round_ <= newest}
        begin = max(self.checkpoints)
        chain: str | None = self.checkpoints[begin]
        found = []
        for update, record in self.log.read_after(begin, chain):
            if update.round > newest:
                break
            found.append(get_number(record))
            chain = record.chain
        assert tuple(found) == self.updates[begin:newest]
        assert chain is not None
        self.updates = self.updates[:newest]
        self.log.resume(newest, chain)


class Chains(RuleBasedStateMachine):
    """Two logs with updates of a few kinds, so that their histories are often equal."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.sides = [Side(self.folder / name) for name in "ab"]
        self.chains: dict[Updates, str] = {(): FIRST}

    def teardown(self) -> None:
        for side in self.sides:
            side.log.close()
        shutil.rmtree(self.folder)

    @rule(which=st.sampled_from([(0,), (1,), (0, 1), (0, 1)]), numbers=st.lists(st.integers(0, 2), max_size=3))
    def append(self, which: tuple[int, ...], numbers: list[int]) -> None:
        for index in which:
            side = self.sides[index]
            for number in numbers:
                side.updates = (*side.updates, number)
                write(side.log, len(side.updates), number)
                self.compare(side)

    @rule(index=st.integers(0, 1))
    def make_checkpoint(self, index: int) -> None:
        side = self.sides[index]
        side.log.begin_segment(len(side.updates))
        side.checkpoints[len(side.updates)] = self.chains[side.updates]
        self.compare(side)

    @rule(index=st.integers(0, 1))
    def prune(self, index: int) -> None:
        side = self.sides[index]
        side.checkpoints = dict(sorted(side.checkpoints.items())[-KEPT:])
        side.log.prune(min(side.checkpoints))

    @rule(index=st.integers(0, 1))
    def restart(self, index: int) -> None:
        self.sides[index].restore(len(self.sides[index].updates))

    @rule(index=st.integers(0, 1))
    def tear(self, index: int) -> None:
        side = self.sides[index]
        if side.log.num_bytes:
            side.tear()
            side.restore(len(side.updates))

    @rule(index=st.integers(0, 1), back=st.integers(0, 8))
    def roll_back(self, index: int, back: int) -> None:
        side = self.sides[index]
        side.restore(max(min(side.checkpoints), len(side.updates) - back))

    @rule(index=st.integers(0, 1), back=st.integers(0, 8))
    def read(self, index: int, back: int) -> None:
        """Read as a follower with the other side's history up to a common round."""
        side, other = self.sides[index], self.sides[1 - index]
        after = max(0, min(len(side.updates), len(other.updates)) - back)
        chain = self.chains[other.updates[:after]]
        numbers: list[int] = []
        try:
            while not is_at_end(side.log, after + len(numbers), chain):
                found = find_records(side.log, after + len(numbers), chain, lambda: max(side.checkpoints))
                for record in parse_records(memoryview(found.read(found.begin, 10_000)), chain):
                    numbers.append(get_number(record))
                    chain = record.chain
                found.close()
        except Conflict:
            assert side.updates[:after] != other.updates[:after]
            return
        except UpdatesGone:
            assert after < min(side.checkpoints)
            return
        assert side.updates[:after] == other.updates[:after]
        assert tuple(numbers) == side.updates[after:]
        assert chain == self.chains[side.updates]

    def compare(self, side: Side) -> None:
        assert side.log.tail is not None
        chain = side.log.tail.chain
        assert self.chains.setdefault(side.updates, chain) == chain
        assert len(set(self.chains.values())) == len(self.chains)

    @precondition(lambda self: hasattr(self, "sides"))
    @invariant()
    def equal_histories_have_equal_chains(self) -> None:
        for side in self.sides:
            assert side.log.tail is not None
            assert side.log.tail.round == len(side.updates)
            self.compare(side)


TestChains = Chains.TestCase
TestChains.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


# ---------------------------------------------------------------------- of a run's storage


def chains_after(folder: Path, rounds: int) -> list[str]:
    """Return the chain after each round of a shard that is not interrupted, in one file."""
    storage, shard = train(folder / "whole", 0)
    found = [get_chain(storage)]
    for round_ in range(1, rounds + 1):
        step(shard, round_, storage)
        found.append(get_chain(storage))
    return found


def get_chain(storage: RunStorage) -> str:
    assert storage.newest_update is not None
    return storage.newest_update[1]


def test_a_restored_shard_continues_the_chain_of_its_round(tmp_path: Path) -> None:
    chains = chains_after(tmp_path, 12)
    train(tmp_path, 11)
    for round_ in (11, 8, 6, 4, 3, 0):  # rolls back from one to the next
        storage = reopen(tmp_path)
        restored = storage.restore(round_)
        assert restored is not None
        assert restored.chain == chains[round_]
        storage.resume(restored, storage._install.model_copy(update={"attempt": 12 - round_}))
        assert storage.newest_update == (round_, chains[round_])
        step(restored.shard, round_ + 1, storage)
        assert storage.newest_update == (round_ + 1, chains[round_ + 1])
        storage.close()
        assert storage.newest_update is None


def test_snapshots_carry_the_chain_after_the_log_is_pruned(tmp_path: Path) -> None:
    chains = chains_after(tmp_path, 30)
    train(tmp_path, 30, checkpoints=tuple(range(4, 30, 4)))
    assert segment_bases(tmp_path) == [20, 24, 28]
    for round_ in range(20, 31):
        assert assert_restores(tmp_path, round_, newest=round_).chain == chains[round_]


def test_updates_of_another_history_are_not_replayed_onto_a_snapshot(tmp_path: Path) -> None:
    train(tmp_path, 11)
    other, shard = train(tmp_path / "other", 0)
    other.append(LoggedUpdate(1, (7,), [], ()), [])  # steps nothing
    shard.version = 1
    for round_ in range(2, 9):
        step(shard, round_, other)
    other.snapshot(shard, History())()
    snapshot(tmp_path, 8).unlink()
    shutil.copy(snapshot(tmp_path / "other", 8), tmp_path / "log-0")
    restored = reopen(tmp_path).restore()
    assert restored is not None
    assert (restored.round, restored.chain, restored.is_short) == (8, get_chain(other), True)
    assert reopen(tmp_path).restore(6) is not None


def lose_a_file(folder: Path) -> None:
    segment(folder, 8).unlink()


def lose_a_file_and_a_record(folder: Path) -> None:
    lose_a_file(folder)
    flip(segment(folder, 4), 0.6)


@pytest.mark.parametrize("accident", [lose_a_file, lose_a_file_and_a_record])
def test_updates_behind_a_loss_are_restored_although_those_before_it_are_damaged(tmp_path: Path, accident: Any) -> None:
    chains = chains_after(tmp_path, 9)
    train(tmp_path, 11)
    accident(tmp_path)
    storage = reopen(tmp_path)
    restored = storage.restore()
    assert restored is not None
    storage.resume(restored, storage._install)
    assert storage.newest_update == (8, chains[8])
    step(restored.shard, 9, storage)
    assert assert_restores(tmp_path, 9).chain == chains[9]


def test_another_attempt_with_other_initial_values_has_another_chain(tmp_path: Path) -> None:
    storages = []
    for name in ("same", "again", "other"):
        shard = new_shard(TWO_SHARDS)
        if name == "other":
            shard.values[0] += 1
        storages.append(open_storage(tmp_path / name, TWO_SHARDS))
        play(storages[-1], shard, 1, (0,))
    same, again, other = map(get_chain, storages)
    assert same == again != other


def test_a_run_without_a_log_has_no_chain(tmp_path: Path) -> None:
    storage, _ = train(tmp_path, 4, durability="none")
    assert storage.newest_update is None
    assert "chain" not in storage.describe_shard(History())
