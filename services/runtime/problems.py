"""Every failure of a service as one shape: an RFC 9457 problem document.

What a service refuses is a `GradpostError`. FastAPI's and Starlette's own errors are translated into one. Anything
else is a bug: it is logged with its traceback, and the client learns no more than `internal_error`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ps_protocol.errors import (
    PROBLEM_CONTENT_TYPE,
    BadInput,
    BodyTooLarge,
    GradpostError,
    InvalidMessage,
    LengthRequired,
    MethodNotAllowed,
    NotFound,
    RoundPending,
    TryAgain,
)

from .logs import get_logger

log = get_logger()

_BY_STATUS: Mapping[int, type[GradpostError]] = {
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.METHOD_NOT_ALLOWED: MethodNotAllowed,
    HTTPStatus.LENGTH_REQUIRED: LengthRequired,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: BodyTooLarge,
    HTTPStatus.UNPROCESSABLE_ENTITY: InvalidMessage,
    HTTPStatus.SERVICE_UNAVAILABLE: TryAgain,
}


def problem_response(
    error: GradpostError, *, instance: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request that failed with `error`; `instance` is the request's path.

    A TryAgain says when: at once if the server has already waited on the client's behalf, else in a second.
    """
    document = error.to_problem()
    if instance is not None:
        document["instance"] = quote(instance)
    all_headers = dict(headers or {})
    if isinstance(error, TryAgain):
        all_headers["retry-after"] = "0" if isinstance(error, RoundPending) else "1"
    # A fact that JSON does not know must not turn a clear answer into an internal error.
    return Response(json.dumps(document, default=str), error.status, all_headers, PROBLEM_CONTENT_TYPE)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failure of `app`, raw ASGI routes included, with a problem document."""
    for kind in (GradpostError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)
    app.add_middleware(UnexpectedErrors)


class UnexpectedErrors:
    """ASGI middleware: a bug becomes `internal_error` and one log entry.

    Not an exception handler, because Starlette raises an unexpected exception again after its handler has answered,
    and the HTTP server would log it a second time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the response has begun: then returning without its end makes the server cut it off."""
        started = False

        async def watch_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watch_send)
        except ClientDisconnect:
            pass  # nobody is left to answer
        except Exception as error:
            log.error("unexpected error", exc_info=error, method=scope.get("method"), path=scope.get("path"))
            if not started:
                internal = GradpostError("an unexpected error; the log of the service has the traceback")
                await problem_response(internal, instance=scope["path"])(scope, receive, send)


async def _answer(request: Request, error: Exception) -> Response:
    headers = error.headers if isinstance(error, HTTPException) else None
    return problem_response(_to_gradpost_error(request, error), instance=request.scope["path"], headers=headers)


def _to_gradpost_error(request: Request, error: Exception) -> GradpostError:
    match error:
        case GradpostError():
            return error
        case RequestValidationError():
            places = [{"place": ".".join(map(str, e["loc"])), "message": e["msg"]} for e in error.errors()]
            listed = "; ".join(f"{e['place']}: {e['message']}" for e in places[:3])
            return InvalidMessage(f"the message does not fit its schema: {listed}", errors=places)
        case HTTPException(status_code=status):
            kind = _BY_STATUS.get(status, BadInput if status < 500 else GradpostError)
            return kind(f"{error.detail}: {request.method} {request.scope['path']}")
        case _:
            raise error
