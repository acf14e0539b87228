"""Each example in the documents is run by a test: one that is added without a test is found here."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from .commands import PROGRAMS
from .markdown import DOCUMENTS, ROOT, TAKEN, code_blocks, without_code

for path in sorted(Path(__file__).parent.glob("test_*.py")):
    importlib.import_module(f"{__package__}.{path.stem}")  # that is when they take their examples

for_each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@for_each_document
def test_every_example_is_taken_by_a_test(path: Path) -> None:
    blocks = code_blocks(path.read_text(encoding="utf-8"))
    assert [block for block in blocks if block.language and block not in TAKEN] == [], "run it in a test: examples()"


@for_each_document
def test_what_has_no_language_is_a_drawing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for block in code_blocks(text, ""):
        assert not re.search(rf"^[ $]*({'|'.join(PROGRAMS)}) ", block.text, re.MULTILINE), block.text
    assert not re.search("^ *(```|~~~)", without_code(text), re.MULTILINE), "a block that no test would see"
