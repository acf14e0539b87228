"""Failures of a service as RFC 9457 problem documents.

Errors of FastAPI and Starlette are translated into `GradpostError`. Any other exception is a bug: it is logged with its
traceback, and the client receives `internal_error` without details.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ps_http2 import asgi
from ps_protocol.errors import (
    ERRORS,
    PROBLEM_CONTENT_TYPE,
    BadInput,
    GradpostError,
    TryAgain,
)

from .logs import get_logger

log = get_logger()

MAX_PLACES = 10  # of a message, reported as invalid
MAX_PLACE = 200  # characters of each

_CODE_OF_STATUS: Mapping[int, str] = {
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_TIMEOUT: "slow_body",
    HTTPStatus.LENGTH_REQUIRED: "length_required",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
    HTTPStatus.UNPROCESSABLE_ENTITY: "invalid_message",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded",
}


def problem_response(
    error: GradpostError, *, instance: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response to a request that failed with `error`; `instance` is the request's path.

    The `retry-after` of a TryAgain is one second; it is 0 if the server has already waited for the client, or another
    one answers soon.
    """
    document = error.to_problem()
    if instance is not None:
        document["instance"] = quote(instance)
    all_headers = dict(headers or {})
    if isinstance(error, TryAgain):
        all_headers["retry-after"] = "0" if error.code in ("round_pending", "queue_full", "stopping") else "1"
    # A fact that JSON cannot represent must not cause an internal error.
    return Response(json.dumps(document, default=str), error.status, all_headers, PROBLEM_CONTENT_TYPE)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failure of `app`, including raw ASGI routes, with a problem document."""
    for kind in (GradpostError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)
    app.add_middleware(AnswerFailures)


class AnswerFailures:
    """ASGI middleware that answers the errors of raw routes, and bugs with `internal_error`.

    For bugs an exception handler does not suffice: Starlette raises an unexpected exception again after its handler has
    answered, and the HTTP server logs it a second time. The rest of a refused body is discarded: over HTTP/1 a client
    may still be sending it, and would lose the connection before it reads the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request. If it fails after its response began, the server aborts the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body_ended = scope["http_version"] == "2"  # which answers first and then discards the rest
        started = False

        async def watch_receive() -> Message:
            nonlocal body_ended
            message = await receive()
            body_ended = body_ended or not message.get("more_body", False)
            return message

        async def watch_send(message: Message) -> None:
            nonlocal started
            if not started and message["status"] >= HTTPStatus.BAD_REQUEST and not body_ended:
                with suppress(TimeoutError, HTTPException):  # slower than DISCARD_SECONDS, or than the limit of bodies
                    async with asyncio.timeout(asgi.DISCARD_SECONDS):
                        while not body_ended:
                            await watch_receive()
            started = True
            await send(message)

        try:
            await self._app(scope, watch_receive, watch_send)
        except ClientDisconnect:
            if not started:  # it may have closed one direction only; without an answer uvicorn sends a 500
                cut_off = BadInput("the request ended before its body did", code="malformed_frame")
                await problem_response(cut_off, instance=scope["path"])(scope, watch_receive, watch_send)
        except (GradpostError, HTTPException) as error:
            if not started:  # else it is too late for an answer, such as for a reply that was revoked
                answer = await _answer(Request(scope), error)
                await answer(scope, watch_receive, watch_send)
        except Exception as error:
            if started and isinstance(error.__cause__, GradpostError):
                return  # as Starlette raises it after the beginning of the response
            log.error("unexpected error", exc_info=error, method=scope["method"], path=scope["path"])
            if not started:
                internal = GradpostError("an unexpected error; the log of the service has the traceback")
                await problem_response(internal, instance=scope["path"])(scope, watch_receive, watch_send)


async def _answer(request: Request, error: Exception) -> Response:
    headers = error.headers if isinstance(error, HTTPException) else None
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"allow": ", ".join(allowed_methods(request))}
    return problem_response(_to_gradpost_error(request, error), instance=request.scope["path"], headers=headers)


def allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes at the request's path; Starlette lists those of the first route only."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in route.methods}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


def _to_gradpost_error(request: Request, error: Exception) -> GradpostError:
    match error:
        case GradpostError():
            return error
        case RequestValidationError():
            places = [
                {"place": ".".join(map(str, e["loc"]))[:MAX_PLACE], "message": e["msg"][:MAX_PLACE]}
                for e in error.errors()[:MAX_PLACES]
            ]
            listed = "; ".join(f"{e['place']}: {e['message']}" for e in places[:3])
            return BadInput(f"the message does not fit its schema: {listed}", code="invalid_message", errors=places)
        case HTTPException(status_code=status):
            code = _CODE_OF_STATUS.get(status, "bad_request" if status < 500 else "internal_error")
            return ERRORS[code].family(f"{error.detail}: {request.method} {request.scope['path']}", code=code)
        case _:
            raise error
