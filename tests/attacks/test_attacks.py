"""A pserver under attack goes on serving, changes nothing and takes no memory; `benchmarks/attacks` measures it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.attacks.arena import MIB, Arena, open_arena
from benchmarks.attacks.attacker import ATTACKS, names_for

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.asyncio(loop_scope="module")]

# Generous, since the machine may be doing anything else at the same time; what does not hold is off by far more.
MAX_GROWN_BYTES = 400 * MIB
MAX_P99_SECONDS = 2.0

# Whose connections or requests the server has to end by itself.
ENDED = {
    "rapid_reset": "GOAWAY ENHANCE_YOUR_CALM",
    "continuation_flood": "GOAWAY ENHANCE_YOUR_CALM",
    "empty_frames": "GOAWAY ENHANCE_YOUR_CALM",
    "made_you_reset": "GOAWAY PROTOCOL_ERROR",
    "data_after_end": "GOAWAY PROTOCOL_ERROR",
    "zero_window": "connection closed",
    "silent_connections": "connection closed",
    "slow_headers": "connection closed",
    "slow_bodies": "408",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["granian", "uvicorn"])
async def arena(request: pytest.FixtureRequest) -> AsyncIterator[Arena]:
    async with open_arena(request.param) as arena:
        yield arena


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_harmless(arena: Arena, name: str) -> None:
    if name not in names_for(arena.server):
        pytest.skip("uvicorn speaks HTTP/1.1 only")
    verdict = await arena.judge(name, 4)
    assert verdict.num_failed == 0, verdict
    assert verdict.state_is_unchanged
    assert verdict.p99_during < MAX_P99_SECONDS, verdict
    assert verdict.grown_bytes < MAX_GROWN_BYTES, verdict
    assert ENDED.get(name, "") in verdict.outcome, verdict


async def test_too_many_connections_wait_or_are_refused_and_do_not_stay() -> None:
    """All places are taken by silent connections; a good client gets one when their time is over."""
    async with open_arena("granian", max_connections=50) as arena:
        verdict = await arena.judge("silent_connections", 6)
    assert verdict.state_is_unchanged
    assert verdict.grown_bytes < MAX_GROWN_BYTES
