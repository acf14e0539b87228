"""How one server takes over from another, with servers that only pretend."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ps_protocol.certificates import WatchedFiles
from services.runtime import renewal
from services.runtime.renewal import RenewedServer

pytestmark = pytest.mark.asyncio


class Pretender:
    """Serves until it is stopped, or fails at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.begun, self.stopped = asyncio.Event(), asyncio.Event()

    async def serve(self) -> None:
        self.begun.set()
        if self.error:
            raise self.error
        await self.stopped.wait()

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(renewal, "OVERLAP_SECONDS", 0.01)


async def test_a_new_one_takes_over(tmp_path: Path) -> None:
    first, second = Pretender(), Pretender()
    coming = iter([first, second])
    server = RenewedServer(lambda: next(coming), WatchedFiles([tmp_path / "cert.pem"]))
    serving = asyncio.create_task(server.serve())
    await first.begun.wait()
    (tmp_path / "cert.pem").touch()
    await first.stopped.wait()
    assert second.begun.is_set()
    assert not second.stopped.is_set()
    server.stop()
    await serving
    assert second.stopped.is_set()


async def test_one_that_fails_does_not(tmp_path: Path) -> None:
    first, second, third = Pretender(), Pretender(OSError("no port")), Pretender()
    coming = iter([first, second, third])
    server = RenewedServer(lambda: next(coming), WatchedFiles([tmp_path / "cert.pem"]))
    serving = asyncio.create_task(server.serve())
    await first.begun.wait()
    (tmp_path / "cert.pem").touch()
    await second.begun.wait()
    await asyncio.sleep(0.05)
    assert not first.stopped.is_set()
    (tmp_path / "cert.pem").write_text("another")
    await first.stopped.wait()
    server.stop()
    await serving


async def test_files_that_cannot_be_used_are_tried_again(tmp_path: Path) -> None:
    first, second = Pretender(), Pretender()
    answers: list[Pretender | OSError] = [first, OSError("key values mismatch"), second]

    def make() -> Pretender:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    server = RenewedServer(make, WatchedFiles([tmp_path / "cert.pem"]))
    serving = asyncio.create_task(server.serve())
    await first.begun.wait()
    (tmp_path / "cert.pem").touch()
    await first.stopped.wait()
    server.stop()
    await serving


async def test_a_server_that_ends_by_itself_is_an_error_of_serve(tmp_path: Path) -> None:
    server = RenewedServer(lambda: Pretender(OSError("gone")), WatchedFiles([tmp_path / "cert.pem"]))
    with pytest.raises(OSError, match="gone"):
        async with asyncio.timeout(5):
            await server.serve()
