"""The wall clocks of all services jump by a day, forth and back, in the middle of a run: nothing comes of it.

Trainers keep theirs, since under libfaketime 0.9.10 `time.sleep` fails.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from services.runtime.checkpoints import complete_checkpoints
from services.runtime.storage import open_checkpoint_storage

from .faulty_run import FaultyRun, expected_result

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(300)]


def find_libfaketime() -> str:
    found = sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip("libfaketime is not installed (the Debian package of this name)")
    return str(found[0])


def days_ahead(run: FaultyRun, checkpoints: Path) -> int:
    """The clock of the coordinator, compared with ours, when it completed its newest checkpoint."""
    newest = complete_checkpoints(open_checkpoint_storage(str(checkpoints)), run.cluster.status().run)[0]
    return round((datetime.fromisoformat(newest.created) - datetime.now(UTC)) / timedelta(days=1))


def test_the_date_does_not_matter(tmp_path: Path) -> None:
    offset, checkpoints = tmp_path / "offset", tmp_path / "checkpoints"
    offset.write_text("+0d\n")
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")},
        "LD_PRELOAD": find_libfaketime(),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",  # seconds until it looks into the file again
    }
    run = FaultyRun(80, environ=environ, lease_seconds=10, checkpoints=checkpoints, checkpoint_rounds=5)
    run.prefix = {rank: ["env", "--unset=LD_PRELOAD"] for rank in (0, 1)}
    with run:
        run.wait_for_round(10)
        for days in (1, -1):
            offset.write_text(f"{days:+}d\n")
            run.wait_for(lambda days=days: days_ahead(run, checkpoints) == days, f"a checkpoint {days} days ahead")
        assert run.results(90) == [expected_result(80)] * 2
        assert not [line for line in run.lines if "was lost" in line or "is silent" in line or "paused" in line]
