"""The parser of documents: sections, tables, code blocks, links."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "deploy" / "README.md"])

_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class CodeBlock:
    language: str
    text: str


TAKEN: set[CodeBlock] = set()


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Return the text under a heading, its subsections included."""
    match = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert match, f"there is no section {heading!r}"
    rest = text[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", without_code(rest), re.MULTILINE)
    return rest[: end.start()] if end else rest


def tables(text: str) -> list[list[dict[str, str]]]:
    """Return all tables, each a list of rows (column -> cell)."""
    found: list[list[dict[str, str]]] = []
    columns: list[str] | None = None
    for line in without_code(text).splitlines():
        line = line.strip()
        if not line.startswith("|"):
            columns = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if columns is None:
            columns = cells
            found.append([])
        elif not set(line) <= set("|-: "):
            assert len(cells) == len(columns), f"a row with {len(cells)} of {len(columns)} cells: {line}"
            found[-1].append(dict(zip(columns, cells, strict=True)))
    return found


def table(text: str, column: str) -> list[dict[str, str]]:
    """Return the first table that has this column."""
    return next(rows for rows in tables(text) if rows and column in rows[0])


def code_blocks(text: str, language: str | None = None) -> list[CodeBlock]:
    """Return all fenced blocks, or those of one language."""
    blocks = [CodeBlock(match[2], match[3]) for match in _FENCED.finditer(text)]
    return [block for block in blocks if language in (None, block.language)]


def examples(text: str, language: str) -> list[CodeBlock]:
    """Return all blocks of one language, for tests that run all of them. test_pages.py finds blocks without a test."""
    blocks = code_blocks(text, language)
    TAKEN.update(blocks)
    return blocks


def example_plan(protocol: str) -> Any:
    """Return the slice plan of the run that docs/protocol.md shows."""
    [block] = [block for block in code_blocks(protocol, "json") if '"plan"' in block.text]
    return json.loads(block.text)["plan"]


def without_code(text: str) -> str:
    """Return the text with its fenced blocks blanked out, of the same length."""
    return _FENCED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def codes(cell: str) -> list[str]:
    """Return the words in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def links(text: str) -> list[str]:
    return _LINK.findall(without_code(text))


def anchors(text: str) -> set[str]:
    """Return the anchors of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
