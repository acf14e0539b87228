"""What the packages import is what pyproject.toml declares: an installed wheel misses nothing."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


DECLARED = {normalise(re.split(r"[<>=]", line)[0]) for line in PROJECT["project"]["dependencies"]}


def parse(source: str) -> ast.Module:
    """CPython 3.11 may fail if another thread parses meanwhile, as printing a traceback does (gh-106905)."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def imported_by(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared(package: str) -> None:
    distributions = packages_distributions()
    known = DECLARED | {"starlette", "pydantic-core"}  # fastapi and pydantic stand on these, and are made of them
    undeclared = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / package).rglob("*.py")
        for name in imported_by(file)
        if not known & {normalise(d) for d in distributions.get(name, [name])}
    }
    assert not undeclared
