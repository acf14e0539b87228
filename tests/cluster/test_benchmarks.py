"""The programs of `benchmarks` still measure; what they print here means nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.wire.machines import TOOLS
from benchmarks.wire.strategies import measure

from .up_support import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
TOLERANCE = 0.05  # of bytes on an interface, relative to the formulas of docs


def command(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{program}", *arguments]


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(command(program, *arguments), stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=230)
    assert done.returncode == 0
    return done.stdout


def is_trainer(process: psutil.Process) -> bool:
    try:
        return "benchmarks.wire.trainer" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def can_have_machines() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} are not installed (Debian packages iproute2, util-linux)")


NUMBER = r"[\d.]+"
REPORTS = [  # a program, its arguments, and what its report contains
    (
        "wire.accuracy",
        "--folds 1 --seeds 1 --epochs 3 --pairs int8/int8 --optimizers AdamW",
        rf"\| int8 / int8 \| {NUMBER} \|",
    ),
    (
        "wire.io_threads",
        "--elements 1000000 --pservers 2 --threads 0 2 --rounds 1",
        rf"(?m)^\| 0 \| {NUMBER} .*\n\| 2 \| {NUMBER} ",
    ),
    ("faults.recovery", "--trainer-kills 1 --pserver-kills 1 --megabytes 1", rf"detected.*\| 1 \| {NUMBER} \|"),
    (
        "faults.goodput",
        "--trainers 2 --minutes 0.15 --interval 4 --compute-seconds 0.05",
        rf"(?s)Goodput: {NUMBER}%.*\| with faults \| 2 \| \d+ ",
    ),
    (
        "faults.durability",
        "--variants log --megabytes 0.1 --repetitions 1 --rounds 5",
        rf"(?s)\| none, plain \|.*\| log \|[^|]*\|[^|]*\| {NUMBER} \|",
    ),
]
REPORTS_OF_MACHINES = [
    (
        "wire.links",
        "--megabits 50 --elements 200000 --compute-seconds 0 --steps 2 --pairs int8/int8",
        rf"(?s)## 50 Mbit/s.*\| int8 / int8 \| {NUMBER}",
    ),
    (
        "wire.overlap",
        "--model 'small CNN' --megabits 50 --forward 0.4 --backward 0.4 --bucket-bytes 131072 --steps 2 "
        "--repetitions 1 --target 0.3 --plot steps.png",
        rf"(?m)^\| 0\.400 \| {NUMBER}",
    ),
]


@pytest.mark.soak
@pytest.mark.extended
@pytest.mark.alone
@pytest.mark.parametrize(("program", "arguments", "said"), REPORTS, ids=[program for program, *_ in REPORTS])
def test_a_program_reports_what_it_measures(program: str, arguments: str, said: str) -> None:
    assert re.search(said, run(program, *shlex.split(arguments)))


@pytest.mark.soak
@pytest.mark.usefixtures("can_have_machines")
@pytest.mark.extended
@pytest.mark.alone
@pytest.mark.parametrize(("program", "arguments", "said"), REPORTS_OF_MACHINES, ids=["links", "overlap"])
def test_a_program_measures_between_machines(program: str, arguments: str, said: str, tmp_path: Path) -> None:
    arguments = arguments.replace("steps.png", str(tmp_path / "steps.png"))
    assert re.search(said, run(program, *shlex.split(arguments)))


@pytest.mark.usefixtures("can_have_machines")
@pytest.mark.extended
@pytest.mark.alone
def test_links_that_are_told_to_end_leave_nothing_behind() -> None:
    arguments = ["--megabits", "20", "--elements", "1000000", "--steps", "1000"]
    with subprocess.Popen(command("wire.links", *arguments), stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert "a plain transfer" in process.stdout.readline().lower()
        children: list[psutil.Process] = []
        while not any(map(is_trainer, children)):
            children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@pytest.mark.extended
@pytest.mark.ring
@pytest.mark.usefixtures("can_have_machines")
@pytest.mark.parametrize(("trainers", "pservers"), [pytest.param(3, 0, marks=pytest.mark.soak), (2, 2)])
def test_bytes_of_a_step(trainers: int, pservers: int) -> None:
    cost = measure(trainers, pservers, 4_000_000_000, 2_000_000, 4)
    assert len(cost.nodes) == trainers + pservers
    for node in cost.nodes:
        assert node.error < TOLERANCE, node


PEERS = ["raw_sockets", "torch_rpc_tcp", "gloo"]


@pytest.mark.soak
def test_ours_beside_its_peers(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "benchmarks.comparison", "--cases", "tiny", "--peers", *PEERS, "--repetitions", "2",
         "--results", str(tmp_path)],
        cwd=ROOT, timeout=230, check=True,
    )  # fmt: skip
    [case] = json.loads((tmp_path / "latest.json").read_text())
    assert case["case"] == "tiny"
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", case["commit"])
    assert sorted(case["peers"]) == sorted(case["ratio"]) == sorted(PEERS)
    for peer, described in case["peers"].items():
        assert 0 < described["median_s"] < 5
        assert case["ratio_interval"][peer][0] <= case["ratio"][peer] <= case["ratio_interval"][peer][1]
    assert case["ours"]["cpu_s_per_gb"]["server"] > 0
    assert case["variant_ratio"] == case["variant_ratio_interval"] == {}
    assert case["ours"]["contributions_per_s"] > 2
    assert case["ours"]["bytes_per_s"] == pytest.approx(case["ours"]["contributions_per_s"] * 2 * 40_000)
    assert case["ours"]["wire_bytes"] > 2 * 2 * 40_000  # all parameters, up and down, for both trainers
    assert [len(case["ours"]["peak_bytes"][role]) for role in ("server", "trainer")] == [2, 2]
    assert 0 < case["ours"]["server_peak_above_idle_bytes"] < max(case["ours"]["peak_bytes"]["server"])
    [report] = tmp_path.glob("comparison_*.md")
    assert "| tiny / torch_rpc_tcp | 1.0 | 0.5 |" in report.read_text()
