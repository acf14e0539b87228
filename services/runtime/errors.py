"""Failures of a service as RFC 9457 problem documents.

Errors of FastAPI and Starlette are translated into `GradpostError`. Any other exception is a bug, of which the client
receives no details.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ps_protocol.errors import ERRORS, PROBLEM_CONTENT_TYPE, BadInput, GradpostError, TryAgain, Unauthenticated

MAX_PLACES = 10  # of a message, reported as invalid
MAX_PLACE = 200  # characters of each

_CODE_OF_STATUS: Mapping[int, str] = {
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
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
    if isinstance(error, Unauthenticated):
        all_headers["www-authenticate"] = "Bearer"
    # A fact that JSON cannot represent must not cause an internal error.
    return Response(json.dumps(document, default=str), error.status, all_headers, PROBLEM_CONTENT_TYPE)


def describe_failure(error: Exception, request: str) -> GradpostError | None:
    """Return the error that a client receives for an exception, None for a bug. `request` is its method and path."""
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
            code = _CODE_OF_STATUS.get(status, "bad_request")
            return ERRORS[code].family(f"{error.detail}: {request}", code=code)
        case ClientDisconnect():
            return BadInput("the request ended before its body did", code="malformed_frame")
        case _:
            return None
