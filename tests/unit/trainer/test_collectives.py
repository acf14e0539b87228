"""Collectives of two processes, which are threads here, and the parts of a ring."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ps_protocol.errors import Ended
from trainer_client.session.collectives import PIECE, Collectives, FlatBucket, address_towards, make_group

CPU = torch.device("cpu")
LONG = timedelta(seconds=10)


@pytest.fixture
def pair() -> Iterator[list[Collectives]]:
    store = dist.HashStore()  # type: ignore[attr-defined] # not in its stubs

    def connect(rank: int) -> Collectives:
        return Collectives(make_group(store, rank, 2, CPU, "127.0.0.1", LONG), LONG, Ended)

    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(connect, range(2)))
    yield made
    for collectives in made:
        collectives.close()


def end_of_wait(collectives: Collectives) -> str:
    """Return the error of a collective."""
    collectives.all_reduce(torch.zeros(3))
    with pytest.raises((Ended, KeyboardInterrupt)) as caught:
        collectives.finish()
    return str(caught.value)


@pytest.mark.parametrize("source", [0, 1])
def test_facts_travel_as_json_from_any_process(pair: list[Collectives], source: int) -> None:
    facts = [{"outcomes": [[3, 4], None], "reason": "déjà vu " * 1000, "grad_norm": 0.1}, {}]
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda one, own: one.exchange(own, source), pair, facts)
        assert [*found] == [facts[source]] * 2


def test_a_wait_for_a_process_that_hangs_ends_with_the_time_out(pair: list[Collectives]) -> None:
    pair[0].timeout = timedelta(seconds=0.3)
    assert "Timed out waiting 300ms" in end_of_wait(pair[0])
    assert "Connection closed" in end_of_wait(pair[1])  # before its own time-out
    assert "Timed out waiting 300ms" in end_of_wait(pair[0])  # not a new wait


def test_a_check_or_an_interrupt_ends_a_wait(pair: list[Collectives]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt("now")

    pair[0]._check = interrupt
    assert end_of_wait(pair[0]) == "now"
    assert end_of_wait(pair[0]) == "the connections are closed"


# ---------------------------------------------------------------------- the ring


@pytest.mark.ring
@pytest.mark.parametrize("url", ["http://127.0.0.1:7070", "https://127.0.0.1", "http://localhost:7070/prefix"])
def test_a_coordinator_on_this_machine_is_reached_from_loopback(url: str) -> None:
    assert address_towards(url) in ("127.0.0.1", "::1")


@pytest.mark.ring
@pytest.mark.clip
@pytest.mark.parametrize("size", [0, 1, PIECE, 2 * PIECE + 3])
def test_squares_are_summed_in_64_bits(size: int) -> None:
    bucket = FlatBucket({"a": size}, CPU)
    bucket.fill({"a": torch.full((size,), 1e30)})  # whose square is infinite in 32
    total = bucket.sum_of_squares()
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(size * float(torch.tensor(1e30)) ** 2, rel=1e-9)
