"""The example that `make train` runs: it learns, and it is what the documentation says of it."""

from __future__ import annotations

import ast
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gradpost

from .test_disks import size_of
from .up_support import ROOT, RunningUp

SCRIPT = ROOT / "examples" / "digits.py"


STEPS = 8 * 23


def disk_use(folder: Path) -> int:
    """Return the bytes of all files; a file may be deleted meanwhile."""
    return sum(size_of(Path(parent, name)) for parent, _, names in os.walk(folder) for name in names)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("flags", "local_steps", "rounds"),
    [
        ("--mode sync", 0, STEPS),
        pytest.param("--mode async", 0, 2 * STEPS, marks=pytest.mark.soak),
        pytest.param("--mode ssp --max-staleness 2", 0, 2 * STEPS, marks=pytest.mark.soak),
        pytest.param("--mode async --no-wait-for-apply --read-consistency shard", 0, 2 * STEPS, marks=pytest.mark.soak),
        pytest.param("--mode sync --push-type int8 --pull-type int8", 0, STEPS, marks=pytest.mark.soak),
        pytest.param("--mode sync --max-delay 1", 0, STEPS, marks=pytest.mark.soak),
        pytest.param("--mode sync", 4, STEPS // 4, marks=pytest.mark.soak),
        pytest.param("--mode ssp", 4, 2 * STEPS // 4, marks=pytest.mark.soak),
    ],
)
def test_two_trainers_learn_the_digits(tmp_path: Path, flags: str, local_steps: int, rounds: int) -> None:
    arguments = ("--json", *flags.split(), "--", "python", SCRIPT)
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


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.py")), ids=lambda script: script.stem)
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


def test_three_lines_differ_from_training_in_one_process() -> None:
    marked = [line for line in SCRIPT.read_text().splitlines() if "# (" in line]
    assert [line[line.index("# (") + 3] for line in marked] == ["1", "2", "3"]
