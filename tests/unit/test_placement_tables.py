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


@pytest.mark.parametrize("slice_parameters", [True, False])
def test_the_default_is_never_worse(script: ModuleType, slice_parameters: bool) -> None:
    for model, num_pservers in product(script.MODELS, script.NUM_PSERVERS):
        parameters = script.model_parameters(model)
        imbalance = {
            placement: script.imbalance(parameters, num_pservers, placement, slice_parameters=slice_parameters)
            for placement in PLACEMENTS
        }
        assert imbalance[DEFAULT_PLACEMENT] == min(imbalance.values()), (model, num_pservers)
