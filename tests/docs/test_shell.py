"""The commands and scripts of documents run as they are printed, but for ports and folders."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
import yaml
from safetensors.torch import load_file

from gradpost import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..cluster.faulty_run import FaultyRun
from ..cluster.trainer_processes import free_port
from ..cluster.training import assert_identical, run_trainers
from ..cluster.training_script import make_model
from ..cluster.up_support import RunningUp, wait_until
from ..kubernetes.rendering import pods
from .conftest import NUM_TRAINERS
from .markdown import ROOT, examples, read, section
from .stage import GRADPOST, Stage, arguments_of_up, environment, needs_curl, run_shell, status_of

INSPECTION_TEXT = read("inspection.md")
FIRST, _, *LOOK = [block.text for block in examples(INSPECTION_TEXT, "sh")]
[PYTHON] = [block.text for block in examples(INSPECTION_TEXT, "python")]
TEXT = read("cli.md")
COMMANDS = "\n".join(block.text for block in examples(TEXT[: TEXT.index("## TensorBoard,")], "sh"))
examples(section(TEXT, "TensorBoard, MLflow and W&B"), "sh")  # tests/unit/cli/test_export.py exports


# ---------------------------------------------------------------- README.md

USE_IT = section((ROOT / "README.md").read_text(), "Use it")
[SCRIPT] = examples(USE_IT, "python")
[SHELL] = examples(USE_IT, "sh")
MODEL_AND_DATA = """
import collections, torch
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(100_000, 8), torch.randint(3, (100_000,)))
make_model = lambda: torch.nn.Sequential(collections.OrderedDict(fc=torch.nn.Linear(8, 3)))
"""


@pytest.mark.cluster
@pytest.mark.extended
@needs_curl
def test_the_first_example_trains_and_can_be_inspected(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL_AND_DATA + SCRIPT.text)
    port = str(free_port())
    up, status, curl = SHELL.text.replace("7070", port).splitlines()
    address = f"http://127.0.0.1:{port}"
    variables = {"GRADPOST_COORDINATOR": address, "GRADPOST_STATE_DIR": str(tmp_path / "state")}
    with RunningUp("--port", port, *arguments_of_up(up), folder=tmp_path, **variables) as running:
        assert wait_until(lambda: status_of(address).get("state") == "training", 90)
        assert "training" in run_shell(tmp_path, status, **variables)
        run_shell(tmp_path, curl)
        assert load_file(tmp_path / "fc.safetensors")["fc.weight"].shape == (3, 8)
        page = httpx.get(address, timeout=30)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        running.signal(SIGINT)
        running.finish()


# ---------------------------------------------------------------------- operations


OPERATIONS_TEXT = read("operations.md")
SCRIPTS = [block.text for block in examples(OPERATIONS_TEXT, "sh")]
[UP] = [script for script in SCRIPTS if "gradpost up" in script]
OPERATIONS_SHELL = "".join(script for script in SCRIPTS if script != UP)


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(400)
@needs_curl
def test_the_commands_work(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with stage.cluster:
        status = json.loads(stage.shell(FIRST.replace("http://127.0.0.1:7070", stage.cluster.address)))
        assert status["state"] == "gathering"
        stage.begin_run()
        (stage.folder / "backup").mkdir()
        pserver = stage.cluster.status().pservers[0].address
        printed = stage.shell(OPERATIONS_SHELL, PSERVER=pserver, BACKUP=str(stage.folder / "backup"))
    assert (stage.folder / "model.safetensors").stat().st_size > 40
    assert "continues from round 1 (attempt 1)" in printed
    assert "tokens/admin: replaced" in printed
    [run] = (stage.folder / "backup" / "checkpoints").iterdir()
    assert printed.count(run.name) > 4
    moved_round = resume_elsewhere(stage.folder / "backup" / "checkpoints")
    assert f"checkpoint of round {moved_round:,} of run {run.name}" in printed


def resume_elsewhere(checkpoints: Path) -> int:
    """Resume in another cluster with other pservers and only these checkpoints, and return the checkpoint's round."""
    with FaultyRun(1_000_000, trainers=1, checkpoints=checkpoints, resume=True) as run:
        return int(run.wait_for_line("begin ").split()[-1])


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(400)
def test_another_number_of_pservers(tmp_path: Path) -> None:
    script = (ROOT / "tests" / "cluster" / "training_script.py").read_text()
    (tmp_path / "train.py").write_text(script.replace("sys.argv[1:]", '["20"]'))
    printed = ""
    for line in UP.splitlines():
        with RunningUp(*arguments_of_up(line), folder=tmp_path) as up:
            code, stdout, stderr = up.finish()
        assert code == 0, stdout + stderr
        printed += stdout
    digests = re.findall(r"result (\w+ 20)", printed)
    assert len(digests) == 4, printed
    assert len(set(digests)) == 1


# ---------------------------------------------------------------------- reliability


