"""A trainer's requests to the coordinator: join the run, declare the model, heartbeats, leave."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from ps_config.certificates import hint_at_tls
from ps_config.control_client import GatewayPage, raise_for_problem
from ps_config.hosts import is_loopback
from ps_config.process_meter import installed_software, measure_process
from ps_protocol.errors import GradpostError, Unreachable, error_from_problem
from ps_protocol.fields import Message
from ps_protocol.messages import (
    DeclareModel,
    JoinTrainer,
    Leave,
    PlanReady,
    RunSummary,
    TrainerHeartbeat,
    TrainerHeartbeatReply,
    TrainerJoined,
)
from ps_protocol.retry import Patience, choose_pause, heartbeat_period
from ps_protocol.routes import (
    DECLARE_MODEL,
    JOIN_TRAINER,
    LEAVE,
    PLAN,
    SUMMARY,
    TRAINER_HEARTBEAT,
)
from ps_protocol.vocabulary import PROTOCOL_VERSION

from ..transport.work import Signal
from .news import Attempt
from .place import TrainerPlace, make_log
from .settings import TrainerSettings

RETRY_SECONDS = 0.1
JOIN_SECONDS = 10.0  # for a coordinator that starts on this machine beside the script
PLAN_WAIT_SECONDS = 5.0
LAST_HEARTBEAT_SECONDS = 5.0


class CoordinatorClient(TrainerPlace):
    """The place of a trainer that a coordinator knows by heartbeats, which a thread sends. Methods block for it."""

    def __init__(self, settings: TrainerSettings, http: httpx.Client) -> None:
        super().__init__(settings)
        self._http = http
        self._coordinator = settings.coordinator.rstrip("/")
        self._heartbeats: threading.Thread | None = None
        self._is_leaving = False
        self._leaving = Signal()
        self._logged: dict[str, str] = {}  # the last line about each topic

    # ------------------------------------------------------------------ joining

    def join(self, metrics_address: str | None) -> TrainerJoined:
        """Join the run, retrying until the coordinator answers and a run can be joined.

        A rank that a living trainer holds is tried for a quarter of `retry_seconds`.
        """
        request = JoinTrainer(
            protocol=PROTOCOL_VERSION,
            instance=secrets.token_hex(16),
            rank=self._settings.rank,
            world_size=self._settings.world_size,
            expects=self._settings.expect,
            metrics_address=metrics_address,
        )
        answer = self._request_with_retry("POST", JOIN_TRAINER, request)
        self.joined = TrainerJoined.from_answer(answer)
        self.log = make_log(run=self.joined.run, trainer=self.joined.rank)
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="gradpost heartbeats", daemon=True)
        self._heartbeats.start()
        return self.joined

    def declare(self, message: DeclareModel) -> PlanReady:
        """Declare the model, and wait until all trainers have and the pservers have the plan."""
        self._request_with_retry("POST", DECLARE_MODEL.format(rank=self.joined.rank), message)
        query = {
            "rank": self.joined.rank,
            "run": self.joined.run,
            "incarnation": self.joined.incarnation,
            "wait_seconds": PLAN_WAIT_SECONDS,
        }
        ready = PlanReady.from_answer(self._request_with_retry("GET", PLAN, params=query))
        base_round = ready.start - 1
        self.adopt_round(base_round)
        attempt = Attempt(ready.attempt, base_round, None if base_round else ready.uploader)
        self.news.attempt = self.news.newest_attempt = attempt
        return ready

    def leave(self, outcome: str, reason: str = "", code: str | None = None) -> None:
        """Report the end of this trainer, for up to `retry_seconds`; after a failure once, since the lease ends.

        Leaving in the middle of a round counts as failed, because only some pservers may have counted this trainer.
        """
        if outcome == "done" and self.counted_round > self.round:
            outcome, reason, code = "failed", f"it left in the middle of round {self.counted_round}", None
        if self._heartbeats is None:
            return
        self.stop_heartbeats()
        self._heartbeats.join(LAST_HEARTBEAT_SECONDS)
        self._heartbeats = None
        message = Leave(
            run=self.joined.run,
            incarnation=self.joined.incarnation,
            outcome="done" if outcome == "done" else "failed",
            round=self.round,
            attempt=self.news.attempt.number,
            reason=reason[:2000],
            code=code,
        )
        # The others wait for a trainer that does not report its end, and its loss may end their run.
        send = self._request_with_retry if outcome == "done" else self._request
        try:
            send("POST", LEAVE.format(rank=self.joined.rank), message)
        except Unreachable as error:
            text = "the coordinator was not notified that this trainer is done, and counts it as lost"
            self.log.error(f"{text}: {error}")
        except (httpx.TransportError, GradpostError):
            pass  # the run is over, or continues without it

    # ------------------------------------------------------------------ heartbeats

    def stop_heartbeats(self) -> None:
        """Let one more heartbeat be the last, which carries what was reported since the one before. Does not block."""
        self._is_leaving = True
        self._leaving.set()
        self.news.request_heartbeat()

    def _send_heartbeat(self) -> bytes:
        """Send a heartbeat, and return the answer. Without one, the next heartbeat has its means, too."""
        with self._means_lock:
            means, self._means = self._means, {}
        # Without pservers there is a ring, whose traffic is that of torch.distributed.
        sent = sum(pserver.sent_bytes for pserver in self.pservers) if self.pservers else None
        received = sum(pserver.received_bytes for pserver in self.pservers) if self.pservers else None
        waiting_since = self._waiting_since
        message = TrainerHeartbeat(
            means=means,
            run=self.joined.run,
            incarnation=self.joined.incarnation,
            round=self.round,
            attempt=self.news.attempt.number,
            results=dict(self.results),
            unreachable=self.news.unreachable(),
            ahead_of=self.news.ahead_of.copy(),
            software=installed_software(),
            script=self.script,
            process=measure_process(sent_bytes=sent, received_bytes=received),
            waiting_seconds=0.0 if waiting_since is None else time.monotonic() - waiting_since,
            is_done=self.is_done,
        )
        try:
            answer = self._request("POST", TRAINER_HEARTBEAT.format(rank=self.joined.rank), message)
        except BaseException:
            self._add_means(means)
            raise
        return answer

    def _send_heartbeats(self) -> None:
        period = heartbeat_period(self.joined.lease_seconds)
        is_last = False
        while self.news.failure is None and not is_last:
            self.news.wait_until_heartbeat_is_due(period, self._leaving)
            is_last = self._is_leaving
            try:
                reply = TrainerHeartbeatReply.from_answer(self._send_heartbeat())
            except (httpx.TransportError, ValueError) as error:  # the latter: a proxy's page, say
                # Training continues without the coordinator.
                cause = error if isinstance(error, GatewayPage) else type(error).__name__
                self._log_once(
                    "heartbeats", f"the coordinator at {self._coordinator} did not answer a heartbeat: {cause}"
                )
            except GradpostError as error:
                if error.status >= 500 or error.may_be_retried:  # the answer says nothing about the run
                    self._log_once("heartbeats", f"the coordinator at {self._coordinator} refused a heartbeat: {error}")
                else:
                    self.news.fail(error)
            else:
                self._adopt_reply(reply)

    def _adopt_reply(self, reply: TrainerHeartbeatReply) -> None:
        self._logged.pop("heartbeats", None)
        self._log_once("notice", reply.notice)
        pages = self.news.pages.copy().items()
        self._log_once("pages", "; ".join(f"pserver {index}: {page}" for index, page in pages))
        self.news.update(reply)
        if reply.failure is not None:
            self.news.fail(error_from_problem(reply.failure))

    # ------------------------------------------------------------------ inspection

    def summary(self) -> RunSummary:
        """Send the newest reported numbers, and return the results of the run."""
        if self._heartbeats is not None:
            with contextlib.suppress(httpx.TransportError, GradpostError):
                self._send_heartbeat()
        return RunSummary.from_answer(self._request_with_retry("GET", SUMMARY))

    # ------------------------------------------------------------------ requests

    def _request_with_retry(
        self,
        method: str,
        path: str,
        message: Message | None = None,
        params: dict[str, Any] | None = None,
    ) -> bytes:
        """Repeat a request until the coordinator answers it, and log what the trainer waits for.

        A coordinator without an answer is tried for the seconds of `_choose_patience`, a taken rank for a quarter of
        `retry_seconds`. An answer that the cluster waits for other processes is repeated without a limit.
        """
        silent_since, refusals = time.monotonic(), Patience(self._settings.retry_seconds / 4)
        refusals.start()
        while True:
            try:
                return self._request(method, path, message, params)
            except httpx.TransportError as error:
                seconds = self._choose_patience(error, path)
                self._log_silence(error, path, seconds, is_final=time.monotonic() >= silent_since + seconds)
                time.sleep(RETRY_SECONDS)
            except GradpostError as error:
                silent_since = time.monotonic()
                if error.status == 503:  # other processes are on their way
                    refusals.reset()
                if not error.may_be_retried or refusals.note_failure():
                    raise
                self._log_once("waiting", f"waiting: {error.detail}")
                time.sleep(choose_pause(error, RETRY_SECONDS))

    def _choose_patience(self, error: Exception, path: str) -> float:
        """Return the seconds for which a coordinator without an answer is tried.

        They are few before the trainer has joined, unless `retry_seconds` is set, if nothing listens on this machine or
        there is no host of this name: the address is wrong then, or no cluster was started.
        """
        given, host = self._settings.retry_seconds, urlsplit(self._coordinator).hostname or ""
        is_absent = isinstance(error, httpx.ConnectError) and (is_loopback(host) or _is_caused(error, socket.gaierror))
        is_first = path == JOIN_TRAINER and "retry_seconds" not in self._settings.model_fields_set
        return min(given, JOIN_SECONDS) if is_first and is_absent else given

    def _log_silence(self, error: Exception, path: str, seconds: float, *, is_final: bool) -> None:
        """Log an error without an answer. Raises Unreachable if it is final, or a certificate that is not trusted."""
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        if path == JOIN_TRAINER and _is_caused(error, ssl.SSLCertVerificationError):  # waiting longer changes nothing
            raise Unreachable(
                f"the certificate of the coordinator at {self._coordinator} is not trusted ({cause}): set "
                "GRADPOST_TLS_CA to the authority that signed it, and GRADPOST_COORDINATOR to a name in it"
            ) from error
        self._log_once("waiting", f"waiting for the coordinator at {self._coordinator} ({cause})")
        if is_final:
            raise Unreachable(
                f"the coordinator at {self._coordinator} did not answer for {seconds:g} s ({cause}). Check its address "
                "in GRADPOST_COORDINATOR, and whether it runs; a cluster on this machine starts with: gradpost up -- "
                "python train.py, or with torchrun: gradpost up --trainers 1 -- torchrun --standalone …"
                f"{hint_at_tls(self._coordinator, error)}"
            ) from error

    def _log_once(self, topic: str, line: str) -> None:
        if line != self._logged.get(topic):
            self._logged[topic] = line
            if line:
                self.log.info(line)

    def _request(
        self, method: str, path: str, message: Message | None = None, params: dict[str, Any] | None = None
    ) -> bytes:
        response = self._http.request(
            method,
            self._coordinator + path,
            params=params,
            content=None if message is None else message.model_dump_json(),
            headers={"content-type": "application/json"},
        )
        raise_for_problem(response)
        return response.content


def _is_caused(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Return whether an error of this kind is the cause of an error."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None
