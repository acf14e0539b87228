"""Memory for copies of blocks: a few large ones or many small ones at once, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from services.pserver import limits as module
from services.pserver.limits import Copies

from ...raising import raises_code


async def test_as_many_at_once_as_fit() -> None:
    copies, done = Copies(max_bytes=10), asyncio.Event()
    held: list[int] = []

    async def look(num_bytes: int) -> None:
        async with copies.reserve(num_bytes):
            held.append(num_bytes)
            try:
                await done.wait()
            finally:
                held.remove(num_bytes)

    small = [asyncio.create_task(look(3)) for _ in range(4)]
    await asyncio.sleep(0.01)
    assert held == [3, 3, 3]
    small[0].cancel()  # its client has left: another gets the room
    await asyncio.sleep(0.01)
    assert held == [3, 3, 3]
    large = asyncio.create_task(look(1000))
    await asyncio.sleep(0.01)
    assert held == [3, 3, 3]
    done.set()
    await asyncio.gather(*small[1:], large)  # one always, however large


async def test_who_finds_no_room_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.02)
    copies = Copies(max_bytes=10)
    async with copies.reserve(8):
        with raises_code("overloaded", match="large blocks"):
            async with copies.reserve(3):
                raise AssertionError
    async with copies.reserve(10):
        pass
