"""When checkpoints of the whole model are made, and what happens if one fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ps_protocol.errors import StaleRound, TryAgain
from ps_protocol.membership import WantCheckpoint
from ps_protocol.messages import PserverHeartbeatReply
from ps_protocol.plan import make_plan
from ps_protocol.routes import WANT_CHECKPOINT
from ps_protocol.vocabulary import ParameterSpec
from services.coordinator.checkpoints import RETRY_SECONDS, Checkpoints
from services.coordinator.reconcile import make_installation
from services.coordinator.shell import Shell
from services.coordinator.state.cluster import Cluster
from services.coordinator.state.record import Decision
from services.runtime.checkpoints import (
    all_checkpoints,
    complete_checkpoints,
    read_manifest,
    round_folder,
)
from services.runtime.failpoints import arm_failpoints
from services.runtime.storage import CheckpointStorage, open_checkpoint_storage

from .coordinating import FakePservers, answering
from .support import beat, change_record, defaults, list_checkpoints, make_cluster, shard_file, train


class Writers(FakePservers):
    """Pservers that receive requests for checkpoints, and may be past the requested round."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[int] = []  # rounds that pserver 0 was asked for
        self.rounds = [0, 0]

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != WANT_CHECKPOINT:
            return await super().__call__(request)
        index, message = int(request.url.host), WantCheckpoint.model_validate_json(request.content)
        if index == 0:
            self.named.append(message.round)
        if message.round < self.rounds[index]:
            raise StaleRound("it is over", current=self.rounds[index])
        return httpx.Response(204)

    def report(
        self,
        cluster: Cluster,
        *,
        published: Sequence[int | None] = (0, 0),
        coming: Sequence[int] = (),
        now: float = 1.0,
    ) -> None:
        """Send heartbeats of both pservers with their newest shards, and with the rounds that they will publish."""
        for index, newest in enumerate(published):
            file = None if newest is None else shard_file(index, newest)
            changes = {"coming_checkpoints": tuple(set(coming) - {newest}), "published": file}
            cluster.pserver_heartbeat(
                index, beat(run=cluster.run.record.name, round_=self.rounds[index], **changes), now
            )


Scheduled = tuple[Cluster, Writers, Checkpoints]


async def do_nothing() -> None:
    pass


async def wait_until(is_so: Callable[[], bool], _: float) -> None:
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0)


def make_checkpoints(
    cluster: Cluster, place: CheckpointStorage, http: Any = None, *, num_kept: int = 2, persist: Any = do_nothing
) -> Checkpoints:
    shell = Shell(cluster, http, cluster.run.settings)
    shell.now, shell.persist, shell.wait_until = (lambda: 1.0), persist, wait_until  # type: ignore[method-assign]
    return Checkpoints(shell, place, num_kept)


@asynccontextmanager
async def requesting(cluster: Cluster, schedule: Checkpoints) -> AsyncIterator[asyncio.Task[int]]:
    making = asyncio.create_task(schedule.make(cluster.run, 10, 12))
    await asyncio.sleep(0)
    yield making
    making.cancel()


@asynccontextmanager
async def scheduling(rounds: Sequence[int] = (0, 0), **settings: Any) -> AsyncIterator[Scheduled]:
    """Yield a run in these rounds with an interval of 5, a checkpoint of round 0, and a clock that stands at 1."""
    cluster = make_cluster(**{"durability": "log", "on_trainer_loss": "wait", "checkpoint_rounds": 5, **settings})
    train(cluster)
    list_checkpoints(cluster, [0])
    writers = Writers()
    writers.rounds = list(rounds)
    writers.report(cluster)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answering(writers))) as http:
        yield cluster, writers, make_checkpoints(cluster, open_checkpoint_storage("memory://unused"), http)


async def test_the_next_checkpoint_is_requested_when_the_one_before_is_complete():
    async with scheduling() as (cluster, writers, schedule):
        writers.report(cluster, coming=[5])  # a restarted coordinator waits for the one that is being written
        await schedule.advance()
        assert writers.named == []
        writers.report(cluster)
        for _ in range(2):
            await schedule.advance()
            assert writers.named == [5]
        writers.rounds = [13, 14]
        for published in ((5, 0), (5, 5)):  # a slow disk, then a missing manifest
            writers.report(cluster, published=published, coming=[5])
            await schedule.advance()
            assert writers.named == [5]
        list_checkpoints(cluster, [5, 0])
        await schedule.advance()
        assert writers.named == [5, 15]


