"""A route on which others measure how fast they reach this process: it takes bytes and counts them, or gives some.

Neither touches a tensor, so that it can be asked before a run begins and disturbs one by no more than its bytes.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ps_protocol.errors import BadInput
from ps_protocol.routes import SPEED

from .app import add_raw_route

MAX_SPEED_BYTES = 16 * 1024 * 1024  # of one request
_PIECE = os.urandom(256 * 1024)  # which nothing on the way can make smaller

_COUNTED = {"type": "object", "properties": {"num_bytes": {"type": "integer"}, "http_version": {"type": "string"}}}
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
TAKE_OPENAPI: dict[str, Any] = {
    "tags": ["inspection"],
    "requestBody": {"required": True, "content": _BINARY},
    "responses": {"200": {"description": "what came", "content": {"application/json": {"schema": _COUNTED}}}},
}
GIVE_OPENAPI: dict[str, Any] = {
    "tags": ["inspection"],
    "parameters": [
        {
            "name": "num_bytes",
            "in": "query",
            "required": True,
            "schema": {"type": "integer", "minimum": 0, "maximum": MAX_SPEED_BYTES},
        }
    ],
    "responses": {"200": {"description": "so many", "content": _BINARY}},
}


def add_speed_routes(app: FastAPI) -> None:
    """Add both directions."""
    add_raw_route(
        app, SPEED, take_bytes, methods=["POST"], summary="Take bytes and count them", openapi_extra=TAKE_OPENAPI
    )
    add_raw_route(app, SPEED, give_bytes, methods=["GET"], summary="Give some bytes", openapi_extra=GIVE_OPENAPI)


async def take_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    """Count the bytes of a body and drop them."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
        if num_bytes > MAX_SPEED_BYTES:
            raise BadInput(
                "more than is needed to measure", code="body_too_large", expected=f"<= {MAX_SPEED_BYTES} bytes"
            )
    answer = json.dumps({"num_bytes": num_bytes, "http_version": scope["http_version"]}).encode()
    await _begin(send, b"application/json", len(answer))
    await send({"type": "http.response.body", "body": answer})


async def give_bytes(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as many bytes as the query asks for."""
    text = "".join(parse_qs(scope["query_string"].decode("latin-1")).get("num_bytes", []))
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) > MAX_SPEED_BYTES:
        raise BadInput(
            "num_bytes says how many are wanted",
            code="invalid_message", expected=f"0 to {MAX_SPEED_BYTES}", actual=text[:40],
        )  # fmt: skip
    left = int(text)
    await _begin(send, b"application/octet-stream", left)
    while left > len(_PIECE):
        await send({"type": "http.response.body", "body": _PIECE, "more_body": True})
        left -= len(_PIECE)
    await send({"type": "http.response.body", "body": _PIECE[:left]})


async def _begin(send: Send, content_type: bytes, num_bytes: int) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % num_bytes)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
