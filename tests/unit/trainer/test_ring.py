"""The ring strategy: flat buckets, rendezvous, and the tally of a round."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from trainer_client.engines.collective.buffers import PIECE, FlatBucket
from trainer_client.engines.collective.ring_group import Tally, TallyVector, address_towards, join_store, open_store

pytestmark = pytest.mark.ring

CPU = torch.device("cpu")


def test_missing_gradients_are_zero_in_each_round() -> None:
    bucket = FlatBucket({"a": 2, "b": 1}, CPU)
    bucket.put("a", torch.ones(2, dtype=torch.bfloat16))
    bucket.complete({"b": torch.full((1,), 3.0)})
    assert bucket.flat.tolist() == [1.0, 1.0, 3.0]
    bucket.clear()
    bucket.complete({"b": torch.full((1,), 4.0)})
    assert bucket.flat.tolist() == [0.0, 0.0, 4.0]


@pytest.mark.parametrize("url", ["http://127.0.0.1:7070", "https://127.0.0.1", "http://localhost:7070/prefix"])
def test_a_coordinator_on_this_machine_is_reached_from_loopback(url: str) -> None:
    assert address_towards(url) in ("127.0.0.1", "::1")


def test_a_store_is_found_at_the_address_that_was_offered() -> None:
    store, rendezvous = open_store("127.0.0.1", timedelta(seconds=5))
    store.set("key", "value")
    assert join_store(rendezvous, timedelta(seconds=5)).get("key") == b"value"


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
    expected = Tally(["a", "c"], [1], is_void=False, lowest=1, num_active=2, has_same_numbers=True, source=2)
    assert tallies({"is_active": False}, first, second) == [expected] * 3
    expected = Tally([], [], is_void=True, lowest=0, num_active=3, has_same_numbers=True, source=None)
    assert tallies({}, {}, {"is_void": True}) == [expected] * 3


@pytest.mark.parametrize(
    ("digests", "are_same"), [((7, 7, 0), True), ((7, 8, 0), False), ((2**24 - 1, 2**24 - 2, 7), False)]
)
def test_hyperparameters_are_compared_among_active_trainers(digests: tuple[int, ...], are_same: bool) -> None:
    said = [{"is_active": rank < 2, "numbers": digest} for rank, digest in enumerate(digests)]
    assert {tally.has_same_numbers for tally in tallies(*said)} == {are_same}


@pytest.mark.clip
@pytest.mark.parametrize("size", [0, 1, PIECE, 2 * PIECE + 3])
def test_squares_are_summed_in_64_bits(size: int) -> None:
    bucket = FlatBucket({"a": size}, CPU)
    bucket.put("a", torch.full((size,), 1e30))  # whose square is infinite in 32
    total = bucket.sum_of_squares()
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(size * float(torch.tensor(1e30)) ** 2, rel=1e-9)
