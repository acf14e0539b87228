"""docs/faults.md names every fault of the campaign and every failpoint, and the tests that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from services.runtime.failpoints import NAMES

from ..chaos.faults import FAULTS
from .markdown import codes, read, section, tables

TEXT = read("faults.md")
ROWS = tables(section(TEXT, "The faults"))[0]
TESTS = Path(__file__).parents[1]


def test_every_fault_stands_there_once() -> None:
    assert sorted(row["fault"] for row in ROWS) == sorted(FAULTS)


def test_every_failpoint_is_used() -> None:
    named = {name for row in ROWS for name in codes(row["how it is injected"])}
    assert {name for name in named if re.fullmatch(r"[a-z]+(\.[a-z]+)+", name)} == NAMES


def test_the_tests_are_there() -> None:
    for name in {name for row in ROWS for name in codes(row["where it is tested alone"])}:
        assert (TESTS.parent / name).exists() or list(TESTS.rglob(name)), name
