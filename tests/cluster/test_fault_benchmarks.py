"""The programs of `benchmarks/faults` still measure; what they print here means nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(240)]


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.faults.{program}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=230, check=True).stdout


def test_recovery() -> None:
    report = run("recovery", "--trainer-kills", "1", "--pserver-kills", "1", "--megabytes", "1")
    values = dict(re.findall(r"\| \*{0,2}([\w ]*\w)[^|]*\| 1 \| ([\d.]+) \|", report))
    assert 0 < float(values["detected"]) <= float(values["released"]) < 20
    assert 0 < float(values["load"]) + float(values["start"]) < float(values["serving"]) < 60


def test_goodput() -> None:
    report = run("goodput", "--trainers", "2", "--minutes", "0.15", "--interval", "4", "--compute-seconds", "0.05")
    [goodput] = re.findall(r"Goodput: ([\d.]+)%", report)
    assert 0 < float(goodput) < 100
    assert re.search(r"\| with faults \| 2 \| \d+ ", report)
    assert len(re.findall(r"^\| (?:kill|SIG)", report, re.MULTILINE)) == 2


def test_durability() -> None:
    report = run("durability", "--variants", "log", "--megabytes", "0.1", "--repetitions", "1", "--rounds", "5")
    assert "| none, plain |" in report
    [ratio] = re.findall(r"\| log \|[^|]*\|[^|]*\| ([\d.]+) \|", report)
    assert 0 < float(ratio) < 100
