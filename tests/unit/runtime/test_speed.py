"""The route on which others measure how fast they reach a service."""

from __future__ import annotations

import pytest

from ps_protocol.routes import SPEED
from services.runtime.speed import MAX_SPEED_BYTES

from ...docs.apps import call, run_pserver

pytestmark = pytest.mark.asyncio


async def test_what_comes_is_counted() -> None:
    async with run_pserver() as (_, app), call(app) as http:
        for num_bytes in (0, 1, 300_000, MAX_SPEED_BYTES):
            answer = (await http.post(SPEED, content=bytes(num_bytes))).json()
            assert answer["num_bytes"] == num_bytes
        reply = await http.post(SPEED, content=bytes(MAX_SPEED_BYTES + 1))
        assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")


async def test_so_many_go_as_are_asked_for() -> None:
    async with run_pserver() as (_, app), call(app) as http:
        for num_bytes in (0, 1, 256 * 1024, 256 * 1024 + 1, MAX_SPEED_BYTES):
            assert len((await http.get(SPEED, params={"num_bytes": num_bytes})).content) == num_bytes
        for text in ("", "-1", "x", str(MAX_SPEED_BYTES + 1), "9" * 5000, "²"):
            reply = await http.get(SPEED, params={"num_bytes": text})
            assert (reply.status_code, reply.json()["code"]) == (422, "invalid_message"), text
        assert (await http.get(SPEED)).status_code == 422
