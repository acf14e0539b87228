"""The examples for other libraries' trainers, with the real libraries: beside the same script without a cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from .training import assert_identical
from .up_support import ROOT, SECONDS, RunningUp, clean_environment

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.extended,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("transformers", "accelerate", "lightning")),
        reason="needs transformers and lightning: pip install -r requirements-adapters.lock",
    ),
]

PROCESS = Path(__file__).with_name("example_process.py")


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


EPOCHS, STEPS = 8, 8 * 23


class Example(NamedTuple):
    script: Path
    batch_size: int  # of each of two trainers

    def command(self, folder: Path, num_trainers: int) -> list[str]:
        """The same examples in each step, whoever has them."""
        folder.mkdir()
        arguments = ["--epochs", EPOCHS, "--batch-size", self.batch_size * 2 // num_trainers]
        return [str(part) for part in (PROCESS, folder, self.script, *arguments)]


class Run(NamedTuple):
    accuracy: float
    parameters: list[dict[str, Tensor]]  # of each rank


HUGGING_FACE = Example(ROOT / "examples" / "huggingface_trainer.py", 16)


LIGHTNING = Example(ROOT / "examples" / "lightning_module.py", 32)


BY_NAME: dict[str, Any] = {"indirect": True, "scope": "module", "ids": ["huggingface", "lightning"]}


def read_run(folder: Path, output: str, num_trainers: int) -> Run:
    accuracies = [float(number) for number in re.findall(r"accuracy on 360 held-out images: (\S+)", output)]
    assert len(accuracies) == num_trainers, output
    return Run(accuracies[0], [load_file(folder / f"{rank}.safetensors") for rank in range(num_trainers)])


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> Example:
    return request.param


@pytest.fixture(scope="module")
def alone(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The library with the optimizer that it was made for."""
    folder = tmp_path_factory.mktemp("alone")
    process = subprocess.run(
        [sys.executable, *example.command(folder / "parameters", 1)],
        cwd=folder,
        env={**clean_environment(), **ONE_THREAD, "PYTHONPATH": str(ROOT), "ALONE": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return read_run(folder / "parameters", process.stdout, 1)


def train(example: Example, folder: Path, num_trainers: int, *arguments: str) -> tuple[Run, dict[str, Any], str]:
    command = ["python", *example.command(folder / "parameters", num_trainers), *arguments]
    with RunningUp("--json", "--trainers", num_trainers, "--", *command, folder=folder, **ONE_THREAD) as up:
        code, stdout, stderr = up.finish()
    assert code == 0, stderr
    return read_run(folder / "parameters", stderr, num_trainers), json.loads(stdout), stderr


@pytest.mark.parametrize("example", [HUGGING_FACE, pytest.param(LIGHTNING, marks=pytest.mark.soak)], **BY_NAME)
def test_one_trainer_has_the_bits_of_the_library_alone(example: Example, alone: Run, tmp_path: Path) -> None:
    run, _, _ = train(example, tmp_path, 1)
    assert_identical(run.parameters[0], alone.parameters[0])
    assert run.accuracy == alone.accuracy


@pytest.mark.parametrize("example", [pytest.param(HUGGING_FACE, marks=pytest.mark.soak), LIGHTNING], **BY_NAME)
def test_two_trainers_learn_as_much_as_one(example: Example, alone: Run, tmp_path: Path) -> None:
    run, summary, output = train(example, tmp_path, 2, "--output", "saved")
    assert summary["rounds"] == STEPS
    assert summary["results"].keys() == {"loss", "accuracy"}
    assert_identical(*run.parameters)
    assert alone.accuracy > 0.93
    assert abs(run.accuracy - alone.accuracy) < 0.03
    assert contents(run.parameters[0]) <= contents(read_saved(tmp_path / "saved"))
    assert not re.findall(r"(?i)torch\.distributed|\bgradpost: .*\bwarning|it/s\]|changed \d+ parameters", output)


def contents(tensors: dict[str, Tensor]) -> set[bytes]:
    """Without names, which transformers changes in what it saves."""
    return {tensor.numpy().tobytes() for tensor in tensors.values()}


def read_saved(folder: Path) -> dict[str, Tensor]:
    """What the library has saved last."""
    [newest] = [path for path in folder.rglob("*") if re.search(rf"\b{STEPS}\b", path.name)]
    if newest.is_dir():
        optimizer = torch.load(newest / "optimizer.pt", weights_only=True)
        saved = load_file(newest / "model.safetensors")
    else:
        checkpoint = torch.load(newest, weights_only=True)
        [optimizer], saved = checkpoint["optimizer_states"], checkpoint["state_dict"]
    assert optimizer["param_groups"][0]["lr"] < 1e-5  # the last of the schedule
    return saved
