"""The binary endpoints: raw ASGI, because a path operation would cost more than the request.

Each one parses the fence, checks it before the body is read, and calls the run. `app.py` describes them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ps_http2.writer import SMALL_BYTES
from ps_protocol.errors import BadInput, Conflict
from ps_protocol.fence import Fence
from ps_protocol.frames import CONTENT_TYPE, LENGTH_BYTES
from ps_protocol.requests import Barrier, Pull, PushAnswer

from .pserver import Pserver
from .run.run import Run
from .run.sync_run import SyncRun
from .shard.bodies import content_length, receive_body
from .waits import WaitingPulls

MAX_GET_BODY_BYTES = 1024 * 1024


class TensorEndpoints:
    """The tensor requests of one pserver, each an ASGI application."""

    def __init__(self, pserver: Pserver) -> None:
        self._pserver = pserver
        self._limits = pserver.limits
        self._waiting = WaitingPulls()

    async def push(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stage one bucket of gradient blocks, or of optimizer state."""
        await _send_json(send, await self._receive_blocks(scope, receive, *self._begin(scope), initial=False))

    async def initial(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store one bucket of initial values and buffers."""
        await _send_json(send, await self._receive_blocks(scope, receive, *self._begin(scope), initial=True))

    def _begin(self, scope: Scope) -> tuple[dict[str, str], Fence, Run]:
        run = self._pserver.run  # first, since a standby refuses every request
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return headers, Fence.from_headers(headers), run

    async def _receive_blocks(
        self, scope: Scope, receive: Receive, headers: dict[str, str], fence: Fence, run: Run, *, initial: bool
    ) -> PushAnswer:
        num_bytes = content_length(headers, self._limits)  # a body of unknown or excessive length is not read at all
        # For its errors only: a repeated push is received, and answered after its checks.
        run.admit_initial(fence) if initial else run.admit_push(fence)
        most = run.max_body_bytes + self._limits.max_header_bytes + LENGTH_BYTES
        if num_bytes > most:
            raise BadInput(
                "the body is larger than the whole shard",
                code="body_too_large", expected=f"<= {most}", actual=num_bytes,
            )  # fmt: skip
        run.transports.add(scope["http_version"])
        with self._pserver.in_flight.reserve(fence.rank, num_bytes, len(run.schedule.members)):
            body = await receive_body(scope, receive, num_bytes, self._limits, self._pserver.pool)
            return await (run.store_initial(fence, body) if initial else run.push(fence, body))

    async def barrier(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a batch or fetch barrier and answer without waiting."""
        await _discard_body(scope, receive)
        headers, fence, run = self._begin(scope)
        barrier = Barrier.from_headers(headers)
        run.check_fence(fence)
        answer = _require_rounds(run, f"{barrier.kind} barrier").count_barrier(fence, barrier)
        await _send_json(send, answer)

    async def buffers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with this shard's buffers."""
        _, fence, run = self._begin(scope)
        run.check_fence(fence)
        with self._waiting.place(fence.rank):
            await _send_parts(send, await run.get_buffers(fence))

    async def slots(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the slots named in the body (a JSON list), or with the names of all."""
        _, fence, run = self._begin(scope)
        keys = await _receive_names(scope, receive)
        run.check_fence(fence)
        with self._waiting.place(fence.rank):
            parts = await run.get_slots(fence, keys)
            await _send_parts(send, parts)
        run.pulled_bytes += sum(map(len, parts))

    async def norm(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the norm of this shard's part of a round's gradient, or accept the global one.

        The request may carry the batch barrier.
        """
        await _discard_body(scope, receive)
        headers, fence, run = self._begin(scope)
        pull = Pull.from_headers(fence.round, headers)
        run.check_fence(fence)
        if not isinstance(run, SyncRun) or run.installed.max_grad_norm is None:
            raise Conflict(
                "this run does not clip gradients; norms require the synchronous mode and max_grad_norm",
                code="mode_mismatch",
            )
        if pull.barrier is not None:
            run.count_barrier(fence, pull.barrier)
        with self._waiting.place(fence.rank):
            answer = await run.get_norm(fence, pull)
        await _send_json(send, answer)

    async def pull(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with one version of the shard, or of the blocks named in the body (a JSON list).

        The body may be a push instead, which is staged first.
        """
        headers, fence, run = self._begin(scope)
        pull = Pull.from_headers(fence.round, headers)
        if headers.get("content-type") == CONTENT_TYPE:
            await self._receive_blocks(scope, receive, headers, fence, run, initial=False)
        elif headers.get("content-length") != "0":
            pull = replace(pull, names=tuple(await _receive_names(scope, receive)))
        run.check_fence(fence)
        run.shard.layout.check_names(pull.names)
        if pull.barrier is not None:  # last, since a refused request must not count
            _require_rounds(run, "batch barrier").count_barrier(fence, pull.barrier)
        with self._waiting.place(fence.rank):
            if pull.norm is not None:  # the round is stepped with it
                deadline = asyncio.get_running_loop().time() + pull.wait_seconds
                await _require_rounds(run, "global norm").get_norm(fence, pull)
                pull = replace(pull, wait_seconds=max(0.0, deadline - asyncio.get_running_loop().time()))
            reply = await run.get(fence, pull)
            run.transports.add(scope["http_version"])
            parts = reply.parts_for(pull.base)
            with reply.reading():
                await _send_parts(send, parts)
        run.pulled_bytes += sum(map(len, parts))


def _require_rounds(run: Run, what: str) -> SyncRun:
    """Return a synchronous run. Raises Conflict for another one."""
    if isinstance(run, SyncRun):
        return run
    raise Conflict(
        f"a {what} requires the synchronous mode",
        code="mode_mismatch", expected=f"no {what}", actual=run.installed.consistency.mode,
    )  # fmt: skip


async def _discard_body(scope: Scope, receive: Receive) -> None:
    """Receive a body that is not needed: a request that is lost before its end has no effect."""
    async for _ in Request(scope, receive).stream():
        pass


async def _receive_names(scope: Scope, receive: Receive) -> list[str]:
    body = b""
    async for part in Request(scope, receive).stream():
        body += part
        if len(body) > MAX_GET_BODY_BYTES:
            raise BadInput(
                "the list of blocks is too long", code="body_too_large", expected=f"<= {MAX_GET_BODY_BYTES} bytes"
            )
    if not body:
        return []
    try:
        names = json.loads(body)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInput("the body of a get must be empty or a JSON list of block names", code="malformed_frame")
    return names


async def _send_json(send: Send, answer: BaseModel) -> None:
    body = answer.model_dump_json().encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_parts(send: Send, parts: Sequence[bytes | memoryview]) -> None:
    num_bytes = sum(map(len, parts))
    if num_bytes <= SMALL_BYTES:
        parts = [b"".join(parts)]
    headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % num_bytes)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number, part in enumerate(parts, 1):
        await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})
