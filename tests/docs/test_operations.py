"""`docs/operations.md`: its commands run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_client.testing import LocalCluster

from ..cluster.trainer_processes import Plot, Trainer
from .markdown import ROOT, examples, read
from .stage import Stage, needs_curl

TEXT = read("operations.md")
SCRIPTS = [block.text for block in examples(TEXT, "sh")]
[UP] = [script for script in SCRIPTS if "gradpost up" in script]
SHELL = "".join(script for script in SCRIPTS if script != UP)


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
    stage.begin_run()
    (stage.folder / "backup").mkdir()
    pserver = stage.cluster.status().pservers[0].address
    more = {"PSERVER": pserver, "BACKUP": str(stage.folder / "backup")}
    printed = stage.shell(SHELL, **more)
    assert (stage.folder / "model.safetensors").stat().st_size > 40
    assert "continues from round 1 (attempt 1)" in printed
    assert "tokens/admin: replaced" in printed
    [run] = (stage.folder / "backup" / "checkpoints").iterdir()
    assert printed.count(run.name) > 4
    moved_round = resume_elsewhere(stage.folder / "backup" / "checkpoints")
    assert f"checkpoint of round {moved_round:,} of run {run.name}" in printed


def resume_elsewhere(checkpoints: Path) -> int:
    """Resume in another cluster with other pservers and only these checkpoints, and return the checkpoint's round."""
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
    script = (ROOT / "tests" / "cluster" / "training_script.py").read_text()
    (tmp_path / "train.py").write_text(script.replace("sys.argv[1:]", '["20"]'))
    printed = stage.shell(UP)
    digests = re.findall(r"result (\w+ 20)", printed)
    assert len(digests) == 4, printed
    assert len(set(digests)) == 1
