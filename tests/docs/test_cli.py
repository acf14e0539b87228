"""`docs/cli.md` and the first example of README.md run as they are printed, but for the port."""

from __future__ import annotations

from pathlib import Path
from signal import SIGINT

import httpx
import pytest
from safetensors.torch import load_file

from ..cluster.faulty_run import FaultyRun
from ..cluster.trainer_processes import free_port
from ..cluster.up_support import RunningUp, wait_until
from .markdown import ROOT, examples, read, section
from .stage import arguments_of_up, needs_curl, run_shell, status_of

TEXT = read("cli.md")
COMMANDS = "\n".join(block.text for block in examples(TEXT[: TEXT.index("## TensorBoard,")], "sh"))
examples(section(TEXT, "TensorBoard, MLflow and W&B"), "sh")  # tests/unit/cli/test_tracking.py exports


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_every_command_works(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with FaultyRun(100_000, min_block_size=64, checkpoints=str(place), lease_seconds=30) as run:
        run.wait_for_round(15)
        variables = {"GRADPOST_COORDINATOR": run.cluster.address, "PLACE": str(place), "OMP_NUM_THREADS": "1"}
        run_shell(tmp_path, COMMANDS, **variables)
    assert load_file(tmp_path / "model.safetensors")["0.weight"].shape == (64, 20)


# ---------------------------------------------------------------- README.md

USE_IT = section((ROOT / "README.md").read_text(), "Use it")
[SCRIPT] = examples(USE_IT, "python")
[SHELL] = examples(USE_IT, "sh")
MODEL_AND_DATA = """
import collections, torch
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(100_000, 8), torch.randint(3, (100_000,)))
make_model = lambda: torch.nn.Sequential(collections.OrderedDict(fc=torch.nn.Linear(8, 3)))
"""


@pytest.mark.cluster
@pytest.mark.extended
@needs_curl
def test_the_first_example_trains_and_can_be_inspected(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL_AND_DATA + SCRIPT.text)
    port = str(free_port())
    up, status, curl = SHELL.text.replace("7070", port).splitlines()
    address = f"http://127.0.0.1:{port}"
    variables = {"GRADPOST_COORDINATOR": address, "GRADPOST_STATE_DIR": str(tmp_path / "state")}
    with RunningUp("--port", port, *arguments_of_up(up), folder=tmp_path, **variables) as running:
        assert wait_until(lambda: status_of(address).get("state") == "training", 90)
        assert "training" in run_shell(tmp_path, status, **variables)
        run_shell(tmp_path, curl)
        assert load_file(tmp_path / "fc.safetensors")["fc.weight"].shape == (3, 8)
        page = httpx.get(address, timeout=30)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        running.signal(SIGINT)
        running.finish()
