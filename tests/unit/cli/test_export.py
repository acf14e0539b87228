"""`gradpost checkpoint export`, `gradpost plan`, and the commands of trackers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import load_file

from gradpost.checkpoint import export_model
from gradpost.output import CommandError
from gradpost.plan import parse_param
from gradpost.track import find_new_points
from ps_protocol.consistency import Consistency
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from services.pserver.durable.disk import Disk
from services.pserver.shard.shard_state import History, concatenate
from services.runtime.checkpoints import Manifest, round_folder, write_manifest
from services.runtime.storage import open_checkpoint_storage

from ..pserver.durable.support import install_for, new_shard, plan_for, step
from .conftest import RunCommand, run_process, serving

PLAN = plan_for(2)
ROUNDS = (0, 4)


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Write two checkpoints of two pservers."""
    storage, shards = open_checkpoint_storage(str(tmp_path / "checkpoints")), {round_: [] for round_ in ROUNDS}
    for index in range(PLAN.num_pservers):
        disk = Disk(tmp_path)
        disk.open(index)
        disk.write_incarnation(index, 1)
        own, _ = disk.open_run(install_for(PLAN))
        shard = new_shard(PLAN, index)
        for round_ in range(max(ROUNDS) + 1):
            if round_:
                step(shard, round_, own)
            if round_ in shards:
                file, path = own.snapshot(shard, History({round_: (0,)} if round_ else {}))()
                storage.copy_file(path, f"{round_folder('run1', round_)}/{file.name}")
                shards[round_].append(file)
        own.close()
    for round_, files in shards.items():
        manifest = Manifest(
            run="run1", attempt=0, round=round_, consistency=Consistency(), plan=PLAN.as_json, shards=tuple(files),
            created="2026-11-24T10:00:00+00:00", aliases={"tied": "a"},
        )  # fmt: skip
        write_manifest(storage, manifest)
    return storage.url


def assert_is_round(file: Path, round_: int) -> None:
    shards = [(index, new_shard(PLAN, index)) for index in range(PLAN.num_pservers)]
    for _, shard in shards:
        for number in range(1, round_ + 1):
            step(shard, number)
    tensors = load_file(file)
    for name, value in concatenate([(index, shard.state) for index, shard in shards], PLAN).items():
        assert torch.equal(tensors[name], value.to(tensors[name].dtype)), name
    assert torch.equal(tensors["tied"], tensors["a"])
    assert tensors["seen"].dtype == torch.int64


def test_the_newest_readable_or_the_wanted_round_is_exported(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model.safetensors"
    export_model(target, place, None, None)
    assert_is_round(target, 4)
    assert "of round 4 of run run1, " in capsys.readouterr().out
    export_model(target, place, "run1", 0)
    assert_is_round(target, 0)
    for file in (tmp_path / "checkpoints" / round_folder("run1", 4)).glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    export_model(target, place, None, None)
    assert_is_round(target, 0)
    assert capsys.readouterr().out.startswith("skipping round 4 of run run1: ")


def test_a_missing_checkpoint_is_named_with_the_others(place: str, tmp_path: Path) -> None:
    message = r"no complete checkpoint of round 7 in .* Choose one of rounds 4 of run run1, 0 of run run1"
    with pytest.raises(CommandError, match=message):
        export_model(tmp_path / "m", place, None, 7)
    with pytest.raises(CommandError, match=r"no complete checkpoint of run run2 in .*"):
        export_model(tmp_path / "m", place, "run2", None)


# ---------------------------------------------------------------------- trackers


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


# ---------------------------------------------------------------------- plan


SEED = ["--param", "w1:10x1000", "--param", "w2:1x10", "--pservers", "3"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a file with parameters of two dtypes, an empty one, a scalar, a buffer and unusual names."""
    path = tmp_path / "model.safetensors"
    tensors = {
        "fc.weight": np.ones((100, 300), "f4"),
        "fc.bias": np.ones(100, "f4"),
        "half": np.ones((3, 5), "f2"),
        "empty": np.ones((0, 7), "f4"),
        "scalar": np.ones((), "f4"),
        "bn.num_batches_tracked": np.ones((), "i8"),
        'ä [bold]"x"\n\x1b[31m': np.ones(3, "f4"),
    }
    safetensors.numpy.save_file(tensors, path, {"format": "np"})
    return path


# ---------------------------------------------------------------- JSON


def test_a_plan_as_json_in_a_process() -> None:
    outcome = run_process("-m", "gradpost", "plan", *SEED, "--json")
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    parameters = [ParameterSpec("w1", (10, 1000)), ParameterSpec("w2", (1, 10))]
    assert json.loads(outcome.stdout) == {
        "digest": make_plan(parameters, 3).digest,
        "blocks": [
            {"name": "w1.block0", "begin": 0, "end": 5000, "pserver": 0},
            {"name": "w1.block1", "begin": 5000, "end": 10_000, "pserver": 1},
            {"name": "w2.block0", "begin": 0, "end": 10, "pserver": 2},
        ],
        "pservers": [
            {"pserver": 0, "bytes": 20_000, "share": 20_000 / 40_040},
            {"pserver": 1, "bytes": 20_000, "share": 20_000 / 40_040},
            {"pserver": 2, "bytes": 40, "share": 40 / 40_040},
        ],
    }


# ---------------------------------------------------------------- tables


PLAIN = """\
block      begin     end   bytes  pserver
w1.block0      0   5,000  20,000        0
w1.block1  5,000  10,000  20,000        1
w2.block0      0      10      40        2

pserver  blocks   bytes  of the mean
      0       1  20,000        1.499
      1       1  20,000        1.499
      2       1      40     0.002997

2 parameters, 3 blocks, 40,040 bytes on 3 pservers
"""


def test_tables_are_plain_and_of_any_width(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    digest = make_plan([parse_param("w1:10x1000"), parse_param("w2:1x10")], 3).digest
    assert run_command("plan", *SEED).stdout == f"{PLAIN}digest {digest}\n"


# ---------------------------------------------------------------- the file


def test_a_file_is_read_by_its_header(model: Path, run_command: RunCommand) -> None:
    outcome = run_command("plan", model, "--pservers", 2, "--json")
    answer = json.loads(outcome.stdout)
    blocks = answer["blocks"]
    assert sum(row["bytes"] for row in answer["pservers"]) == 4 * (30_000 + 100 + 1 + 3) + 2 * 15 + 8
    assert {block["name"]: (block["begin"], block["end"]) for block in blocks} == {
        "fc.weight.block0": (0, 15_000),
        "fc.weight.block1": (15_000, 30_000),
        "fc.bias.block0": (0, 100),
        "half.block0": (0, 15),
        "scalar.block0": (0, 1),
        'ä [bold]"x"\n\x1b[31m.block0': (0, 3),
    }
    assert outcome.stderr == ""
    assert 'ä [bold]"x"\\n\\x1b[31m.block0' in run_command("plan", model, "--pservers", 2).stdout


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("s:", ParameterSpec("s", ())),
        ("s::BF16", ParameterSpec("s", (), "BF16")),
        ("e:0", ParameterSpec("e", (0,))),
        ("a:b:3x4:F16", ParameterSpec("a:b", (3, 4), "F16")),
        ("ä b\n:3", ParameterSpec("ä b\n", (3,))),
    ],
)
def test_parameters_as_text(text: str, spec: ParameterSpec) -> None:
    assert parse_param(text) == spec
