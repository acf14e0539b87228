"""One history of the campaign has no violation, and each sabotage is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .campaign import Campaign
from .sabotaged import SABOTAGES

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.alone, pytest.mark.timeout(600)]


def test_a_history_without_violations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign(seed=1, num_standbys=0, folder=tmp_path)
    campaign.run(count=1)
    campaign.report()
    output = capsys.readouterr().out
    assert campaign.num_violations == 0, output
    assert len(campaign.num_faults) >= 6
    assert re.search(r"[1-9]\d* checkpoints read", output)
    assert f"\nchaos: seed=1 histories=1 faults={campaign.num_faults.total()} " in output


OTHERS = (
    "hanging log", "one-way partition of a pserver", "pserver and place of checkpoints lost", "zombie writer",
    "one-way partition of a standby", "stalling standby",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        "disk error in a promotion",
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in OTHERS),
    ],
)
def test_a_history_of_one_fault(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign(seed=1, kinds=[kind], folder=tmp_path)
    campaign.run_each()
    output = capsys.readouterr().out
    assert campaign.num_violations == 0, output


@pytest.mark.parametrize(
    "sabotage",
    ["dedupe", "early"]
    + [pytest.param(each, marks=pytest.mark.soak) for each in ("places", "standby", "order", "log", "pages")],
)
def test_broken_services_are_detected(sabotage: str, tmp_path: Path) -> None:
    campaign = Campaign(seed=1, kinds=SABOTAGES[sabotage][1], sabotage=sabotage, folder=tmp_path)
    campaign.run(count=2)
    assert campaign.num_violations > 0
