"""What `make bench` compares, and what it calls met."""

from __future__ import annotations

import pytest

from benchmarks.comparison.cases import CASES
from benchmarks.comparison.contestant import Repetition
from benchmarks.comparison.results import OURS, CaseResult, judge


def test_quick_leaves_out_what_takes_long() -> None:
    quick = {case.name: set(case.quick_peers) for case in CASES if case.quick_peers is not None}
    assert quick == {
        "sync_100mb_fp32": {"raw_sockets", "torch_rpc_tcp", "torch_rpc", "gloo", "ray"},
        "sync_100mb_bf16": {"gloo"},
        "resnet50": set(),
        "tiny": {"torch_rpc_tcp"},
        "sync_100mb_adam": set(),
    }


@pytest.mark.parametrize(("ours", "verdict"), [([0.7, 0.8, 0.9], "met"), ([0.8, 0.9, 1.0], "missed")])
def test_a_target_is_met_when_the_lower_end_of_the_interval_is(ours: list[float], verdict: str) -> None:
    [case] = [case for case in CASES if case.name == "sync_100mb_fp32"]
    names = (OURS, "torch_rpc_tcp", "http1")
    seconds = {OURS: ours, "torch_rpc_tcp": [1.0] * 3}
    figures = {name: [Repetition(one, 1.0, {}, 0.0) for one in its] for name, its in seconds.items()}
    above = {OURS: 200_000_000, "torch_rpc_tcp": 0}
    result = CaseResult(case, dict.fromkeys(names, case.ours.work), figures, {}, above)
    lines = judge([result]).splitlines()
    [line] = [line for line in lines if "torch_rpc_tcp" in line]
    assert line.startswith("| sync_100mb_fp32 / torch_rpc_tcp | 0.75 | 0.6 | ")
    assert line.endswith(f" {verdict} |")
    assert "| MB of a pserver above idle, sync_100mb_fp32 | 264 | | 200 | met |" in lines
