from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from gradpost.plan import parse_param
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec

from .conftest import RunCommand, run_process

SEED = ["--param", "w1:10x1000", "--param", "w2:1x10", "--pservers", "3"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a file with parameters of two dtypes, an empty one, a scalar, a buffer and unusual names."""
    path = tmp_path / "model.safetensors"
    tensors = {
        "fc.weight": np.ones((100, 300), "f4"),
        "fc.bias": np.ones(100, "f4"),
        "half": np.ones((3, 5), "f2"),
        "empty": np.ones((0, 7), "f4"),
        "scalar": np.ones((), "f4"),
        "bn.num_batches_tracked": np.ones((), "i8"),
        'ä [bold]"x"\n\x1b[31m': np.ones(3, "f4"),
    }
    safetensors.numpy.save_file(tensors, path, {"format": "np"})
    return path


# ---------------------------------------------------------------- JSON


def test_a_plan_as_json_in_a_process() -> None:
    outcome = run_process("-m", "gradpost", "plan", *SEED, "--json")
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    parameters = [ParameterSpec("w1", (10, 1000)), ParameterSpec("w2", (1, 10))]
    assert json.loads(outcome.stdout) == {
        "digest": make_plan(parameters, 3).digest,
        "blocks": [
            {"name": "w1.block0", "begin": 0, "end": 5000, "pserver": 0},
            {"name": "w1.block1", "begin": 5000, "end": 10_000, "pserver": 1},
            {"name": "w2.block0", "begin": 0, "end": 10, "pserver": 2},
        ],
        "pservers": [
            {"pserver": 0, "bytes": 20_000, "share": 20_000 / 40_040},
            {"pserver": 1, "bytes": 20_000, "share": 20_000 / 40_040},
            {"pserver": 2, "bytes": 40, "share": 40 / 40_040},
        ],
    }


def test_the_options_reach_the_plan(run_command: RunCommand) -> None:
    def blocks(*options: object) -> Any:
        return json.loads(run_command("plan", *SEED, "--json", *options).stdout)["blocks"]

    assert len(blocks("--min-block-size", 5)) == 5
    assert [block["end"] for block in blocks("--whole")] == [10_000, 10]
    assert [block["pserver"] for block in blocks("--whole", "--placement", "round_robin")] == [0, 1]
    assert len({json.dumps(blocks("--placement", p)) for p in ("hash", "round_robin")}) == 2


# ---------------------------------------------------------------- tables


PLAIN = """\
block      begin     end   bytes  pserver
w1.block0      0   5,000  20,000        0
w1.block1  5,000  10,000  20,000        1
w2.block0      0      10      40        2

pserver  blocks   bytes  of the mean
      0       1  20,000        1.499
      1       1  20,000        1.499
      2       1      40     0.002997

2 parameters, 3 blocks, 40,040 bytes on 3 pservers
"""


def test_tables_are_plain_and_of_any_width(run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    digest = make_plan([parse_param("w1:10x1000"), parse_param("w2:1x10")], 3).digest
    assert run_command("plan", *SEED).stdout == f"{PLAIN}digest {digest}\n"


# ---------------------------------------------------------------- the file


def test_a_file_is_read_by_its_header(model: Path, run_command: RunCommand) -> None:
    outcome = run_command("plan", model, "--pservers", 2, "--json")
    answer = json.loads(outcome.stdout)
    blocks = answer["blocks"]
    assert sum(row["bytes"] for row in answer["pservers"]) == 4 * (30_000 + 100 + 1 + 3) + 2 * 15 + 8
    assert {block["name"]: (block["begin"], block["end"]) for block in blocks} == {
        "fc.weight.block0": (0, 15_000),
        "fc.weight.block1": (15_000, 30_000),
        "fc.bias.block0": (0, 100),
        "half.block0": (0, 15),
        "scalar.block0": (0, 1),
        'ä [bold]"x"\n\x1b[31m.block0': (0, 3),
    }
    assert outcome.stderr == ""
    assert 'ä [bold]"x"\\n\\x1b[31m.block0' in run_command("plan", model, "--pservers", 2).stdout


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("s:", ParameterSpec("s", ())),
        ("s::BF16", ParameterSpec("s", (), "BF16")),
        ("e:0", ParameterSpec("e", (0,))),
        ("a:b:3x4:F16", ParameterSpec("a:b", (3, 4), "F16")),
        ("ä b\n:3", ParameterSpec("ä b\n", (3,))),
    ],
)
def test_parameters_as_text(text: str, spec: ParameterSpec) -> None:
    assert parse_param(text) == spec
