"""Disks that are full, slow or damaged: the pserver logs what to do, and the run goes on without a loss."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gradpost.up.state_folder import holds_a_run
from services.runtime.checkpoints import complete_checkpoints, read_shard_file
from services.runtime.storage import open_checkpoint_storage

from .faulty_run import FaultyRun
from .surroundings import SmallDisk, small_disk
from .training import expected_result

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(300)]


def train(folder: Path, rounds: int = 60, **settings: Any) -> FaultyRun:
    return FaultyRun(rounds, state_dir=folder, **{"lease_seconds": 5, **settings})


# What a damaged log or checkpoint costs is in tests/unit/pserver/durable and, for a whole cluster, in test_faults.py.


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_others_do_not_go_on_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    """The file is named at once: to read it again and again would not help."""
    with train(tmp_path, checkpoint_rounds=60) as run:
        run.results()
        run.cluster.summary()
    [shard] = tmp_path.glob("checkpoints/*/000000000060/pserver-1-of-2.safetensors")
    flip(shard)
    with train(tmp_path, pservers=3, resume=True) as run:
        assert [child.wait(60) for child in run.cluster.trainers] == [1, 1]
        run.wait_for_line("StorageFailed: pserver ")
        assert f"{shard.name} in " in run.wait_for_line("is damaged")
    shutil.rmtree(shard.parent)  # the only one
    assert not holds_a_run(tmp_path)  # so that `gradpost up --resume` refuses


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def test_a_round_waits_for_room_in_the_log(disk: SmallDisk) -> None:
    with FaultyRun(60, state_dir=disk.path, round_timeout_seconds=30) as run:
        run.wait_for_round(10)
        disk.fill()
        assert "No space left on device" in run.wait_for_line("the log cannot be written; the round waits")
        stands_at = run.round_of(0)
        run.wait_for_line("the log cannot be written; the round waits", 5)
        assert run.round_of(0) <= stands_at + 1
        disk.make_room()
        assert run.results() == [expected_result(60)] * 2


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(disk: SmallDisk, tmp_path: Path) -> None:
    with FaultyRun(80, state_dir=tmp_path / "state", checkpoints=disk.path, checkpoint_rounds=5) as run:
        run.wait_for_round(12)
        disk.fill()
        line = run.wait_for_line("a checkpoint could not be written; training goes on", 4)
        assert "No space left on device" in line
        place = open_checkpoint_storage(str(disk.path))
        newest = complete_checkpoints(place, run.cluster.status().run)[0]
        assert newest.round in (5, 10, 15)
        for file in newest.shards:
            read_shard_file(place, newest.run, file)  # raises if it is damaged
        run.restart_pserver(1)
        run.wait_for_line("restored from disk")
        run.wait_for_round(run.round_of(0) + 3)
        disk.make_room()
        assert run.results() == [expected_result(80)] * 2
        newest = complete_checkpoints(place, newest.run)[0]
        assert newest.round > 15


def test_a_disk_that_stays_full_ends_the_run_for_everybody(disk: SmallDisk) -> None:
    settings = {"round_timeout_seconds": 3, "rejoin_timeout_seconds": 1}
    with FaultyRun(1000, state_dir=disk.path, **settings) as run:
        run.wait_for_round(100)  # the coordinator has written down by now that rounds were ended
        disk.fill()
        assert [trainer.wait(30) for trainer in run.cluster.trainers] == [1, 1]
        for rank in (0, 1):
            run.wait_for_line(f"[trainer {rank}] ps_protocol.errors.StorageFailed: ")
        run.wait_for_line('"event": "run failed"', of="coordinator")
        status = run.cluster.status()
        assert status.state == "failed"
        assert status.failure is not None
        assert (status.failure["code"], status.failure["status"]) == ("storage_failed", 507)
        assert "cannot log round" in status.failure["detail"] or "cannot be written" in status.failure["detail"]
        assert not [line for line in run.lines if "Traceback" in line and "[trainer" not in line]


LOG_BYTES = 64 * 1024
KEEP = 2


def shards_of(state: Path, pserver: int) -> dict[int, int]:
    """Return the sizes of the shards in the place, by round."""
    found = state.glob(f"checkpoints/*/*/pserver-{pserver}-of-2.safetensors")
    return {int(path.parent.name): size_of(path) for path in found}


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted, or renamed, meanwhile
        return 0


class DiskUse:
    """The largest sizes of the log of a pserver, and of all of its checkpoints."""

    def __init__(self, state: Path) -> None:
        self.log, self.checkpoints, self.largest = 0, 0, 0
        self._state = state

    def look(self) -> None:
        for index in (0, 1):
            own, log = [], 0
            for path in self._state.glob(f"pserver-{index}/log/*"):
                if path.suffix == ".checkpoint":
                    own.append(size_of(path))
                else:
                    log += size_of(path)
            sizes = [*own, *shards_of(self._state, index).values()]
            self.log = max(self.log, log)
            self.checkpoints = max(self.checkpoints, sum(sizes))
            self.largest = max([self.largest, *sizes])


@contextmanager
def measuring(state: Path) -> Iterator[DiskUse]:
    use, is_over = DiskUse(state), threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            use.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield use
    finally:
        is_over.set()
        thread.join()


def test_the_disk_that_a_pserver_takes_is_bounded_as_documented(tmp_path: Path) -> None:
    """The coordinator, which completes the checkpoints, is away for most of the run."""
    settings = {"max_log_bytes": LOG_BYTES, "keep_checkpoints": KEEP, "rejoin_timeout_seconds": 60}
    with FaultyRun(300, state_dir=tmp_path, **settings) as run, measuring(tmp_path) as use:
        run.wait_for_round(30)
        run.kill(run.cluster.coordinator)
        run.wait_for_round(250)
        run.cluster.restart_coordinator()
        assert run.results() == [expected_result(300)] * 2
    assert use.log <= (KEEP + 2) * LOG_BYTES
    assert use.checkpoints <= 2 * (KEEP + 1) * use.largest
    assert use.log > LOG_BYTES  # it would have been far more
