"""The life of a pserver process with the coordinator: as the pserver or as a standby, in one role after another.

pserver    registers, then sends heartbeats          ──another process has replaced it──────────────► standby
standby    reports, and follows the named leader     ──promoted, or it has the newest folder────────► pserver
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import httpx

from ps_config.certificates import hint_at_tls
from ps_config.control_client import send_message
from ps_protocol.errors import Forbidden, GradpostError, StalePserver, TryAgain, Unauthenticated
from ps_protocol.fields import Message
from ps_protocol.membership import PserverRegistered
from ps_protocol.messages import PserverHeartbeatReply
from ps_protocol.retry import Patience, RetryPolicy, heartbeat_period, request_with_retry
from ps_protocol.routes import PSERVER_HEARTBEAT, REGISTER_PSERVER, REPORT_STANDBY
from ps_protocol.standbys import StandbyAnswer
from ps_protocol.vocabulary import PserverIndex, Round
from services.runtime.logs import get_logger
from services.runtime.security import TOKEN_WAIT_SECONDS

from .durable.disk import FolderTaken
from .following.follower import Follower
from .inspection import describe_standby, make_heartbeat
from .pserver import Pserver
from .settings import PserverSettings
from .waits import run_until, wait_for_any

log = get_logger()

RETRY_SECONDS = 0.5
TIMEOUT_SECONDS = 5.0
GOODBYE_SECONDS = 1.0
LAST_CHECKPOINT_SECONDS = 60.0  # for a place that hangs; the log contains the acknowledged rounds, too
LOST_SECONDS = 0.2  # between the reports of a standby while its leader is lost
FAIL_OVER_SECONDS = 2.0  # after a lease, for standbys that report again

# A ValueError is an answer of something else, such as the page of a proxy.
NO_ANSWER = (httpx.TransportError, ValueError, GradpostError)
# Another report of a standby would get the same answer.
FINAL_CODES = frozenset({"unsupported_protocol", "world_mismatch", "no_pservers"})


class Registration:
    """The background task, which ends when `stop` is set, and sets `stop` once the coordinator reports the end."""

    def __init__(
        self,
        pserver: Pserver,
        settings: PserverSettings,
        http: httpx.AsyncClient,
        make_follower: Callable[[PserverIndex], Follower],
    ) -> None:
        self.exit_code = 0
        self._pserver = pserver
        self._settings = settings
        self._http = http
        self._make_follower = make_follower
        self._index = settings.pserver_index
        self._coordinator = settings.coordinator.rstrip("/")
        self._logged = ""  # why the newest request waits
        self._unauthenticated = Patience(TOKEN_WAIT_SECONDS)  # of the same: a new token may arrive later here
        self._alone: tuple[float, Round] | None = None  # since when the coordinator has been lost in the newest round
        self._lost_since: float | None = None  # the same of the leader, which had been promoted

    async def run(self, stop: asyncio.Event) -> None:
        """Take part in one role after another, until `stop` is set. Then say goodbye."""
        pserver, answer = self._pserver, None
        if self._settings.follow is not None:
            pserver.follower = self._make_follower(self._settings.follow)
        while not stop.is_set():
            self._logged, self._lost_since = "", None
            self._unauthenticated.reset()
            follower = pserver.follower
            work = run_until(stop, self._register(stop)) if follower is None else self._follow(follower, stop)
            answer = await work
            if answer is not None:
                await self._send_heartbeats(answer, stop)
        if pserver.follower is None:
            await self._leave(answer)

    # ------------------------------------------------------------------ a pserver

    async def _register(self, stop: asyncio.Event) -> PserverRegistered | None:
        """Register until the coordinator answers. The disk of the folder may hang.

        Returns None if it refuses this pserver, or if this process has become a standby.
        """
        policy = RetryPolicy((TryAgain,), self._pause_for_folder)
        try:
            held = await request_with_retry(lambda: self._pserver.open_folder(self._index), policy)
        except FolderTaken as error:
            if self._index is None or not error.facts.get("copy"):
                raise
            await self._become_standby(self._index, error)  # of the standby that has replaced this pserver
            return None
        disk = self._pserver.disk
        index = self._index if disk.index is None else disk.index
        request = self._pserver.make_registration(index, disk.previous_incarnation, held)

        async def attempt() -> PserverRegistered:
            return PserverRegistered.from_answer(await self._post(REGISTER_PSERVER, request))

        try:
            answer = await request_with_retry(attempt, RetryPolicy(NO_ANSWER, self._pause_for_answer))
        except GradpostError as error:
            if error.code == "superseded" and (follow := error.facts.get("follow", index)) is not None:
                await self._become_standby(follow, error)
            else:
                log.error("the coordinator refused this pserver", code=error.code, reason=str(error))
                self._exit(1, stop)
            return None
        await self._pserver.adopt_identity(answer)
        log.info("registered", pserver=answer.index, incarnation=answer.incarnation)
        return answer

    async def _become_standby(self, index: PserverIndex, reason: GradpostError) -> None:
        log.info("this process becomes a standby", pserver=index, reason=str(reason))
        await self._pserver.begin_again()
        self._pserver.follower = self._make_follower(index)

    async def _pause_for_folder(self, error: TryAgain) -> None:
        log.error(str(error))
        await asyncio.sleep(RETRY_SECONDS)

    async def _pause_for_answer(self, error: Exception) -> None:
        if isinstance(error, GradpostError) and not error.may_be_retried and not self._may_pass(error):
            raise error
        self._log_wait(error)
        await asyncio.sleep(RETRY_SECONDS)

    def _may_pass(self, error: GradpostError) -> bool:
        """Return whether a refused token may be accepted soon."""
        return isinstance(error, Unauthenticated | Forbidden) and not self._unauthenticated.note_failure()

    def _log_wait(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}".removesuffix(": ") + hint_at_tls(self._coordinator, error)
        if cause != self._logged:
            self._logged = cause
            meanwhile = "" if self._pserver.shown is None else "; training continues without it"
            log.info("waiting for the coordinator" + meanwhile, coordinator=self._coordinator, reason=cause)

    async def _send_heartbeats(self, registered: PserverRegistered, stop: asyncio.Event) -> None:
        """Send heartbeats, three in a lease, until the lease has expired."""
        pserver, path = self._pserver, PSERVER_HEARTBEAT.format(index=registered.index)

        async def send() -> float | None:
            heartbeat = make_heartbeat(pserver)
            try:
                reply = PserverHeartbeatReply.from_answer(await self._post(path, heartbeat))
            except StalePserver as error:
                log.warning("the coordinator does not know this pserver any more", reason=str(error))
                return None
            pserver.handle_heartbeat_reply(reply, heartbeat)
            if reply.stop and self._settings.exit_when_done:
                self._exit(reply.exit_code, stop)
            return registered.lease_seconds

        await self._repeat(send, registered.lease_seconds, stop)

    async def _repeat(
        self, send: Callable[[], Awaitable[float | None]], lease_seconds: float, stop: asyncio.Event
    ) -> None:
        """Call `send` three times in a lease, and when it is due, until it returns None instead of the lease."""
        due = self._pserver.heartbeat_is_due
        while not stop.is_set():
            due.clear()
            try:
                answered = await send()
            except NO_ANSWER as error:
                self._log_wait(error)
                self._exit_if_alone(stop)
            else:
                if answered is None:
                    return
                self._logged, self._alone, lease_seconds = "", None, answered
            follower = self._pserver.follower
            is_lost = follower is not None and follower.lost
            await wait_for_any(LOST_SECONDS if is_lost else heartbeat_period(lease_seconds), stop, due)

    def _exit_if_alone(self, stop: asyncio.Event) -> None:
        """Exit after `patience_seconds` without the coordinator and without progress."""
        run, now = self._pserver.shown, asyncio.get_running_loop().time()
        if run is None or not self._settings.exit_when_done:
            return
        if self._alone is None or self._alone[1] != run.round:
            self._alone = now, run.round
        if now - self._alone[0] > (seconds := run.installed.patience_seconds):
            log.error("the coordinator does not answer and no round is applied; exiting", seconds=seconds)
            self._exit(1, stop)

    def _exit(self, code: int, stop: asyncio.Event) -> None:
        self.exit_code = code
        stop.set()

    async def _leave(self, registered: PserverRegistered | None) -> None:
        """Persist the shard. Heartbeats go on until that is done, and report that this pserver will come back."""
        self._pserver.is_stopping = True
        stopping = asyncio.create_task(self._stop_pserver(), name="stop")
        while registered is not None:
            is_last = stopping.done()
            await self._post_in_the_end(PSERVER_HEARTBEAT.format(index=registered.index), make_heartbeat(self._pserver))
            if is_last:
                break
            await asyncio.wait({stopping}, timeout=heartbeat_period(registered.lease_seconds))
        await stopping

    async def _stop_pserver(self) -> None:
        try:
            await asyncio.wait_for(self._pserver.stop(), LAST_CHECKPOINT_SECONDS)
        except TimeoutError:
            log.error("the last checkpoint was not written in time", seconds=LAST_CHECKPOINT_SECONDS)

    async def _post(self, path: str, message: Message) -> bytes:
        return await send_message(self._http, "POST", self._coordinator + path, message, timeout=TIMEOUT_SECONDS)

    async def _post_in_the_end(self, path: str, message: Message) -> None:
        """Post a message of a process that leaves. Without an answer its lease expires anyway."""
        with contextlib.suppress(*NO_ANSWER, TimeoutError):
            await asyncio.wait_for(self._post(path, message), GOODBYE_SECONDS)

    # ------------------------------------------------------------------ a standby

    async def _follow(self, follower: Follower, stop: asyncio.Event) -> PserverRegistered | None:
        """Follow, and report three times in a lease, at once when the leader is lost, and once more in the end.

        Returns the registration of this process if it is promoted, else None: `stop` is set, or this process leads
        again.
        """
        pserver, leads = self._pserver, False
        following = asyncio.create_task(follower.follow(), name="follow")
        following.add_done_callback(lambda _: follower.report())

        async def send() -> float | None:
            nonlocal leads
            if following.done() or follower.is_released:
                return None
            try:
                report = describe_standby(follower, pserver.address)
                answer = StandbyAnswer.from_answer(await self._post(REPORT_STANDBY, report))
            except GradpostError as error:
                is_refused = isinstance(error, Unauthenticated | Forbidden) and not self._may_pass(error)
                if is_refused or error.code in FINAL_CODES:
                    self._fail(follower, error, stop)
                raise
            self._unauthenticated.reset()
            follower.note_answer(answer)
            if answer.stop and self._settings.exit_when_done:
                self._exit(answer.exit_code, stop)
            leads = await self._may_lead_again(follower, answer)
            return None if leads else answer.lease_seconds

        try:
            await self._repeat(send, 3 * RETRY_SECONDS, stop)
        finally:
            following.cancel()
            await asyncio.wait({following})
        if not following.cancelled() and (error := following.exception()) is not None:
            if not isinstance(error, GradpostError):
                raise error
            self._fail(follower, error, stop)
        await self._post_in_the_end(REPORT_STANDBY, describe_standby(follower, pserver.address, is_stopping=True))
        async with pserver.promoting:  # it may be being promoted
            if follower.is_released:
                return pserver.promoted
            if follower.replica is not None:
                await follower.replica.end(TryAgain("the standby stops"))
            if leads:
                log.warning("the newest folder of a lost pserver is here; it starts again", pserver=follower.index)
                await pserver.begin_again()
                self._index = follower.index
        return None

    def _fail(self, follower: Follower, error: GradpostError, stop: asyncio.Event) -> None:
        log.error("this process cannot follow", pserver=follower.index, code=error.code, reason=str(error))
        self._exit(1, stop)

    async def _may_lead_again(self, follower: Follower, answer: StandbyAnswer) -> bool:
        """Return whether a promoted pserver is lost, no other standby has replaced it, and its folder is here."""
        now = asyncio.get_running_loop().time()
        if answer.leader is not None or not answer.incarnation:
            self._lost_since = None
            return False
        self._lost_since = now if self._lost_since is None else self._lost_since
        is_lost = now - self._lost_since > answer.lease_seconds + FAIL_OVER_SECONDS
        return is_lost and await follower.has_folder_of(answer.incarnation)
