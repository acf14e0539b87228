"""A restored shard has the bits that it had, from the files that are left; equal histories have equal chains."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.errors import Conflict, UpdatesGone
from services.pserver.durable import storage as run_storage
from services.pserver.durable import update_log
from services.pserver.durable.records import Record, parse_records
from services.pserver.durable.storage import RunStorage
from services.pserver.durable.update_log import LoggedUpdate, UpdateLog
from services.pserver.shard.shard_state import History
from services.runtime import storage as storage_module

from ....soaking import examples
from .support import (
    TWO_SHARDS,
    assert_restores,
    cut,
    flip,
    install_for,
    open_storage,
    refuse,
    reopen,
    segment,
    segment_bases,
    snapshot,
    step,
    train,
)


@pytest.mark.parametrize(("rounds", "durability"), [(0, "log"), (4, "log"), (11, "log"), (11, "fsync")])
def test_any_round_since_the_oldest_snapshot_is_restored_bit_for_bit(tmp_path, rounds, durability):
    train(tmp_path, rounds, durability=durability)
    restored = assert_restores(tmp_path, rounds)
    assert restored.history.participants.get(rounds) == ((0,) if rounds else None)
    for round_ in range(rounds + 1):
        assert_restores(tmp_path, round_, newest=round_)
    assert reopen(tmp_path).restore(rounds + 1) is None
    assert reopen(tmp_path).find_restorable() == [(0, rounds)]


def test_damage_in_the_log_costs_only_the_rounds_of_its_segment(tmp_path):
    train(tmp_path, 11)
    flip(segment(tmp_path, 4), 0.4)  # in round 6 of 5 to 8
    assert reopen(tmp_path).find_restorable() == [(8, 11), (0, 5)]
    assert reopen(tmp_path).restore(6) is None
    for round_ in (5, 11):
        assert_restores(tmp_path, round_, newest=round_)
    flip(segment(tmp_path, 8), 0.1)  # in round 9 of 9 to 11
    assert reopen(tmp_path).find_restorable() == [(8, 8), (0, 5)]


def empty_the_newest_segment(folder: Path) -> None:
    newest = segment(folder, 8)
    flip(newest, 0.99)
    newest.with_name(newest.name.replace(f"{8:012}", f"{12:012}")).write_bytes(b"")


def delete_log(folder: Path) -> None:
    for base in segment_bases(folder):
        segment(folder, base).unlink()


@pytest.mark.parametrize(
    ("accident", "round_", "is_short"),
    [
        pytest.param(lambda folder: None, 12, False, id="none"),
        pytest.param(lambda folder: cut(segment(folder, 8)), 11, False, id="torn tail"),  # it was not acknowledged
        pytest.param(lambda folder: flip(segment(folder, 8), 0.1), 8, True, id="damaged record"),
        pytest.param(empty_the_newest_segment, 11, True, id="damaged last record before an empty file"),
        pytest.param(delete_log, 8, True, id="no log"),
        pytest.param(lambda folder: flip(snapshot(folder, 8)), 12, False, id="damaged snapshot"),
        pytest.param(lambda folder: cut(snapshot(folder, 8)), 12, False, id="short snapshot"),
        pytest.param(lambda folder: snapshot(folder, 8).unlink(), 12, False, id="no snapshot"),
    ],
)
def test_the_newest_restorable_round_is_restored_and_known_to_be_short(tmp_path, accident, round_, is_short):
    train(tmp_path, 12)
    accident(tmp_path)
    assert_restores(tmp_path, round_, is_short=is_short)


def test_a_snapshot_that_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch):
    train(tmp_path, 11)
    storage = reopen(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(run_storage, "read_file", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            storage.restore()
    assert storage.restore().round == 11


@pytest.mark.parametrize(
    ("began", "expected"), [({1: 8}, 8), ({1: 6}, 4), ({1: 6, 2: 9}, 4), ({1: None}, None)], ids=str
)
def test_snapshots_that_a_later_attempt_has_rolled_back_are_passed_over(tmp_path, began, expected):
    train(tmp_path, 11, durability="none")
    restored = RunStorage(install_for(TWO_SHARDS, "none", began=began), 0, tmp_path / "log-0").restore()
    assert (restored and restored.round) == expected


def test_without_a_log_the_newest_snapshot_is_restored(tmp_path):
    train(tmp_path, 11, durability="none")
    storage = open_storage(tmp_path, TWO_SHARDS, "none")
    assert storage.restore().round == 8
    assert sorted(storage.find_restorable()) == [(0, 0), (4, 4), (8, 8)]
    flip(snapshot(tmp_path, 4))
    assert sorted(storage.find_restorable(newest=3)) == [(0, 0), (4, 4), (8, 8)]
    assert sorted(storage.find_restorable(newest=4)) == [(0, 0), (8, 8)]


def test_complete_checkpoints_are_kept_until_others_are_complete(tmp_path):
    storage, shard = train(tmp_path, 11)
    storage.complete = (4, 0)
    for round_ in (12, 13, 14, 15):
        step(shard, round_, storage)
        storage.snapshot(shard, History())()
        storage.complete = (4, 0) if round_ < 14 else (12, 4)
    assert reopen(tmp_path).find_restorable() == [(13, 15), (12, 12), (4, 4)]


def test_a_rollback_deletes_later_snapshots_and_half_written_ones(tmp_path):
    train(tmp_path, 11)
    half = tmp_path / "log-0" / f".{snapshot(tmp_path, 8).name}.12345678"
    half.write_bytes(b"half")
    storage = reopen(tmp_path)
    storage.resume(storage.restore(6), storage._install.model_copy(update={"attempt": 1}))
    assert reopen(tmp_path).find_restorable() == [(0, 6)]
    assert not half.exists()


def failing_once(real: Callable[[int], None]) -> Callable[[int], None]:
    failures = [OSError(errno.EIO, "Input/output error")]

    def call(fd: int) -> None:
        if failures:
            raise failures.pop()
        real(fd)

    return call


def test_a_record_that_could_not_be_synced_is_cut_off_and_written_again(tmp_path, monkeypatch):
    storage, shard = train(tmp_path, 3, durability="fsync")
    size, before = segment(tmp_path, 0).stat().st_size, shard.digest()
    monkeypatch.setattr(os, "fdatasync", failing_once(os.fdatasync))
    with pytest.raises(OSError, match="Input/output error"):
        step(shard, 4, storage)
    assert segment(tmp_path, 0).stat().st_size == storage.log.num_bytes == size
    assert shard.digest() == before
    step(shard, 4, storage)
    assert_restores(tmp_path, 4)


def test_a_log_that_gets_no_new_file_goes_on_in_the_old_one(tmp_path, monkeypatch):
    storage, shard = train(tmp_path, 3)
    monkeypatch.setattr(update_log, "sync_folder", failing_once(storage_module.sync_folder))
    write = storage.snapshot(shard, History())
    for round_ in (4, 5):
        step(shard, round_, storage)
    assert segment_bases(tmp_path) == [0]
    assert_restores(tmp_path, 5)
    write()
    assert_restores(tmp_path, 5)


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
        tail = self.log.tail
        assert tail is not None
        before = sum(record.end - record.begin for _, record in self.log.read_after(len(self.updates) - 1))
        os.truncate(tail.segment.path, tail.end - before // 2)
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
            while not side.log.is_newest(after + len(numbers), chain):
                found = side.log.read_behind(after + len(numbers), chain)
                for record in parse_records(memoryview(found), chain):
                    numbers.append(get_number(record))
                    chain = record.chain
        except Conflict:
            assert side.updates[:after] != other.updates[:after]
            return
        except UpdatesGone:
            assert after < max(min(side.checkpoints), side.log.positions[0].round)
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
    assert storage.log.tail is not None
    return storage.log.tail.chain


def test_snapshots_carry_the_chain_after_the_log_is_pruned(tmp_path: Path) -> None:
    chains = chains_after(tmp_path, 30)
    train(tmp_path, 30, checkpoints=tuple(range(4, 30, 4)))
    assert segment_bases(tmp_path) == [20, 24, 28]
    for round_ in range(20, 31):
        assert assert_restores(tmp_path, round_, newest=round_).chain == chains[round_]


def test_updates_of_another_history_are_not_replayed_onto_a_snapshot(tmp_path: Path) -> None:
    train(tmp_path, 11)
    other, shard = train(tmp_path / "other", 0)
    other.log.append(LoggedUpdate(1, (7,), [], ()), [])  # steps nothing
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
    assert (storage.log.tail.round, storage.log.tail.chain) == (8, chains[8])
    step(restored.shard, 9, storage)
    assert assert_restores(tmp_path, 9).chain == chains[9]
