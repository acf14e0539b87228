"""The fail-over: a standby takes the place of a pserver that does not answer any more.

    suspect ──► probe ──no answer──► persist the suspicion ──► fence a standby ──► register it, persist ──► promote it
            ──► freeze the pservers, decide, install, as after any restart (reconcile.py)

A pserver is suspected by its standbys and by a restarted process of it (here), by trainers, supervisors and its own
heartbeats (process.py), at the end of its lease (coordinator.py), and if it does not answer (reconcile.py).
No probe is made if its process has ended, if it stops or stalls, or if its lease is over. There is one task for each
shard. While it replaces the pserver, no change of members begins.

A member of the in-sync set replaces the pserver, which may be alive: without the confirmations of that standby it
acknowledges nothing. Without a member, as with another durability than `replicated`, the run waits for the restart.

Every step may be repeated. After a restart of the coordinator a standby that was fenced or chosen reports again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from functools import partial
from typing import Any

import httpx

from ps_config.control_client import send_message
from ps_protocol.errors import GradpostError, TryAgain
from ps_protocol.membership import PserverRegistered, RegisterPserver, RequiredStandbys
from ps_protocol.messages import PserverHeartbeat, PserverState
from ps_protocol.retry import RetryPolicy, request_with_retry
from ps_protocol.routes import FENCE_STANDBY, PROMOTE_STANDBY, STATE
from ps_protocol.standbys import FenceStandby, ReportStandby, SeenStandbys
from ps_protocol.vocabulary import Incarnation, PserverIndex
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger

from .shell import NO_ANSWER, Shell
from .state.joining import check_protocol
from .state.pservers import PserverMember, Standby
from .state.replicas import Replica, Replicas, choose_leader, judge_registration

log = get_logger()

PROBE_SECONDS = 0.4
NUM_PROBES = 2  # a pause of 0.4 s is no death, and the pserver may have closed the connection that the first one uses
REQUEST_SECONDS = 2.0  # for a standby that is fenced or promoted
RETRY_SECONDS = 0.1


class FailOver:
    """The tasks that promote standbys, and the in-sync sets that pservers wait for."""

    def __init__(self, shell: Shell) -> None:
        self.has_ended = False  # set at the end of each fail-over, and cleared by its reader
        self._shell = shell
        self._cluster = shell.cluster
        self._tasks: dict[PserverIndex, asyncio.Task[None]] = {}
        self._replacing: set[PserverIndex] = set()
        self._ended: set[Replica] = set()  # processes that are known to have ended

    @property
    def is_replacing(self) -> bool:
        """True while a standby is being promoted, so that no change of members can be completed."""
        return bool(self._replacing) and self._cluster.serves_run

    # ------------------------------------------------------------------ the in-sync set

    async def note_heartbeat(self, index: PserverIndex, message: PserverHeartbeat) -> RequiredStandbys:
        """Change the in-sync set as the heartbeat of a pserver says, persist it, and return the standbys to wait for.

        Raises TryAgain or StorageFailed if it cannot be written.
        """
        cluster, run, seen = self._cluster, self._cluster.run, message.standbys
        if seen and (message.run, message.attempt) == run.record.attempt_id:
            cluster.registry = cluster.registry.change_replicas(
                index, lambda replicas: self._note_standbys(replicas, index, seen)
            )
        if cluster.registry.replicas[index] != cluster.persisted.get(index):
            await self._shell.persist()
        return cluster.find_required(index, message.incarnation) or RequiredStandbys()  # else the sender is outdated

    def _note_standbys(self, replicas: Replicas, index: PserverIndex, seen: SeenStandbys) -> Replicas:
        joining = self._cluster.registry.find_successors(index).keys() & seen.connected
        continues = self._cluster.run.settings.replica_loss == "continue"
        return replicas.note_report(seen.number, seen.connected, seen.caught_up, joining, continues=continues)

    def note_standby(self, report: ReportStandby) -> None:
        """Act on the report of a standby: it has lost its pserver, or was chosen to replace it."""
        index = report.follows
        if report.is_stopping:
            return
        self._ended.discard(report.instance)
        member = self._cluster.registry.known.get(index)
        if member is not None and member.record.instance == report.instance and member.is_unaware:
            self._start(index, self._promote(member))
        elif report.lost:
            self.suspect(index, report.lost)

    def check_registration(self, request: RegisterPserver) -> None:
        """Raise TryAgain for a restarted pserver without updates that a standby, or a lost successor, may hold.

        Raises BadInput (`unsupported_protocol`) for a process of another version.
        """
        check_protocol(request.protocol)
        self._ended.discard(request.instance)
        cluster, index = self._cluster, request.index
        if index is None or not cluster.serves_run:
            return
        lost = cluster.registry.known.get(index)
        if lost is not None and lost.is_lost and self._is_awaited(lost, request):
            text = f"the newest incarnation of pserver {index} was at {lost.info.address}"
            raise TryAgain(f"{text}; this process has an older state and waits for it")
        if index in cluster.registry.replicas and cluster.run.record.state != "gathering":
            self._check_members(index, request)

    def _check_members(self, index: PserverIndex, request: RegisterPserver) -> None:
        """Raise TryAgain if a member of the in-sync set, or a successor, may hold later updates than a process."""
        cluster, run, held = self._cluster, self._cluster.run, request.held
        replicas, members = cluster.registry.replicas[index], self._list_members(index)
        member = cluster.registry.find(index, replicas.incarnation)
        is_own = request.previous == replicas.incarnation  # the process before was the leader in force
        successor = member.record if member is not None and member.is_unaware and not is_own else None
        # After a power failure the logs of members may be longer, and the newest heartbeat of the leader may be older.
        known = [run.newest_received, *(standby.report.round for standby in members)]
        if member is not None and member.attempt_id == run.record.attempt_id:
            known.append(member.round)
        silent = replicas.in_sync - cluster.registry.find_successors(index).keys()
        if successor is not None:
            known.append(successor.restored or 0)
            silent |= {successor.instance}
        is_whole = held is not None and (held.run, held.attempt) == run.record.attempt_id and not held.rounds.is_short
        until_reports = cluster.lease_seconds if member and member.is_restored else 0.0
        patience = run.settings.rejoin_timeout_seconds / 2
        role = judge_registration(
            held.rounds.applied if held is not None and is_whole else None,
            max(known),
            has_member=bool(members),
            silent_seconds=self._shell.now() - member.seen_at if member and silent - self._ended else math.inf,
            limits=(patience if held is not None and held.has_rebooted else until_reports, patience),
        )
        if role == "waits":
            text = f"a standby in sync with pserver {index} does not report"
            raise TryAgain(f"{text}, and may hold updates that this process does not have")
        if role == "follows":
            if is_own and member is not None:
                self._ended.add(member.record.instance)
            self.suspect(index, replicas.incarnation)
            text = f"pserver {index} may be alive; if it is not, its standby replaces it, and this process follows then"
            raise TryAgain(f"{text}: it does not hold all updates that the standby has received")

    def _list_members(self, index: PserverIndex) -> list[Standby]:
        """Return the living standbys in sync that hold the current attempt, the one with the newest round first."""
        attempt_id, in_sync = self._cluster.run.record.attempt_id, self._cluster.registry.replicas[index].in_sync
        members = [standby for key, standby in self._cluster.registry.find_successors(index).items() if key in in_sync]
        current = [one for one in members if (one.report.run, one.report.attempt) == attempt_id]
        return sorted(current, key=lambda standby: standby.report.round, reverse=True)

    def _is_awaited(self, lost: PserverMember, request: RegisterPserver) -> bool:
        """Return whether a process must wait, because a lost pserver with its index may return with later updates."""
        is_older = request.previous < lost.record.promoted_at and (request.previous > 0 or request.held is not None)
        # One that was lost before it had the run has acknowledged nothing.
        has_run = request.previous < self._cluster.run.holders.get(lost.info.index, 0)
        limit = self._cluster.run.settings.rejoin_timeout_seconds / 2  # then the run goes back
        return is_older and has_run and self._shell.now() - lost.seen_at < limit

    @property
    def is_settled(self) -> bool:
        """True unless a pserver of the run is suspected, or its next incarnation does not hold the run yet."""
        known, holders = self._cluster.registry.known, self._cluster.run.holders
        has_left = any(member.info.incarnation != holders.get(index) for index, member in known.items())
        return not self._may_replace() or not (self._tasks or has_left)

    # ------------------------------------------------------------------ suspicion

    def suspect(self, index: PserverIndex, incarnation: Incarnation) -> None:
        """Probe a pserver in a task, and replace it if it does not answer, unless it has another incarnation now."""
        if not self._is_to_be_replaced(index, incarnation) or not self._cluster.registry.replicas[index].in_sync:
            return  # without a standby in sync it returns, or the run fails
        self._start(index, self._replace_if_silent(index, incarnation))

    def suspect_ended(self, index: PserverIndex, address: str) -> None:
        """Replace the pserver at an address, whose process has ended; or forget the standby there."""
        for instance, standby in self._cluster.registry.standbys.items():
            if standby.report.address == address:
                self._ended.add(instance)
        self._cluster.registry = self._cluster.registry.drop_standby(address)
        member = self._cluster.registry.known.get(index)
        if member is not None and member.info.address == address:
            self._ended.add(member.record.instance)
            self.suspect(index, member.info.incarnation)

    def suspect_lost(self) -> None:
        """Suspect pservers with an expired lease, and those that were fenced before the coordinator restarted."""
        registry = self._cluster.registry
        fenced = (index for index, replicas in registry.replicas.items() if replicas.is_suspected)
        for index in {*registry.known.keys() - registry.members.keys(), *fenced}:
            self.suspect(index, registry.incarnations[index])

    def _may_replace(self) -> bool:
        cluster = self._cluster
        return cluster.serves_run and cluster.run.record.state != "gathering" and cluster.resume_at is None

    def _start(self, index: PserverIndex, work: Coroutine[Any, Any, None]) -> None:
        if index in self._tasks:
            work.close()
            return
        self._tasks[index] = asyncio.create_task(work, name=f"fail-over of pserver {index}")
        self._tasks[index].add_done_callback(partial(self._finish, index))

    def _finish(self, index: PserverIndex, task: asyncio.Task[None]) -> None:
        del self._tasks[index]
        if index in self._replacing:
            self._replacing.discard(index)
            self.has_ended = True
        if not task.cancelled():
            if (error := task.exception()) is not None:
                log.error("a fail-over has failed", pserver=index, error=repr(error))
            self._shell.changed()

    def close(self) -> None:
        """Cancel the tasks. The next process of the coordinator repeats what they have not completed."""
        for task in self._tasks.values():
            task.cancel()

    async def _probe(self, member: PserverMember) -> bool:
        """Return whether a pserver answers with its incarnation."""
        for _ in range(NUM_PROBES):
            try:
                body = await self._shell.call(member, "GET", STATE, timeout=PROBE_SECONDS)
                return PserverState.from_answer(body).incarnation == member.info.incarnation
            except (httpx.ConnectError, ValueError):
                return False
            except httpx.HTTPError:
                continue
            except GradpostError:
                return True  # it refuses or is busy, but lives
        return False

    # ------------------------------------------------------------------ the replacement

    async def _replace_if_silent(self, index: PserverIndex, incarnation: Incarnation) -> None:
        registry = self._cluster.registry
        member = registry.find(index, incarnation)
        if member is None:
            return
        has_ended = member.record.instance in self._ended or member.is_lost
        is_certain = has_ended or member.heartbeat.is_stopping or member.heartbeat.is_stalled
        is_certain |= registry.replicas[index].is_suspected
        if not is_certain and await self._probe(member):
            return
        if not self._is_to_be_replaced(index, incarnation):
            return
        news = "a pserver stops, stalls, has ended or is silent; a standby replaces it"
        log.warning(news, pserver=index, incarnation=incarnation)
        self._replacing.add(index)
        self._cluster.registry = self._cluster.registry.change_replicas(index, Replicas.suspect)
        await self._persist_patiently()
        reach_failpoint("fence.before")
        while self._is_to_be_replaced(index, incarnation):
            candidates = self._list_members(index)
            # A standby that was cut off before its promotion reports again.
            if not candidates and member.record.instance in self._cluster.registry.standbys:
                await self._promote(member)
                return
            for standby in candidates:
                request = await self._fence(standby, index, incarnation)
                if request is not None and self._is_to_be_replaced(index, incarnation):
                    await self._register(request)
                    return
            await asyncio.sleep(RETRY_SECONDS)  # the pserver may register again meanwhile

    def _is_to_be_replaced(self, index: PserverIndex, incarnation: Incarnation) -> bool:
        return self._may_replace() and self._cluster.registry.find(index, incarnation) is not None

    async def _fence(self, standby: Standby, index: PserverIndex, incarnation: Incarnation) -> RegisterPserver | None:
        """Fence a standby. Return its registration if it may lead, else None."""
        name, attempt = self._cluster.run.record.attempt_id
        message = FenceStandby(run=name, attempt=attempt, incarnation=incarnation)
        url = standby.report.address + FENCE_STANDBY
        try:
            body = await send_message(self._shell.http, "PUT", url, message, timeout=REQUEST_SECONDS)
            request = RegisterPserver.from_answer(body)
        except NO_ANSWER as error:
            log.warning("a standby cannot replace its pserver", pserver=index, address=url, error=repr(error))
            return None
        held = request.held
        is_expected = request.instance == standby.report.instance and request.index == index
        if not is_expected or held is None or (held.run, held.attempt) != self._cluster.run.record.attempt_id:
            return None
        chosen = choose_leader(self._cluster.registry.replicas[index], {request.instance: held.rounds.applied})
        return request.model_copy(update={"previous": incarnation}) if chosen == request.instance else None

    async def _register(self, request: RegisterPserver) -> None:
        reach_failpoint("promote.before")
        answer = self._cluster.register_pserver(request, self._shell.now(), is_standby=True)
        member = self._cluster.registry.members[answer.index]
        self._shell.interrupt(answer.index)
        self._shell.changed()
        await self._persist_patiently()
        reach_failpoint("promote.after")
        await self._promote(member)

    async def _promote(self, member: PserverMember) -> None:
        """Promote a standby that is registered, until it answers, or another process must take its place."""
        index, incarnation = member.info.index, member.info.incarnation
        answer = PserverRegistered(index=index, incarnation=incarnation, lease_seconds=self._cluster.lease_seconds)
        self._replacing.add(index)
        url = member.info.address + PROMOTE_STANDBY
        while self._is_to_be_promoted(index, incarnation):
            try:
                await send_message(self._shell.http, "PUT", url, answer, timeout=REQUEST_SECONDS)
            except NO_ANSWER as error:
                log.warning("a standby was not promoted", pserver=index, address=url, error=repr(error))
                if self._list_members(index):
                    await self._replace_if_silent(index, incarnation)
                    return
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._cluster.registry = self._cluster.registry.drop_standby(member.info.address)
                log.info("a standby was promoted", pserver=index, incarnation=incarnation)
                return

    def _is_to_be_promoted(self, index: PserverIndex, incarnation: Incarnation) -> bool:
        """Return whether a registered standby is alive, and may not know of its promotion."""
        member = self._cluster.registry.find(index, incarnation)
        if member is None or not member.is_unaware or not self._cluster.serves_run:
            return False
        return not member.is_lost or member.record.instance in self._cluster.registry.standbys

    async def _persist_patiently(self) -> None:
        """Persist the state. Raises StorageFailed after the round time-out."""
        await request_with_retry(self._shell.persist, RetryPolicy((TryAgain,), lambda _: asyncio.sleep(RETRY_SECONDS)))
