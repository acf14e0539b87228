"""A real cluster for the commands of documents."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from trainer_client.testing import LocalCluster

from ..cluster.faulty_run import SCRIPT
from ..cluster.up_support import wait_until
from .markdown import ROOT

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl (apt-get install curl)")
GRADPOST = [sys.executable, "-P", "-m", "gradpost"]
FUNCTIONS = f"""
curl() {{ command curl --fail-with-body "$@" || return; echo; }}
gradpost() {{ {shlex.join(GRADPOST)} "$@"; }}
python() {{ {sys.executable} "$@"; }}
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
            lease_seconds=1, round_timeout_seconds=2, rejoin_timeout_seconds=3, max_log_bytes=1 << 30,
        )  # fmt: skip

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables of a shell for this cluster."""
        return {
            "URL": self.cluster.address,
            "ADMIN": (self.tokens / "admin").read_text().strip(),
            "GRADPOST_COORDINATOR": self.cluster.address,
            "GRADPOST_TOKENS_DIR": str(self.tokens),
            **more,
        }

    def shell(self, *scripts: str, **more: str) -> str:
        """Return the output of a document's commands in a shell of this cluster's folder; each has to succeed."""
        return run_shell(self.folder, *scripts, **self.environment(**more))

    def begin_run(self) -> None:
        """Start both trainers, and wait until they have completed a round."""
        for rank in range(2):
            command = [sys.executable, str(SCRIPT), "1000000", "0.01"]
            self.cluster.start_trainer(rank, command, {"PYTHONPATH": str(ROOT)})
        assert wait_until(lambda: self.cluster.status().round > 0, 60)


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


def status_of(address: str) -> dict[str, Any]:
    """Return the status of a cluster; nothing while its coordinator does not answer."""
    try:
        status: dict[str, Any] = httpx.get(f"{address}/v1/status", timeout=30).json()
    except httpx.TransportError:
        return {}
    return status


def arguments_of_up(line: str) -> list[str]:
    """Return the arguments of a document's `gradpost up`."""
    gradpost, up, *arguments = shlex.split(line, comments=True)
    assert (gradpost, up) == ("gradpost", "up")
    return arguments
