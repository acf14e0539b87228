"""The examples learn and use public names only, and the programs of `benchmarks` still measure."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import gradpost
from benchmarks.wire.machines import TOOLS
from benchmarks.wire.strategies import measure

from .test_surroundings import size_of
from .training import assert_identical
from .up_support import ROOT, SECONDS, RunningUp, clean_environment

pytestmark = pytest.mark.timeout(240)

DIGITS = ROOT / "examples" / "digits.py"
STEPS = 8 * 23
HAS_LIBRARIES = all(find_spec(name) is not None for name in ("transformers", "accelerate", "lightning"))


def disk_use(folder: Path) -> int:
    """Return the bytes of all files; a file may be deleted meanwhile."""
    return sum(size_of(Path(parent, name)) for parent, _, names in os.walk(folder) for name in names)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("flags", "local_steps", "rounds"),
    [
        pytest.param("--mode sync", 0, STEPS, marks=pytest.mark.extended),
        pytest.param("--mode async --no-wait-for-apply --read-consistency shard", 0, 2 * STEPS, marks=pytest.mark.soak),
        pytest.param("--mode sync --push-type int8 --pull-type int8", 0, STEPS, marks=pytest.mark.soak),
        pytest.param("--mode ssp --max-staleness 2", 4, 2 * STEPS // 4, marks=pytest.mark.soak),
    ],
)
def test_two_trainers_learn_the_digits(tmp_path: Path, flags: str, local_steps: int, rounds: int) -> None:
    arguments = ("--json", *flags.split(), "--", "python", DIGITS)
    settings = {"GRADPOST_LOCAL_STEPS": str(local_steps)}
    largest = 0
    with RunningUp(*arguments, folder=tmp_path, **settings) as up, ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(up.finish)
        while not outcome.done():
            largest = max(largest, disk_use(tmp_path / ".gradpost"))
            time.sleep(0.05)
        code, stdout, stderr = outcome.result()
    assert code == 0, stderr
    summary, mode = json.loads(stdout), flags.split()[1]
    assert (summary["state"], summary["mode"], summary["transport"]) == ("finished", mode, "HTTP/2")
    assert summary["rounds"] == rounds
    assert summary["results"]["accuracy"] >= 0.97
    assert stderr.count("accuracy on 360 held-out images: ") == 2
    assert stderr.count(f"] trained: mode={mode} transport=HTTP/2 accuracy=") == 2
    # Of a model of 0.24 MB, as docs/reliability.md says.
    assert largest <= 16_000_000
    assert disk_use(tmp_path / ".gradpost") <= 2_500_000


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("gan.py --steps 40", r"\d+% of the points are near a centre, and \d of 8 centres have points"),
        pytest.param("gan.py --steps 1500", r"[4-9]\d% of .* and [6-8] of 8", marks=pytest.mark.extended),
        ("reinforce.py --goal 20", r"\d+ episodes, 2\d steps"),
        pytest.param("reinforce.py", r"\d+ episodes, 1[2-9]\d steps", marks=pytest.mark.extended),
    ],
)
def test_two_trainers_run_other_scripts(tmp_path: Path, command: str, said: str) -> None:
    script, *arguments = command.split()
    with RunningUp("--", "python", DIGITS.with_name(script), *arguments, folder=tmp_path) as up:
        code, stdout, stderr = up.finish()
    assert code == 0, stdout + stderr
    assert len(re.findall(rf"\[trainer \d\] {said}", stdout)) == 2, stdout
    assert not re.search("no names|buffers", stdout)


@pytest.mark.parametrize("script", sorted(DIGITS.parent.glob("*.py")), ids=lambda script: script.stem)
def test_examples_use_public_names_only(script: Path) -> None:
    tree = ast.parse(script.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {"gradpost", "ps_config", "ps_http2", "ps_protocol", "services", "trainer_client"}
    assert {name for name in imported if name.split(".")[0] in own} == {"gradpost"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gradpost"
    }
    assert used
    assert used <= set(gradpost.__all__)


@pytest.mark.cluster
@pytest.mark.extended
def test_a_pserver_that_dies_changes_no_bit(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "failover.py"]
    environ = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=2 * SECONDS, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"^round \d+: training goes on after a pause of \d+\.\d\d s$", process.stdout, re.MULTILINE)
    assert "incarnation 2" in process.stdout
    assert process.stdout.endswith("the same bits\n")


PROCESS = Path(__file__).with_name("example_process.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
EPOCHS = 8


class Example(NamedTuple):
    script: Path
    batch_size: int  # of each of two trainers

    def command(self, folder: Path, num_trainers: int) -> list[str]:
        """Return the command; the examples of a step do not depend on the number of trainers."""
        folder.mkdir()
        arguments = ["--epochs", EPOCHS, "--batch-size", self.batch_size * 2 // num_trainers]
        return [str(part) for part in (PROCESS, folder, self.script, *arguments)]


class Run(NamedTuple):
    accuracy: float
    parameters: list[dict[str, Tensor]]  # of each rank


HUGGING_FACE = Example(ROOT / "examples" / "huggingface_trainer.py", 16)
LIGHTNING = Example(ROOT / "examples" / "lightning_module.py", 32)
BY_NAME: dict[str, Any] = {"indirect": True, "scope": "module", "ids": ["huggingface", "lightning"]}


def read_run(folder: Path, output: str, num_trainers: int) -> Run:
    accuracies = [float(number) for number in re.findall(r"accuracy on 360 held-out images: (\S+)", output)]
    assert len(accuracies) == num_trainers, output
    return Run(accuracies[0], [load_file(folder / f"{rank}.safetensors") for rank in range(num_trainers)])


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> Example:
    return request.param


@pytest.fixture(scope="module")
def alone(example: Example, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the library with the optimizer that it was made for."""
    folder = tmp_path_factory.mktemp("alone")
    process = subprocess.run(
        [sys.executable, *example.command(folder / "parameters", 1)],
        cwd=folder,
        env={**clean_environment(), **ONE_THREAD, "PYTHONPATH": str(ROOT), "ALONE": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return read_run(folder / "parameters", process.stdout, 1)


def train(example: Example, folder: Path, num_trainers: int, *arguments: str) -> tuple[Run, dict[str, Any], str]:
    command = ["python", *example.command(folder / "parameters", num_trainers), *arguments]
    with RunningUp("--json", "--trainers", num_trainers, "--", *command, folder=folder, **ONE_THREAD) as up:
        code, stdout, stderr = up.finish()
    assert code == 0, stderr
    return read_run(folder / "parameters", stderr, num_trainers), json.loads(stdout), stderr


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.skipif(not HAS_LIBRARIES, reason="pip install -r requirements-adapters.lock")
@pytest.mark.parametrize("example", [HUGGING_FACE, pytest.param(LIGHTNING, marks=pytest.mark.soak)], **BY_NAME)
def test_one_trainer_has_the_bits_of_the_library_alone(example: Example, alone: Run, tmp_path: Path) -> None:
    run, _, _ = train(example, tmp_path, 1)
    assert_identical(run.parameters[0], alone.parameters[0])
    assert run.accuracy == alone.accuracy


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.skipif(not HAS_LIBRARIES, reason="pip install -r requirements-adapters.lock")
@pytest.mark.parametrize("example", [pytest.param(HUGGING_FACE, marks=pytest.mark.soak), LIGHTNING], **BY_NAME)
def test_two_trainers_learn_as_much_as_one(example: Example, alone: Run, tmp_path: Path) -> None:
    run, summary, output = train(example, tmp_path, 2, "--output", "saved")
    assert summary["rounds"] == STEPS
    assert summary["results"].keys() == {"loss", "accuracy"}
    assert_identical(*run.parameters)
    assert alone.accuracy > 0.93
    assert abs(run.accuracy - alone.accuracy) < 0.03
    assert contents(run.parameters[0]) <= contents(read_saved(tmp_path / "saved"))
    assert not re.findall(r"(?i)torch\.distributed|\bgradpost: .*\bwarning|it/s\]|changed \d+ parameters", output)


def contents(tensors: dict[str, Tensor]) -> set[bytes]:
    """Return the values without names, which transformers changes in files."""
    return {tensor.numpy().tobytes() for tensor in tensors.values()}


def read_saved(folder: Path) -> dict[str, Tensor]:
    """Return the parameters that the library has saved last."""
    [newest] = [path for path in folder.rglob("*") if re.search(rf"\b{STEPS}\b", path.name)]
    if newest.is_dir():
        optimizer = torch.load(newest / "optimizer.pt", weights_only=True)
        saved = load_file(newest / "model.safetensors")
    else:
        checkpoint = torch.load(newest, weights_only=True)
        [optimizer], saved = checkpoint["optimizer_states"], checkpoint["state_dict"]
    assert optimizer["param_groups"][0]["lr"] < 1e-5  # the last of the schedule
    return saved


# ---------------------------------------------------------------------- benchmarks

TOLERANCE = 0.05  # of bytes on an interface, relative to the formulas of docs


def command(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{program}", *arguments]


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
ON_MACHINES = ("wire.links", "wire.overlap")
LINKS = "--megabits 50 --elements 200000 --compute-seconds 0 --steps 2 --pairs int8/int8"
OVERLAP = (
    "--model 'small CNN' --megabits 50 --forward 0.4 --backward 0.4 --bucket-bytes 131072 --steps 2 "
    "--repetitions 1 --target 0.3 --plot FOLDER/steps.png"
)
ACCURACY = "--folds 1 --seeds 1 --epochs 3 --pairs int8/int8 --optimizers AdamW"
IO_THREADS = "--elements 1000000 --pservers 2 --threads 0 2 --rounds 1"
RECOVERY = "--trainer-kills 1 --pserver-kills 1 --megabytes 1"
GOODPUT = "--trainers 2 --minutes 0.15 --interval 4 --compute-seconds 0.05"
DURABILITY = "--variants log --megabytes 0.1 --repetitions 1 --rounds 5"


@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.extended
@pytest.mark.alone
@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("wire.accuracy", ACCURACY, rf"\| int8 / int8 \| {NUMBER} \|"),
        ("wire.io_threads", IO_THREADS, rf"(?m)^\| 0 \| {NUMBER} .*\n\| 2 \| {NUMBER} "),
        ("faults.recovery", RECOVERY, rf"detected.*\| 1 \| {NUMBER} \|"),
        ("faults.goodput", GOODPUT, rf"(?s)Goodput: {NUMBER}%.*\| with faults \| 2 \| \d+ "),
        ("faults.durability", DURABILITY, rf"(?s)\| none, plain \|.*\| log \|[^|]*\|[^|]*\| {NUMBER} \|"),
        ("wire.links", LINKS, rf"(?s)## 50 Mbit/s.*\| int8 / int8 \| {NUMBER}"),
        ("wire.overlap", OVERLAP, rf"(?m)^\| 0\.400 \| {NUMBER}"),
    ],
)
def test_a_program_reports_what_it_measures(
    program: str, arguments: str, said: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if program in ON_MACHINES:
        request.getfixturevalue("can_have_machines")
    words = shlex.split(arguments.replace("FOLDER", str(tmp_path)))
    done = subprocess.run(command(program, *words), stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=230)
    assert done.returncode == 0
    assert re.search(said, done.stdout)


@pytest.mark.cluster
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


@pytest.mark.cluster
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


@pytest.mark.cluster
@pytest.mark.soak
def test_ours_beside_its_peers(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "benchmarks.comparison", "--cases", "tiny", "--peers", *PEERS, "--repetitions", "2",
         "--results", str(tmp_path)],
        cwd=ROOT, timeout=230, check=True,
    )  # fmt: skip
    [case] = json.loads((tmp_path / "latest.json").read_text())
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", case["commit"])
    assert sorted(case["peers"]) == sorted(case["ratio"]) == sorted(PEERS)
    for peer, described in case["peers"].items():
        assert 0 < described["median_s"] < 5
        assert case["ratio_interval"][peer][0] <= case["ratio"][peer] <= case["ratio_interval"][peer][1]
    ours = case["ours"]
    assert ours["bytes_per_s"] == pytest.approx(ours["contributions_per_s"] * 2 * 40_000)
    assert ours["wire_bytes"] > 2 * 2 * 40_000  # all parameters, up and down, for both trainers
    assert 0 < ours["server_peak_above_idle_bytes"] < max(ours["peak_bytes"]["server"])
    [report] = tmp_path.glob("comparison_*.md")
    assert "| tiny / torch_rpc_tcp | 1.0 | 0.5 |" in report.read_text()
