"""The points of curves, and the trackers with their real packages and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradpost.track import find_new_points

from .conftest import run_process, serving

CURVES = {
    "loss": {
        "0": {"round": [1, 2], "at": [10.0, 11.0], "value": [4.0, None]},
        "1": {"round": [1], "at": [10.5], "value": [5.0]},
    },
    "top-5 (%)": {"0": {"round": [2], "at": [11.0], "value": [0.5]}},
}


def test_each_point_is_found_once() -> None:
    newest = dict[str, float]()
    assert [repr(tuple(point)) for point in find_new_points({"curves": CURVES}, newest)] == [
        "(10.0, 'trainer-0', 1, 'loss', 4.0)",
        "(10.5, 'trainer-1', 1, 'loss', 5.0)",
        "(11.0, 'trainer-0', 2, 'loss', nan)",
        "(11.0, 'trainer-0', 2, 'top-5 (%)', 0.5)",
    ]
    after_rollback = {"loss": {"0": {"round": [1, 1], "at": [10.0, 12.0], "value": [4.0, 3.5]}}}
    assert find_new_points({"curves": after_rollback}, newest) == [(12.0, "trainer-0", 1, "loss", 3.5)]


# ---------------------------------------------------------------- the real trackers


def make_answers(state: str, num_trainers: int) -> dict[str, str]:
    """Return the answers of a coordinator whose run is over."""
    status = {
        "at": 1e9, "run": "5f0c", "attempt": 0, "state": state, "mode": "ssp", "num_pservers": 3,
        "num_trainers": num_trainers, "waiting_for": [], "failure": None, "plan_digest": None, "num_parameters": 1,
        "parameter_bytes": 8, "round": 2, "pservers": [], "trainers": [],
    }  # fmt: skip
    return {"/v1/status": json.dumps(status), "/v1/curves": json.dumps({"run": "5f0c", "curves": CURVES})}


def export_with(*command: str, state: str = "finished", num_trainers: int = 2, **environment: str) -> None:
    with serving(make_answers(state, num_trainers)) as address:
        outcome = run_process("-P", "-m", "gradpost", *command, "--coordinator", address, **environment)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout.startswith("run 5f0c goes to ")
    assert outcome.stdout.endswith("4 points of curves\n")


def test_tensorboard_has_a_folder_of_each_trainer(tmp_path: Path) -> None:
    package = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(package, reason="pip install '.[tensorboard]'")
    export_with("tensorboard", "--logdir", str(tmp_path))
    found = {}
    for source in ("trainer-0", "trainer-1"):
        files = accumulator.EventAccumulator(str(tmp_path / "5f0c" / source), size_guidance={"scalars": 0})
        files.Reload()
        for tag in files.Tags()["scalars"]:
            found[source, tag] = [(event.step, str(event.value), event.wall_time) for event in files.Scalars(tag)]
    assert found == {
        ("trainer-0", "loss"): [(1, "4.0", 10.0), (2, "nan", 11.0)],
        ("trainer-0", "top-5 (%)"): [(2, "0.5", 11.0)],
        ("trainer-1", "loss"): [(1, "5.0", 10.5)],
    }


@pytest.mark.extended
@pytest.mark.parametrize("state", ["finished", "failed"])
def test_mlflow_has_the_run_its_settings_and_its_metrics(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install '.[mlflow]'")
    export_with("mlflow", state=state, MLFLOW_TRACKING_URI=str(tmp_path / "mlruns"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(str(tmp_path / "mlruns"))
    [run] = client.search_runs([client.get_experiment_by_name("gradpost").experiment_id])
    assert (run.info.run_name, run.info.status) == ("5f0c", state.upper())
    assert run.data.params == {"mode": "ssp", "num_pservers": "3", "num_trainers": "2"}
    assert {
        name: [
            (point.step, str(point.value), point.timestamp)
            for point in client.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
    } == {
        "trainer-0/loss": [(1, "4.0", 10_000), (2, "nan", 11_000)],
        "trainer-0/top-5 ___": [(2, "0.5", 11_000)],
        "trainer-1/loss": [(1, "5.0", 10_500)],
    }


@pytest.mark.extended
@pytest.mark.parametrize(("num_trainers", "prefix"), [(1, ""), (2, "trainer-0/")])
def test_wandb_has_the_run_its_settings_and_its_metrics(num_trainers: int, prefix: str, tmp_path: Path) -> None:
    """The file of an offline run holds names and values as text."""
    pytest.importorskip("wandb", reason="pip install '.[wandb]'")
    export_with("wandb", state="failed", num_trainers=num_trainers, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    [file] = tmp_path.rglob("*.wandb")
    for text in ("gradpost", "5f0c", "num_pservers", f"{prefix}loss", f"{prefix}top-5 (%)"):
        assert text.encode() in file.read_bytes()
