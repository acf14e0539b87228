"""The checkpoints of a run: the rounds after which every pserver publishes its shard, the manifests, and deletions.

A checkpoint is **open** while every pserver has published its shard or is about to. So a slow disk delays the
checkpoints of all pservers, and after a failed write all of them try a later round. Which one is open follows from the
pservers' heartbeats, so that a restarted coordinator continues. A checkpoint is **complete** once its manifest is
written; it is deleted when newer ones suffice. Nothing else deletes in the shared storage.

The result of a run is the checkpoint of its last round, and its summary.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime

from ps_protocol.errors import GradpostError, RunStopped, StaleRound, TryAgain
from ps_protocol.membership import WantCheckpoint
from ps_protocol.messages import RunSummary, ShardFile
from ps_protocol.routes import WANT_CHECKPOINT
from ps_protocol.vocabulary import Round
from services.runtime.checkpoints import MANIFEST, Manifest, list_rounds, round_folder, write_manifest
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger
from services.runtime.storage import CheckpointStorage

from .shell import NO_ANSWER, Shell
from .state.pservers import PserverMember
from .state.run import Run

log = get_logger()

NAMINGS = 8  # attempts with later rounds, when pservers have passed the named one
RETRY_SECONDS = 0.5  # between attempts that fail


class Checkpoints:
    """The checkpoints of the newest run. One task calls `complete` and `advance`, which may wait long."""

    def __init__(self, shell: Shell, place: CheckpointStorage, num_kept: int) -> None:
        self.place = place
        self._shell = shell
        self._cluster = shell.cluster
        self._num_kept = num_kept
        self._of: tuple[str, int] | None = None  # the run and attempt of the next three
        self._requested: Round | None = None  # a checkpoint of this or a later round is requested
        self._named: tuple[Round, float] | None = None  # the newest named round, and when
        self._num_failures = 0  # failed attempts in a row
        self._cleaned: object = None  # the state in which the place was cleaned last

    async def work(self) -> None:
        """Complete checkpoints, and name the next one, after each change. The place may be slow or hang."""
        seen = -1
        while True:
            seen = await self._shell.wait_for_change(seen)
            if await self.complete():
                self._shell.notify()
            await self.advance()

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
            return max(self._cluster.run.record.checkpoints, default=-1)

        def has_ended() -> bool:
            record = self._cluster.run.record
            is_gone = (*record.attempt_id, record.state) != (run.record.name, run.record.attempt, state)
            return is_gone or round_ <= newest() or self._num_failures >= max_failures

        self._shell.changed()
        try:
            await self._shell.wait_until(has_ended, seconds)
        finally:
            self._requested = None
        if not self._cluster.is_current(run) or newest() < round_:
            text = f"no checkpoint of round {round_} or later is complete; see the pservers' logs"
            raise TryAgain(text, complete=list(self._cluster.run.record.checkpoints))
        return newest()

    # ------------------------------------------------------------------ naming

    async def advance(self) -> None:
        """Name the round of the next checkpoint if it is due. Waits for the answers of the pservers."""
        self._reset_if_new_attempt()
        run, members = self._cluster.run, self._find_members()
        if not members:
            return
        newest = max(run.record.checkpoints, default=-1)
        round_ = max(member.round for member in members)
        if self._named is not None and self._named[0] <= newest:
            self._named, self._num_failures = None, 0
        if self._requested is not None and self._requested <= newest:
            self._requested = None  # it is complete; the request may not be answered yet
        is_urgent = self._requested is not None or any(member.heartbeat.is_log_long for member in members)
        known = frozenset.intersection(*(member.known_checkpoints for member in members))
        open_ = max((known_round for known_round in known if known_round > newest), default=None)
        is_writing = any(coming <= member.round for member in members for coming in member.coming_checkpoints)
        if is_writing or (open_ is not None and (open_ <= round_ or not is_urgent)):
            return
        if not is_urgent and (run.record.is_over or not run.checkpoint_interval):
            return
        if self._named is not None:  # it is not complete yet, or failed
            if self._shell.now() < self._named[1] + RETRY_SECONDS:
                return
            self._num_failures += open_ is None
        await self._name(run, members, round_, is_urgent)

    def _reset_if_new_attempt(self) -> None:
        if self._cluster.run.record.attempt_id != self._of:
            self._of = self._cluster.run.record.attempt_id
            self._requested = self._named = None
            self._num_failures = 0

    def _find_members(self) -> list[PserverMember]:
        """Return the pservers if all of them serve the run in training, or finished, else none."""
        run, registry = self._cluster.run, self._cluster.registry
        is_under_way = run.record.state == "training" or self._cluster.is_saving_result
        return list(registry.members.values()) if is_under_way and registry.is_serving(run.record.attempt_id) else []

    async def _name(self, run: Run, members: list[PserverMember], newest: Round, is_urgent: bool) -> None:
        """Name a round that no pserver has passed: the newest if it `is_urgent`, else the next one that is due."""
        ahead, interval, is_over = 0, run.checkpoint_interval, run.record.is_over
        for _ in range(NAMINGS):
            newest += ahead
            round_ = newest if is_urgent else (newest // interval + 1) * interval
            wanted = WantCheckpoint(run=run.record.name, round=round_, is_over=is_over)
            late = [newer for newer in await asyncio.gather(*(self._want(m, wanted) for m in members)) if newer]
            self._named = round_, self._shell.now()
            if not late:
                return  # or a pserver failed
            newest, ahead = max(late), 0 if is_over else max(1, 2 * ahead)

    async def _want(self, member: PserverMember, wanted: WantCheckpoint) -> Round | None:
        """Request a pserver's shard of a checkpoint. Return the newer round if it has passed the wanted one."""
        try:
            await self._shell.call(member, "PUT", WANT_CHECKPOINT, wanted)
        except StaleRound as error:
            return int(error.facts.get("current", wanted.round))
        except NO_ANSWER:
            return None
        # Until the next heartbeat reports it.
        self._cluster.registry = self._cluster.registry.note_progress(member.info, coming=(wanted.round,))
        return None

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
        is_changed = cluster.is_current(before) and cluster.run.record.checkpoints != before.record.checkpoints
        try:
            if is_changed:
                await self._shell.persist()
            await self._clean()
        except GradpostError:
            pass  # it has been logged; nothing is deleted that a restarted coordinator would list
        return is_changed

    def _find_ready(self) -> list[ShardFile] | None:
        """Return the shards of the next checkpoint, if all pservers serve the newest attempt and have published it."""
        run, registry = self._cluster.run, self._cluster.registry
        if run.record.state == "gathering" or not registry.members or not registry.is_serving(run.record.attempt_id):
            return None
        files = [member.heartbeat.published for member in registry.members.values()]
        shards = [file for file in files if file is not None]
        is_ready = len(shards) == len(files) and len({file.round for file in shards}) == 1
        return shards if is_ready and shards[0].round > max(run.record.checkpoints, default=-1) else None

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
        except OSError as error:  # each heartbeat tries it again
            self._shell.note_problem("the manifest of a checkpoint could not be written", error, place=self.place.url)
            return
        self._shell.note_problem("the manifest of a checkpoint could not be written", None, place=self.place.url)
        reach_failpoint("checkpoint.manifest.after")
        cluster.update(run, lambda newest: newest.add_checkpoint(manifest.attempt, manifest.round))

    async def _clean(self) -> None:
        """Delete what is part of no kept checkpoint, whenever that has changed."""
        run, registry = self._cluster.run, self._cluster.registry
        if run.record.plan is None:
            return
        kept, known = run.record.checkpoints, set(run.record.checkpoints)
        if registry.is_serving(run.record.attempt_id):
            # A pserver that has published a later shard reports no earlier one, which therefore stays incomplete.
            published = (member.heartbeat.published for member in registry.members.values())
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


