"""The manifests of checkpoints: written when all shards are there, deleted when newer ones suffice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

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

from .cluster import Cluster

log = get_logger()


class Manifests:
    """The complete checkpoints of the run: the newest `max_complete`, once all pservers have written their shards."""

    def __init__(self, cluster: Cluster, place: CheckpointStorage, max_complete: int) -> None:
        self._cluster = cluster
        self._place = place
        self._max_complete = max_complete
        self._trouble = ""  # the problem with the place that was logged last

    async def update(self) -> bool:
        """Complete and delete checkpoints. Returns whether that changed anything.

        One call at a time. It takes as long as the place does, so that run and attempt may change meanwhile.
        """
        cluster, before = self._cluster, list(self._cluster.complete_checkpoints)
        if not cluster.knows_checkpoints and cluster.run.plan is not None and cluster.registry.num_pservers:
            await self._list_checkpoints()
        while cluster.knows_checkpoints and (shards := self._written_shards()) is not None:
            newest = max(cluster.complete_checkpoints, default=-1)
            ready = max(set(shards[0]).intersection(*shards[1:]), default=-1)
            # A pserver that has written later shards may delete this one: see `RunStorage.prune_place`.
            is_given_up = newest >= 0 and any(max(one, default=-1) > ready for one in shards)
            if ready <= newest or is_given_up or not await self._complete([one[ready] for one in shards]):
                break
        # A checkpoint may be the target of a rollback that is under way.
        while len(cluster.complete_checkpoints) > self._max_complete and not cluster.run.is_changing:
            await self._delete(round_folder(cluster.run.name, cluster.complete_checkpoints.pop()))
        return cluster.complete_checkpoints != before

    def _written_shards(self) -> list[dict[Round, ShardFile]] | None:
        """Return the shards of each pserver; None unless all of them serve the newest attempt."""
        run, members = self._cluster.run, self._cluster.registry.members.values()
        if run.plan is None or run.state == "gathering" or not members or len(members) < run.plan.num_pservers:
            return None
        if any((member.run, member.attempt) != (run.name, run.attempt) for member in members):
            return None
        return [member.checkpoints for member in members]

    async def _list_checkpoints(self) -> None:
        """List the checkpoints of the run, and delete those of undone rounds."""
        cluster, run = self._cluster, self._cluster.run
        attempt = run.attempt
        try:
            found = await asyncio.to_thread(_delete_undone, self._place, run.name, dict(run.began))
        except OSError as error:
            self._log_once(log.warning, "the place of the checkpoints cannot be used", error, place=self._place.url)
            return
        self._trouble = ""
        if cluster.run is run and run.attempt == attempt:
            cluster.complete_checkpoints[:] = found
            cluster.checkpoints_known_for = run.name, attempt

    def _log_once(self, write: Callable[..., object], text: str, error: OSError, **facts: object) -> None:
        """Log a problem with the place once. It is tried again with each heartbeat."""
        if str(error) != self._trouble:
            write(text, error=str(error), **facts)
        self._trouble = str(error)

    async def _delete(self, folder: str) -> None:
        try:
            for name in (
                f"{folder}/{MANIFEST}",
                folder,
            ):  # the manifest first, so that a partial checkpoint does not count
                await asyncio.to_thread(self._place.delete, name)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted", folder=folder, error=str(error))

    async def _complete(self, files: Iterable[ShardFile]) -> bool:
        """Write the manifest of these shards. Returns whether the place accepted it."""
        cluster, run = self._cluster, self._cluster.run
        assert run.plan is not None
        shards = tuple(sorted(files, key=lambda file: file.pserver))
        manifest = Manifest(
            run=run.name,
            attempt=run.attempt,
            round=shards[0].round,
            consistency=run.settings.consistency,
            plan=run.plan.as_json,
            aliases={} if run.declaration is None else run.declaration.aliases,
            shards=shards,
            controls=run.membership.newest_controls,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        cluster.is_completing = True
        try:
            reach_failpoint("checkpoint.manifest")
            await asyncio.to_thread(write_manifest, self._place, manifest)
        except OSError as error:
            self._log_once(log.error, "the manifest of a checkpoint could not be written", error, round=manifest.round)
            return False
        finally:
            cluster.is_completing = False
        self._trouble = ""
        reach_failpoint("checkpoint.manifest.after")
        if cluster.run is run and run.attempt == manifest.attempt:  # else the round may be undone
            cluster.complete_checkpoints.insert(0, manifest.round)
        return True


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
