"""Event files for TensorBoard after a rollback, and without the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gradpost.tensorboard import EventFiles

from .conftest import RunCommand


def test_without_the_package(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    outcome = run_command("tensorboard", "--logdir", tmp_path / "logs")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith('gradpost: error: this needs TensorBoard: pip install "gradpost[tensorboard]" (')
    assert not (tmp_path / "logs").exists()


def curve(*points: tuple[int, float, float | None]) -> dict[str, Any]:
    rounds, times, values = zip(*points, strict=True)
    return {"run": "5f0c", "curves": {"loss": {"0": {"round": rounds, "at": times, "value": values}}}}


def statistics(name: str, version: int) -> dict[str, Any]:
    return {
        "run": "5f0c", "name": name, "version": version, "norm": float(version), "mean": 0.25, "minimum": 0.0,
        "maximum": 0.5, "update_ratio": None, "histogram": {"begin": 0.0, "width": 0.5, "counts": [1, 1]},
    }  # fmt: skip


@pytest.fixture
def accumulator() -> Any:
    return pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'gradpost[tensorboard]'"
    )


def written(accumulator: Any, folder: Path, tag: str) -> list[tuple[int, float]]:
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_a_curve_that_goes_back(accumulator: Any, tmp_path: Path) -> None:
    files = EventFiles(tmp_path)
    files.add_curves(curve((1, 10.0, 4.0), (2, 11.0, 3.0), (3, 12.0, 2.0)))
    files.add_curves(curve((1, 10.0, 4.0), (3, 12.0, 2.0), (4, 13.0, None)))  # thinned out, and one more
    files.flush()
    place = tmp_path / "5f0c" / "trainer-0"
    assert written(accumulator, place, "loss")[:3] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert str(written(accumulator, place, "loss")[3]) == "(4, nan)"
    files.add_curves(curve((1, 10.0, 4.0), (2, 14.0, 3.5), (3, 15.0, 2.5)))
    files.close()
    assert written(accumulator, place, "loss") == [(1, 4.0), (2, 3.5), (3, 2.5)]
    assert files.num_points == 6


def test_parameters_that_go_back(accumulator: Any, tmp_path: Path) -> None:
    files = EventFiles(tmp_path)
    for version in (5, 7, 7):
        files.add_parameters([statistics("a", version + 1), statistics("b", version)])
    assert files.num_histograms == 4
    files.add_parameters([statistics("b", 6), statistics("a", 6)])
    files.close()
    place = tmp_path / "5f0c" / "parameters"
    assert written(accumulator, place, "norm/a") == [(6, 6.0)]  # of the round of the rollback
    assert written(accumulator, place, "norm/b") == [(5, 5.0), (6, 6.0)]
