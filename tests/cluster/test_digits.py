"""The example that `make train` runs: it learns, and it is what the documentation says of it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import trainer_client

from .up_support import ROOT, RunningUp

SCRIPT = ROOT / "examples" / "digits.py"


@pytest.mark.cluster
@pytest.mark.parametrize("mode", ["sync", "async", pytest.param("ssp", marks=pytest.mark.extended)])
def test_two_trainers_learn_the_digits(tmp_path: Path, server: str, transport: str, mode: str) -> None:
    with RunningUp("--json", "--server", server, "--mode", mode, "--", "python", SCRIPT, folder=tmp_path) as up:
        code, stdout, stderr = up.finish()
    assert code == 0, stderr
    summary = json.loads(stdout)
    assert (summary["state"], summary["mode"], summary["transport"]) == ("finished", mode, transport)
    steps = 8 * 23
    assert summary["rounds"] == (steps if mode == "sync" else 2 * steps)
    assert summary["results"]["accuracy"] >= 0.97
    assert stderr.count("accuracy on 360 held-out images: ") == 2
    assert stderr.count(f"] trained: mode={mode} transport={transport} accuracy=") == 2


def test_it_uses_public_names_only() -> None:
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in (
            "ps_protocol",
            "services",
            "trainer_client",
            "gradpost",
        ):
            assert node.module == "trainer_client"
            assert {alias.name for alias in node.names} <= set(trainer_client.__all__)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(
                name.startswith(("ps_protocol", "services", "trainer_client.", "gradpost")) for name in names
            )


def test_three_lines_differ_from_training_in_one_process() -> None:
    marked = [line for line in SCRIPT.read_text().splitlines() if "# (" in line]
    assert [line[line.index("# (") + 3] for line in marked] == ["1", "2", "3"]
