"""Checks of the whole project: its dependencies, imports, Makefile and language."""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import gradpost
from ps_protocol.errors import ERRORS

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def run(arguments: list[str], folder: Path = ROOT, **environment: str) -> tuple[int, str]:
    """Return the exit code of a process, and what it wrote to stdout and stderr."""
    process = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout


def parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SystemError:  # CPython 3.11, if another thread parses or prints a traceback at the time (gh-106905)
        return ast.parse(source)


def python_files(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    return files


# ---------------------------------------------------------------- dependencies


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(requirements: list[str]) -> set[str]:
    return {normalise(re.split(r"[\[<>=]", requirement)[0]) for requirement in requirements}


LOCKS = [
    [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    for name in ("requirements.lock", "requirements-bench.lock", "requirements-adapters.lock")
]


def test_locks_are_sorted_lists_of_exact_public_versions_for_any_platform() -> None:
    for lines in LOCKS:
        assert [line.lower() for line in lines] == sorted(line.lower() for line in lines)
        for line in lines:
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9]+(\.[0-9]+)*(\.?(post|rc|a|b)[0-9]+)?", line), line
            assert not re.match("nvidia|triton|cuda|pip=", line), line


def test_locks_name_each_declared_dependency_once() -> None:
    project = SETTINGS["project"]
    declared = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    locked = names_of([line for lines in LOCKS for line in lines])
    assert len(locked) == sum(map(len, LOCKS))
    assert not names_of(declared) - locked


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
    project = SETTINGS["project"]
    trackers = [r for extra in ("mlflow", "wandb") for r in project["optional-dependencies"][extra]]
    # fastapi and pydantic are built on these two; mlflow is a name of mlflow-skinny's where that is not installed.
    known = names_of([*project["dependencies"], *trackers]) | {"starlette", "pydantic-core", "mlflow"}
    undeclared = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in python_files(package)
        for name in imported_by(file)
        if not known & {normalise(d) for d in distributions.get(name, [name])}
    }
    assert not undeclared


AUDIT = ROOT / ".ci" / "audit.py"
FINE = {"name": "fine", "version": "1.0", "vulns": []}
VULNERABLE = {"name": "bad", "version": "0.1", "vulns": [{"id": "CVE-1", "fix_versions": ["0.2"], "aliases": []}]}
SKIPPED = {"name": "unknown", "skip_reason": "Dependency not found"}
UNREACHABLE = "Traceback\nrequests.exceptions.ConnectionError: no name api.osv.dev"


@pytest.mark.skipif(not AUDIT.exists(), reason="is not in a source distribution")
@pytest.mark.parametrize(
    ("packages", "error", "code", "expected_code", "said"),
    [
        ([FINE, FINE], "", 0, 0, r"audit: 2 packages looked up, 0 with known vulnerabilities\n$"),
        ([FINE, VULNERABLE], "", 1, 1, r"audit: bad 0\.1: CVE-1, fixed in 0\.2\n"),
        (None, UNREACHABLE, 1, 0, r"audit: NOT DONE, as osv\.dev cannot be reached: requests\.exceptions\.Conn"),
        (None, "KeyError: 'name'", 1, 1, ""),
    ],
)
def test_audit_fails_unless_no_package_is_vulnerable_or_the_advisories_are_unreachable(
    packages: list[Any] | None, error: str, code: int, expected_code: int, said: str, tmp_path: Path
) -> None:
    report = "" if packages is None else json.dumps({"dependencies": packages, "fixes": []})
    script = f"import sys\nassert '--requirement' in sys.argv\nprint({report!r})\nprint({error!r}, file=sys.stderr)"
    (tmp_path / "pip_audit.py").write_text(f"{script}\nsys.exit({code})")
    actual_code, output = run([sys.executable, "-P", str(AUDIT)], PYTHONPATH=str(tmp_path))
    assert (actual_code, re.search(said, output) is not None) == (expected_code, True), output


# ---------------------------------------------------------------- imports


def test_public_names_are_imported_without_torch_until_one_needs_it() -> None:
    program = (
        "import sys, gradpost\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "print([name for name in gradpost.__all__ if getattr(gradpost, name).__name__ != name])\n"
        "assert 'torch' in sys.modules\n"
    )
    assert run([sys.executable, "-P", "-c", program]) == (0, "[]\n")
    assert {error.family for error in ERRORS.values()} <= {getattr(gradpost, name) for name in gradpost.__all__}


