"""The bytes in the report of `benchmarks.wire.strategies` match the formulas."""

from __future__ import annotations

import re

import pytest

from benchmarks.wire.strategies import BYTES, formula

from ..cluster.test_benchmarks import TOLERANCE
from .markdown import RESULTS, table

TEXT = (RESULTS / "strategies_2core_epyc_202611.md").read_text(encoding="utf-8")
ROWS = table(TEXT, "formula, MB each way")


@pytest.mark.ring
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['cluster']}, {row['machine']}")
def test_measured_bytes_match_the_formulas(row: dict[str, str]) -> None:
    elements = re.search(r"([\d,]+) elements of float32", TEXT)
    assert elements
    num_trainers, num_pservers = map(int, [*re.findall(r"\d+", row["cluster"]), "0"][:2])
    expected = formula(row["machine"], BYTES * int(elements[1].replace(",", "")), num_trainers, num_pservers) / 1e6
    assert float(row["formula, MB each way"]) == pytest.approx(expected, abs=0.05)
    for way in ("MB out", "MB in"):
        assert float(row[way]) == pytest.approx(expected, rel=TOLERANCE)
