"""The table of benchmarks/placement.py in docs/modes.md, and the conclusion from it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from ps_protocol.plan import DEFAULT_PLACEMENT
from ps_protocol.vocabulary import PLACEMENTS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "placement.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_placement", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_in_the_docs_is_what_the_script_prints() -> None:
    printed = subprocess.run(
        [sys.executable, str(SCRIPT)], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    ).stdout
    assert printed in (ROOT / "docs" / "modes.md").read_text()


@pytest.mark.parametrize(
    ("model", "num_tensors", "num_elements"),
    [
        ("ResNet-18", 62, 11_689_512),
        ("ResNet-50", 161, 25_557_032),
        ("VGG-16", 32, 138_357_544),
        ("GPT-2 small", 148, 124_439_808),
        ("BERT-base", 199, 109_482_240),
        ("ViT-B/16", 152, 86_567_656),
        ("small CNN", 8, 1_199_882),
        ("two-layer net", 4, 20_020),
    ],
)
def test_the_shapes_are_those_of_the_real_model(
    script: ModuleType, model: str, num_tensors: int, num_elements: int
) -> None:
    parameters = script.model_parameters(model)
    assert len(parameters) == len({spec.name for spec in parameters}) == num_tensors
    assert sum(spec.num_elements for spec in parameters) == num_elements


@pytest.mark.parametrize("slice_parameters", [True, False])
def test_the_default_is_never_worse(script: ModuleType, slice_parameters: bool) -> None:
    for model, num_pservers in product(script.MODELS, script.NUM_PSERVERS):
        parameters = script.model_parameters(model)
        imbalance = {
            placement: script.imbalance(parameters, num_pservers, placement, slice_parameters=slice_parameters)
            for placement in PLACEMENTS
        }
        assert imbalance[DEFAULT_PLACEMENT] == min(imbalance.values()), (model, num_pservers)
