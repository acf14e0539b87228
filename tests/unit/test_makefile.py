"""The Makefile's targets, as far as they can be seen without running them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments: str) -> str:
    process = subprocess.run(
        ["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_help_lists_every_target() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    listed = re.findall(r"^  make ([a-z-]+) +\S", make(), re.MULTILINE)
    assert sorted(listed) == sorted(targets[1].split())


def test_train_runs_the_example_in_the_mode_that_is_asked_for() -> None:
    line = make("--dry-run", "train", "MODE=sync", "TRAINERS=3").splitlines()[-1]
    assert line == ".venv/bin/gradpost up --mode sync --pservers 2 --trainers 3 -- python examples/digits.py"


def test_test_all_is_test_and_what_that_leaves_out() -> None:
    quick, all_ = (make("--dry-run", target).splitlines() for target in ("test", "test-all"))
    assert all_[: len(quick)] == quick
    assert all("adapters" in line for line in all_[len(quick) : -2])  # if they are not installed yet
    side_by_side, alone = all_[-2:]
    assert quick[-1] == side_by_side.replace('"extended and not soak and not alone"', '"not extended and not soak"')
    assert side_by_side == alone.replace("and alone", "and not alone") + " -n 2 --dist loadfile"


def test_soak_runs_what_test_all_leaves_out_and_ends_within_an_hour() -> None:
    side_by_side, alone, chaos = make("--dry-run", "soak", "ARGS=--seed 7").splitlines()[-3:]
    assert '-m "(soak or hypothesis) and not alone"' in side_by_side
    assert "tests/attacks tests/chaos -m alone" in alone
    seconds = [int(*re.findall(r"--session-timeout (\d+)", line)) for line in (side_by_side, alone)]
    [minutes] = re.findall(r"tests\.chaos --minutes (\d+) --seed 7$", chaos)
    assert sum(seconds) + 60 * int(minutes) < 3600


def test_chaos_passes_its_arguments_on() -> None:
    line = make("--dry-run", "chaos", "ARGS=--minutes 3 --seed 1").splitlines()[-1]
    assert line == ".venv/bin/python -m tests.chaos --minutes 3 --seed 1"
