"""The programs of `benchmarks` still measure; what they print here means nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.wire.machines import TOOLS
from benchmarks.wire.strategies import measure

from ..soaking import parametrize_sampled
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


@pytest.mark.soak
@pytest.mark.extended
@pytest.mark.alone
def test_accuracy(tmp_path: Path) -> None:
    arguments = ["--folds", "1", "--seeds", "1", "--epochs", "3", "--pairs", "int8/int8", "--optimizers", "AdamW"]
    report = run("wire.accuracy", *arguments, "--json", str(tmp_path / "found.json"))
    [accuracies] = json.loads((tmp_path / "found.json").read_text()).values()
    assert len(accuracies) == 3
    assert all(85 < accuracy < 100 for [accuracy] in accuracies.values())
    assert re.search(r"\| int8 / int8 \| [\d.]+ \|", report)
    assert re.search(r"at most 0\.5 points: [+-][\d.]+ \[.*\], (met|missed)", report)


@pytest.mark.soak
@pytest.mark.usefixtures("can_have_machines")
@pytest.mark.extended
@pytest.mark.alone
def test_links(tmp_path: Path) -> None:
    arguments = ["--megabits", "50", "--elements", "200000", "--compute-seconds", "0", "--steps", "2"]
    report = run("wire.links", *arguments, "--pairs", "int8/int8", "--json", str(tmp_path / "found.json"))
    [rate] = json.loads((tmp_path / "found.json").read_text())
    assert all(40 < megabits < 50 for megabits in rate["plain"].values())
    [plain], [eight_bits], [frozen] = rate["runs"].values()
    assert all(second > 0.8 * 8 * 1.6 / 50 for second in plain["seconds"])  # 800 kB, there and back
    for way in ("sent_bytes", "received_bytes"):
        assert all(800_000 < count < 900_000 for count in plain[way])
        assert all(200_000 < count < 250_000 for count in eight_bits[way])
        assert all(400_000 < count < 450_000 for count in frozen[way])
    assert rate["times_as_fast"]["int8 / int8"] > 1.5
    assert "## 50 Mbit/s" in report


@pytest.mark.overlap
@pytest.mark.soak
@pytest.mark.usefixtures("can_have_machines")
@pytest.mark.extended
@pytest.mark.alone
def test_overlap(tmp_path: Path) -> None:
    """A network of 4.8 MB at 50 Mbit/s: 0.8 s there, 0.8 s back, and as much computation."""
    arguments = ["--model", "small CNN", "--megabits", "50", "--forward", "0.4", "--backward", "0.4"]
    arguments += ["--bucket-bytes", "131072"]
    arguments += ["--steps", "2", "--repetitions", "1", "--target", "0.3", "--plot", str(tmp_path / "steps.png")]
    report = run("wire.overlap", *arguments)
    [row] = re.findall(r"^\| 0\.400 \| (.*) \|$", report, re.MULTILINE)
    push, pull, hideable, none, pushes, both, *_ = (float(cell.strip().rstrip("%")) for cell in row.split("|"))
    assert 0.7 < push < 2 > pull > 0.7
    assert hideable == pytest.approx(min(push, 0.4) + min(pull, 0.4), abs=0.01)
    assert 1 < both < pushes < none < 4
    assert (tmp_path / "steps.png").stat().st_size > 1000


@pytest.mark.soak
@pytest.mark.extended
@pytest.mark.alone
def test_io_threads() -> None:
    report = run("wire.io_threads", "--elements", "1000000", "--pservers", "2", "--threads", "0", "2", "--rounds", "1")
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \[.*\] \| ([\d.]+) \|$", report, re.MULTILINE)
    [own, two] = [tuple(map(float, row)) for row in rows]
    assert (own[0], own[2], two[0]) == (0, 1, 2)
    assert two[2] == pytest.approx(two[1] / own[1], rel=0.1)
    assert 0 < two[3] < own[3] < own[1]


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
@parametrize_sampled(("trainers", "pservers"), [(3, 0), (4, 0), (2, 2), (3, 1)], [(2, 2)])
def test_bytes_of_a_step(trainers: int, pservers: int) -> None:
    cost = measure(trainers, pservers, 4_000_000_000, 2_000_000, 4)
    assert len(cost.nodes) == trainers + pservers
    for node in cost.nodes:
        assert node.error < TOLERANCE, node


@pytest.mark.soak
def test_recovery() -> None:
    report = run("faults.recovery", "--trainer-kills", "1", "--pserver-kills", "1", "--megabytes", "1")
    values = dict(re.findall(r"\| \*{0,2}([\w ]*\w)[^|]*\| 1 \| ([\d.]+) \|", report))
    assert 0 < float(values["detected"]) <= float(values["released"]) < 20
    assert 0 < float(values["load"]) + float(values["start"]) < float(values["serving"]) < 60


@pytest.mark.soak
def test_goodput() -> None:
    report = run(
        "faults.goodput", "--trainers", "2", "--minutes", "0.15", "--interval", "4", "--compute-seconds", "0.05"
    )
    [goodput] = re.findall(r"Goodput: ([\d.]+)%", report)
    assert 0 < float(goodput) < 100
    assert re.search(r"\| with faults \| 2 \| \d+ ", report)
    assert len(re.findall(r"^\| (?:kill|SIG)", report, re.MULTILINE)) == 2


@pytest.mark.soak
def test_durability() -> None:
    report = run("faults.durability", "--variants", "log", "--megabytes", "0.1", "--repetitions", "1", "--rounds", "5")
    assert "| none, plain |" in report
    [ratio] = re.findall(r"\| log \|[^|]*\|[^|]*\| ([\d.]+) \|", report)
    assert 0 < float(ratio) < 100


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
