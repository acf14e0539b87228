"""What documents have from the code stands in them as it is in the code."""

from __future__ import annotations

import pytest

from .markdown import examples, read, section
from .reference import DOCUMENTS
from .reference.tables import put_table

examples(section(read("cli.md"), "Reference"), "console")  # `gradpost.main` writes all of that section


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_document_is_that_of_the_code(name: str) -> None:
    text = read(name)
    assert text == DOCUMENTS[name](text), "run: make reference"


def test_a_table_is_put_under_its_heading() -> None:
    one, old = "## One\n\n| a |\n|---|\n| 1 |\n", "| a |\n|---|\n| 1 |\n"
    new = "| a | b |\n|---|---|\n| 2 | |\n| 3 | 4 |\n"
    text = put_table(f"{one}\n## Two\n\nBefore.\n\n{old}\nAfter.\n", "Two", ("a", "b"), [("2", ""), ("3", "4")])
    assert text == f"{one}\n## Two\n\nBefore.\n\n{new}\nAfter.\n"
