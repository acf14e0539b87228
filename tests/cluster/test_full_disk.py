"""A disk that is full holds up training, or costs a checkpoint; when there is room again nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.runtime.checkpoints import complete_checkpoints, read_shard_file
from services.runtime.storage import open_checkpoint_storage

from .faulty_run import FaultyRun, expected_result
from .small_disk import SmallDisk, small_disk

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(120)]


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
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1)
        run.wait_for_line("restored from disk")
        run.wait_for_round(run.round_of(0) + 3)
        disk.make_room()
        assert run.results() == [expected_result(80)] * 2
        newest = complete_checkpoints(place, newest.run)[0]
        assert newest.round > 15


def test_a_disk_that_stays_full_ends_the_run_for_everybody(disk: SmallDisk) -> None:
    """The coordinator's state is on it, too."""
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
