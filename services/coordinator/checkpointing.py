"""The schedule of checkpoints: the coordinator names the rounds after which every pserver writes its shard.

A checkpoint is **open** while every pserver has written its shard or is about to. So a slow disk delays the
checkpoints of all pservers, and after a failed write all of them try a later round. The schedule depends only on the
pservers' heartbeats, so that a restarted coordinator continues it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import httpx

from ps_protocol.errors import GradpostError, StaleRound
from ps_protocol.messages import PserverState
from ps_protocol.routes import STATE
from ps_protocol.vocabulary import Round

from .cluster import Cluster
from .control import call_pserver, want_checkpoint
from .pservers import PserverMember

NAMINGS = 8  # attempts with later rounds, when pservers have passed the named one
RETRY_SECONDS = 0.5  # between attempts that fail


class CheckpointSchedule:
    """The rounds of checkpoints: one is named when it is due or requested, and none is open."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._http = http
        self._now = now
        self._of: tuple[str, int] | None = None  # the run and attempt of this state
        self._requested: Round | None = None  # a checkpoint of this or a later round is requested
        self._named: tuple[Round, float] | None = None  # the newest named round, and when
        self.num_failures = 0  # failed attempts in a row

    async def refresh_rounds(self) -> None:
        """Fetch the rounds of the pservers, whose newest heartbeats may be old."""
        self._reset_if_new_attempt()
        before, members = self._of, self._find_members()
        asked = (call_pserver(self._http, member, "GET", STATE) for member in members)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        self._reset_if_new_attempt()
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, bytes) and self._of == before:
                with suppress(ValueError):  # the page of a proxy
                    member.round = max(member.round, PserverState.model_validate_json(answer).round)
            elif isinstance(answer, BaseException) and not isinstance(answer, GradpostError | httpx.HTTPError):
                raise answer

    def request(self) -> Round:
        """Request a checkpoint at once. Returns the earliest round that it can have."""
        self._reset_if_new_attempt()
        self._requested = max(self._cluster.rounds, default=0)
        self._named, self.num_failures = None, 0
        return self._requested

    def withdraw_request(self) -> None:
        """Withdraw the request."""
        self._requested = None

    def _reset_if_new_attempt(self) -> None:
        run = self._cluster.run
        if (run.name, run.attempt) != self._of:
            self._of = run.name, run.attempt
            self._requested = self._named = None
            self.num_failures = 0

    async def advance(self) -> None:
        """Name the next round, if it is time. Takes as long as the pservers take to answer."""
        self._reset_if_new_attempt()
        cluster, members = self._cluster, self._find_members()
        if not members or not cluster.knows_checkpoints:
            return
        newest = max(cluster.complete_checkpoints, default=-1)
        round_ = max(member.round for member in members)
        if self._named is not None and self._named[0] <= newest:
            self._named, self.num_failures = None, 0
        if self._requested is not None and self._requested <= newest:
            self._requested = None  # it is complete; the request may not be answered yet
        open_ = self._find_open(members, newest)
        is_writing = any(coming <= member.round for member in members for coming in member.coming_checkpoints)
        if is_writing or (open_ is not None and (open_ <= round_ or self._requested is None)):
            return
        interval = cluster.run.checkpoint_interval
        if self._requested is None and not interval:
            return
        if self._named is not None:  # it is not complete yet, or failed
            if self._now() < self._named[1] + RETRY_SECONDS:
                return
            self.num_failures += open_ is None
        await self._name(members, round_, interval)

    def _find_members(self) -> list[PserverMember]:
        """Return the pservers if all of them serve the run in training, else none."""
        run, registry = self._cluster.run, self._cluster.registry
        members = [member for _, member in sorted(registry.members.items())]
        is_served = all((member.run, member.attempt) == (run.name, run.attempt) for member in members)
        return members if run.state == "training" and registry.is_complete and is_served else []

    @staticmethod
    def _find_open(members: list[PserverMember], newest: Round) -> Round | None:
        """Return the round of the open checkpoint, if there is one."""
        rounds = [member.coming_checkpoints.union(member.checkpoints) for member in members]
        return max((round_ for round_ in frozenset.intersection(*rounds) if round_ > newest), default=None)

    async def _name(self, members: list[PserverMember], newest: Round, interval: Round) -> None:
        """Name a round that no pserver has passed: the newest if one was requested, else the next that is due."""
        run, ahead = self._cluster.run.name, 0
        for _ in range(NAMINGS):
            newest += ahead
            round_ = newest if self._requested is not None else (newest // interval + 1) * interval
            wanted = (want_checkpoint(self._http, member, run, round_) for member in members)
            answers = await asyncio.gather(*wanted, return_exceptions=True)
            for member, answer in zip(members, answers, strict=True):
                if answer is None:  # until the next heartbeat reports it
                    member.coming_checkpoints |= {round_}
                elif not isinstance(answer, GradpostError | httpx.HTTPError | ValueError):  # a proxy's page
                    raise answer
            self._named = round_, self._now()
            late = [int(answer.facts.get("current", round_)) for answer in answers if isinstance(answer, StaleRound)]
            if not late:
                return  # or a pserver failed
            newest, ahead = max(late), max(1, 2 * ahead)
