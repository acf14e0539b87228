"""One history of the campaign has no violation, and each sabotage is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ps_protocol.vocabulary import Mode

from .campaign import Campaign
from .sabotaged import SABOTAGES

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.alone, pytest.mark.timeout(600)]


def test_a_history_without_violations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign(seed=1, folder=tmp_path)
    campaign.run(count=1)
    campaign.report()
    output = capsys.readouterr().out
    assert campaign.num_violations == 0, output
    assert len(campaign.num_faults) >= 6
    assert re.search(r"[1-9]\d* checkpoints read", output)
    last = f"chaos: seed=1 histories=1 faults={campaign.num_faults.total()} "
    assert output.splitlines()[-1].startswith(last)


@pytest.mark.parametrize(
    ("sabotage", "mode"),
    [
        ("dedupe", "sync"),
        pytest.param("log", "async", marks=pytest.mark.soak),
        ("places", "sync"),
        ("early", "sync"),
        pytest.param("standby", "sync", marks=pytest.mark.soak),
        pytest.param("order", "sync", marks=pytest.mark.soak),
        pytest.param("dedupe", "async", marks=pytest.mark.soak),
        pytest.param("log", "sync", marks=pytest.mark.soak),
        pytest.param("pauses", "async", marks=pytest.mark.soak),
        pytest.param("pages", "sync", marks=pytest.mark.soak),
    ],
)
def test_broken_services_are_detected(sabotage: str, mode: Mode, tmp_path: Path) -> None:
    campaign = Campaign(seed=1, kinds=SABOTAGES[sabotage][1], sabotage=sabotage, mode=mode, folder=tmp_path)
    campaign.run(count=2)
    assert campaign.num_violations > 0
