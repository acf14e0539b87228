"""The links of every document and report lead somewhere; the Python of documents compiles, their JSON parses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .markdown import DOCUMENTS, RESULTS, ROOT, anchors, code_blocks, links


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted(RESULTS.glob("*.md"))], ids=name)
def test_internal_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in links(text):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"there is no heading for {link}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_snippets_are_valid(path: Path) -> None:
    for block in code_blocks(path.read_text(encoding="utf-8")):
        if block.language == "python":
            compile(block.text, name(path), "exec")
        elif block.language == "json":
            json.loads(block.text)


def test_there_is_something_to_check() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    assert sum(len(links(text)) for text in texts) > 20
    assert any(code_blocks(text, "python") for text in texts)
    assert any(code_blocks(text, "json") for text in texts)
