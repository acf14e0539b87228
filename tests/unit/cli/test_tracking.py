"""The trackers with their real packages, after a rollback, and without a package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gradpost.tracking.export import Export, TrackedRun
from gradpost.tracking.tensorboard import EventFiles

from .conftest import Outcome, RunCommand, run_process, serving


@pytest.mark.parametrize(
    ("command", "title", "package"),
    [
        ("tensorboard", "TensorBoard", "torch.utils.tensorboard"),
        ("mlflow", "MLflow", "mlflow"),
        ("wandb", "W&B", "wandb"),
    ],
)
def test_without_the_package(
    command: str, title: str, package: str, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"gradpost.tracking.{command}", raising=False)
    outcome = run_command(command, *(["--logdir", "logs"] if command == "tensorboard" else []))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith(f"gradpost: error: this needs {title}: pip install '.[{command}]' (")
    assert not list(tmp_path.iterdir())


def curve(*points: tuple[int, float, float | None]) -> dict[str, Any]:
    rounds, times, values = zip(*points, strict=True)
    return {"run": "5f0c", "curves": {"loss": {"0": {"round": rounds, "at": times, "value": values}}}}


def statistics(name: str, version: int) -> dict[str, Any]:
    return {
        "run": "5f0c", "name": name, "version": version, "norm": float(version), "update_ratio": None,
    }  # fmt: skip


# ---------------------------------------------------------------- TensorBoard


@pytest.fixture
def accumulator() -> Any:
    return pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install '.[tensorboard]'"
    )


def written(accumulator: Any, folder: Path, tag: str) -> list[tuple[int, float]]:
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


@pytest.fixture
def export(tmp_path: Path) -> Iterator[Export]:
    export = Export(partial(EventFiles, tmp_path))
    export.continue_run(TrackedRun("5f0c", {"num_trainers": 1}))
    yield export
    export.close(is_failed=False)


def test_a_curve_that_goes_back(accumulator: Any, export: Export, tmp_path: Path) -> None:
    export.add_curves(curve((1, 10.0, 4.0), (2, 11.0, 3.0), (3, 12.0, 2.0)))
    export.add_curves(curve((1, 10.0, 4.0), (3, 12.0, 2.0), (4, 13.0, None)))  # thinned out, and one more
    export.flush()
    place = tmp_path / "5f0c" / "trainer-0"
    assert written(accumulator, place, "loss")[:3] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert str(written(accumulator, place, "loss")[3]) == "(4, nan)"
    export.add_curves(curve((1, 10.0, 4.0), (2, 14.0, 3.5), (3, 15.0, 2.5)))
    export.flush()
    assert written(accumulator, place, "loss") == [(1, 4.0), (2, 3.5), (3, 2.5)]
    assert export.num_points == 6


def test_another_run_is_a_tracker_run_of_its_own(accumulator: Any, export: Export, tmp_path: Path) -> None:
    export.add_curves(curve((3, 12.0, 2.0)))
    export.add_parameters([statistics("a", 3)])
    export.continue_run(TrackedRun("beef", {"num_trainers": 1}))
    export.add_curves(curve((4, 13.0, 1.0)))  # of the earlier run
    export.add_curves(curve((1, 11.0, 5.0)) | {"run": "beef"})
    export.add_parameters([statistics("a", 3) | {"run": "beef"}])
    export.flush()
    assert written(accumulator, tmp_path / "5f0c" / "trainer-0", "loss") == [(3, 2.0)]
    assert written(accumulator, tmp_path / "beef" / "trainer-0", "loss") == [(1, 5.0)]
    assert written(accumulator, tmp_path / "beef" / "parameters", "norm/a") == [(3, 3.0)]


# ---------------------------------------------------------------- MLflow and W&B

CURVES = {
    "loss": {
        "0": {"round": [1, 2], "at": [10.0, 11.0], "value": [4.0, None]},
        "1": {"round": [1], "at": [10.5], "value": [5.0]},
    },
    "top-5 (%)": {"0": {"round": [2], "at": [11.0], "value": [0.5]}},
}


def export_with(command: str, state: str, num_trainers: int = 2, **environment: str) -> Outcome:
    """Run the command beside a coordinator whose run is over."""
    status = {
        "at": 1e9, "run": "5f0c", "attempt": 0, "state": state, "mode": "ssp", "num_pservers": 3,
        "num_trainers": num_trainers, "waiting_for": [], "failure": None, "plan_digest": None, "num_parameters": 1,
        "parameter_bytes": 8, "round": 2, "pservers": [], "trainers": [],
    }  # fmt: skip
    answers = {
        "/v1/status": status,
        "/v1/curves": {"run": "5f0c", "curves": CURVES},
        "/v1/parameters": {"parameters": [{"name": "w"}]},
        "/v1/statistics/w": statistics("w", 2),
    }
    with serving({path: json.dumps(answer) for path, answer in answers.items()}) as address:
        outcome = run_process("-P", "-m", "gradpost", command, "--coordinator", address, **environment)
    assert outcome.stdout.startswith("run 5f0c goes to "), outcome.stderr
    return outcome


@pytest.mark.extended
@pytest.mark.parametrize("state", ["finished", "failed"])
def test_mlflow_has_the_run_its_settings_and_its_metrics(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install '.[mlflow]'")
    outcome = export_with("mlflow", state, MLFLOW_TRACKING_URI=str(tmp_path / "mlruns"))
    assert outcome.exit_code == 0, outcome.stderr
    assert "4 points of curves" in outcome.stdout
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(str(tmp_path / "mlruns"))
    [run] = client.search_runs([client.get_experiment_by_name("gradpost").experiment_id])
    assert (run.info.run_name, run.info.status) == ("5f0c", state.upper())
    assert run.data.params == {"mode": "ssp", "num_pservers": "3", "num_trainers": "2"}
    points = {
        name: [
            (point.step, str(point.value), point.timestamp)
            for point in client.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
    }
    [(*norm, _)] = points.pop("norm/w")
    assert norm == [2, "2.0"]
    assert points == {
        "trainer-0/loss": [(1, "4.0", 10_000), (2, "nan", 11_000)],
        "trainer-0/top-5 ___": [(2, "0.5", 11_000)],
        "trainer-1/loss": [(1, "5.0", 10_500)],
    }


@pytest.mark.extended
@pytest.mark.parametrize(("num_trainers", "prefix"), [(1, ""), (2, "trainer-0/")])
def test_wandb_has_the_run_its_settings_and_its_metrics(num_trainers: int, prefix: str, tmp_path: Path) -> None:
    """The file of an offline run holds names and values as text."""
    pytest.importorskip("wandb", reason="pip install '.[wandb]'")
    outcome = export_with("wandb", "failed", num_trainers, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    assert outcome.exit_code == 0, outcome.stderr
    assert "4 points of curves" in outcome.stdout
    [file] = tmp_path.rglob("*.wandb")
    for text in ("gradpost", "5f0c", "num_pservers", f"{prefix}loss", f"{prefix}top-5 (%)", "norm/w"):
        assert text.encode() in file.read_bytes()
