"""Strategy ring: flat buckets, and the address under which trainers meet."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from trainer_client.flat_buckets import PIECE, FlatBucket, cut_buckets
from trainer_client.ring.rendezvous import address_towards, join_store, open_store
from trainer_client.ring.tally import Tally, TallyVector

pytestmark = pytest.mark.ring

CPU = torch.device("cpu")


def test_buckets_begin_with_the_last_parameter_and_never_cut_one() -> None:
    sizes = {"a": 5, "large": 100, "b": 3, "scalar": 1, "none": 0}
    parameters = {name: torch.empty(size) for name, size in sizes.items()}
    buckets = cut_buckets(parameters, 16, CPU)
    assert [list(bucket.parts) for bucket in buckets] == [["none", "scalar", "b"], ["large"], ["a"]]
    assert [bucket.flat.numel() for bucket in buckets] == [4, 100, 5]


def test_what_is_not_there_is_zero_each_time() -> None:
    bucket = FlatBucket({"a": 2, "b": 1}, CPU)
    bucket.put("a", torch.ones(2, dtype=torch.bfloat16))
    bucket.complete({"b": torch.full((1,), 3.0)})
    assert bucket.flat.tolist() == [1.0, 1.0, 3.0]
    bucket.begin()
    bucket.complete({"b": torch.full((1,), 4.0)})
    assert bucket.flat.tolist() == [0.0, 0.0, 4.0]


@pytest.mark.parametrize("url", ["http://127.0.0.1:7070", "https://127.0.0.1", "http://localhost:7070/prefix"])
def test_a_coordinator_on_this_machine_is_reached_from_loopback(url: str) -> None:
    assert address_towards(url) in ("127.0.0.1", "::1")


def test_a_store_is_found_at_the_address_that_was_offered() -> None:
    store, rendezvous = open_store("127.0.0.1", timedelta(seconds=5))
    store.set("key", "value")
    assert join_store(rendezvous, timedelta(seconds=5)).get("key") == b"value"


def test_everybody_reads_the_same_tally() -> None:
    """Trainer 0 has no batches left, 1 brings NaN, 2 has written parameters."""
    vectors = [TallyVector(["a", "b", "c"], rank, 3, CPU) for rank in range(3)]
    for _ in range(2):  # the vectors are kept
        vectors[0].say([], is_active=False)
        vectors[1].say(["c"], is_finite=False)
        vectors[2].say(["a", "c"], has_written=True)
        total = torch.stack([one.vector for one in vectors]).sum(0)
        for one in vectors:
            one.vector.copy_(total)
            assert one.read() == Tally(
                ["a", "c"],
                [1],
                is_void=False,
                num_active=2,
                has_same_numbers=True,
                source=2,
            )


def test_one_void_contribution_makes_the_round_void() -> None:
    vectors = [TallyVector([], rank, 3, CPU) for rank in range(3)]
    for rank, one in enumerate(vectors):
        one.say([], is_void=rank == 2)
    vectors[0].vector.copy_(torch.stack([one.vector for one in vectors]).sum(0))
    assert vectors[0].read() == Tally([], [], is_void=True, num_active=3, has_same_numbers=True, source=None)


@pytest.mark.parametrize(
    ("digests", "are_same"), [((7, 7, 0), True), ((7, 8, 0), False), ((2**24 - 1, 2**24 - 2, 7), False)]
)
def test_numbers_are_compared_among_those_who_have_batches(digests: tuple[int, ...], are_same: bool) -> None:
    vectors = [TallyVector([], rank, 3, CPU) for rank in range(3)]
    for rank, one in enumerate(vectors):
        one.say([], is_active=rank < 2, numbers=digests[rank])
    vectors[0].vector.copy_(torch.stack([one.vector for one in vectors]).sum(0))
    assert vectors[0].read().has_same_numbers is are_same


@pytest.mark.clip
@pytest.mark.parametrize("size", [0, 1, PIECE, 2 * PIECE + 3])
def test_squares_are_added_up_in_64_bits(size: int) -> None:
    bucket = FlatBucket({"a": size}, CPU)
    bucket.put("a", torch.full((size,), 1e30))  # whose square is infinite in 32
    total = bucket.sum_of_squares()
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(
        size * float(torch.tensor(1e30)) ** 2, rel=1e-9
    )  # a rounding for each element, at worst
