"""Who may import whom: the contracts of import-linter in pyproject.toml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gradpost
from ps_protocol.errors import ERRORS

pytest.importorskip("importlinter")

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS = [contract["name"] for contract in SETTINGS["contracts"]]
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"

# A line that breaks each contract, and where.
VIOLATIONS = [
    ("ps_protocol/slicing.py", "import services.runtime"),
    ("services/runtime/__init__.py", "import services.pserver"),
    ("ps_protocol/plan.py", "import pydantic"),
    ("ps_http2/frames.py", "import ps_protocol"),
    ("ps_http2/connection.py", "import httpx"),
    ("ps_http2/client.py", "import starlette"),
    ("ps_http2/stream.py", "from . import connection"),
    ("services/pserver/rounds.py", "import asyncio"),
]


def run_lint(folder: Path) -> tuple[int, dict[str, str], str]:
    """Return the exit status, the verdict on each contract, and all that was said."""
    process = subprocess.run(
        [sys.executable, "-P", "-c", LINT],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = process.stdout + process.stderr
    verdicts = {name: match[1] for name in CONTRACTS if (match := re.search(rf"{re.escape(name)} (KEPT|BROKEN)", said))}
    return process.returncode, verdicts, said


def test_the_contracts_are_kept() -> None:
    status, verdicts, said = run_lint(ROOT)
    assert (status, verdicts) == (0, dict.fromkeys(CONTRACTS, "KEPT")), said


def test_a_broken_contract_is_noticed(tmp_path: Path) -> None:
    """Else a contract over misspelt modules would be kept for ever."""
    for package in SETTINGS["root_packages"]:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, line in VIOLATIONS:
        with (tmp_path / path).open("a") as file:
            file.write(f"\n{line}\n")
    status, verdicts, said = run_lint(tmp_path)
    assert (status, verdicts) == (1, dict.fromkeys(CONTRACTS, "BROKEN")), said


def test_the_public_names_are_imported_without_torch_until_one_needs_it() -> None:
    program = (
        "import sys, gradpost\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "print([name for name in gradpost.__all__ if getattr(gradpost, name).__name__ != name])\n"
        "assert 'torch' in sys.modules\n"
    )
    assert subprocess.check_output([sys.executable, "-P", "-c", program], text=True) == "[]\n"
    errors = {error.family for error in ERRORS.values()}
    assert errors <= {getattr(gradpost, name) for name in gradpost.__all__}
