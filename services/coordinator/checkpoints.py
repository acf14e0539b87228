"""The checkpoints of a run: the rounds after which every pserver writes its shard, and the manifests.

A checkpoint is **open** while every pserver has written its shard or is about to. So a slow disk delays the
checkpoints of all pservers, and after a failed write all of them try a later round. The schedule depends only on the
pservers' heartbeats, so that a restarted coordinator continues it. A checkpoint is **complete** once its manifest is
written; it is deleted when newer ones suffice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime

import httpx

from ps_protocol.errors import GradpostError, StaleRound
from ps_protocol.messages import ShardFile
from ps_protocol.vocabulary import Round
from services.runtime.checkpoints import (
    MANIFEST,
    Manifest,
    complete_checkpoints,
    delete_manifest,
    is_undone,
    round_folder,
    write_manifest,
)
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger
from services.runtime.storage import CheckpointStorage

from .pserver_calls import read_state, want_checkpoint
from .state.cluster import Cluster
from .state.pservers import PserverMember
from .state.run import Run

log = get_logger()

NAMINGS = 8  # attempts with later rounds, when pservers have passed the named one
RETRY_SECONDS = 0.5  # between attempts that fail


class CheckpointSchedule:
    """The schedule of checkpoints. A round is named if a checkpoint is due or requested, and none is open."""

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
        answers = await asyncio.gather(*(read_state(self._http, member) for member in members), return_exceptions=True)
        self._reset_if_new_attempt()
        for member, answer in zip(members, answers, strict=True):
            if not isinstance(answer, BaseException):
                if self._of == before:
                    self._cluster.registry = self._cluster.registry.note_progress(member.info, answer.round)
            elif not isinstance(answer, GradpostError | httpx.HTTPError | ValueError):  # a proxy's page
                raise answer

    def request(self) -> Round:
        """Request a checkpoint of the next possible round. Returns the earliest round that it can have."""
        self._reset_if_new_attempt()
        self._requested = max(self._cluster.rounds, default=0)
        self._named, self.num_failures = None, 0
        return self._requested

    def withdraw_request(self) -> None:
        """Withdraw the request for a checkpoint."""
        self._requested = None

    def _reset_if_new_attempt(self) -> None:
        if self._cluster.run.record.attempt_id != self._of:
            self._of = self._cluster.run.record.attempt_id
            self._requested = self._named = None
            self.num_failures = 0

    async def advance(self) -> None:
        """Name the round of the next checkpoint if it is due. Waits for the answers of the pservers."""
        self._reset_if_new_attempt()
        cluster, members = self._cluster, self._find_members()
        if not members or not cluster.run.knows_checkpoints:
            return
        newest = max(cluster.run.complete_checkpoints, default=-1)
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
        is_served = run.record.state == "training" and registry.is_serving(run.record.attempt_id)
        return registry.sorted_members if is_served else []

    @staticmethod
    def _find_open(members: list[PserverMember], newest: Round) -> Round | None:
        """Return the round of the open checkpoint, if there is one."""
        rounds = [member.coming_checkpoints.union(member.shards) for member in members]
        shards = [member.shards for member in members]
        later = (round_ for round_ in frozenset.intersection(*rounds) if round_ > newest)
        return max((round_ for round_ in later if not _is_given_up(round_, newest, shards)), default=None)

    async def _name(self, members: list[PserverMember], newest: Round, interval: Round) -> None:
        """Name a round that no pserver has passed: the newest on request, else the next one that is due."""
        run, ahead = self._cluster.run.record.name, 0
        for _ in range(NAMINGS):
            newest += ahead
            round_ = newest if self._requested is not None else (newest // interval + 1) * interval
            wanted = (want_checkpoint(self._http, member, run, round_) for member in members)
            answers = await asyncio.gather(*wanted, return_exceptions=True)
            for member, answer in zip(members, answers, strict=True):
                if answer is None:  # until the next heartbeat reports it
                    self._cluster.registry = self._cluster.registry.note_progress(member.info, coming=(round_,))
                elif not isinstance(answer, GradpostError | httpx.HTTPError | ValueError):  # a proxy's page
                    raise answer
            self._named = round_, self._now()
            late = [int(answer.facts.get("current", round_)) for answer in answers if isinstance(answer, StaleRound)]
            if not late:
                return  # or a pserver failed
            newest, ahead = max(late), max(1, 2 * ahead)


class Manifests:
    """The complete checkpoints of the run: the newest `max_complete`, once all pservers have written their shards."""

    def __init__(self, cluster: Cluster, place: CheckpointStorage, max_complete: int) -> None:
        self._cluster = cluster
        self._place = place
        self._max_complete = max_complete
        self._trouble = ""  # the problem with the place that was logged last

    async def update(self) -> bool:
        """Complete and delete checkpoints. Returns whether that changed anything.

        Only one call may run at a time. It waits for the place, so that run and attempt may change meanwhile.
        """
        cluster, before = self._cluster, self._cluster.run
        if not before.knows_checkpoints and before.record.plan is not None and cluster.registry.num_pservers:
            await self._list_checkpoints()
        while (shards := self._written_shards(before)) is not None:
            newest = max(cluster.run.complete_checkpoints, default=-1)
            ready = max(set(shards[0]).intersection(*shards[1:]), default=-1)
            if ready <= newest or _is_given_up(ready, newest, shards):
                break
            if not await self._complete([written[ready] for written in shards]):
                break
        # A checkpoint may be the target of a rollback that is under way.
        while cluster.is_current(before) and not cluster.run.is_changing:
            if len(cluster.run.complete_checkpoints) <= self._max_complete:
                break
            oldest = cluster.run.complete_checkpoints[-1]
            cluster.run = cluster.run.drop_checkpoint(oldest)
            await self._delete(round_folder(before.record.name, oldest))
        return cluster.is_current(before) and cluster.run.complete_checkpoints != before.complete_checkpoints

    def _written_shards(self, before: Run) -> list[dict[Round, ShardFile]] | None:
        """Return the shards of each pserver; None unless all of them serve the newest attempt of this run."""
        run, registry = self._cluster.run, self._cluster.registry
        if not self._cluster.is_current(before) or run.record.plan is None or run.record.state == "gathering":
            return None
        if not run.knows_checkpoints or not registry.members or not registry.is_serving(run.record.attempt_id):
            return None
        return [member.shards for member in registry.members.values()]

    async def _list_checkpoints(self) -> None:
        """List the checkpoints of the run, and delete those of undone rounds."""
        run = self._cluster.run
        try:
            found = await asyncio.to_thread(_delete_undone, self._place, run.record.name, dict(run.record.began))
        except OSError as error:
            self._log_once(log.warning, "the place of the checkpoints cannot be used", error, place=self._place.url)
            return
        self._trouble = ""
        self._cluster.update(run, lambda newest: newest.list_checkpoints(run.record.attempt, found))

    def _log_once(self, write: Callable[..., object], text: str, error: OSError, **facts: object) -> None:
        """Log a problem with the place once. Each heartbeat tries the place again."""
        if str(error) != self._trouble:
            write(text, error=str(error), **facts)
        self._trouble = str(error)

    async def _delete(self, folder: str) -> None:
        try:
            # The manifest first, so that a partial checkpoint does not count.
            for name in (f"{folder}/{MANIFEST}", folder):
                await asyncio.to_thread(self._place.delete, name)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted", folder=folder, error=str(error))

    async def _complete(self, files: Iterable[ShardFile]) -> bool:
        """Write the manifest of these shards. Returns whether the place accepted it."""
        cluster, run = self._cluster, self._cluster.run
        assert run.record.plan is not None
        shards = tuple(sorted(files, key=lambda file: file.pserver))
        manifest = Manifest(
            run=run.record.name,
            attempt=run.record.attempt,
            round=shards[0].round,
            consistency=run.settings.consistency,
            plan=run.record.plan.as_json,
            aliases={} if run.record.declaration is None else run.record.declaration.aliases,
            shards=shards,
            controls=run.record.membership.newest_controls,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        cluster.is_writing_manifest = True
        try:
            reach_failpoint("checkpoint.manifest")
            await asyncio.to_thread(write_manifest, self._place, manifest)
        except OSError as error:
            self._log_once(log.error, "the manifest of a checkpoint could not be written", error, round=manifest.round)
            return False
        finally:
            cluster.is_writing_manifest = False
        self._trouble = ""
        reach_failpoint("checkpoint.manifest.after")
        cluster.update(run, lambda newest: newest.add_checkpoint(manifest.attempt, manifest.round))
        return True


def _is_given_up(round_: Round, newest: Round, shards: Iterable[Collection[Round]]) -> bool:
    """Return whether a checkpoint is never completed, because a pserver has written a later shard.

    That pserver may delete its earlier shard once there is a complete checkpoint: see `RunStorage.prune_place`.
    `newest` is the round of the newest complete checkpoint, or -1.
    """
    return newest >= 0 and any(max(written, default=-1) > round_ for written in shards)


def _delete_undone(place: CheckpointStorage, run: str, began: Mapping[int, Round | None]) -> list[Round]:
    """Delete the manifests of rounds that a later attempt has undone, and return the other rounds.

    Pservers delete their shards of undone rounds when they roll back.
    """
    rounds = []
    for manifest in complete_checkpoints(place, run):
        if is_undone(manifest.round, manifest.attempt, began):
            delete_manifest(place, manifest)
        else:
            rounds.append(manifest.round)
    return sorted(rounds, reverse=True)
