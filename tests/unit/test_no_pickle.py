"""None of our modules can unpickle anything: they import nothing that does."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
    "packages"
]

MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# By their last two names: what loads a pickle without saying so, or may.
CALLS = {
    "torch.load",
    "torch.save",
    "np.load",
    "numpy.load",
    "pandas.read_pickle",
    "hub.load",
    "multiprocessing.connection",
}


def findings(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names if alias.name.partition(".")[0] in MODULES}
            case ast.ImportFrom(module=str(module), names=names):
                whole = {f"{module.rpartition('.')[2]}.{alias.name}" for alias in names}
                found |= (whole & CALLS) | ({module} if module.partition(".")[0] in MODULES else set())
            case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr=attribute):
                found |= {f"{name}.{attribute}"} & CALLS
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_that_unpickles_is_used(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    assert {str(file): found for file in files if (found := findings(file.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    ["import pickle", "import shelve as s", "from marshal import loads", "from torch import load", "x = torch.load(f)",
     "import dill.source", "a.hub.load(x)", "from multiprocessing import connection"],
)  # fmt: skip
def test_it_would_be_noticed(line: str) -> None:
    assert findings(line)