# ---------------------------------------------------------------- size

MAX_LINES = 450  # of a file that a reader takes in at one sitting


def test_no_file_of_the_product_is_too_long() -> None:
    lines = {file: len(file.read_text().splitlines()) for package in PACKAGES for file in python_files(package)}
    assert not {file.relative_to(ROOT): count for file, count in lines.items() if count > MAX_LINES}


# ---------------------------------------------------------------- doctests

DOCTESTS = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for folder in [*PACKAGES, "benchmarks"]
    for file in python_files(folder)
    if re.search(r"^ +>>> ", file.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("module", DOCTESTS)
def test_examples_in_docstrings_are_true(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed


# ---------------------------------------------------------------- the Makefile


def make(*arguments: str) -> list[str]:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    code, output = run(["make", "--no-print-directory", f"PYTHON={sys.executable}", *arguments])
    assert code == 0, output
    return output.splitlines()


def test_make_lists_every_target() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    listed = re.findall(r"^  make ([a-z-]+) +\S", "\n".join(make()), re.MULTILINE)
    assert sorted(listed) == sorted(targets[1].split())


def test_soak_runs_what_test_all_leaves_out_and_ends_within_an_hour() -> None:
    side_by_side, alone, chaos = make("--dry-run", "soak", "ARGS=--seed 7")[-3:]
    assert '-m "(soak or hypothesis) and not alone"' in side_by_side
    assert "tests/attacks tests/chaos -m alone" in alone
    seconds = [int(*re.findall(r"--session-timeout (\d+)", line)) for line in (side_by_side, alone)]
    [minutes] = re.findall(r"tests\.chaos --minutes (\d+) --seed 7$", chaos)
    assert sum(seconds) + 60 * int(minutes) < 3600


# ---------------------------------------------------------------- language

SOURCES = [
    ".ci",
    "benchmarks",
    "examples",
    "gradpost",
    "ps_config",
    "ps_http2",
    "ps_protocol",
    "services",
    "tests",
    "trainer_client",
]
FRAGMENT = re.compile(r"(Of|Who|Whom|Whose|Who(?:ever)|Those|What|Whether|The same|As|By|How|Where)\b")
# Spelt so that this file contains none of the words.
ARCHAISM = re.compile(r"\b(a(?:new)|who(?:ever)|(?:no|some|every)(?:body))\b", re.IGNORECASE)
QUOTATION = re.compile(r"""`[^`]*`|"[^"]*"|“[^”]*”""")


def find_fragments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the beginning of each docstring that is no sentence."""
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            begin = (ast.get_docstring(node) or "A class.").partition("\n\n")[0].strip()
            if begin[0].islower() or begin[-1] not in ".:?!" or FRAGMENT.match(begin):
                yield node.body[0].lineno, begin


def find_archaisms(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment and string that contains such a word outside quotations."""
    if not ARCHAISM.search(source):
        return
    strings = (node for node in ast.walk(parse(source)) if isinstance(node, ast.Constant))
    texts = [(node.lineno, node.value) for node in strings if isinstance(node.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    yield from ((line, text) for line, text in texts if ARCHAISM.search(QUOTATION.sub("", text)))


@pytest.mark.parametrize("folder", SOURCES)
def test_docstrings_are_sentences_and_words_are_plain(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text[:100]}"
        for file in python_files(folder)
        for find in (find_fragments, find_archaisms)
        for line, text in find(file.read_text())
    ]
    assert not found, "\n".join(found)


def test_a_fragment_or_an_archaism_would_be_noticed() -> None:
    for docstring in ("Return the ranks", "return the ranks.", "Of a further process: its place."):
        assert [*find_fragments(f"def f():\n    {docstring!r}")]
    assert not [*find_fragments("def f():\n    '`encode` undoes this.\\n\\nIn any order'")]
    for line in ("# a" + "new", "x = f'no" + "body {y}'"):
        assert [*find_archaisms(line)]
    assert not [*find_archaisms("# the word `a" + "new`")]