# ---------------------------------------------------------------- the result

RESULT_SECONDS = 60.0  # for a request to wait for the checkpoint of a finished run


class RunResult:
    """The result of the newest run."""

    def __init__(self, shell: Shell, checkpoints: Checkpoints) -> None:
        self._shell = shell
        self._checkpoints = checkpoints
        self._saving: asyncio.Task[None] | None = None
        self._last_summary: RunSummary | None = None

    def save_if_due(self) -> None:
        """Begin to save the result of a run that its trainers have left, unless that is done or under way."""
        run = self._shell.cluster.run
        if run.record.is_deserted and not run.is_result_saved and (self._saving is None or self._saving.done()):
            self._saving = asyncio.create_task(self._save(run), name="save the result")

    async def _save(self, run: Run) -> None:
        """Make a checkpoint of a finished run's last round, and then the summary. Then its pservers may exit."""
        cluster = self._shell.cluster
        try:
            if cluster.is_current(run) and cluster.is_saving_result:
                await self._write_checkpoint(run)
            if warning := (await self._make_summary()).warning:
                log.warning(warning)
            cluster.update(run, lambda newest: replace(newest, saved_at=self._shell.now()))
        finally:
            self._shell.changed()

    def find_summary(self, run: str) -> RunSummary | None:
        """Return the summary of a run that is over; None if it is not made yet, or another run has begun."""
        return self._last_summary if self._last_summary is not None and self._last_summary.run == run else None

    async def _write_checkpoint(self, run: Run) -> None:
        """Make the run's last checkpoint. A pserver that dies meanwhile may return within the rejoin time-out."""
        shell = self._shell
        await shell.read_states()
        if max(shell.cluster.rounds, default=0) == 0:
            return  # the run ended without a round
        try:
            round_ = await self._checkpoints.make(run, run.settings.rejoin_timeout_seconds, math.inf)
        except TryAgain as error:
            log.error("the run's last round has no checkpoint", error=error.detail)
            return
        shell.cluster.update(run, lambda last: last.fail_for_lost_rounds(round_, last.highest_round, shell.now()))

    async def summary(self) -> RunSummary:
        """Return the summary of the run. Once it is over, its result is on the disk when this returns."""
        cluster, run = self._shell.cluster, self._shell.cluster.run
        if run.record.is_deserted:
            await self._shell.wait_until(
                lambda: cluster.run.is_result_saved or not cluster.is_current(run), RESULT_SECONDS
            )
        return await self._make_summary()

    async def _make_summary(self) -> RunSummary:
        run = self._shell.cluster.run
        last = self.find_summary(run.record.name)
        if last is not None and last.state == run.record.state:
            return last
        answers = await self._shell.read_states()
        run = self._shell.cluster.refresh(run)
        states = [state for state in answers if state.run == run.record.name]
        is_ring = run.settings.consistency.is_ring
        rounds = run.highest_round if is_ring else min((state.round for state in states), default=run.highest_round)
        carried = ["ring"] if is_ring else sorted({f"HTTP/{v}" for state in states for v in state.transports})
        end = self._shell.now() if run.ended_at is None else run.ended_at
        results: dict[str, float] = {}
        for _, report in sorted(run.reports.items(), reverse=True):
            results.update(report.heartbeat.results)  # the lowest rank's results win
        summary = RunSummary(
            run=run.record.name,
            state=run.record.state,
            is_stopped=isinstance(run.record.failure, RunStopped),
            mode=run.settings.mode,
            transport="+".join(carried) or "none",
            num_trainers=len(run.record.trainers),
            rounds=rounds,
            earlier_rounds=min(run.first_round or 0, rounds),
            seconds=0.0 if run.started_at is None else max(0.0, end - run.started_at),
            shards=tuple(states),
            results=results,
            warning=run.describe_left_early(rounds),
        )
        if run.record.is_over:
            self._last_summary = summary
        return summary
