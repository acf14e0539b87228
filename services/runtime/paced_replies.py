"""Flow control for granian, which holds some parts of each reply, or all of one in one part, however slow its client.

So clients that open no window, or read nothing, would make it hold one reply after another, for ever. Here the next
part of a reply waits when the server holds too much already, until its client has taken what came before, by what the
kernel says (`connections.py`); and who takes nothing is cut off.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .connections import Connections, Peer, Traffic
from .logs import get_logger
from .strangers import SWEEPS, Strangers

MAX_EACH_BYTES = 1024 * 1024  # of one connection, when all together have too many
MIN_BYTES_PER_SECOND = 4 * 1024  # who takes less takes nothing
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.001, 0.05

log = get_logger()


@dataclass(slots=True)
class Flow:
    """What one connection was given and has taken."""

    given: int = 0  # bytes of replies
    taken: int = 0  # of them; with headers and frames of the transport it would be a little more
    counted: int = 0  # by the kernel, when that was last asked
    asked_at: float = 0.0
    progress_at: float = 0.0

    @property
    def untaken(self) -> int:
        """Bytes that the server still holds."""
        return self.given - self.taken

    def observe(self, traffic: Traffic, now: float) -> None:
        """Take over what the kernel says."""
        gain = traffic.taken - self.counted
        self.taken = min(self.given, self.taken + gain)
        if not self.untaken or gain > MIN_BYTES_PER_SECOND * (now - self.asked_at):  # answers to pings are no progress
            self.progress_at = now
        self.counted, self.asked_at = traffic.taken, now


class PaceReplies:
    """ASGI middleware, the outermost; and every now and then, `sweep` cuts off connections that do nothing.

    That is: who takes nothing of a reply for `stall_seconds`, and who has asked for nothing in `silent_seconds`,
    counted from the first sweep that saw the connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        port: int,
        *,
        max_untaken_bytes: int,
        stall_seconds: float,
        silent_seconds: float,
        max_connections: int,
    ) -> None:
        self._app = app
        self._max_untaken_bytes = max_untaken_bytes
        self._untaken_bytes = 0  # of all, as of the last look at them and what was given since
        self._connections = Connections(port)
        self._stall_seconds = stall_seconds
        self._period = min(stall_seconds, silent_seconds) / SWEEPS
        self._flows: dict[Peer, Flow] = {}
        self._strangers = Strangers(
            self._connections,
            self._flows.__contains__,
            seconds=silent_seconds,
            max_connections=max_connections,
        )
        self._look_again_at = 0.0

    def __repr__(self) -> str:
        return f"<PaceReplies [{len(self._flows)} connections | {self._untaken_bytes} bytes not taken]>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, its reply part by part."""
        if scope["type"] != "http" or not scope.get("client"):
            await self._app(scope, receive, send)
            return
        peer: Peer = (scope["client"][0], int(scope["client"][1]))  # granian gives it as a text
        flow = self._flows.get(peer)
        if flow is None:
            now = asyncio.get_running_loop().time()
            flow = self._flows[peer] = Flow(asked_at=now, progress_at=now)

        async def send_paced(message: Message) -> None:
            num_bytes = len(message.get("body", b""))
            if self._untaken_bytes + num_bytes > self._max_untaken_bytes:
                await self._wait_for_room(flow, num_bytes)
            flow.given += num_bytes
            self._untaken_bytes += num_bytes
            await send(message)

        await self._app(scope, receive, send_paced)

    async def _wait_for_room(self, flow: Flow, num_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        while True:
            if loop.time() >= self._look_again_at:  # for all who wait
                self._look(loop.time())
            if self._untaken_bytes + num_bytes <= self._max_untaken_bytes:
                return
            if not flow.untaken or flow.untaken + num_bytes <= MAX_EACH_BYTES:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)

    def _look(self, now: float) -> dict[Peer, Traffic]:
        """Ask the kernel about all connections."""
        open_now = self._connections.scan()
        for peer, flow in [*self._flows.items()]:
            if peer in open_now:
                flow.observe(open_now[peer], now)
            else:  # gone, or hidden from us
                flow.taken = flow.given
                del self._flows[peer]
        self._untaken_bytes = sum(flow.untaken for flow in self._flows.values())
        done = asyncio.get_running_loop().time()
        self._look_again_at = done + max(FIRST_PAUSE_SECONDS, 10 * (done - now))  # with very many it takes its time
        return open_now

    async def sweep_forever(self) -> None:
        """Run it as a task and cancel it."""
        while True:
            await asyncio.sleep(self._period)
            self.sweep(asyncio.get_running_loop().time())

    def sweep(self, now: float) -> None:
        """Look at all connections once."""
        self._strangers.sweep(self._look(now), now)
        for peer, flow in self._flows.items():
            if now - flow.progress_at >= self._stall_seconds:
                log.warning("a client that takes nothing of its replies is cut off", client=peer[0], bytes=flow.untaken)
                self._connections.cut(peer)
