"""`make bench` still measures ours and the peers that need nothing else; what it prints here means nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = ["raw_sockets", "torch_rpc_tcp", "gloo"]

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(240)]


def test_ours_beside_its_peers(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "benchmarks.comparison", "--cases", "tiny", "--peers", *PEERS, "--repetitions", "2",
         "--results", str(tmp_path)],
        cwd=ROOT, timeout=230, check=True,
    )  # fmt: skip
    [case] = json.loads((tmp_path / "latest.json").read_text())
    assert case["case"] == "tiny"
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", case["commit"])
    assert sorted(case["peers"]) == sorted(case["ratio"]) == sorted(PEERS)
    for peer, described in case["peers"].items():
        assert 0 < described["median_s"] < 5
        assert case["ratio_interval"][peer][0] <= case["ratio"][peer] <= case["ratio_interval"][peer][1]
    assert case["ours"]["cpu_s_per_gb"]["server"] > 0
    assert case["variant_ratio"] == case["variant_ratio_interval"] == {}
    assert case["ours"]["contributions_per_s"] > 2
    assert case["ours"]["bytes_per_s"] == pytest.approx(case["ours"]["contributions_per_s"] * 2 * 40_000)
    assert case["ours"]["wire_bytes"] > 2 * 2 * 40_000  # all parameters, up and down, for both trainers
    assert [len(case["ours"]["peak_bytes"][role]) for role in ("server", "trainer")] == [2, 2]
    assert 0 < case["ours"]["server_peak_above_idle_bytes"] < max(case["ours"]["peak_bytes"]["server"])
    [report] = tmp_path.glob("comparison_*.md")
    assert "| tiny / torch_rpc_tcp | 1.0 | 0.5 |" in report.read_text()
