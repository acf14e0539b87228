"""The bytes of a step on each machine's interface match the formulas for pservers and rings within 5 %."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.wire.machines import TOOLS
from benchmarks.wire.strategies import measure

from ..soaking import parametrize_sampled

pytestmark = [pytest.mark.cluster, pytest.mark.ring, pytest.mark.extended, pytest.mark.timeout(180)]

ELEMENTS, STEPS = 2_000_000, 4
BITS = 4_000_000_000
TOLERANCE = 0.05


@pytest.fixture
def can_have_machines() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} are not installed (Debian packages iproute2, util-linux)")


@pytest.mark.usefixtures("can_have_machines")
@parametrize_sampled(("trainers", "pservers"), [(3, 0), (4, 0), (2, 2), (3, 1)], [(2, 2)])
def test_bytes_of_a_step(trainers: int, pservers: int) -> None:
    cost = measure(trainers, pservers, BITS, ELEMENTS, STEPS)
    assert len(cost.nodes) == trainers + pservers
    for node in cost.nodes:
        assert node.error < TOLERANCE, node
