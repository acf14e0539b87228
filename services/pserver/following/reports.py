"""The reports of a standby to the coordinator, which answers with the pserver to follow."""

from __future__ import annotations

import asyncio
import contextlib

import httpx

from ps_config.certificates import hint_at_tls
from ps_config.control_client import send_message
from ps_config.process_meter import measure_process
from ps_config.versions import installed_versions
from ps_protocol.errors import Forbidden, GradpostError, Unauthenticated
from ps_protocol.process_reports import Software
from ps_protocol.retry import Patience, heartbeat_period
from ps_protocol.routes import REPORT_STANDBY
from ps_protocol.standbys import ReportStandby, StandbyAnswer
from ps_protocol.vocabulary import PROTOCOL_VERSION
from services.runtime.logs import get_logger
from services.runtime.security import TOKEN_WAIT_SECONDS

from ..settings import PserverSettings
from ..waits import wait_for_any
from .follower import Follower

log = get_logger()

TIMEOUT_SECONDS = 5.0
RETRY_SECONDS = 0.5
LOST_SECONDS = 0.2  # between reports while there is no leader
GOODBYE_SECONDS = 1.0
FAIL_OVER_SECONDS = 2.0  # after a lease, for standbys that report again

FINAL_CODES = frozenset({"unsupported_protocol", "world_mismatch", "no_pservers"})  # another report would get the same


class Reports:
    """The background task, which ends when `stop` is set, and sets `stop` once the coordinator reports the end.

    It also ends when this process is promoted, since a pserver sends heartbeats, and when it leads again: a promoted
    pserver is lost, no other standby has replaced it, and its folder is here.
    """

    def __init__(self, follower: Follower, settings: PserverSettings, http: httpx.AsyncClient) -> None:
        self.exit_code = 0
        self.leads_again = False
        self._lost_since: float | None = None
        self._follower = follower
        self._settings = settings
        self._http = http
        self._coordinator = settings.coordinator.rstrip("/")

    async def run(self, address: str, stop: asyncio.Event) -> None:
        """Report three times in a lease, at once when the leader is lost, and once more in the end."""
        loop, logged, answered_at, round_ = asyncio.get_running_loop(), "", asyncio.get_running_loop().time(), 0
        period, unauthenticated = RETRY_SECONDS, Patience(TOKEN_WAIT_SECONDS)  # a new token may arrive later here
        follower = self._follower
        while not stop.is_set() and not follower.is_released:
            follower.report_is_due.clear()
            try:
                answer = await self._report(address)
            except (httpx.TransportError, ValueError, GradpostError) as error:
                is_refused = isinstance(error, Unauthenticated | Forbidden) and unauthenticated.note_failure()
                if isinstance(error, GradpostError) and (is_refused or error.code in FINAL_CODES):
                    self.fail(error, stop)
                    break
                text = f"{type(error).__name__}: {error}".removesuffix(": ") + hint_at_tls(self._coordinator, error)
                if text != logged:
                    log.info("waiting for the coordinator", coordinator=self._coordinator, reason=text)
                logged = text
                if (newest := follower.lag.round) != round_:
                    answered_at, round_ = loop.time(), newest
                self._exit_if_alone(loop.time() - answered_at, stop)
            else:
                logged, answered_at, period = "", loop.time(), heartbeat_period(answer.lease_seconds)
                unauthenticated.reset()
                follower.note_answer(answer)
                if answer.stop and self._settings.exit_when_done:
                    self.exit_code = answer.exit_code
                    stop.set()
                elif await self._may_lead_again(answer) and not follower.is_released:
                    log.warning("the newest folder of a lost pserver is here; it starts again", pserver=follower.index)
                    self.leads_again = True
                    stop.set()
            await wait_for_any(LOST_SECONDS if follower.lost else period, stop, follower.report_is_due)
        with contextlib.suppress(httpx.TransportError, ValueError, GradpostError, TimeoutError):
            await asyncio.wait_for(self._report(address, is_stopping=True), GOODBYE_SECONDS)

    async def _may_lead_again(self, answer: StandbyAnswer) -> bool:
        now = asyncio.get_running_loop().time()
        if answer.leader is not None or not answer.incarnation:
            self._lost_since = None
            return False
        self._lost_since = now if self._lost_since is None else self._lost_since
        is_lost = now - self._lost_since > answer.lease_seconds + FAIL_OVER_SECONDS
        return is_lost and await self._follower.has_folder_of(answer.incarnation)

    def fail(self, error: GradpostError, stop: asyncio.Event) -> None:
        """Log an error that ends the process, and end it."""
        log.error("this process cannot follow", pserver=self._follower.index, code=error.code, reason=str(error))
        self.exit_code = 1
        stop.set()

    def _exit_if_alone(self, seconds: float, stop: asyncio.Event) -> None:
        """Exit as pservers do: after the round time-out without the coordinator, and without progress."""
        replica = self._follower.replica
        if self._settings.exit_when_done and replica and seconds > replica.installed.round_timeout_seconds:
            log.error("the coordinator does not answer and no round is applied; exiting", seconds=round(seconds))
            self.exit_code = 1
            stop.set()

    async def _report(self, address: str, *, is_stopping: bool = False) -> StandbyAnswer:
        lag, replica = self._follower.lag, self._follower.replica
        report = ReportStandby(
            protocol=PROTOCOL_VERSION,
            instance=self._follower.instance,
            address=address,
            is_stopping=is_stopping,
            lost=self._follower.lost,
            follows=self._follower.index,
            run=replica.installed.run if replica else None,
            attempt=replica.installed.attempt if replica else 0,
            round=replica.round if replica else 0,
            lag_rounds=lag.rounds,
            lag_bytes=lag.num_bytes,
            lag_seconds=lag.seconds(asyncio.get_running_loop().time()),
            software=Software(**installed_versions()),
            process=measure_process(),
        )
        url = self._coordinator + REPORT_STANDBY
        return StandbyAnswer.from_answer(await send_message(self._http, "POST", url, report, timeout=TIMEOUT_SECONDS))
