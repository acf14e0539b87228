"""The ring strategy: rendezvous, the tally of a round, and the norm of a bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_client.session.collectives import PIECE, FlatBucket, Tally, TallyVector, address_towards

pytestmark = pytest.mark.ring

CPU = torch.device("cpu")


@pytest.mark.parametrize("url", ["http://127.0.0.1:7070", "https://127.0.0.1", "http://localhost:7070/prefix"])
def test_a_coordinator_on_this_machine_is_reached_from_loopback(url: str) -> None:
    assert address_towards(url) in ("127.0.0.1", "::1")


def tallies(*said: dict[str, Any]) -> list[Tally]:
    """Return the tally that each rank reads when the vectors have been added up."""
    vectors = [TallyVector(["a", "b", "c"], rank, len(said), CPU) for rank in range(len(said))]
    for _ in range(2):  # the vectors are used again
        for vector, one in zip(vectors, said, strict=True):
            vector.fill(**{"present": [], **one})
        total = torch.stack([one.vector for one in vectors]).sum(0)
        for one in vectors:
            one.vector.copy_(total)
        found = [one.read() for one in vectors]
    return found


def test_all_ranks_read_the_same_tally() -> None:
    """Trainer 0 has no batches left, 1 brings NaN, 2 has written parameters."""
    first, second = {"present": ["c"], "is_finite": False}, {"present": ["a", "c"], "has_written": True}
    expected = Tally(["a", "c"], [1], lowest=1, num_active=2, has_same_terms=True, source=2)
    assert tallies({"is_active": False}, first, second) == [expected] * 3


@pytest.mark.clip
@pytest.mark.parametrize("size", [0, 1, PIECE, 2 * PIECE + 3])
def test_squares_are_summed_in_64_bits(size: int) -> None:
    bucket = FlatBucket({"a": size}, CPU)
    bucket.fill({"a": torch.full((size,), 1e30)})  # whose square is infinite in 32
    total = bucket.sum_of_squares()
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(size * float(torch.tensor(1e30)) ** 2, rel=1e-9)
