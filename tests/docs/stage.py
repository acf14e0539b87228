"""A real cluster on which something goes wrong on purpose, and what everybody says then."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import nn

from gradpost.status import print_status
from ps_protocol.errors import GradpostError
from trainer_client import RemoteOptimizer, connect
from trainer_client.testing import LocalCluster

from ..cluster.trainer_processes import Plot, Trainer
from .markdown import ROOT

GRADPOST = [sys.executable, "-P", "-m", "gradpost"]
FUNCTIONS = f"""
curl() {{ command curl --fail-with-body "$@"; }}
gradpost() {{ {shlex.join(GRADPOST)} "$@"; }}
python3() {{ {sys.executable} "$@"; }}
"""


class Stage:
    """One cluster of a pserver and two trainers, with tokens in `folder`/tokens and short patience."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = folder / "tokens"
        run_gradpost("token", "create", "--dir", str(self.tokens))
        self.cluster = LocalCluster(
            pservers=1, trainers=2, tokens_dir=self.tokens, state_dir=folder / "state", max_body_bytes=3_000_000,
            lease_seconds=1, round_timeout_seconds=2, rejoin_timeout_seconds=3,
        )  # fmt: skip
        self._trainers: list[Trainer] = []

    def environment(self, **more: str) -> dict[str, str]:
        """What somebody's shell has who works with this cluster."""
        return {
            "URL": self.cluster.address,
            "ADMIN": (self.tokens / "admin").read_text().strip(),
            "GRADPOST_COORDINATOR": self.cluster.address,
            "GRADPOST_TOKENS_DIR": str(self.tokens),
            **more,
        }

    def run(self, *command: str, **more: str) -> str:
        """What a command of ours prints."""
        return run_gradpost(*command, **self.environment(**more))

    def shell(self, *scripts: str, **more: str) -> str:
        """What the commands of a document print in a shell of this cluster's folder; each has to work."""
        return run_shell(self.folder, *scripts, **self.environment(**more))

    def status_with(self, text: str) -> str:
        """What `gradpost status` prints at the first moment when this is in it: a process of its own may be late."""
        printed = ""

        def is_there() -> bool:
            nonlocal printed
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                print_status(self.cluster.status())
            printed = stream.getvalue()
            return text in printed

        self.wait_for(is_there)
        return printed

    def ask(self, method: str, path: str, scope: str = "admin", **headers: str) -> str:
        """The body of an answer of the coordinator."""
        token = (self.tokens / scope).read_text().strip()
        headers = {"authorization": f"Bearer {token}", **headers}
        return httpx.request(method, self.cluster.address + path, headers=headers).text

    # ------------------------------------------------------------ trainers

    def play(self, *plots: Plot) -> list[Trainer]:
        """Trainers as processes of their own, in the order of ranks."""
        settings = {"token_file": self.tokens / "train"}
        plots = tuple(Plot(plot.steps, plot.hangs_after, settings) for plot in plots)
        played = [Trainer(self.cluster.address, rank, plot) for rank, plot in enumerate(plots)]
        self._trainers += played
        return played

    def train(
        self, rank: int, coordinator: str | None = None, *, size: int = 2, nan_at: int = 0,
        kind: Any = torch.optim.SGD, retry_seconds: float = 12, **settings: Any,
    ) -> str:  # fmt: skip
        """A trainer in this thread; with what it ends, as its traceback would."""
        settings |= {"rank": rank, "retry_seconds": retry_seconds, "token_file": self.tokens / "train"}
        try:
            with connect(coordinator or self.cluster.address, **settings) as session:
                model = nn.Linear(4, size)
                optimizer = RemoteOptimizer(kind(model.parameters(), lr=0.1), model=model, session=session)
                while True:
                    optimizer.zero_grad()
                    model(torch.ones(3, 4)).sum().backward()
                    if optimizer.round + 1 == nan_at:
                        model.weight.grad.fill_(torch.nan)  # type: ignore[union-attr]
                    optimizer.step()
        except GradpostError as error:
            return f"{type(error).__name__}: {error}"

    def clear(self) -> None:
        """Everybody goes, so that the next run can begin."""
        while self._trainers:
            self._trainers.pop().end()
        self.wait_for(lambda: len(self.cluster.status().pservers) == 1)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """The coordinator is asked again and again: it tells nobody by itself."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.cluster.status()
            time.sleep(0.05)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's without settings of ours; modules are found in any folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def run_gradpost(*command: str, cwd: Path | None = None, **more: str) -> str:
    """What a command of ours prints on both streams, however it ends."""
    done = subprocess.run(
        [*GRADPOST, *command], env=environment(more), cwd=cwd, text=True, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout


def run_shell(folder: Path, *scripts: str, **more: str) -> str:
    """What the commands of a document print in a folder; each has to work."""
    done = subprocess.run(
        ["bash", "-e"], input=FUNCTIONS + "".join(scripts), env=environment(more), text=True, cwd=folder,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
