"""All documents: links lead somewhere, generated parts are those of the code, and every example is run by a test."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from ps_protocol.errors import ERRORS

from .markdown import (
    DOCUMENTS,
    RESULTS,
    ROOT,
    TAKEN,
    anchors,
    code_blocks,
    codes,
    examples,
    links,
    read,
    section,
    tables,
    without_code,
)
from .reference import GENERATED, SETTINGS
from .test_commands import PROGRAMS

examples(section(read("cli.md"), "Reference"), "console")  # typer writes that section
for language in ("sh", "text"):  # commands for a cluster in trouble, and what they print
    examples(read("troubleshooting.md"), language)
for path in sorted(Path(__file__).parent.glob("test_*.py")):
    if path.stem != "test_pages":
        importlib.import_module(f"{__package__}.{path.stem}")  # that takes its examples


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted(RESULTS.glob("*.md"))], ids=name_of)
def test_internal_links_lead_somewhere(path: Path) -> None:
    for link in links(path.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"there is no heading for {link}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_example_is_valid_and_taken_by_a_test(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for block in code_blocks(text):
        if block.language == "python":
            compile(block.text, name_of(path), "exec")
        elif block.language == "json":
            json.loads(block.text)
        elif not block.language:  # a drawing
            assert not re.search(rf"^[ $]*({'|'.join(PROGRAMS)}) ", block.text, re.MULTILINE), block.text
        assert not block.language or block in TAKEN, f"run it in a test, by examples(): {block}"
    assert not re.search("^ *(```|~~~)", without_code(text), re.MULTILINE), "a block that no test would see"


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_parts_are_those_of_the_code(name: str) -> None:
    text = read(name)
    assert text == GENERATED[name](text), "run: make reference"


def test_the_architecture_names_existing_files() -> None:
    named = [code for code in codes(without_code(read("architecture.md"))) if code.endswith((".py", ".toml", "/"))]
    missing = [path for path in named if path != "settings.py" and not (ROOT / path).exists()]
    assert len(named) > 60
    assert missing == []


def test_each_dependency_is_listed_with_its_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [re.split(r"[<>=]", dependency)[0] for dependency in project["dependencies"]]
    documented = [codes(row["package"])[0] for row in tables((ROOT / "CONTRIBUTING.md").read_text())[1]]
    assert sorted(documented) == sorted([*packages, *project["optional-dependencies"]])


def test_each_error_code_is_in_the_guide_to_troubleshooting() -> None:
    assert set(ERRORS) <= set(codes(without_code(read("troubleshooting.md"))))


def test_each_alert_is_described() -> None:
    files = ("prometheus/rules.yml", "kubernetes/components/monitoring/rules.yaml")
    alerts = {name for file in files for name in re.findall(r"alert: (\w+)", (ROOT / "deploy" / file).read_text())}
    described = re.findall(r"^- `(Gradpost\w+)`:", section(read("operations.md"), "Alerts"), re.MULTILINE)
    assert sorted(described) == sorted(alerts)


@pytest.mark.parametrize("model", SETTINGS.values(), ids=lambda model: model.__name__)
def test_settings_are_described(model: type[BaseSettings]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []
