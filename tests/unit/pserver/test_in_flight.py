"""How much a pserver takes in at once: nobody keeps the others out, and everybody gets on."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from ps_protocol.errors import TryAgain
from services.pserver.limits import InFlight, WaitingGets

from ...raising import raises_code


def test_a_share_for_each_trainer() -> None:
    in_flight = InFlight(200)
    with ExitStack() as bodies:
        for _ in range(2):
            bodies.enter_context(in_flight.reserve(0, 50, 2))
        with raises_code("overloaded", match="trainer 0"), in_flight.reserve(0, 1, 2):
            pass
        bodies.enter_context(in_flight.reserve(1, 100, 2))  # the other's share is its own
        assert in_flight.num_bytes == 200
    assert in_flight.num_bytes == 0


def test_one_body_always_fits() -> None:
    """However small the limit is, a complete round of all trainers comes in: one body after another."""
    in_flight = InFlight(1)
    with ExitStack() as bodies:
        for rank in range(2):
            bodies.enter_context(in_flight.reserve(rank, 10**9, 2))
        with raises_code("overloaded"), in_flight.reserve(0, 1, 2):
            pass
    with in_flight.reserve(0, 10**9, 2):
        pass


def test_a_body_that_fails_is_counted_no_more() -> None:
    in_flight = InFlight(100)
    with pytest.raises(ZeroDivisionError), in_flight.reserve(0, 60, 1):
        raise ZeroDivisionError
    assert in_flight.num_bytes == 0


async def test_newer_gets_end_the_oldest() -> None:
    waiting = WaitingGets(max_each=2)
    order: list[str] = []

    async def get(name: str, rank: int = 0) -> str:
        try:
            async with waiting.place(rank):
                await asyncio.sleep(60)
        except TryAgain:
            order.append(name)
        return name

    gets = [asyncio.create_task(get(name)) for name in ("a", "b")]
    gets.append(asyncio.create_task(get("of another", rank=1)))
    await asyncio.sleep(0)
    for name in ("c", "d"):
        gets.append(asyncio.create_task(get(name)))
        await asyncio.wait(gets[: len(gets) - 3], timeout=1)
    assert order == ["a", "b"]
    for task in gets:
        task.cancel()
    await asyncio.gather(*gets, return_exceptions=True)
    assert repr(waiting) == "<WaitingGets [{}]>"
