"""`docs/tutorial.md`: both scripts train, and few of their lines differ."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path

import pytest
import torch

from ..cluster.up_support import RunningUp
from .markdown import examples, read
from .stage import arguments_of_up, run_shell

PLAIN, CONVERTED = examples(read("tutorial.md"), "python")
[SHELL] = examples(read("tutorial.md"), "sh")
ALONE, UP = SHELL.text.splitlines()
EPOCHS = 4  # of the ten
MAX_CHANGED = 13  # as many as a correct script for DistributedDataParallel


def accuracies(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"epoch \d: accuracy ([\d.]+)", output)]


def test_few_lines_change() -> None:
    plain, converted = (
        [re.sub(r"\s+#.*", "", line) for line in block.text.splitlines()] for block in (PLAIN, CONVERTED)
    )
    changes = [line for line in difflib.ndiff(plain, converted) if line.startswith(("-", "+"))]
    assert len(re.findall(r"# \d", CONVERTED.text)) == 8 < len(changes) <= MAX_CHANGED


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_both_scripts_train(tmp_path: Path) -> None:
    for name, block in (("plain.py", PLAIN), ("train.py", CONVERTED)):
        text = re.sub(r"range\(10\)|(?<=epochs\(loader, )10", lambda ten: ten[0].replace("10", str(EPOCHS)), block.text)
        (tmp_path / name).write_text(f"import torch; torch.set_num_threads(1)\n{text}")
    plain = accuracies(run_shell(tmp_path, shlex.join(["python", "plain.py"])))
    alone = accuracies(run_shell(tmp_path, ALONE))
    with RunningUp(*arguments_of_up(UP), folder=tmp_path) as up:
        code, output, errors = up.finish()
    together = accuracies(output)
    assert (code, len(plain), len(alone), len(together)) == (0, EPOCHS, EPOCHS, 2 * EPOCHS), errors
    assert min(plain[-1], alone[-1], *together[-2:]) > 0.9
    assert together[-1] == together[-2]  # all trainers have one model, with its statistics of batch norm
    assert torch.load(tmp_path / "model.pt", weights_only=True)["1.num_batches_tracked"] == EPOCHS * 1500 / 50
