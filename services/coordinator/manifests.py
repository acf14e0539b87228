"""Checkpoints of the whole model: from shards that pservers have written to a manifest, and its end when it is old."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime

from ps_protocol.messages import ShardFile
from ps_protocol.vocabulary import Round
from services.runtime.checkpoints import Manifest, complete_checkpoints, round_folder, write_manifest
from services.runtime.failpoints import reach_failpoint
from services.runtime.logs import get_logger
from services.runtime.places import Place

from .cluster import Cluster

log = get_logger()


class Manifests:
    """Written when every pserver has written its shard of a round; the newest are kept, older checkpoints deleted."""

    def __init__(self, cluster: Cluster, place: Place, keep: int) -> None:
        self._cluster = cluster
        self._place = place
        self._keep = keep
        self._failed: set[Round] = set()  # could not be written, and was said

    async def find(self) -> None:
        """Look which complete checkpoints of the run there are, after this process was started again."""
        run = self._cluster.run.name
        try:
            rounds = await asyncio.to_thread(_complete_rounds, self._place, run)
        except OSError as error:
            log.warning("the place of the checkpoints cannot be read", place=self._place.url, error=str(error))
            return
        if self._cluster.run.name == run:
            self._cluster.complete_checkpoints[:] = rounds

    async def update(self) -> None:
        """Complete what can be completed, and delete what is older than the newest ones."""
        cluster, run = self._cluster, self._cluster.run
        members = cluster.registry.members.values()
        if run.plan is None or run.state == "gathering" or len(members) < run.plan.num_pservers:
            return
        if any((member.run, member.attempt) != (run.name, run.attempt) for member in members):
            return  # they have not heard of the newest attempt yet
        shards = [member.checkpoints for member in members]
        newest = cluster.complete_checkpoints[0] if cluster.complete_checkpoints else -1
        ready = sorted(r for r in set(shards[0]).intersection(*shards[1:]) if r > newest and r not in self._failed)
        for round_ in ready:
            files = sorted((one[round_] for one in shards), key=lambda file: file.pserver)
            if not await self._complete(round_, files) or cluster.run is not run:
                return
        for round_ in cluster.complete_checkpoints[self._keep :]:
            cluster.complete_checkpoints.remove(round_)
            await self._delete(round_folder(run.name, round_))

    async def _delete(self, folder: str) -> None:
        try:
            await asyncio.to_thread(self._place.delete, folder)
        except OSError as error:
            log.warning("an old checkpoint could not be deleted", folder=folder, error=str(error))

    async def _complete(self, round_: Round, files: Iterable[ShardFile]) -> bool:
        cluster, run = self._cluster, self._cluster.run
        assert run.plan is not None
        manifest = Manifest(
            run=run.name,
            attempt=run.attempt,
            round=round_,
            consistency=run.defaults.consistency,
            plan=run.plan.to_json(),
            aliases={} if run.declaration is None else run.declaration.aliases,
            shards=tuple(files),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        try:
            reach_failpoint("checkpoint.manifest")
            await asyncio.to_thread(write_manifest, self._place, manifest)
        except OSError as error:
            self._failed.add(round_)
            log.error("the manifest of a checkpoint could not be written", round=round_, error=str(error))
            return False
        reach_failpoint("checkpoint.manifest.after")
        cluster.complete_checkpoints.insert(0, round_)
        return True


def _complete_rounds(place: Place, run: str) -> list[Round]:
    return [manifest.round for manifest in complete_checkpoints(place, run)]


def newest_checkpoint(place: Place) -> Manifest | None:
    """The newest complete checkpoint of any run, by the date in its manifest; None if there is none. Blocks."""
    newest = [next(complete_checkpoints(place, run), None) for run in place.list("")]
    found = [manifest for manifest in newest if manifest is not None]
    return max(found, key=lambda manifest: (manifest.created, manifest.round), default=None)
