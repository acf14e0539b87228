"""The reports of a standby: which answers end it, and when it becomes the pserver whose newest folder it has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from ps_protocol.errors import Conflict, Forbidden, GradpostError, StorageFailed, Unauthenticated
from ps_protocol.standbys import StandbyAnswer
from services.pserver.durable.disk import StateFolder
from services.pserver.following import reports
from services.pserver.following.reports import Reports
from services.pserver.settings import PserverSettings

from .support import Standby

LEASE = 0.2
LOST: dict[str, Any] = {"incarnation": 2}


async def report(folder: Path, *answers: dict[str, Any] | GradpostError) -> Reports:
    """Send reports, which get these answers in turn, for 2 s."""
    num_reports = 0

    def answer(_: httpx.Request) -> httpx.Response:
        nonlocal num_reports
        num_reports += 1
        fields = answers[(num_reports - 1) % len(answers)]
        if isinstance(fields, GradpostError):
            return httpx.Response(400, json=fields.to_problem())
        return httpx.Response(200, content=StandbyAnswer(lease_seconds=LEASE, **fields).model_dump_json())

    stop = asyncio.Event()
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        standby = Standby(None, "", http, folder)  # type: ignore[arg-type]
        own = Reports(standby.follower, PserverSettings(state_dir=folder), http)
        begun = asyncio.get_running_loop().time()
        task = asyncio.create_task(own.run("http://standby:1", stop))
        await asyncio.wait({task}, timeout=2)
        if own.leads_again:
            assert stop.is_set()
            assert asyncio.get_running_loop().time() - begun > LEASE + reports.FAIL_OVER_SECONDS
        stop.set()
        await task
        await standby.close()
    return own


@pytest.mark.parametrize(
    ("incarnation", "locked", "answers", "leads"),
    [
        (2, False, [LOST], True),
        (1, False, [LOST], False),  # of an earlier leader
        (2, True, [LOST], False),  # its process lives
        (2, False, [{}], False),  # the pserver lives, or was never promoted
        (2, False, [LOST, {}], False),
        (2, False, [LOST, {"leader": "http://pserver:1", "incarnation": 2}], False),
    ],
)
async def test_which_standby_leads_again(
    tmp_path: Path,
    incarnation: int,
    locked: bool,
    answers: list[dict[str, Any]],
    leads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "FAIL_OVER_SECONDS", 0.2)
    monkeypatch.setattr(reports, "RETRY_SECONDS", 0.05)
    StateFolder(tmp_path, 0).close()
    folder = StateFolder(tmp_path, 0, 1)
    folder.write_identity(incarnation, None)
    if not locked:
        folder.close()
    assert (await report(tmp_path, *answers)).leads_again is leads


@pytest.mark.parametrize(
    ("patience", "error", "exit_code"),
    [
        (1.0, Unauthenticated("no valid token"), 0),  # a new token reached the coordinator first
        (0.3, Unauthenticated("no valid token"), 1),
        (0.3, Forbidden("the scope is too narrow"), 1),
        (1.0, StorageFailed("the disk of the coordinator is full"), 0),
        (1.0, Conflict("there is no such pserver", code="world_mismatch"), 1),
    ],
)
async def test_which_answers_end_a_standby(
    tmp_path: Path, patience: float, error: GradpostError, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "TOKEN_WAIT_SECONDS", patience, raising=False)
    monkeypatch.setattr(reports, "RETRY_SECONDS", 0.1)
    assert (await report(tmp_path, {}, *[error] * 8)).exit_code == exit_code
