"""`gradpost up` starts again what has died, and goes on where a run has stopped; models are exported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from signal import SIGINT

import pytest
import torch
from safetensors.torch import load_file

from .faulty_run import SCRIPT
from .training import assert_identical, expected_result
from .training_script import digest_of, make_model
from .up_support import ROOT, RunningUp, clean_environment

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(300)]
ROUNDS = 60


def train(folder: Path, *arguments: object, rounds: int = ROUNDS, trouble: str = "", **environ: str) -> tuple[int, str]:
    command = ["--", "python", SCRIPT, rounds, 0.005, trouble]
    with RunningUp("--lease-seconds", 1, *arguments, *command, folder=folder, **environ) as up:
        code, stdout, stderr = up.finish()
        return code, stdout + stderr


def ask(folder: Path, *arguments: object) -> str:
    command = [sys.executable, "-P", "-m", "gradpost", *map(str, arguments)]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_services_and_scripts_that_die_are_started_again(tmp_path: Path) -> None:
    code, output = train(
        tmp_path, "--max-restarts", 3, trouble="1:20:raise-once", GRADPOST_FAILPOINTS="apply.after=kill@25"
    )
    assert code == 0, output
    assert output.count(f"result {expected_result(ROUNDS)}") == 2, output
    assert "trainer 1 failed with exit code 1; starting it again (2 restarts left)" in output
    assert "pserver 0 was ended by SIGKILL (out of memory?); starting it again" in output


def test_a_run_that_failed_is_resumed_and_its_model_exported(tmp_path: Path) -> None:
    code, output = train(tmp_path, trouble="1:20:raise")
    assert code == 1
    assert "no data" in output
    code, output = train(tmp_path, "--resume")
    assert code == 0, output
    assert "begin 20" in output or "begin 19" in output, output
    assert output.count(f"result {expected_result(ROUNDS)}") == 2, output
    assert json.loads(ask(tmp_path, "checkpoint", "list", "--json"))[0]["round"] == ROUNDS
    assert "of round 60 of run" in ask(tmp_path, "checkpoint", "export", "model.safetensors")
    model = make_model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert f"{digest_of(model)} {ROUNDS}" == expected_result(ROUNDS)


@pytest.mark.parametrize("options", ["", "--durability none", "--mode async"])
def test_the_newest_round_of_a_run_that_was_interrupted_is_exported(tmp_path: Path, options: str) -> None:
    with RunningUp(*options.split(), "--", "python", SCRIPT, 100_000, 0.005, folder=tmp_path) as up:
        up.wait_for("[trainer 0] round 30", "[trainer 1] round 30")
        up.signal(SIGINT)
        code, _, _ = up.finish()
    assert code == 128 + SIGINT
    said = ask(tmp_path, "checkpoint", "export", "model.safetensors")
    found = re.search(r"of round (\d+) of run", said)
    assert found is not None, said
    round_ = int(found[1])
    if options == "--durability none" and "is newer, but not all pservers have it" in said:
        return  # one pserver had applied one round more than the other
    assert round_ >= 30
    model = make_model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    if options == "--mode async":  # contributions, in an order that differs from run to run
        assert round_ >= 2 * 30
        assert digest_of(model) != digest_of(make_model())
    else:
        assert f"{digest_of(model)} {round_}" == expected_result(round_)


@pytest.mark.parametrize("place", ["", "dir://shared::file://{}"])
def test_a_checkpoint_is_resumed_on_other_pservers_and_another_placement(tmp_path: Path, place: str) -> None:
    """The last place is one of fsspec's that processes share; `file://` is a folder to us."""
    environ = {"GRADPOST_CHECKPOINTS": place.format(tmp_path)} if place else {}
    code, output = train(tmp_path, "--lease-seconds", 5, **environ)
    assert code == 0, output
    assert bool(place) == (tmp_path / "shared").is_dir()
    more = ("--lease-seconds", 5, "--resume", "--pservers", 3, "--placement", "hash")
    code, output = train(tmp_path, *more, rounds=2 * ROUNDS, **environ)
    assert code == 0, output
    assert output.count(f"begin {ROUNDS}") == 2, output
    assert output.count(f"result {expected_result(2 * ROUNDS)}") == 2, output


def test_tied_parameters_and_buffers_are_exported(tmp_path: Path) -> None:
    script = tmp_path / "tied.py"
    script.write_text(
        """
import torch
from trainer_client import RemoteOptimizer

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into = torch.nn.Embedding(12, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.out = torch.nn.Linear(6, 12, bias=False, dtype=torch.float32)
        self.out.weight = self.into.weight

torch.manual_seed(0)
model = Tied()
if __name__ == "__main__":
    optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    rank = optimizer.session.rank
    for _ in range(3):
        optimizer.zero_grad()
        model.out(model.norm(model.into(torch.arange(6) + 6 * rank))).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"trained{rank}.pt")
"""
    )
    with RunningUp("--", "python", script, folder=tmp_path) as up:
        code, stdout, stderr = up.finish()
    assert code == 0, stdout + stderr
    ask(tmp_path, "checkpoint", "export", "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["norm.running_mean"].any()
    for rank in range(2):
        trained = torch.load(tmp_path / f"trained{rank}.pt", weights_only=True)
        del trained["norm.num_batches_tracked"]  # each trainer counts its own
        assert_identical(tensors, trained)
    assert torch.equal(tensors["into.weight"], tensors["out.weight"])
    assert tensors["norm.num_batches_tracked"].dtype == torch.int64
    namespace: dict[str, object] = {"__name__": "tied"}
    exec(script.read_text(), namespace)
    model = namespace["model"]
    assert isinstance(model, torch.nn.Module)
    model.load_state_dict(tensors, strict=True)
