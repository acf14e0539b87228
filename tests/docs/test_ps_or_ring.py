"""docs/ps-or-ring.md: its table is the benchmark's, its bytes are within what a test allows, its command is played."""

from __future__ import annotations

import re

import pytest

from benchmarks.wire.strategies import BYTES, HEAD, formula
from services.coordinator.settings import _OF_PSERVERS as REFUSED
from services.coordinator.settings import CoordinatorSettings

from ..cluster.test_ring import UP
from ..cluster.test_traffic import TOLERANCE
from .markdown import DOCS, codes, examples, links, read, section, table

TEXT = read("ps-or-ring.md")
[COMMAND] = examples(TEXT, "sh")
ROWS = table(TEXT, "formula, MB each way")
[REPORT] = [DOCS / link for link in links(TEXT) if "/results/strategies" in link]

pytestmark = pytest.mark.ring


def test_the_command_is_the_one_that_is_played() -> None:
    assert COMMAND.text.split() == ["gradpost", "up", *UP]


def test_the_columns_are_those_of_the_benchmark() -> None:
    assert HEAD.splitlines()[0] in TEXT


def test_the_table_is_the_report() -> None:
    assert table(REPORT.read_text(encoding="utf-8"), "formula, MB each way") == ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['cluster']}, {row['machine']}")
def test_what_was_measured_is_what_the_formulas_say(row: dict[str, str]) -> None:
    elements = re.search(r"([\d,]+) elements of float32", TEXT)
    assert elements
    num_trainers, num_pservers = map(int, [*re.findall(r"\d+", row["cluster"]), "0"][:2])
    expected = formula(row["machine"], BYTES * int(elements[1].replace(",", "")), num_trainers, num_pservers) / 1e6
    assert float(row["formula, MB each way"]) == pytest.approx(expected, abs=0.05)
    for way in ("MB out", "MB in"):
        assert float(row[way]) == pytest.approx(expected, rel=TOLERANCE)


def test_what_is_refused_is_named() -> None:
    named = {name for name in codes(section(TEXT, "What a ring cannot do")) if name in CoordinatorSettings.model_fields}
    assert named >= REFUSED
