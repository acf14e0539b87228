"""How a pserver stays a member: it registers with the coordinator and sends heartbeats, for as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib

import httpx

from ps_protocol.errors import GradpostError, StalePserver, error_from_problem
from ps_protocol.messages import (
    Message,
    PserverHeartbeatReply,
    PserverRegistered,
    RegisterPserver,
    heartbeat_period,
)
from ps_protocol.routes import PSERVER_HEARTBEAT, REGISTER_PSERVER
from ps_protocol.vocabulary import PROTOCOL_VERSION
from services.runtime.logs import get_logger

from .pserver import Pserver
from .settings import PserverSettings

log = get_logger()

RETRY_SECONDS = 0.5
TIMEOUT_SECONDS = 5.0


class Registration:
    """One background task; ends when `stop` is set, and sets it when the coordinator says that the run is over."""

    def __init__(self, pserver: Pserver, settings: PserverSettings, http: httpx.AsyncClient) -> None:
        self._pserver = pserver
        self._settings = settings
        self._http = http
        self._coordinator = settings.coordinator.rstrip("/")
        self.exit_code = 0

    async def run(self, address: str, stop: asyncio.Event) -> None:
        """Register `address`, then send heartbeats, three in a lease; register again when we are not known any more."""
        while not stop.is_set():
            answer = await self._register(address, stop)
            if answer is not None:
                await self._send_heartbeats(answer, stop)

    async def _register(self, address: str, stop: asyncio.Event) -> PserverRegistered | None:
        request = RegisterPserver(
            protocol=PROTOCOL_VERSION,
            instance=self._pserver.instance,
            address=address,
            http2=self._settings.server == "granian",
            index=self._settings.pserver_index,
        )
        said = ""
        while not stop.is_set():
            try:
                answer = PserverRegistered.model_validate_json(await self._post(REGISTER_PSERVER, request))
            except httpx.TransportError as error:
                problem = f"waiting for the coordinator at {self._coordinator}: {type(error).__name__}"
            except GradpostError as error:
                if not error.may_be_retried:
                    log.error("the coordinator refused this pserver", code=error.code, reason=str(error))
                    self.exit_code = 1
                    stop.set()
                    return None
                problem = f"waiting: {error}"
            else:
                await self._pserver.registered(answer)
                log.info("registered", pserver=answer.index, incarnation=answer.incarnation)
                return answer
            if problem != said:
                said = problem
                log.info(problem)
            await _sleep(RETRY_SECONDS, stop)
        return None

    async def _send_heartbeats(self, registered: PserverRegistered, stop: asyncio.Event) -> None:
        path = PSERVER_HEARTBEAT.format(index=registered.index)
        while not stop.is_set():
            try:
                body = await self._post(path, self._pserver.heartbeat())
                reply = PserverHeartbeatReply.model_validate_json(body)
            except StalePserver as error:
                log.warning("the coordinator does not know this pserver any more", reason=str(error))
                return
            except (httpx.TransportError, GradpostError) as error:
                log.warning("a heartbeat failed", error=repr(error))
            else:
                if reply.stop and self._settings.exit_when_done:
                    self.exit_code = reply.exit_code
                    stop.set()
            await _sleep(heartbeat_period(registered.lease_seconds), stop)

    async def _post(self, path: str, message: Message) -> bytes:
        response = await self._http.post(
            self._coordinator + path, content=message.model_dump_json(), timeout=TIMEOUT_SECONDS,
            headers={"content-type": "application/json"},
        )  # fmt: skip
        if response.is_error:
            try:
                raise error_from_problem(response.json())
            except ValueError:  # a proxy's page, say
                text = f"{self._coordinator}{path} answered {response.status_code} without a problem document"
                raise httpx.RemoteProtocolError(text) from None
        return response.content


async def _sleep(seconds: float, stop: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
