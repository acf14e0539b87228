"""CONTRIBUTING.md has a reason for each direct dependency."""

from __future__ import annotations

import re
import tomllib

from .markdown import ROOT, codes, tables


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [re.split(r"[<>=]", dependency)[0] for dependency in project["dependencies"]]
    documented = [codes(row["package"])[0] for row in tables((ROOT / "CONTRIBUTING.md").read_text())[1]]
    assert sorted(documented) == sorted([*packages, *project["optional-dependencies"]])