RELIABILITY_TEXT = read("reliability.md")
[LOOP] = examples(section(RELIABILITY_TEXT, "A loop that continues"), "python")
[RELIABILITY_SHELL] = examples(section(RELIABILITY_TEXT, "Restart, resume, roll back, export"), "sh")
[LOAD] = examples(section(RELIABILITY_TEXT, "Restart, resume, roll back, export"), "python")
SAVE, LOAD_OWN = examples(section(RELIABILITY_TEXT, "A script's own checkpoints"), "python")

BEFORE = """
import os, pathlib, time, gradpost, torch
torch.set_num_threads(1)
session, total_rounds = gradpost.connect(), 1_000_000
model = torch.nn.Linear(8, 3)
def batch_of(rank, round_):
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    return torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)
"""
STEP = """
    print("computes round", optimizer.round + 1, flush=True)
    if session.rank == 1 and optimizer.round == 4 and not pathlib.Path("died").exists():
        pathlib.Path("died").touch()
        os._exit(1)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    time.sleep(0.02)
"""


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(150)
def test_one_machine(tmp_path: Path) -> None:
    assert LOOP.text.count("    ...\n") == 1
    (tmp_path / "train.py").write_text(BEFORE + LOOP.text.replace("    ...\n", STEP))
    port = str(free_port())
    up, resume, *look = RELIABILITY_SHELL.text.replace("7070", port).splitlines(keepends=True)

    with RunningUp(*arguments_of_up(up), folder=tmp_path) as running:
        running.wait_for("[trainer 1] computes round 5")  # where it is killed once
        running.wait_for("[trainer 1] computes round 10")
        running.signal(SIGINT)
        _, first, _ = running.finish()
    with RunningUp("--port", port, *arguments_of_up(resume), folder=tmp_path) as running:
        assert wait_until(lambda: status_of(f"http://127.0.0.1:{port}").get("round", 0) > 100, 60)
        printed = run_shell(tmp_path, *look)
        running.signal(SIGINT)
        _, second, _ = running.finish()
    assert computed(second)[0] - max([10, *computed(first)]) in (0, 1)  # an unfinished round is repeated
    assert "checkpoint of round" in printed

    names = {"safetensors": safetensors, "model": torch.nn.Linear(8, 3)}
    exec(LOAD.text.replace("model.safetensors", str(tmp_path / "model.safetensors")), names)


@pytest.mark.cluster
def test_a_checkpoint_of_the_script(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def take_steps(optimizer: RemoteOptimizer, model: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + step + rank)
            optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def train(session: Session) -> dict[str, torch.Tensor]:
        model = torch.nn.Linear(8, 3)
        optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3), session=session, model=model)
        take_steps(optimizer, model, session.rank)
        if session.rank == 0:
            exec(SAVE.text, {"torch": torch, "model": model, "optimizer": optimizer})
        return take_steps(optimizer, model, session.rank)

    def resume(session: Session) -> dict[str, torch.Tensor]:
        model = torch.nn.Linear(8, 3)
        names: dict[str, Any] = {
            "torch": torch,
            "model": model,
            "gradpost": SimpleNamespace(RemoteOptimizer=partial(RemoteOptimizer, session=session)),
        }
        exec(LOAD_OWN.text, names)
        return take_steps(names["optimizer"], model, session.rank)

    expected, *_ = run_trainers(cluster.address, [train] * NUM_TRAINERS)
    for actual in run_trainers(cluster.address, [resume] * NUM_TRAINERS):
        assert_identical(actual, expected)


def computed(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"computes round (\d+)", output)]


# ---------------------------------------------------------------------- tutorial


PLAIN, CONVERTED = examples(read("tutorial.md"), "python")
[TUTORIAL_SHELL] = examples(read("tutorial.md"), "sh")
ALONE, TUTORIAL_UP = TUTORIAL_SHELL.text.splitlines()
EPOCHS = 4  # of the ten


def accuracies(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"epoch \d: accuracy ([\d.]+)", output)]


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_both_scripts_train(tmp_path: Path) -> None:
    for name, block in (("plain.py", PLAIN), ("train.py", CONVERTED)):
        text = re.sub(r"range\(10\)|(?<=epochs\(loader, )10", lambda ten: ten[0].replace("10", str(EPOCHS)), block.text)
        (tmp_path / name).write_text(f"import torch; torch.set_num_threads(1)\n{text}")
    plain = accuracies(run_shell(tmp_path, shlex.join(["python", "plain.py"])))
    alone = accuracies(run_shell(tmp_path, ALONE))
    with RunningUp(*arguments_of_up(TUTORIAL_UP), folder=tmp_path) as up:
        code, output, errors = up.finish()
    together = accuracies(output)
    assert (code, len(plain), len(alone), len(together)) == (0, EPOCHS, EPOCHS, 2 * EPOCHS), errors
    assert min(plain[-1], alone[-1], *together[-2:]) > 0.9
    assert together[-1] == together[-2]  # all trainers have one model, with its statistics of batch norm
    assert torch.load(tmp_path / "model.pt", weights_only=True)["1.num_batches_tracked"] == EPOCHS * 1500 / 50


