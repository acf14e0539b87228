"""Requests that are refused or that stop halfway, and that change nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from ps_protocol.errors import GradpostError

from .support import (
    Bench,
    Halfway,
    Upload,
)


@dataclass(frozen=True)
class Refusal:
    """What an error said, without its traceback, which keeps the request's frames and with them its body."""

    text: str
    facts: dict[str, Any]


async def refused(code: str, request: Awaitable[object]) -> Refusal:
    try:
        await request
    except GradpostError as caught:
        if caught.code == code:
            return Refusal(str(caught), caught.facts)
        raise
    pytest.fail(f"expected {code}")


async def unchanged(b: Bench, code: str, request: Coroutine[Any, Any, object]) -> Refusal:
    """The request is refused and changes nothing, not even what memory is in use."""
    digest, used = await b.digest(), b.pserver.pool.used_bytes
    refusal = await refused(code, request)
    assert await b.digest() == digest
    assert await b.settle_used_bytes(used) == used
    return refusal


async def keep_busy(b: Bench) -> Callable[[], Awaitable[None]]:
    """Occupy the compute thread; returns what frees it again."""
    begun, free = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert free.wait(10)

    job = asyncio.create_task(b.compute.run(wait))
    while not begun.is_set():  # noqa: ASYNC110 - it is set on another thread
        await asyncio.sleep(0.001)

    async def release() -> None:
        free.set()
        await job

    return release


def begin_push(b: Bench, rank: int, round_: int, **arguments: Any) -> tuple[asyncio.Task[Any], Halfway]:
    """A push whose last bytes do not come before `go` is set."""
    halfway = Halfway()
    push = b.push(rank, round_, upload=lambda body: Upload(body, num_pieces=2, pause=halfway), **arguments)
    return asyncio.create_task(push), halfway
