"""A client of an ASGI application that stays until it is told to leave."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiClient:
    """Asks for one path, without a body; `send` says what becomes of the answer."""

    def __init__(self, path: str, query: bytes = b"") -> None:
        self.leaves = asyncio.Event()
        self._scope: dict[str, Any] = {
            "type": "http", "method": "GET", "path": path, "query_string": query, "http_version": "2",
            "headers": [(b"host", b"localhost")],
        }  # fmt: skip
        self._asked = False

    async def ask(self, app: ASGIApp) -> None:
        """Returns when the application has answered."""
        await app(self._scope, self.receive, self.send)

    async def receive(self) -> Message:
        if self._asked:
            await self.leaves.wait()
            return {"type": "http.disconnect"}
        self._asked = True
        return {"type": "http.request"}

    async def send(self, message: Message) -> None:
        raise NotImplementedError
