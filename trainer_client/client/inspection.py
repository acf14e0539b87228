"""Blocking calls of the inspection API, for the command line, tests and scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from ps_config.certificates import TlsFiles, client_context, hint_at_tls
from ps_config.control_client import BearerAuth, GatewayPage, may_be_problem, raise_for_problem
from ps_config.tokens import TokenPair
from ps_protocol.errors import NotFound, Unreachable
from ps_protocol.fields import Message
from ps_protocol.messages import (
    CheckpointCreated,
    ClusterStatus,
    Leave,
    PserverState,
    RunSummary,
    TrainerStatus,
)
from ps_protocol.routes import (
    CHECKPOINTS,
    LEAVE,
    MODEL,
    PARAMETER,
    PSERVER_ENDED,
    ROLL_BACK,
    STATE,
    STATUS,
    SUMMARY,
)
from ps_protocol.standbys import PserverEnded

T = TypeVar("T")

Object = dict[str, Any]

TIMEOUT_SECONDS = 10.0
SUMMARY_SECONDS = 75.0  # the last checkpoint of a finished run is awaited
CHECKPOINT_SECONDS = 300.0  # the coordinator ends the wait before that
READ_SECONDS = 60.0  # for an answer that comes from the pservers


class ClusterView:
    """The inspection API of a coordinator and its pservers; safe to use from several threads.

    Every method raises Unreachable if there is no answer, the GradpostError that an answer contains, and
    SettingsError if there is no token in `token_file`.
    """

    def __init__(
        self,
        coordinator: str,
        *,
        tls: TlsFiles = TlsFiles(),  # noqa: B008 - frozen
        token_file: Path | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.coordinator = coordinator.rstrip("/")
        # Without TLS it is never used: that spares reading all the authorities.
        verify = client_context(tls) if tls.paths or coordinator.startswith("https:") else False
        auth = None if token_file is None else BearerAuth(TokenPair(token_file))
        self._http = httpx.Client(verify=verify, auth=auth, trust_env=False, timeout=timeout_seconds)

    def get(self, kind: type[T], route: str, timeout: float | None = None) -> T:
        """Return what the coordinator answers to a GET request."""
        return self._get(kind, self.coordinator + route, timeout)

    def status(self) -> ClusterStatus:
        """Return the status of the cluster."""
        return self.get(ClusterStatus, STATUS)

    def summary(self) -> RunSummary:
        """Return the results of the run, as the services know them."""
        return self.get(RunSummary, SUMMARY, SUMMARY_SECONDS)

    def create_checkpoint(self) -> CheckpointCreated:
        """Make a checkpoint of the whole model; blocks until it is complete."""
        body = self._request("POST", self.coordinator + CHECKPOINTS, timeout=CHECKPOINT_SECONDS)
        return CheckpointCreated.from_answer(body)

    def model(self, name: str | None = None) -> Iterator[bytes]:
        """Yield a parameter or, without a name, the whole model of one round as a safetensors file, piece by piece."""
        path = MODEL if name is None else PARAMETER.replace("{name:path}", quote(name))
        with self._stream(self.coordinator + path, READ_SECONDS, "the model") as response:
            yield from response.iter_bytes()

    def roll_back(self, round_: int) -> dict[str, Any]:
        """Roll the run back to a complete checkpoint; return the round at which it continues."""
        return self.change_run("POST", ROLL_BACK, {"round": round_})

    def change_run(self, method: str, path: str, message: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send an administrator's change; return the round from which it applies. Blocks until all pservers have it."""
        body = None if message is None else json.dumps(message)
        answer = self._request(method, self.coordinator + path, body, timeout=CHECKPOINT_SECONDS)
        return TypeAdapter(Object).validate_json(answer)

    def pserver_state(self, index: int, *, digest: bool = False) -> PserverState:
        """Return the state of pserver `index`."""
        address = next((p.address for p in self.status().pservers if p.index == index), None)
        if address is None:
            raise NotFound(f"pserver {index} is not here")
        url = f"{address}{STATE}?digest={str(digest).lower()}"
        return self._get(PserverState, url)

    def leave_for(self, run: str, trainer: TrainerStatus, reason: str | None) -> None:
        """Leave the run for a trainer whose process is gone: as done, or as failed with the reason.

        The other trainers learn of it before its lease ends.
        """
        message = Leave(
            run=run,
            incarnation=trainer.heartbeat.incarnation,
            outcome="failed" if reason else "done",
            round=trainer.heartbeat.round,
            reason=reason or "",
        )
        self._request("POST", self.coordinator + LEAVE.format(rank=trainer.rank), message)

    def report_end(self, index: int, address: str) -> None:
        """Report that the process of a pserver at an address, or of a standby of it, has ended."""
        path = PSERVER_ENDED.format(index=index)
        self._request("POST", self.coordinator + path, PserverEnded(address=address))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> ClusterView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _get(self, kind: type[T], url: str, timeout: float | None = None) -> T:
        try:
            return TypeAdapter(kind).validate_json(self._request("GET", url, timeout=timeout))
        except ValidationError as error:
            advice = "Check the address, any proxy and the installed version"
            raise Unreachable(f"{url} did not answer as this version of Gradpost. {advice}") from error

    @contextmanager
    def _stream(self, url: str, timeout: float, name: str) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", url, timeout=timeout) as response:
                if may_be_problem(response):
                    response.read()
                raise_for_problem(response)
                yield response
        except httpx.TransportError as error:
            raise Unreachable(f"{name} of {self.coordinator} broke off: {error!r}") from error

    def _request(
        self, method: str, url: str, message: Message | str | None = None, timeout: float | None = None
    ) -> bytes:
        body = message.model_dump_json() if isinstance(message, Message) else message
        try:
            response = self._http.request(
                method, url, content=body, headers={"content-type": "application/json"},
                timeout=httpx.USE_CLIENT_DEFAULT if timeout is None else timeout,
            )  # fmt: skip
            raise_for_problem(response)
        except GatewayPage as page:
            raise Unreachable(str(page)) from page
        except (httpx.TransportError, httpx.InvalidURL) as error:
            origin = "/".join(url.split("/", 3)[:3])
            cause = str(error) or type(error).__name__
            raise Unreachable(f"no answer from {origin}: {cause}{hint_at_tls(url, error)}") from error
        return response.content
