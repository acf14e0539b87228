"""How a trainer goes when the coordinator is away."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from ps_protocol.fields import MAX_RESULT_NAME, MAX_RESULTS
from trainer_client import session as session_module
from trainer_client.io_thread import IoThread
from trainer_client.metrics import TrainerMetrics
from trainer_client.session import Session


class SlowCoordinator:
    """In the place of the client: it takes a while until somebody hears the farewell."""

    settings = SimpleNamespace(retry_seconds=5.0)
    has_heard = False

    async def finish(self) -> None:
        pass

    async def leave(self, outcome: str, reason: str) -> None:
        await asyncio.sleep(0.3)
        self.has_heard = True


@pytest.mark.parametrize("outcome", ["done", "failed"])
def test_who_is_done_has_longer_to_say_so(
    outcome: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others go on without who has failed, and wait for who is done until they know."""
    monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.05)
    session: Any = Session.__new__(Session)
    session.io, session.client, session.host = IoThread(), SlowCoordinator(), None
    session._is_open = True
    session.land_last_step = session.accompany = None
    session.close(outcome)
    assert session.client.has_heard == (outcome == "done")
    assert ("counts as lost" in capsys.readouterr().err) == (outcome == "failed")


def test_closing_ends_what_loses_a_cancellation_and_what_begins_meanwhile() -> None:
    io = IoThread()
    ended = []

    async def begin_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("late")

    async def lose_the_first() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        late.append(asyncio.create_task(begin_late()))
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("first")

    late: list[asyncio.Task[None]] = []
    future = io.start(lose_the_first())
    io.run(asyncio.sleep(0))
    io.close()
    assert future.done()
    assert sorted(ended) == ["first", "late"]


def test_a_number_that_the_coordinator_would_refuse_is_refused_at_once() -> None:
    """Else a heartbeat would be refused, which ends training."""
    session: Any = Session.__new__(Session)
    session.io, session._is_open, session._reported = IoThread(), True, set()
    session.client = SimpleNamespace(metrics=TrainerMetrics(), membership=SimpleNamespace(results={}))
    for name in ("", "x" * (MAX_RESULT_NAME + 1), "loss\n", "\x1b[2A"):
        with pytest.raises(ValueError, match="the name of a result has 1 to 200 printable characters"):
            session.report(**{name: 0.5})
    session.report(**{f"val/{number}": 0.5 for number in range(MAX_RESULTS)})
    with pytest.raises(ValueError, match="at most 256 different numbers"):
        session.report(loss=0.5)
    session.report(**{"val/0": 0.25})
    session.io.close()
    assert session.client.membership.results == {"val/0": 0.25, **dict.fromkeys(session._reported - {"val/0"}, 0.5)}
