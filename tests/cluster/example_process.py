"""Run an example as it stands, and keep the parameters that it ends with.

    python example_process.py FOLDER EXAMPLE [ARGUMENT ...]

With ALONE in the environment there is no cluster: the optimizer stays where it is, as in a script without ours. It uses
the implementation that the pservers have, so that results can be compared bit for bit.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import gradpost
from gradpost import RemoteOptimizer

optimizers: list[torch.optim.Optimizer] = []


class Recorded(RemoteOptimizer):
    def __init__(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
        super().__init__(optimizer, **arguments)
        optimizers.append(self)


class Alone:
    rank, world_size = 0, 1

    def report(self, **results: float) -> None:
        print(results)


def step_here(optimizer: torch.optim.Optimizer, **arguments: Any) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizers.append(optimizer)
    return optimizer


def main(folder: Path, script: str, *arguments: str) -> None:
    rank = os.environ.get("RANK", "0")
    if "ALONE" in os.environ:
        gradpost.connect = Alone
        gradpost.RemoteOptimizer = step_here
    else:
        gradpost.RemoteOptimizer = Recorded
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    [optimizer] = optimizers
    named = ((n, p) for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True))
    save_file({name: parameter.detach().contiguous() for name, parameter in named}, folder / f"{rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
