"""The checkpoints of a run: the rounds after which every pserver publishes its shard, the manifests, and deletions.

A checkpoint is **open** while every pserver has published its shard or is about to. So a slow disk delays the
checkpoints of all pservers, and after a failed write all of them try a later round. Which one is open follows from the
pservers' heartbeats, so that a restarted coordinator continues. A checkpoint is **complete** once its manifest is
written; it is deleted when newer ones suffice. Nothing else deletes in the shared storage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime

import httpx

from ps_protocol.errors import GradpostError, StaleRound, TryAgain
from ps_protocol.messages import ShardFile
from ps_protocol.vocabulary import Round
from services.runtime.checkpoints import MANIFEST, Manifest, list_rounds, round_folder, write_manifest
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


class Checkpoints:
    """The checkpoints of the newest run. One task at a time calls `complete` and `advance`, which may wait long."""

    def __init__(
        self,
        cluster: Cluster,
        http: httpx.AsyncClient,
        place: CheckpointStorage,
        num_kept: int,
        *,
        now: Callable[[], float],
        persist: Callable[[], Awaitable[None]],
        wait_until: Callable[[Callable[[], bool], float], Awaitable[None]],
    ) -> None:
        self.place = place
        self.wake = asyncio.Event()  # after every change of the cluster
        self._cluster = cluster
        self._http = http
        self._num_kept = num_kept
        self._now = now
        self._persist = persist
        self._wait_until = wait_until
        self._of: tuple[str, int] | None = None  # the run and attempt of the next three
        self._requested: Round | None = None  # a checkpoint of this or a later round is requested
        self._named: tuple[Round, float] | None = None  # the newest named round, and when
        self._num_failures = 0  # failed attempts in a row
        self._trouble = ""  # the problem with the place that was logged last
        self._cleaned: object = None  # the state in which the place was cleaned last

    # ------------------------------------------------------------------ a requested checkpoint

    async def make(self, run: Run, seconds: float, max_failures: float) -> Round:
        """Make a checkpoint of the newest round or a later one, and return its round once it is complete.

        Raises TryAgain after this time or number of failed attempts, and if the run ends or goes back meanwhile.
        """
        self._reset_if_new_attempt()
        state = self._cluster.run.record.state
        self._requested = round_ = max(self._cluster.rounds, default=0)
        self._named, self._num_failures = None, 0

        def newest() -> Round:
            return max(self._cluster.run.complete_checkpoints, default=-1)

        def has_ended() -> bool:
            record = self._cluster.run.record
            is_gone = (*record.attempt_id, record.state) != (run.record.name, run.record.attempt, state)
            return is_gone or round_ <= newest() or self._num_failures >= max_failures

        self.wake.set()
        try:
            await self._wait_until(has_ended, seconds)
        finally:
            self._requested = None
        if not self._cluster.is_current(run) or newest() < round_:
            text = f"no checkpoint of round {round_} or later is complete; see the pservers' logs"
            raise TryAgain(text, complete=list(self._cluster.run.complete_checkpoints))
        return newest()

    async def refresh_rounds(self) -> None:
        """Fetch the rounds of the pservers, whose newest heartbeats may be old."""
        of, members = self._cluster.run.record.attempt_id, self._find_members()
        answers = await asyncio.gather(*(read_state(self._http, member) for member in members), return_exceptions=True)
        for member, answer in zip(members, answers, strict=True):
            if not isinstance(answer, BaseException):
                if self._cluster.run.record.attempt_id == of:
                    self._cluster.registry = self._cluster.registry.note_progress(member.info, answer.round)
            elif not isinstance(answer, GradpostError | httpx.HTTPError | ValueError):  # a proxy's page
                raise answer

    # ------------------------------------------------------------------ naming

    async def advance(self) -> None:
        """Name the round of the next checkpoint if it is due. Waits for the answers of the pservers."""
        self._reset_if_new_attempt()
        run, members = self._cluster.run, self._find_members()
        if not members:
            return
        newest = max(run.complete_checkpoints, default=-1)
        round_ = max(member.round for member in members)
        if self._named is not None and self._named[0] <= newest:
            self._named, self._num_failures = None, 0
        if self._requested is not None and self._requested <= newest:
            self._requested = None  # it is complete; the request may not be answered yet
        known = frozenset.intersection(*(member.known_checkpoints for member in members))
        open_ = max((known_round for known_round in known if known_round > newest), default=None)
        is_writing = any(coming <= member.round for member in members for coming in member.coming_checkpoints)
        if is_writing or (open_ is not None and (open_ <= round_ or self._requested is None)):
            return
        if self._requested is None and (run.record.is_over or not run.checkpoint_interval):
            return
        if self._named is not None:  # it is not complete yet, or failed
            if self._now() < self._named[1] + RETRY_SECONDS:
                return
            self._num_failures += open_ is None
        await self._name(run, members, round_)

    def _reset_if_new_attempt(self) -> None:
        if self._cluster.run.record.attempt_id != self._of:
            self._of = self._cluster.run.record.attempt_id
            self._requested = self._named = None
            self._num_failures = 0

    def _find_members(self) -> list[PserverMember]:
        """Return the pservers if all of them serve the run in training, or finished, else none."""
        run, registry = self._cluster.run, self._cluster.registry
        is_under_way = run.record.state == "training" or self._cluster.is_saving_result
        return registry.sorted_members if is_under_way and registry.is_serving(run.record.attempt_id) else []

    async def _name(self, run: Run, members: list[PserverMember], newest: Round) -> None:
        """Name a round that no pserver has passed: the newest on request, else the next one that is due."""
        ahead, interval, is_over = 0, run.checkpoint_interval, run.record.is_over
        for _ in range(NAMINGS):
            newest += ahead
            round_ = newest if self._requested is not None else (newest // interval + 1) * interval
            wanted = (want_checkpoint(self._http, m, run.record.name, round_, is_over=is_over) for m in members)
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
            newest, ahead = max(late), 0 if is_over else max(1, 2 * ahead)

    # ------------------------------------------------------------------ manifests

    async def complete(self) -> bool:
        """Complete and delete checkpoints. Returns whether that changed anything.

        It waits for the place, so that run and attempt may change meanwhile.
        """
        cluster, before = self._cluster, self._cluster.run
        if (shards := self._find_ready()) is not None:
            await self._write_manifest(shards)
        # A checkpoint may be the target of a rollback that is under way.
        if cluster.is_current(before) and not cluster.run.is_changing:
            cluster.run = cluster.run.drop_checkpoints(self._num_kept)
        is_changed = cluster.is_current(before) and cluster.run.complete_checkpoints != before.complete_checkpoints
        try:
            if is_changed:
                await self._persist()
            await self._clean()
        except GradpostError:
            pass  # it has been logged; nothing is deleted that a restarted coordinator would list
        return is_changed

    def _find_ready(self) -> list[ShardFile] | None:
        """Return the shards of the next checkpoint, if all pservers serve the newest attempt and have published it."""
        run, registry = self._cluster.run, self._cluster.registry
        if run.record.state == "gathering" or not registry.members or not registry.is_serving(run.record.attempt_id):
            return None
        files = [member.heartbeat.published for member in registry.sorted_members]
        shards = [file for file in files if file is not None]
        is_ready = len(shards) == len(files) and len({file.round for file in shards}) == 1
        return shards if is_ready and shards[0].round > max(run.complete_checkpoints, default=-1) else None

    async def _write_manifest(self, shards: list[ShardFile]) -> None:
        cluster, run = self._cluster, self._cluster.run
        assert run.record.plan is not None
        manifest = Manifest(
            run=run.record.name,
            attempt=run.record.attempt,
            round=shards[0].round,
            consistency=run.settings.consistency,
            plan=run.record.plan,
            aliases={} if run.record.declaration is None else run.record.declaration.aliases,
            shards=tuple(shards),
            controls=run.record.membership.newest_controls,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        try:
            reach_failpoint("checkpoint.manifest")
            await asyncio.to_thread(write_manifest, self.place, manifest)
        except OSError as error:
            if str(error) != self._trouble:  # each heartbeat tries it again
                text = "the manifest of a checkpoint could not be written"
                log.error(text, round=manifest.round, place=self.place.url, error=str(error))
            self._trouble = str(error)
            return
        self._trouble = ""
        reach_failpoint("checkpoint.manifest.after")
        cluster.update(run, lambda newest: newest.add_checkpoint(manifest.attempt, manifest.round))

    async def _clean(self) -> None:
        """Delete what is part of no kept checkpoint, whenever that has changed."""
        run, registry = self._cluster.run, self._cluster.registry
        if run.record.plan is None:
            return
        kept, known = run.complete_checkpoints, set(run.complete_checkpoints)
        if registry.is_serving(run.record.attempt_id):
            # A pserver that has published a later shard reports no earlier one, which therefore stays incomplete.
            published = (member.heartbeat.published for member in registry.sorted_members)
            known |= {file.round for file in published if file is not None}
        state = run.record.attempt_id, kept, max(known, default=0)
        if state == self._cleaned:
            return
        self._cleaned = state
        try:
            await asyncio.to_thread(_delete_others, self.place, run.record.name, kept, before=state[2])
        except OSError as error:
            log.warning("old checkpoints could not be deleted", error=str(error))


def _delete_others(place: CheckpointStorage, run: str, kept: Collection[Round], *, before: Round) -> None:
    """Delete all rounds before a round, and all manifests, of checkpoints that are not kept.

    A later round without a manifest may be under way; with one it was undone by a rollback.
    """
    for round_ in list_rounds(place, run):
        if round_ not in kept:
            # The manifest first, so that a partial checkpoint does not count.
            place.delete(f"{round_folder(run, round_)}/{MANIFEST}")
            if round_ < before:
                place.delete(round_folder(run, round_))
