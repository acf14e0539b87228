"""docs/operations.md: its commands run, what they name is there, and every alert has its place."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from trainer_client.testing import LocalCluster

from ..cluster.trainer_processes import Plot, Trainer
from .markdown import ROOT, code_blocks, codes, read, section
from .stage import Stage

TEXT = read("operations.md")
[UP] = [block.text for block in code_blocks(TEXT, "sh") if "gradpost up" in block.text]
SHELL = "".join(block.text for block in code_blocks(TEXT, "sh") if block.text != UP)
ELSEWHERE = [
    command
    for text in [*(line for block in code_blocks(TEXT, "bash") for line in block.text.splitlines()), *codes(TEXT)]
    for command in [text.strip()]
    if command.startswith(("docker ", "kubectl "))
]

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="wants curl (apt-get install curl)")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    with stage.cluster:
        yield stage
        stage.clear()


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(400)
@needs_curl
def test_the_commands_work(stage: Stage) -> None:
    for trainer in stage.play(Plot(), Plot()):
        trainer.wait_for("round", 1)
    (stage.folder / "backup").mkdir()
    pserver = stage.cluster.status().pservers[0].address
    more = {"PSERVER": pserver, "BACKUP": str(stage.folder / "backup")}
    printed = stage.shell(SHELL, **more)
    assert (stage.folder / "model.safetensors").stat().st_size > 40
    assert "goes on from round 1 (attempt 1)" in printed
    assert "tokens/admin: replaced" in printed
    [run] = (stage.folder / "backup" / "checkpoints").iterdir()
    assert printed.count(run.name) > 4
    moved_round = goes_on_elsewhere(stage.folder / "backup" / "checkpoints")
    assert f"checkpoint of round {moved_round:,} of run {run.name}" in printed


def goes_on_elsewhere(checkpoints: Path) -> int:
    """After which round another cluster goes on that is given nothing but this place, and has other pservers."""
    with LocalCluster(pservers=2, trainers=1, checkpoints=checkpoints, resume=True) as cluster:
        trainer = Trainer(cluster.address, 0, Plot())
        try:
            return trainer.wait_for("round", 1).round - 1
        finally:
            trainer.end()


@pytest.mark.cluster
@pytest.mark.extended
@pytest.mark.timeout(400)
def test_another_number_of_pservers(tmp_path: Path, stage: Stage) -> None:
    script = (ROOT / "tests" / "cluster" / "fault_script.py").read_text()
    (tmp_path / "train.py").write_text(script.replace("int(sys.argv[1])", "20"))
    printed = stage.shell(UP)
    digests = re.findall(r"result (\w+ 20)", printed)
    assert len(digests) == 4, printed
    assert len(set(digests)) == 1


def test_what_is_named_elsewhere_is_there() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    objects = {
        f"{one['kind'].lower()}/{one['metadata']['name']}"
        for file in (ROOT / "deploy" / "kubernetes" / "base").glob("*.yaml")
        for one in yaml.safe_load_all(file.read_text())
        if one.get("metadata")
    }
    assert len(ELSEWHERE) > 8
    for command in ELSEWHERE:
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
        if command.startswith("docker "):
            found = re.fullmatch(r"docker compose (?:up|down|logs|restart|exec)((?: -\S+)*)((?: \S+)?).*", command)
            assert found, command
            assert found[2].strip().partition("=")[0] in {"", *composed}, command
        elif " -k " in command:
            assert (ROOT / command.rpartition(" ")[2] / "kustomization.yaml").exists(), command
        else:
            assert command.startswith("kubectl -n gradpost "), command
            named = set(re.findall(r"\w+/[\w-]+", command))
            assert named, command
            assert named <= objects, command


def test_every_alert_has_its_place() -> None:
    found = set()
    for file in ("prometheus/rules.yml", "kubernetes/components/monitoring/rules.yaml"):
        found |= set(re.findall(r"alert: (\w+)", (ROOT / "deploy" / file).read_text()))
    headings = set(re.findall(r"^### (\w+)$", section(TEXT, "Alerts"), re.MULTILINE))
    assert found == headings
