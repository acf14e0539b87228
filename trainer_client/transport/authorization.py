"""The token that a trainer, or whoever looks at a cluster, sends with every request."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from ps_config.tokens import TokenPair


class BearerAuth(httpx.Auth):
    """Sends a file's token; if that is refused, the one that it replaced, which the other side may still go by."""

    def __init__(self, pair: TokenPair) -> None:
        self._pair = pair

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """See httpx.Auth. Raises SettingsError if there is no token."""
        for token in self._pair.read():
            request.headers["authorization"] = f"Bearer {token}"
            response = yield request
            if response.status_code != httpx.codes.UNAUTHORIZED:
                return
