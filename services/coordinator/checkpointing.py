"""The coordinator names the rounds after which every pserver writes its shard: one checkpoint after another.

A checkpoint is **open** as long as every pserver has written its shard or is about to. So a slow disk makes checkpoints
rarer for all pservers alike, and a pserver that fails to write makes all of them try a later round. Everything that
this rests on is in the heartbeats of the pservers: a coordinator that was restarted goes on from there.
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

NAMINGS = 8  # of later and later rounds at once, when pservers have passed the one that was named
RETRY_SECONDS = 0.5  # between checkpoints that do not come about


class CheckpointSchedule:
    """Names a round when a checkpoint is due, or was asked for, and none is open. Lives on the event loop."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._http = http
        self._now = now
        self._of: tuple[str, int] | None = None  # the run and the attempt that all else is about
        self._requested: Round | None = None  # a checkpoint of this round, or a later one, is to be made at once
        self._named: tuple[Round, float] | None = None  # the newest round that was named, and when
        self.num_failures = 0  # checkpoints in a row that did not come about

    async def refresh_rounds(self) -> None:
        """Learn from the pservers how far they are, as far as they answer: their newest heartbeats may be old."""
        self._reset_if_new_attempt()
        before, members = self._of, self._find_members()
        asked = (call_pserver(self._http, member, "GET", STATE) for member in members)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        self._reset_if_new_attempt()
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, bytes) and self._of == before:
                with suppress(ValueError):  # a proxy's page
                    member.round = max(member.round, PserverState.model_validate_json(answer).round)
            elif isinstance(answer, BaseException) and not isinstance(answer, GradpostError | httpx.HTTPError):
                raise answer

    def request(self) -> Round:
        """Ask for a checkpoint at once, instead of when one is due; returns the round that it is of at least."""
        self._reset_if_new_attempt()
        self._requested = max(self._cluster.rounds, default=0)
        self._named, self.num_failures = None, 0
        return self._requested

    def withdraw_request(self) -> None:
        """End what `ask` has begun."""
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
            self._requested = None  # it is made, and the request may be unanswered yet
        open_ = self._find_open(members, newest)
        is_writing = any(coming <= member.round for member in members for coming in member.coming_checkpoints)
        if is_writing or (open_ is not None and (open_ <= round_ or self._requested is None)):
            return
        plan = cluster.run.plan
        assert plan is not None  # it trains
        interval = cluster.run.defaults.checkpoint_interval(plan)
        if self._requested is None and not interval:
            return
        if self._named is not None:  # it has not come about yet, or will not
            if self._now() < self._named[1] + RETRY_SECONDS:
                return
            self.num_failures += open_ is None
        await self._name(members, round_, interval)

    def _find_members(self) -> list[PserverMember]:
        """Return the pservers, if all of them serve what is being trained."""
        run, registry = self._cluster.run, self._cluster.registry
        members = [member for _, member in sorted(registry.members.items())]
        is_served = all((member.run, member.attempt) == (run.name, run.attempt) for member in members)
        return members if run.state == "training" and registry.is_complete and is_served else []

    @staticmethod
    def _find_open(members: list[PserverMember], newest: Round) -> Round | None:
        """Return the round of the checkpoint that every pserver has written its shard of, or is about to."""
        rounds = [member.coming_checkpoints.union(member.checkpoints) for member in members]
        return max((round_ for round_ in frozenset.intersection(*rounds) if round_ > newest), default=None)

    async def _name(self, members: list[PserverMember], newest: Round, interval: Round) -> None:
        """Name a round that is over on no pserver: the newest if a checkpoint was asked for, else the next one due."""
        run, ahead = self._cluster.run.name, 0
        for _ in range(NAMINGS):
            newest += ahead
            round_ = newest if self._requested is not None else (newest // interval + 1) * interval
            wanted = (want_checkpoint(self._http, member, run, round_) for member in members)
            answers = await asyncio.gather(*wanted, return_exceptions=True)
            for member, answer in zip(members, answers, strict=True):
                if answer is None:  # the next heartbeat says so itself
                    member.coming_checkpoints |= {round_}
                elif not isinstance(answer, GradpostError | httpx.HTTPError | ValueError):  # the last: a proxy's page
                    raise answer
            self._named = round_, self._now()
            late = [int(answer.facts.get("current", round_)) for answer in answers if isinstance(answer, StaleRound)]
            if not late:
                return  # or a pserver cannot now
            newest, ahead = max(late), max(1, 2 * ahead)
