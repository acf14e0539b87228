"""Real containers with Docker Compose, or with the compatible tool that `COMPOSE` names."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

Compose = Callable[..., str]


def _command() -> list[str] | None:
    if command := os.environ.get("COMPOSE"):
        return shlex.split(command)
    try:  # the client alone, or one that reaches no engine, is not enough
        subprocess.run(["docker", "info"], capture_output=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return ["docker", "compose"]


@pytest.fixture(scope="module")  # all examples use the same ports
def compose() -> Iterator[Compose]:
    """Yield a function that runs the compose tool and returns its output. All containers are removed at the end."""
    command = _command()
    if command is None:
        pytest.skip("needs containers: `docker info` reaches no engine, and COMPOSE names no other tool")

    def run(*arguments: str, check: bool = True, seconds: float = 120) -> str:
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, text=True, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0 or not check, f"{arguments} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        return done.stdout

    run("down", "--volumes", check=False)
    try:
        run("build", seconds=1500)
        yield run
    finally:
        run("down", "--volumes", check=False)
