"""A real cluster for the failures and the commands of documents, and the output of all processes."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from gradpost.status import print_status
from ps_protocol.errors import GradpostError
from trainer_client import RemoteOptimizer, connect
from trainer_client.testing import LocalCluster

from ..cluster.trainer_processes import Plot, Trainer
from .markdown import ROOT

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl (apt-get install curl)")
GRADPOST = [sys.executable, "-P", "-m", "gradpost"]
FUNCTIONS = f"""
curl() {{ command curl --fail-with-body "$@"; }}
gradpost() {{ {shlex.join(GRADPOST)} "$@"; }}
python3() {{ {sys.executable} "$@"; }}
"""


class Stage:
    """A cluster of a pserver and two trainers, with tokens in `folder`/tokens and short time-outs."""

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
        """Return the variables of a shell for this cluster."""
        return {
            "URL": self.cluster.address,
            "ADMIN": (self.tokens / "admin").read_text().strip(),
            "GRADPOST_COORDINATOR": self.cluster.address,
            "GRADPOST_TOKENS_DIR": str(self.tokens),
            **more,
        }

    def run(self, *command: str, **more: str) -> str:
        """Return the output of a gradpost command."""
        return run_gradpost(*command, **self.environment(**more))

    def shell(self, *scripts: str, **more: str) -> str:
        """Return the output of a document's commands in a shell of this cluster's folder; each has to succeed."""
        return run_shell(self.folder, *scripts, **self.environment(**more))

    def status_with(self, text: str) -> str:
        """Wait until `gradpost status` would print this text, and return its output."""
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
        """Return the body of the coordinator's answer."""
        token = (self.tokens / scope).read_text().strip()
        headers = {"authorization": f"Bearer {token}", **headers}
        return httpx.request(method, self.cluster.address + path, headers=headers).text

    # ------------------------------------------------------------ trainers

    def play(self, *plots: Plot) -> list[Trainer]:
        """Start trainers as processes, in the order of ranks."""
        settings = {"token_file": self.tokens / "train"}
        plots = tuple(Plot(plot.steps, plot.hangs_after, settings) for plot in plots)
        played = [Trainer(self.cluster.address, rank, plot) for rank, plot in enumerate(plots)]
        self._trainers += played
        return played

    def begin_run(self) -> list[Trainer]:
        """Start both trainers, and wait until they have completed a round."""
        trainers = self.play(Plot(), Plot())
        for trainer in trainers:
            trainer.wait_for("round", 1)
        return trainers

    def train(
        self, rank: int, coordinator: str | None = None, *, size: int = 2, nan_at: int = 0,
        kind: Any = torch.optim.SGD, retry_seconds: float = 12, **settings: Any,
    ) -> str:  # fmt: skip
        """Train in this thread, and return the error that ends it as a traceback shows it."""
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
        """End all trainers, and wait until their run has ended, so that the next trainers begin another one."""
        while self._trainers:
            self._trainers.pop().end()
        self.wait_for(self._is_clear)

    def _is_clear(self) -> bool:
        status = self.cluster.status()
        is_left = all(trainer.state in ("done", "failed", "lost") for trainer in status.trainers)
        return status.state != "training" and is_left and len(status.pservers) == 1

    def wait_for(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Poll until the condition is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.cluster.status()
            time.sleep(0.05)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's variables without settings; modules are found in any folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def run_gradpost(*command: str, cwd: Path | None = None, **more: str) -> str:
    """Return the output of a gradpost command on both streams, whatever its exit code is."""
    done = subprocess.run(
        [*GRADPOST, *command], env=environment(more), cwd=cwd, text=True, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout


def run_shell(folder: Path, *scripts: str, **more: str) -> str:
    """Return the output of a document's commands in a folder; each has to succeed."""
    done = subprocess.run(
        ["bash", "-e"], input=FUNCTIONS + "".join(scripts), env=environment(more), text=True, cwd=folder,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
