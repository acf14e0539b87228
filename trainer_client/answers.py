"""Answers of services, and pages of gateways and proxies in their place."""

from __future__ import annotations

import httpx

from ps_protocol.errors import error_from_answer
from ps_protocol.printable import printable
from ps_protocol.retry import read_retry_after

MAX_LINE = 100  # characters of a page that are shown


class GatewayPage(httpx.RemoteProtocolError):
    """An answer that no service of ours has made.

    It is a transport error whatever its status is: the service may be away, and a gateway answers for it.
    """


def may_be_problem(response: httpx.Response) -> bool:
    """Return whether an answer is not what was asked for, so that its body has to be read to know what it is."""
    return not response.is_success or response.headers.get("content-type", "").startswith("text/html")


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the GradpostError that a read answer stands for, if it is one; GatewayPage if it is not a service's."""
    if not may_be_problem(response):
        return
    error = error_from_answer(response.content)
    if error is not None:
        error.retry_after_seconds = read_retry_after(response.headers.get("retry-after"))
        raise error
    lines = (line.strip() for line in response.text.splitlines())
    first = printable(next(filter(None, lines), "an empty page")[:MAX_LINE])
    text = f"{response.url} answered {response.status_code} without a problem document: {first}"
    raise GatewayPage(f"{text}; is it Gradpost?", request=response.request)
