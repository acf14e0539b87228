"""A pserver that stops writes its last checkpoint, and does not wait for ever for a disk to take it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
import pytest
import structlog

from services.pserver import registration
from services.pserver.registration import Registration
from services.pserver.settings import PserverSettings

from .support import bench

pytestmark = pytest.mark.asyncio


async def test_a_place_that_hangs_does_not_keep_a_pserver_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_let_go, stop = threading.Event(), asyncio.Event()
    stop.set()
    async with (
        bench(state_dir=tmp_path) as one,
        httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(404))) as http,
    ):
        await one.play_round(1)
        monkeypatch.setattr(one.run.storage._place, "write", lambda *_: is_let_go.wait(20))
        monkeypatch.setattr(registration, "LAST_CHECKPOINT_SECONDS", 0.2)
        staying = Registration(one.pserver, PserverSettings(state_dir=tmp_path), http)
        with structlog.testing.capture_logs() as logs:
            await asyncio.wait_for(staying.run("http://pserver:1", stop), 5)
        assert "the last checkpoint was not written in time" in [line["event"] for line in logs]
        assert not is_let_go.is_set()
        is_let_go.set()