async def test_the_newest_round_is_requested_when_a_log_with_rows_is_long():
    async with scheduling([7, 7], checkpoint_rounds=20) as (cluster, writers, schedule):
        await schedule.advance()
        assert writers.named == [20]
        heartbeat = cluster.registry.members[1].heartbeat.model_copy(update={"is_log_long": True})
        cluster.registry = cluster.registry.heartbeat(1, heartbeat, 1.0)
        schedule._shell.now = lambda: 1.0 + RETRY_SECONDS  # type: ignore[method-assign]
        await schedule.advance()
        assert writers.named == [20, 7]


def test_rows_that_are_not_known_before_shorten_no_interval():
    """A round of the dense block of 6,400 elements logs 26,624 bytes. The limit is four times the shard's size."""
    specs = [ParameterSpec("e", (1000, 64), is_sparse=True), ParameterSpec("w", (6400,))]
    plan, settings = make_plan(specs, 1), defaults(2, durability="log")
    assert settings.limit_log(plan) == 4 * (4 * 70_400 + 1024)
    assert settings.checkpoint_interval(plan) == settings.limit_log(plan) // 26_624 == 42
    cluster = make_cluster(durability="log")
    train(cluster)
    assert make_installation(cluster, 0, 1, None).max_log_bytes == 0  # its rounds are all alike
    change_record(cluster, plan=plan)
    assert make_installation(cluster, 0, 1, None).max_log_bytes == settings.limit_log(plan)


async def test_a_later_round_is_requested_if_a_pserver_is_past_the_requested_one():
    async with scheduling() as (_, writers, schedule):
        writers.rounds = [4, 12]  # after the heartbeats
        await schedule.advance()
        assert writers.named == [5, 15]


async def test_a_requested_checkpoint_is_made_once():
    """The heartbeats may be a second old, and the schedule may advance before the request is answered."""
    async with scheduling([6, 6]) as (cluster, writers, schedule):
        writers.rounds = [7, 7]
        async with requesting(cluster, schedule) as making:
            for _ in range(2):
                await schedule.advance()
                assert writers.named == [6, 8]
            writers.rounds = [9, 9]
            writers.report(cluster, published=(8, 8))
            list_checkpoints(cluster, [8, 0])
            await schedule.advance()
            assert writers.named == [6, 8, 10]  # the next scheduled one
            assert await making == 8


async def test_a_requested_checkpoint_is_not_made_in_the_next_attempt():
    async with scheduling([7, 7]) as (cluster, writers, schedule), requesting(cluster, schedule) as making:
        change_record(cluster, attempt=1)
        for member in cluster.registry.members.values():
            heartbeat = member.heartbeat.model_copy(update={"attempt": 1})
            cluster.registry = cluster.registry.heartbeat(member.info.index, heartbeat, 1.0)
        await schedule.advance()
        assert writers.named == [10]
        with pytest.raises(TryAgain, match="no checkpoint of round 7 or later is complete"):
            await making


# ---------------------------------------------------------------- manifests


@pytest.fixture
def place(tmp_path: Path) -> CheckpointStorage:
    return open_checkpoint_storage(str(tmp_path))


@pytest.fixture
def cluster() -> Cluster:
    cluster = make_cluster(durability="log", on_trainer_loss="wait")
    train(cluster)
    return cluster


@pytest.fixture
def manifests(cluster: Cluster, place: CheckpointStorage) -> Checkpoints:
    return make_checkpoints(cluster, place)


def report(
    cluster: Cluster,
    pserver: int,
    published: int | None = None,
    attempt: int = 0,
    place: CheckpointStorage | None = None,
) -> PserverHeartbeatReply:
    """Send the heartbeat of a pserver that has published the shard of this round."""
    file = None if published is None else shard_file(pserver, published, attempt)
    if place is not None and file is not None:
        place.write(f"{round_folder('run1', file.round)}/{file.name}", [b"shard"])
    return cluster.pserver_heartbeat(pserver, beat(run="run1", attempt=attempt, published=file), 1.0)


def report_all(cluster: Cluster, *published: int, attempt: int = 0, place: CheckpointStorage | None = None) -> None:
    for pserver in (0, 1):
        report(cluster, pserver, *published, attempt=attempt, place=place)


async def complete(manifests: Checkpoints, cluster: Cluster, *rounds: int) -> None:
    for round_ in rounds:
        report_all(cluster, round_)
        await manifests.complete()


def roll_back(cluster: Cluster, round_: int) -> None:
    run = cluster.run
    cluster.run = run.apply_decision(Decision(run.record.attempt + 1, round_, 0, run.record.membership))


def found(place: CheckpointStorage) -> list[int]:
    return [manifest.round for manifest in complete_checkpoints(place, "run1")]


