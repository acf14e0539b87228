"""New certificates for an HTTP server that reads them only when it starts: another one takes over its port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ps_protocol.certificates import WatchedFiles

from .logs import get_logger

log = get_logger()

CHECK_SECONDS = 1.0
OVERLAP_SECONDS = 1.0  # what a new server gets to listen before the old one stops accepting


class Backend(Protocol):
    """An HTTP server in this process, on this event loop, without signal handlers, logs and lifespan of its own."""

    async def serve(self) -> None:
        """Serve until `stop`, and then until the requests in flight are answered, however long that takes."""

    def stop(self) -> None:
        """Accept no more connections and requests."""


class RenewedServer:
    """A backend that is replaced by a new one each time that its files change.

    Both listen on the same port for a moment, so that no connection is refused; one that came to the old one last may
    be closed unanswered, and its client asks again. The old one lets the requests in
    flight end and closes its connections; so those that trainers keep open get the new certificate as well.
    """

    def __init__(self, make: Callable[[], Backend], files: WatchedFiles) -> None:
        self._make = make
        self._files = files
        self._current = make()
        self._stopped = asyncio.Event()

    async def serve(self) -> None:
        """See Backend. Files that do not fit each other, as while they are being replaced, change nothing."""
        serving = asyncio.create_task(self._current.serve())
        ending: list[asyncio.Task[None]] = []
        while not serving.done() and not await self._stopped_within(CHECK_SECONDS, serving):
            if self._files.have_changed() and (new := self._make_new()):
                replacing = asyncio.create_task(new.serve())
                await self._stopped_within(OVERLAP_SECONDS, replacing)
                if replacing.done():
                    log.error("the server with the new certificate has failed", error=repr(replacing.exception()))
                    continue
                self._current.stop()
                self._current = new
                ending, serving = [*(task for task in ending if not task.done()), serving], replacing
                log.info("the certificate has been renewed")
        self._current.stop()
        await asyncio.gather(serving, *ending)

    def stop(self) -> None:
        """See Backend."""
        self._stopped.set()
        self._current.stop()

    def _make_new(self) -> Backend | None:
        try:
            return self._make()
        except OSError as error:  # ssl.SSLError included
            log.warning("the new certificate cannot be used yet", error=str(error))
            self._files.forget()
            return None

    async def _stopped_within(self, seconds: float, serving: asyncio.Task[None]) -> bool:
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait({stopped, serving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return self._stopped.is_set()
