"""The registration of a pserver with the coordinator, and its heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import httpx

from ps_config.certificates import hint_at_tls
from ps_config.control_client import send_message
from ps_protocol.errors import Forbidden, GradpostError, StalePserver, TryAgain, Unauthenticated
from ps_protocol.fields import Message
from ps_protocol.membership import PserverRegistered, RegisterPserver
from ps_protocol.messages import PserverHeartbeatReply
from ps_protocol.retry import Patience, RetryPolicy, heartbeat_period, request_with_retry
from ps_protocol.routes import PSERVER_HEARTBEAT, REGISTER_PSERVER
from ps_protocol.vocabulary import PROTOCOL_VERSION, PserverIndex, Round
from services.runtime.logs import get_logger
from services.runtime.security import TOKEN_WAIT_SECONDS

from .durable.disk import FolderTaken
from .pserver import Pserver
from .settings import PserverSettings
from .waits import wait_for_any

log = get_logger()

RETRY_SECONDS = 0.5
TIMEOUT_SECONDS = 5.0
GOODBYE_SECONDS = 1.0
LAST_CHECKPOINT_SECONDS = 60.0  # for a place that hangs; the log contains the acknowledged rounds, too


class Registration:
    """The background task, which ends when `stop` is set, and sets `stop` once the coordinator reports the end."""

    def __init__(
        self, pserver: Pserver, settings: PserverSettings, http: httpx.AsyncClient, *, local: str | None = None
    ) -> None:
        self.exit_code = 0
        self.next_role: dict[str, PserverIndex | None] = {}  # settings with which this process goes on
        self._pserver = pserver
        self._local = local  # the name of its Unix socket
        self._settings = settings
        self._http = http
        self._coordinator = settings.coordinator.rstrip("/")
        self._logged = ""  # why the newest registration waits
        self._unauthenticated = Patience(TOKEN_WAIT_SECONDS)  # of the same: a new token may arrive later here

    async def run(self, address: str, stop: asyncio.Event, answer: PserverRegistered | None = None) -> None:
        """Register `address`, then send heartbeats, three in a lease. Register again when the lease has expired.

        A promoted standby has an `answer` already.
        """
        if answer is not None:
            await self._send_heartbeats(answer, stop)
        while not stop.is_set():
            answer = await self._register(address, stop)
            if answer is not None:
                await self._send_heartbeats(answer, stop)
        await self._leave(answer)

    async def _register(self, address: str, stop: asyncio.Event) -> PserverRegistered | None:
        """Register until the coordinator answers. Return None if it refuses this pserver, or `stop` is set before."""
        self._logged = ""
        self._unauthenticated.reset()
        index = self._settings.pserver_index
        policy = RetryPolicy((TryAgain,), partial(self._pause_for_folder, stop))
        try:
            held = await request_with_retry(lambda: self._pserver.open_folder(index), policy)
        except _Stopping:
            return None
        except FolderTaken as error:
            if index is None or not error.facts.get("copy"):
                raise
            self._become_standby(index, error, stop)  # of the standby that has replaced this pserver
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
            return PserverRegistered.from_answer(await self._post(REGISTER_PSERVER, request))

        # A ValueError is an answer of something else, such as the page of a proxy.
        policy = RetryPolicy((httpx.TransportError, ValueError, GradpostError), partial(self._pause_for_answer, stop))
        try:
            answer = await request_with_retry(attempt, policy)
        except _Stopping:
            return None
        except GradpostError as error:
            if error.code == "superseded":
                self._become_standby(error.facts.get("follow", request.index), error, stop)
                return None
            log.error("the coordinator refused this pserver", code=error.code, reason=str(error))
            self._exit(1, stop)
            return None
        await self._pserver.adopt_identity(answer)
        log.info("registered", pserver=answer.index, incarnation=answer.incarnation)
        return answer

    def _become_standby(self, index: PserverIndex | None, reason: GradpostError, stop: asyncio.Event) -> None:
        log.info("this process becomes a standby", pserver=index, reason=str(reason))
        self.next_role = {"follow": index}
        self._exit(0, stop)

    async def _pause_for_folder(self, stop: asyncio.Event, error: TryAgain) -> None:
        log.error(str(error))
        await wait_for_any(RETRY_SECONDS, stop)
        if stop.is_set():
            raise _Stopping

    async def _pause_for_answer(self, stop: asyncio.Event, error: Exception) -> None:
        if isinstance(error, GradpostError):
            may_pass = isinstance(error, Unauthenticated | Forbidden) and not self._unauthenticated.note_failure()
            if not error.may_be_retried and not may_pass:
                raise error
            problem = f"waiting: {error}"
        else:
            cause = f"{type(error).__name__}: {error}".removesuffix(": ")
            problem = f"waiting for the coordinator at {self._coordinator} ({cause})"
            problem += hint_at_tls(self._coordinator, error)
        if problem != self._logged:
            self._logged = problem
            log.info(problem)
        await wait_for_any(RETRY_SECONDS, stop)

    async def _send_heartbeats(self, registered: PserverRegistered, stop: asyncio.Event) -> None:
        path = PSERVER_HEARTBEAT.format(index=registered.index)
        is_failing = False
        alone: tuple[float, Round] | None = None  # when the coordinator had been lost in the newest round
        now = asyncio.get_running_loop().time
        while not stop.is_set():
            self._pserver.heartbeat_is_due.clear()
            heartbeat = self._pserver.make_heartbeat()
            try:
                reply = PserverHeartbeatReply.from_answer(await self._post(path, heartbeat))
            except StalePserver as error:
                log.warning("the coordinator does not know this pserver any more", reason=str(error))
                return
            except (httpx.TransportError, GradpostError, ValueError) as error:  # ValueError: see `_register`
                if not is_failing:
                    log.warning("heartbeats fail; training continues without the coordinator", error=repr(error))
                is_failing = True
                state = self._pserver.make_heartbeat()
                if alone is None or alone[1] != state.round:
                    alone = now(), state.round
                if self._settings.exit_when_done and state.run is not None and now() - alone[0] > self._patience:
                    log.error(
                        "the coordinator does not answer and no round is applied; exiting", seconds=self._patience
                    )
                    self._exit(1, stop)
            else:
                is_failing = False
                alone = None
                self._pserver.handle_heartbeat_reply(reply, heartbeat)
                if reply.stop and self._settings.exit_when_done:
                    self._exit(reply.exit_code, stop)
            await wait_for_any(heartbeat_period(registered.lease_seconds), stop, self._pserver.heartbeat_is_due)

    @property
    def _patience(self) -> float:
        """The seconds without coordinator and progress after which a pserver with a run exits."""
        return self._pserver.run.installed.round_timeout_seconds

    def _exit(self, code: int, stop: asyncio.Event) -> None:
        self.exit_code = code
        stop.set()

    async def _leave(self, registered: PserverRegistered | None) -> None:
        """Persist the shard. Heartbeats go on until that is done, and report that this pserver will come back."""
        self._pserver.is_stopping = True
        stopping, has_stopped = asyncio.create_task(self._stop_pserver(), name="stop"), asyncio.Event()
        stopping.add_done_callback(lambda _: has_stopped.set())
        while registered is not None:
            is_last = has_stopped.is_set()
            with contextlib.suppress(httpx.TransportError, GradpostError, TimeoutError):  # its lease expires anyway
                path = PSERVER_HEARTBEAT.format(index=registered.index)
                await asyncio.wait_for(self._post(path, self._pserver.make_heartbeat()), GOODBYE_SECONDS)
            if is_last:
                break
            await wait_for_any(heartbeat_period(registered.lease_seconds), has_stopped)
        await stopping

    async def _stop_pserver(self) -> None:
        try:
            await asyncio.wait_for(self._pserver.stop(), LAST_CHECKPOINT_SECONDS)
        except TimeoutError:
            log.error("the last checkpoint was not written in time", seconds=LAST_CHECKPOINT_SECONDS)

    async def _post(self, path: str, message: Message) -> bytes:
        return await send_message(self._http, "POST", self._coordinator + path, message, timeout=TIMEOUT_SECONDS)


class _Stopping(Exception):  # noqa: N818 - no error
    """The pserver stops before it is registered."""