async def test_a_checkpoint_is_complete_when_all_pservers_have_published_their_shards(cluster, place, manifests):
    report(cluster, 0, 0)
    await manifests.complete()
    assert found(place) == []
    await complete(manifests, cluster, 0)
    report(cluster, 0, 4)
    await manifests.complete()
    assert found(place) == list(cluster.run.record.checkpoints) == [0]
    report(cluster, 1, 4)
    await manifests.complete()
    assert found(place) == list(cluster.run.record.checkpoints) == [4, 0]
    manifest = read_manifest(place, "run1", 4)
    assert [file.pserver for file in manifest.shards] == [0, 1]


async def test_older_checkpoints_are_deleted_unless_a_change_is_under_way(cluster, place, manifests):
    """Until the last pserver has been changed, the run may be rolling back to an older one."""
    await complete(manifests, cluster, 0, 4)
    cluster.run = cluster.run.with_change()
    await complete(manifests, cluster, 8)
    assert found(place) == list(cluster.run.record.checkpoints) == [8, 4, 0]
    cluster.run = cluster.run.finish_change(cluster.run.record.change_number)
    await complete(manifests, cluster, 12)
    assert found(place) == list(cluster.run.record.checkpoints) == [12, 8]
    assert place.list("run1") == ["000000000008", "000000000012"]


async def test_shards_of_rounds_that_stay_incomplete_are_deleted(cluster, place, manifests):
    """One pserver cannot publish, and the others try one round after another."""
    await complete(manifests, cluster, 4)
    for round_ in (8, 12, 16):
        report(cluster, 0, round_, place=place)
        await manifests.complete()
    assert place.list("run1") == ["000000000004", "000000000016"]
    report(cluster, 1, 16, place=place)
    await manifests.complete()
    assert found(place) == [16, 4]


async def test_a_checkpoint_is_not_completed_from_shards_of_several_attempts(cluster, place, manifests):
    change_record(cluster, attempt=1)
    report(cluster, 0, 4, attempt=1)
    report(cluster, 1, 4, attempt=0)
    await manifests.complete()
    assert found(place) == []


async def test_a_manifest_that_cannot_be_written_is_tried_again(cluster, place, manifests):
    """The one of a finished run's last round is the last one."""
    report_all(cluster, 4)
    try:
        arm_failpoints("checkpoint.manifest=eio")
        assert not await manifests.complete()
    finally:
        arm_failpoints("")
    assert cluster.run.record.checkpoints == ()
    assert await manifests.complete()
    assert found(place) == list(cluster.run.record.checkpoints) == [4]


async def test_nothing_is_deleted_that_a_restarted_coordinator_would_list(cluster, place):
    problems = [TryAgain("the coordinator's state cannot be written")]

    async def persist() -> None:
        if 12 in cluster.run.record.checkpoints and problems:
            raise problems.pop()

    manifests = make_checkpoints(cluster, place, persist=persist)
    await complete(manifests, cluster, 4, 8, 12)
    assert (found(place), list(cluster.run.record.checkpoints)) == ([12, 8, 4], [12, 8])
    await complete(manifests, cluster, 16)
    assert found(place) == [16, 12]


@pytest.mark.parametrize("attempts", [[4], [4, 12]])
async def test_checkpoints_of_rounds_that_a_rollback_has_undone_are_deleted(cluster, place, attempts):
    manifests = make_checkpoints(cluster, place, num_kept=3)
    await complete(manifests, cluster, 4, 8, 12)
    for round_ in attempts:
        roll_back(cluster, round_)
    newest = len(attempts)
    report_all(cluster, attempt=newest)
    await manifests.complete()
    assert found(place) == list(cluster.run.record.checkpoints) == [4]
    report_all(cluster, 8, attempt=newest)
    await manifests.complete()
    assert [(m.attempt, m.round) for m in all_checkpoints(place)] == [(newest, 8), (0, 4)]
    assert list(cluster.run.record.checkpoints) == [8, 4]


async def test_a_manifest_that_is_written_during_a_rollback_of_its_round_is_deleted(
    cluster, place, manifests, monkeypatch
):
    write = place.write

    def write_slowly(name: str, chunks: list[bytes]) -> None:
        roll_back(cluster, 0)
        write(name, chunks)

    report_all(cluster, 4)
    with monkeypatch.context() as patch:
        patch.setattr(place, "write", write_slowly)
        await manifests.complete()
    assert cluster.run.record.checkpoints == ()
    report_all(cluster, attempt=1)
    await manifests.complete()
    assert found(place) == list(cluster.run.record.checkpoints) == []
