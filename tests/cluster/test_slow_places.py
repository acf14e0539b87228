"""Slow places of checkpoints, and a coordinator that is away: checkpoints are rarer for all alike, logs stay short."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL

import httpx
import pytest

from ..soaking import parametrize_sampled
from .faulty_run import SCRIPT, FaultyRun, expected_result

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(200)]

LOG_BYTES = 64 * 1024
KEEP = 2
TROUBLE = """
import os, time
if os.environ.get("GRADPOST_PSERVER_INDEX") == "1":
    from services.runtime.storage import LocalStorage
    write = LocalStorage.write
    def write_in_trouble(self, name, chunks):
        if name.endswith(".safetensors") and "/000000000000/" not in name:
            {trouble}
        write(self, name, chunks)
    LocalStorage.write = write_in_trouble
"""


def environ_with(trouble: str, folder: Path) -> dict[str, str]:
    """Make pserver 1 run the statement `trouble` before it writes a shard other than the initial values."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(TROUBLE.format(trouble=trouble))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")}
    return {**kept, "PYTHONPATH": f"{folder}{os.pathsep}{SCRIPT.parent.parent.parent}"}


def complete(run: FaultyRun) -> list[int]:
    found = httpx.get(f"{run.cluster.address}/v1/checkpoints", timeout=30).json()
    return [one["round"] for one in found]


def shards_of(state: Path, pserver: int) -> dict[int, int]:
    """Sizes of the shards in the place, by round."""
    found = state.glob(f"checkpoints/*/*/pserver-{pserver}-of-2.safetensors")
    return {int(path.parent.name): size_of(path) for path in found}


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted, or renamed, meanwhile
        return 0


class DiskUse:
    """The most that the log of a pserver, and all of its checkpoints, have taken."""

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


@parametrize_sampled("seconds", [0.3, 0.8], [0.8])
def test_all_pservers_make_the_same_checkpoints_at_the_pace_of_the_slowest(tmp_path: Path, seconds: float) -> None:
    state = tmp_path / "state"
    environ = environ_with(f"time.sleep({seconds})", tmp_path / "site")
    with FaultyRun(100_000, environ=environ, state_dir=state, checkpoint_rounds=5) as run:
        seen: set[int] = set()
        while len(seen) < 6:
            run.wait_for_round(run.round_of(0) + 2)
            listed = complete(run)
            seen.update(listed)
            shards = [shards_of(state, index) for index in (0, 1)]
            still = [round_ for round_ in listed if round_ in complete(run)]
            assert [round_ for round_ in still if round_ not in shards[0] or round_ not in shards[1]] == []
            assert len(listed) <= KEEP + 1
        known = run.cluster.status().round  # by the newest heartbeats
        assert run.make_checkpoint() >= known
        for child in run.cluster.trainers:
            child.signal(SIGKILL)


TROUBLES = {"slow place": "time.sleep(2)", "full place": "raise OSError(28, 'No space left on device')"}


@parametrize_sampled("trouble", ["none", "slow place", "full place", "no coordinator"], ["no coordinator"])
def test_the_disk_that_a_pserver_takes_is_bounded_as_documented(tmp_path: Path, trouble: str) -> None:
    state = tmp_path / "state"
    environ = environ_with(TROUBLES.get(trouble, "pass"), tmp_path / "site")
    settings = {"max_log_bytes": LOG_BYTES, "keep_checkpoints": KEEP, "rejoin_timeout_seconds": 60}
    with FaultyRun(300, environ=environ, state_dir=state, **settings) as run, measuring(state) as use:
        run.wait_for_round(30)
        if trouble == "no coordinator":
            run.kill(run.cluster.coordinator)
            run.wait_for_round(250)
            run.cluster.restart_coordinator()
        assert run.results() == [expected_result(300)] * 2
    assert use.log <= (KEEP + 2) * LOG_BYTES
    assert use.checkpoints <= 2 * (KEEP + 1) * use.largest
    assert use.log > LOG_BYTES  # it would have been far more
