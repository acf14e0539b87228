"""The binary endpoints: raw ASGI, because a path operation would cost more than the request.

Each one parses the fence, checks it before the body is read, and calls the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ps_http2.asgi import send_from
from ps_protocol.errors import BadInput, Conflict, GradpostError
from ps_protocol.fence import MAX_DIGITS, Fence
from ps_protocol.frames import CONTENT_TYPE, LENGTH_BYTES
from ps_protocol.norms import AgreedNorm
from ps_protocol.routes import BARRIER_HEADER, HAVE_HEADER, NORM_HEADER, VERDICT_HEADER, WAIT_HEADER
from ps_protocol.vocabulary import Round

from .apply_rounds import BarrierKind, RoundsExecutor
from .bodies import content_length, discard_body, receive_body
from .limits import WaitingPulls
from .pserver import Pserver
from .run import Run

MAX_WAIT_SECONDS = 30.0
MAX_GET_BODY_BYTES = 1024 * 1024


class TensorEndpoints:
    """The tensor requests of one pserver, each an ASGI application."""

    def __init__(self, pserver: Pserver) -> None:
        self._pserver = pserver
        self._limits = pserver.limits
        self._waiting = WaitingPulls()

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stage one bucket of gradient blocks, or of optimizer state."""
        await self._receive_blocks(scope, receive, send, initial=False)

    async def initial(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store one bucket of initial values and buffers."""
        await self._receive_blocks(scope, receive, send, initial=True)

    async def _receive_blocks(self, scope: Scope, receive: Receive, send: Send, *, initial: bool) -> None:
        headers = _headers(scope)
        num_bytes = content_length(headers, self._limits)  # a body of unknown or excessive length is not read at all
        try:
            fence = Fence.from_headers(headers)
            run = self._pserver.run
            run.admit_initial(fence) if initial else run.admit_push(fence)
            most = run.max_body_bytes + self._limits.max_header_bytes + LENGTH_BYTES
            if num_bytes > most:
                raise BadInput(
                    "the body is larger than the whole shard",
                    code="body_too_large", expected=f"<= {most}", actual=num_bytes,
                )  # fmt: skip
        except GradpostError:
            await discard_body(receive)
            raise
        run.transports.add(scope["http_version"])
        with self._pserver.in_flight.reserve(fence.rank, num_bytes, len(run.members)):
            limits = replace(self._limits, max_tensors=min(self._limits.max_tensors, run.max_body_tensors))
            body = await receive_body(scope, receive, num_bytes, limits, self._pserver.pool)
            answer = await (run.set_initial(fence, body) if initial else run.push(fence, body))
        await _send_json(send, answer.model_dump_json())

    async def barrier(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a batch or fetch barrier and answer at once."""
        headers = _headers(scope)
        await discard_body(receive)
        run, fence, kind = self._pserver.run, Fence.from_headers(headers), _barrier_kind(headers)
        answer = _require_rounds(run, fence, f"{kind} barrier").count_barrier(
            fence, kind, is_finite=_is_finite(headers)
        )
        await _send_json(send, answer.model_dump_json())

    async def buffers(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with this shard's buffers."""
        await discard_body(receive)
        fence = Fence.from_headers(_headers(scope))
        run = self._pserver.run
        run.check_fence(fence)
        async with self._waiting.place(fence.rank):
            await _send_parts(scope, send, await run.get_buffers(fence))

    async def slots(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the slots named in the body (a JSON list), or with the names of all."""
        fence = Fence.from_headers(_headers(scope))
        run = self._pserver.run
        keys = await _receive_names(receive)
        run.check_fence(fence)
        async with self._waiting.place(fence.rank):
            parts = await run.get_slots(fence, keys)
            await _send_parts(scope, send, parts)
        run.pulled_bytes += sum(map(len, parts))

    async def norm(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the norm of this shard's part of a round's gradient, or accept the global one.

        The request may carry the batch barrier.
        """
        headers = _headers(scope)
        await discard_body(receive)
        fence = Fence.from_headers(headers)
        wait_seconds = _wait_seconds(headers)
        norm = _norm(headers)
        run = self._pserver.run
        run.check_fence(fence)
        rounds = run.executor
        if not isinstance(rounds, RoundsExecutor) or run.install.max_grad_norm is None:
            raise Conflict(
                "the gradients of this run are not clipped, so that rounds have no norm (max_grad_norm)",
                code="mode_mismatch",
            )
        _count_carried_barrier(run, fence, headers)
        async with self._waiting.place(fence.rank):
            answer = await rounds.get_norm(fence, wait_seconds, norm)
        await _send_json(send, answer.model_dump_json())

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with one version of the shard, or of the blocks named in the body (a JSON list)."""
        headers = _headers(scope)
        fence = Fence.from_headers(headers)
        run = self._pserver.run
        wait_seconds = _wait_seconds(headers)
        base = _base_version(headers)
        norm = _norm(headers)
        names = await _receive_names(receive)
        run.check_fence(fence)
        run.check_names(names)
        _count_carried_barrier(run, fence, headers)  # last, since a refused request must not count
        async with self._waiting.place(fence.rank):
            if norm is not None:  # the round is stepped with it
                deadline = asyncio.get_running_loop().time() + wait_seconds
                await _require_rounds(run, fence, "global norm").get_norm(fence, wait_seconds, norm)
                wait_seconds = max(0.0, deadline - asyncio.get_running_loop().time())
            reply = await run.executor.get(fence, wait_seconds, names)
            run.transports.add(scope["http_version"])
            parts = reply.parts_for(base)
            async with reply.reading():
                await _send_parts(scope, send, parts)
        run.pulled_bytes += sum(map(len, parts))


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _bad_header(name: str, problem: str, expected: str, actual: str | None) -> BadInput:
    return BadInput(f"the header {name} {problem}", code="bad_header", expected=expected, actual=actual and actual[:40])


def _barrier_kind(headers: dict[str, str]) -> BarrierKind:
    match headers.get(BARRIER_HEADER):
        case "batch":
            return "batch"
        case "fetch":
            return "fetch"
        case other:
            raise _bad_header(BARRIER_HEADER, "names no barrier", "batch or fetch", other)


def _require_rounds(run: Run, fence: Fence, what: str) -> RoundsExecutor:
    """Return the executor of a synchronous run. Raises what is stale about the request, else Conflict."""
    run.check_fence(fence)
    if isinstance(run.executor, RoundsExecutor):
        return run.executor
    raise Conflict(
        f"a {what} belongs to the synchronous mode",
        code="mode_mismatch", expected=f"no {what}", actual=run.install.consistency.mode,
    )  # fmt: skip


def _count_carried_barrier(run: Run, fence: Fence, headers: dict[str, str]) -> None:
    is_finite = _is_finite(headers)
    if BARRIER_HEADER not in headers:
        return
    if _barrier_kind(headers) != "batch":
        raise BadInput("other requests may carry the batch barrier only", code="bad_header", expected="batch")
    _require_rounds(run, fence, "batch barrier").count_barrier(fence, "batch", is_finite=is_finite)


def _is_finite(headers: dict[str, str]) -> bool:
    verdict = headers.get(VERDICT_HEADER)
    if verdict not in (None, "finite", "nonfinite"):
        raise _bad_header(VERDICT_HEADER, "is no verdict", "finite or nonfinite", verdict)
    return verdict != "nonfinite"


def _wait_seconds(headers: dict[str, str]) -> float:
    text = headers.get(WAIT_HEADER, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise _bad_header(WAIT_HEADER, "is no time to wait", f"0 to {MAX_WAIT_SECONDS:g}", text)
    return seconds


def _base_version(headers: dict[str, str]) -> Round | None:
    text = headers.get(HAVE_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise _bad_header(HAVE_HEADER, "is no round", "digits", text)
    return int(text)


def _norm(headers: dict[str, str]) -> AgreedNorm | None:
    return AgreedNorm.from_header(headers[NORM_HEADER]) if NORM_HEADER in headers else None


async def _receive_names(receive: Receive) -> list[str]:
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_GET_BODY_BYTES:
            raise BadInput(
                "the list of blocks is too long", code="body_too_large", expected=f"<= {MAX_GET_BODY_BYTES} bytes"
            )
    try:
        names = json.loads(body) if body else []
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInput("the body of a get is empty or a JSON list of block names", code="malformed_frame")
    return names


async def _send_json(send: Send, json: str) -> None:
    body = json.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_parts(scope: Scope, send: Send, parts: Sequence[bytes | memoryview]) -> None:
    num_bytes = sum(map(len, parts))
    headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(num_bytes).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number, part in enumerate(parts, 1):
        await send_from(part, scope, send, more_body=number < len(parts))
