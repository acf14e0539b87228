"""docs/placement.md: `gradpost plan` does what stands there; its tables are those of benchmarks/placement.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .markdown import examples, read
from .stage import run_shell

[SCRIPT] = examples(read("placement.md"), "sh")


def test_the_plans(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(300, 200)}, tmp_path / "model.safetensors")
    of_file, of_shapes = SCRIPT.text.splitlines()
    assert "fc.weight" in run_shell(tmp_path, of_file)
    plan = json.loads(run_shell(tmp_path, of_shapes))
    assert {block["name"] for block in plan["blocks"]} == {"w1.block0", "w1.block1", "s.block0"}
    assert {block["pserver"] for block in plan["blocks"]} == {0, 1, 2}
