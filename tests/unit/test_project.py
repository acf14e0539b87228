"""Checks of the whole project: its dependencies, imports, sizes, doctests and language."""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import gradpost
from ps_protocol.errors import ERRORS

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def run_python(program: str) -> str:
    """Return what a program prints in an interpreter of its own."""
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


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


# ---------------------------------------------------------------- imports


def test_public_names_are_imported_without_torch_until_one_needs_it() -> None:
    program = (
        "import sys, gradpost\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "print([name for name in gradpost.__all__ if getattr(gradpost, name).__name__ != name])\n"
        "assert 'torch' in sys.modules\n"
    )
    assert run_python(program) == "[]\n"
    assert {error.family for error in ERRORS.values()} <= {getattr(gradpost, name) for name in gradpost.__all__}


def test_the_coordinator_starts_without_torch_and_numpy() -> None:
    program = "import sys, services.coordinator.process; print({'torch', 'numpy'} & {*sys.modules})"
    assert run_python(program) == "set()\n"


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