# ---------------------------------------------------------------------- inspection


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(400)
@needs_curl
def test_a_run_is_inspected_and_administered(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with FaultyRun(100_000, min_block_size=64, checkpoints=str(place), lease_seconds=30) as run:
        run.wait_for_round(15)
        check_inspection(tmp_path, run.cluster.address)
        variables = {"GRADPOST_COORDINATOR": run.cluster.address, "PLACE": str(place), "OMP_NUM_THREADS": "1"}
        run_shell(tmp_path, COMMANDS, **variables)
    assert load_file(tmp_path / "model.safetensors")["0.weight"].shape == (64, 20)


def check_inspection(folder: Path, address: str) -> None:
    printed = run_shell(folder, "\n".join(LOOK), URL=address)
    assert load_file(folder / "weight.safetensors")["0.weight"].shape == (64, 20)
    documents = [json.loads(line) for line in printed.splitlines() if line.startswith(("{", "["))]
    requests = [event["facts"] for event in documents[-1] if event["by"]]
    assert [facts["action"] for facts in requests if facts["outcome"] == "done"] == [
        "set rate", "freeze", "unfreeze", "pause", "resume", "checkpoint",
    ]  # fmt: skip
    code = f"{PYTHON}\nimport torch\ntorch.save(state, {str(folder / 'state.pt')!r})\n"
    run_shell(folder, shlex.join(["python", "-c", code]), URL=address)
    make_model().load_state_dict(torch.load(folder / "state.pt", weights_only=True), strict=True)


# ---------------------------------------------------------------------- Kubernetes


[KUBERNETES] = examples(section(read("deploy.md"), "Kubernetes"), "sh")
PROXIES = section(read("deploy.md"), "Behind proxies")
for language in ("nginx", "haproxy"):  # tests/cluster/test_surroundings.py runs them
    examples(PROXIES, language)

# Print the objects instead of sending them to a cluster.
KUBECTL = """
kubectl() {
  case "$*" in
    *port-forward*) ;;
    apply*) command kubectl kustomize "${@:3}" ;;
    *) command kubectl "$@" --dry-run=client --output yaml ;;
  esac
  echo ---
}
"""


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, to render manifests")
def test_the_commands_for_kubernetes_create_the_secret_of_the_pods(tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    printed = run_shell(tmp_path, KUBECTL, KUBERNETES.text).partition("apiVersion")
    objects: list[dict[str, Any]] = [one for one in yaml.safe_load_all(printed[1] + printed[2]) if one]
    namespace, secret, *_ = objects
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", secret["metadata"]["namespace"])
    volumes = [volume for _, pod in pods("overlays/laptop") for volume in pod["spec"]["volumes"]]
    wanted = [volume["secret"] for volume in volumes if "secret" in volume]
    assert {volume["secretName"] for volume in wanted} == {secret["metadata"]["name"]}
    assert {item["key"] for volume in wanted for item in volume.get("items", [])} <= secret["data"].keys()
    assert {name: base64.b64decode(data) for name, data in secret["data"].items()} == {
        path.name: path.read_bytes() for path in (tmp_path / "tokens").iterdir()
    }


# ---------------------------------------------------------------------- machines


MACHINES_TEXT = read("machines.md")
[TOKENS] = examples(MACHINES_TEXT, "sh")
[BY_HAND] = examples(MACHINES_TEXT, "console")


def make_folder(folder: Path, *arguments: str) -> None:
    """Make the tokens, the script, and programs `gradpost` and `python` in `folder`/bin."""
    script = (ROOT / "tests" / "cluster" / "training_script.py").read_text()
    (folder / "train.py").write_text(script.replace("sys.argv[1:]", repr(list(arguments))))
    (folder / "bin").mkdir()
    write_program(folder / "bin" / "gradpost", *GRADPOST)
    write_program(folder / "bin" / "python", sys.executable)
    run_shell(folder, TOKENS.text)


def write_program(path: Path, *command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(400)
def test_by_hand(tmp_path: Path) -> None:
    """Each machine is an address on loopback."""
    make_folder(tmp_path, "20")
    text = BY_HAND.text.replace("10.0.0.", "127.0.0.").replace("7070", str(free_port()))
    text = text.replace("/var/lib", str(tmp_path))
    coordinator, pserver, trainer = (line.removeprefix("$ ") for line in text.splitlines())
    services = [coordinator, *(pserver.replace("--pserver-index 0", f"--pserver-index {i}") for i in range(2))]
    trainers = [trainer.replace("RANK=0", f"RANK={rank}") for rank in range(2)]
    env = environment({
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "GRADPOST_TOKENS_DIR": str(tmp_path / "tokens"),
    })  # fmt: skip
    started: list[subprocess.Popen[str]] = []
    try:
        for command in [*services, *trainers]:
            words = ["env", *shlex.split(command)]
            started.append(subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE))
        check_results("".join(trainer.communicate(timeout=200)[0] for trainer in started[3:]))
        for service in started[:3]:
            service.send_signal(SIGTERM)
        assert [process.wait(100) for process in started] == [0] * 5
    finally:
        for process in started:
            process.kill()
            process.communicate()


def check_results(printed: str) -> None:
    """Check that both trainers have the result of round 20."""
    results = re.findall(r"result (\w+) 20$", printed, re.MULTILINE)
    assert len(results) == 2, printed
    assert len(set(results)) == 1
