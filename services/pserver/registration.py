"""How a pserver stays a member: it registers with the coordinator and sends heartbeats, for as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import httpx

from ps_config.certificates import hint_at_tls
from ps_protocol.errors import GradpostError, StalePserver, TryAgain
from ps_protocol.fields import Message
from ps_protocol.messages import PserverHeartbeatReply, PserverRegistered, RegisterPserver, heartbeat_period
from ps_protocol.retry import RetryPolicy, request_with_retry
from ps_protocol.routes import PSERVER_HEARTBEAT, REGISTER_PSERVER
from ps_protocol.vocabulary import PROTOCOL_VERSION, Round
from services.runtime.errors import raise_for_problem
from services.runtime.logs import get_logger

from .pserver import Pserver
from .settings import PserverSettings

log = get_logger()

RETRY_SECONDS = 0.5
TIMEOUT_SECONDS = 5.0
GOODBYE_SECONDS = 1.0
LAST_CHECKPOINT_SECONDS = 60.0  # for a place that hangs; what was acknowledged is in the log, too


class Registration:
    """One background task; ends when `stop` is set, and sets it when the coordinator says that the run is over."""

    def __init__(
        self, pserver: Pserver, settings: PserverSettings, http: httpx.AsyncClient, *, local: str | None = None
    ) -> None:
        self._pserver = pserver
        self._local = local  # the name of its Unix socket
        self._settings = settings
        self._http = http
        self._coordinator = settings.coordinator.rstrip("/")
        self.exit_code = 0
        self._logged = ""  # why the newest registration waits

    async def run(self, address: str, stop: asyncio.Event) -> None:
        """Register `address`, then send heartbeats, three in a lease; register again when we are not known any more."""
        answer = None
        while not stop.is_set():
            answer = await self._register(address, stop)
            if answer is not None:
                await self._send_heartbeats(answer, stop)
        await self._leave(answer)

    async def _leave(self, registered: PserverRegistered | None) -> None:
        """Write down what is held. Heartbeats go on until that is done, and say that this pserver will be back."""
        self._pserver.is_stopping = True
        stopping, has_stopped = asyncio.create_task(self._stop_pserver(), name="stop"), asyncio.Event()
        stopping.add_done_callback(lambda _: has_stopped.set())
        while registered is not None:
            is_last = has_stopped.is_set()
            with contextlib.suppress(httpx.TransportError, GradpostError, TimeoutError):  # its lease ends anyhow
                path = PSERVER_HEARTBEAT.format(index=registered.index)
                await asyncio.wait_for(self._post(path, self._pserver.make_heartbeat()), GOODBYE_SECONDS)
            if is_last:
                break
            await _wait(heartbeat_period(registered.lease_seconds), has_stopped)
        await stopping

    async def _stop_pserver(self) -> None:
        try:
            await asyncio.wait_for(self._pserver.stop(), LAST_CHECKPOINT_SECONDS)
        except TimeoutError:
            log.error("the last checkpoint was not written in time", seconds=LAST_CHECKPOINT_SECONDS)

    async def _register(self, address: str, stop: asyncio.Event) -> PserverRegistered | None:
        """Register until the coordinator answers. Return None if it refuses this pserver, or `stop` is set before."""
        self._logged = ""
        index = self._settings.pserver_index
        policy = RetryPolicy((TryAgain,), partial(self._pause_for_folder, stop))
        try:
            held = await request_with_retry(lambda: self._pserver.open_folder(index), policy)
        except _Stopping:
            return None
        disk = self._pserver.disk
        request = RegisterPserver(
            protocol=PROTOCOL_VERSION,
            instance=self._pserver.instance,
            address=address,
            http2=self._settings.http2,
            local=self._local,
            index=index if disk is None or disk.index is None else disk.index,
            previous=0 if disk is None else disk.previous_incarnation,
            held=held,
        )

        async def attempt() -> PserverRegistered:
            if stop.is_set():
                raise _Stopping
            return PserverRegistered.model_validate_json(await self._post(REGISTER_PSERVER, request))

        # A ValueError is an answer of something else, such as the page of a proxy.
        policy = RetryPolicy((httpx.TransportError, ValueError, GradpostError), partial(self._pause_for_answer, stop))
        try:
            answer = await request_with_retry(attempt, policy)
        except _Stopping:
            return None
        except GradpostError as error:
            log.error("the coordinator refused this pserver", code=error.code, reason=str(error))
            self.exit_code = 1
            stop.set()
            return None
        await self._pserver.adopt_identity(answer)
        log.info("registered", pserver=answer.index, incarnation=answer.incarnation)
        return answer

    async def _pause_for_folder(self, stop: asyncio.Event, error: TryAgain) -> None:
        log.error(str(error))
        await _wait(RETRY_SECONDS, stop)
        if stop.is_set():
            raise _Stopping

    async def _pause_for_answer(self, stop: asyncio.Event, error: Exception) -> None:
        if isinstance(error, GradpostError):
            if not error.may_be_retried:
                raise error
            problem = f"waiting: {error}"
        else:
            cause = f"{type(error).__name__}: {error}".removesuffix(": ")
            problem = f"waiting for the coordinator at {self._coordinator} ({cause})"
            problem += hint_at_tls(self._coordinator, error)
        if problem != self._logged:
            self._logged = problem
            log.info(problem)
        await _wait(RETRY_SECONDS, stop)

    async def _send_heartbeats(self, registered: PserverRegistered, stop: asyncio.Event) -> None:
        path = PSERVER_HEARTBEAT.format(index=registered.index)
        is_silent = False
        alone = IsolationTimer(asyncio.get_running_loop().time)
        while not stop.is_set():
            self._pserver.heartbeat_is_due.clear()
            heartbeat = self._pserver.make_heartbeat()
            try:
                body = await self._post(path, heartbeat)
                reply = PserverHeartbeatReply.model_validate_json(body)
            except StalePserver as error:
                log.warning("the coordinator does not know this pserver any more", reason=str(error))
                return
            except (httpx.TransportError, GradpostError, ValueError) as error:  # the latter: a proxy's page, say
                if not is_silent:
                    log.warning("heartbeats fail; training goes on without the coordinator", error=repr(error))
                is_silent = True
                if self._settings.exit_when_done and alone.has_expired(self._pserver):
                    log.error("the coordinator does not come back, and nobody trains (exit_when_done)")
                    self.exit_code = 1
                    stop.set()
            else:
                is_silent = False
                alone.ends()
                self._pserver.handle_heartbeat_reply(reply, heartbeat)
                if reply.stop and self._settings.exit_when_done:
                    self.exit_code = reply.exit_code
                    stop.set()
            await _wait(heartbeat_period(registered.lease_seconds), stop, self._pserver.heartbeat_is_due)

    async def _post(self, path: str, message: Message) -> bytes:
        response = await self._http.post(
            self._coordinator + path, content=message.model_dump_json(), timeout=TIMEOUT_SECONDS,
            headers={"content-type": "application/json"},
        )  # fmt: skip
        raise_for_problem(response)
        return response.content


class _Stopping(Exception):  # noqa: N818 - no error
    """The pserver stops before it is registered."""


class IsolationTimer:
    """How long a pserver with a run has heard neither of its coordinator nor of a trainer: both may have gone."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: float | None = None
        self._round: Round = 0

    def ends(self) -> None:
        """The coordinator is there."""
        self._since = None

    def has_expired(self, pserver: Pserver) -> bool:
        """Whether it has lasted for as long as anybody waits for anybody. Without a run it is just early."""
        state = pserver.make_heartbeat()
        if self._since is None or state.round != self._round:
            self._since, self._round = self._now(), state.round
        return state.run is not None and self._now() - self._since > pserver.run.install.round_timeout_seconds


async def _wait(seconds: float, *events: asyncio.Event) -> None:
    """Until the first of these is set, and so many seconds at most."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
