"""Durability `replicated`: a pserver acknowledges and shows an update once every required standby has confirmed it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from ps_protocol.consistency import Consistency
from ps_protocol.errors import StaleRun, TrainerLost
from ps_protocol.membership import RequiredStandbys
from ps_protocol.messages import PserverHeartbeatReply
from ps_protocol.routes import BLOCK_STATISTICS, SHARD, SHARD_DIGESTS
from services.pserver.durable.replay import replay_update
from services.pserver.run import standbys, sync_run
from services.pserver.shard import shard as shard_module

from .standby_support import NAME, SOON, Standby, begin, client, contribute, is_waiting, replicated, require
from .support import Bench, bench, decode, refused, until
from .test_replication import KINDS, logging, play, read_copy


@pytest.fixture(autouse=True)
def with_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the compute thread, as for a large shard."""
    monkeypatch.setattr(shard_module, "SMALL_ELEMENTS", 0)


# ---------------------------------------------------------------------- the gate


async def test_a_round_counts_once_the_standby_has_confirmed_it(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        pending = await refused("round_pending", b.get(0, 1, wait_seconds=SOON))
        assert pending.text == "round 1 waits for a standby in sync with pserver 0"
        assert b.run.round == 0
        assert b.pserver.make_heartbeat().round == 0
        await standby.confirm(1)
        assert decode(await b.get(0, 1))[1]["round"] == "1"


async def test_a_change_of_members_is_answered_while_a_standby_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_run, "FREEZE_SECONDS", SOON)
    async with replicated(tmp_path) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        for _ in range(2):
            pending = await refused("round_pending", asyncio.wait_for(b.freeze(2), 5))
            assert pending.text == "a change of members waits for a standby in sync with pserver 0"
        await standby.confirm(1)
        assert (await b.freeze(2)).applied == 1


async def test_a_round_counts_once_the_set_has_changed(tmp_path: Path) -> None:
    async with replicated(tmp_path, requires=(NAME, "standby-b")) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        await standby.confirm(1)
        get = begin(b.get(0, 1))
        assert await is_waiting(get)
        require(b, 0)  # late
        assert await is_waiting(get)
        require(b, 2, NAME)
        await get


def read(path: str, **query: Any) -> Callable[[Bench], Awaitable[Any]]:
    async def request(b: Bench) -> httpx.Response:
        async with client(b) as http:
            answer = await http.get(path, params={"name": "p2.block0", "wait_seconds": 5, **query})
            assert answer.status_code == 200, answer.text
            return answer

    return request


async def read_state(b: Bench) -> bytes:
    return await b.call("slots", b.fence(0, 1), json.dumps(["momentum_buffer/p2.block0"]).encode())


READS = {
    "blocks": read(SHARD, name="p2.block0"),
    "the shard": read(SHARD),
    "a capture": read(SHARD, round=1),
    "statistics": read(BLOCK_STATISTICS, wait_seconds=0),
    "statistics of a step": read(BLOCK_STATISTICS),
    "a part of a get": lambda b: b.get(0, 1, names=["p2.block0"]),
    "optimizer state": read_state,
    "freeze": lambda b: b.freeze(2),
}


@pytest.mark.parametrize("what", READS)
async def test_no_read_shows_an_update_before_it_is_held(tmp_path: Path, what: str) -> None:
    async with replicated(tmp_path) as (b, standby):
        early = begin(READS[what](b)) if what in ("a capture", "statistics of a step") else None
        if early is not None:
            assert await is_waiting(early)
        await contribute(b, 1)
        update = begin(b.get(1, 1))
        await standby.receive(1)
        await until(lambda: b.run.storage.newest_update[0] == 1)
        reading = early or begin(READS[what](b))
        assert await is_waiting(reading)
        await standby.confirm(1)
        await asyncio.wait_for(reading, 5)
        await update


async def test_followers_read_updates_that_are_not_held(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        shard, history, chain = await read_copy(b)
        assert (shard.version, chain) == b.run.storage.newest_update
        assert shard.version == 1
        async with client(b) as http:
            digests = (await http.get(SHARD_DIGESTS, params={"run": "run1", "attempt": 0})).json()
        assert digests == {"round": 1, "digests": shard.digest_blocks()}
        await standby.confirm(1)
        await b.get(0, 1)
        assert history == b.run.schedule.copy_history()


async def test_a_snapshot_is_published_once_its_round_is_confirmed(tmp_path: Path) -> None:
    async with replicated(tmp_path, checkpoint_rounds=1) as (b, standby):
        storage = b.run.storage
        await b.run.want_checkpoint(1)
        await contribute(b, 1)
        await standby.receive(1)
        writes = begin(b.wait_until_published())
        assert await is_waiting(writes)
        assert (storage.rounds, b.run.writer.published.round) == ([1, 0], 0)
        await standby.confirm(1)
        await b.get(0, 1)
        await b.get(1, 1)
        await writes
        assert b.run.writer.published.round == 1
        await contribute(b, 2)
        await until(lambda: 2 in storage.rounds)
        assert b.run.round == 1
        await standby.confirm(2)
        await b.get(0, 2)


async def test_a_part_of_a_newer_version_is_read_once_that_is_held(tmp_path: Path) -> None:
    async with replicated(tmp_path, consistency=Consistency(max_delay=1)) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        await standby.confirm(1)
        await until(lambda: b.run.round == 1)
        await contribute(b, 2)
        await standby.receive(2)
        get = begin(b.get(0, 1, names=["p2.block0"]))
        assert await is_waiting(get)
        await standby.confirm(2)
        assert decode(await get)[1]["round"] == "2"


# ---------------------------------------------------------------------- restarts, rollbacks and ends


async def test_a_restored_version_is_read_once_the_standby_holds_it(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        await b.run.close(StaleRun("the process ends"))
    required = RequiredStandbys(number=4, instances=(NAME,))
    async with bench(2, state_dir=tmp_path, incarnation=2, durability="replicated", required=required) as b:
        assert b.run.round == 1
        get = begin(b.get(0, 1))
        freeze = begin(b.freeze(2))
        assert await is_waiting(get)
        assert not freeze.done()
        seen = b.pserver.make_heartbeat().standbys
        assert (seen.number, seen.connected, seen.caught_up) == (4, (NAME,), ())
        standby = Standby(b)
        await standby.receive(1)
        assert (await standby.confirm(0)).status_code == 200
        assert b.pserver.make_heartbeat().standbys.caught_up == ()  # an earlier incarnation may have acknowledged it
        assert await is_waiting(get)
        await standby.confirm(1)
        assert decode(await get)[1]["round"] == "1"
        assert (await freeze).applied == 1
        assert b.pserver.make_heartbeat().standbys.caught_up == (NAME,)


async def test_after_a_rollback_the_set_stays_and_confirmations_begin_again(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (b, standby):
        for round_ in (1, 2):
            await contribute(b, round_)
            await standby.receive(round_)
            await standby.confirm(round_)
            await b.get(0, round_)
            await b.get(1, round_)
        await b.install_next_run("run1", attempt=1, restore=1, number=2)
        assert b.run.standbys.required == RequiredStandbys(number=1, instances=(NAME,))
        assert (await standby.confirm(2, attempt=0)).json()["code"] == "stale_run"
        get = begin(b.get(0, 1, attempt=1))
        assert await is_waiting(get)
        again = Standby(b, after=1)
        await again.confirm(1)
        await get


async def test_another_run_begins_with_its_own_set(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (b, _):
        required = RequiredStandbys(number=0, instances=("standby-b",))
        late = b.pserver.make_heartbeat()
        await b.install_next_run(number=2, required=required)
        assert b.run.standbys.required == required
        reply = PserverHeartbeatReply(required=RequiredStandbys(number=9, instances=(NAME,)))
        b.pserver.handle_heartbeat_reply(reply, late)  # about the run before
        assert b.run.standbys.required == required
        await b.install_next_run(number=3, required=RequiredStandbys(number=1))  # repeated, with a newer set
        assert b.run.standbys.required.number == 1


ENDS: dict[str, tuple[Callable[[Bench], Awaitable[Any]], str]] = {
    "the pserver stops": (lambda b: b.pserver.stop(), "stopping"),
    "the run fails": (lambda b: b.run.end(TrainerLost("trainer 1 is lost"), is_failure=True), "trainer_lost"),
    "a rollback": (lambda b: b.install_next_run("run1", attempt=1, restore=0, number=2), "stale_run"),
    "another run": (lambda b: b.install_next_run(number=2), "stale_run"),
}


@pytest.mark.parametrize("how", ENDS)
async def test_every_wait_for_standbys_ends_with_the_run(tmp_path: Path, how: str) -> None:
    end, code = ENDS[how]
    async with replicated(tmp_path) as (b, _):
        await contribute(b, 1)
        waits = [begin(b.get(rank, 1)) for rank in (0, 1)]
        await until(lambda: b.run.storage.newest_update[0] == 1)
        waits += [begin(b.freeze(2)), begin(b.run.read_now(dict))]
        assert await is_waiting(waits[-1])
        await asyncio.wait_for(end(b), 5)
        for wait in waits:
            await asyncio.wait_for(refused(code, wait), 5)


async def test_a_standby_that_confirms_nothing_for_the_round_time_out_fails_the_run(tmp_path: Path) -> None:
    async with replicated(tmp_path, round_timeout_seconds=0.2) as (b, _):
        await b.get(0, 0)
        await contribute(b, 1)
        lost = await refused("standby_lost", b.get(0, 1))
        assert lost.text == "round 1 waited 0.2 s for a standby in sync with pserver 0"
        failure = b.pserver.make_heartbeat().failure
        assert failure is not None
        assert failure["code"] == "standby_lost"


async def test_a_wait_that_has_ended_does_not_count_for_the_next_one(tmp_path: Path) -> None:
    async with replicated(tmp_path, round_timeout_seconds=0.3) as (b, standby):
        standbys = b.run.standbys
        began = standbys.note_wait(1)
        await contribute(b, 1)
        await standby.receive(1)
        await standby.confirm(1)
        await until(lambda: b.run.round == 1)
        await standby.leave()  # it may have ended
        assert standbys.note_wait(2) > began


# ---------------------------------------------------------------------- reports and refusals


async def test_the_heartbeat_reports_standbys_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standbys, "LATE_SECONDS", SOON)
    async with replicated(tmp_path, requires=()) as (b, standby):
        due, seen = b.pserver.heartbeat_is_due, lambda: b.pserver.make_heartbeat().standbys
        due.clear()
        await contribute(b, 1)
        await standby.receive(1)
        assert seen().connected == ()  # a rollback could go back to before its copy
        await standby.confirm(1)
        assert due.is_set()
        assert (seen().number, seen().connected, seen().caught_up) == (1, (NAME,), ())
        due.clear()
        require(b, 2, NAME)
        assert due.is_set()
        assert (seen().number, seen().caught_up) == (2, (NAME,))
        await until(lambda: b.run.round == 1)
        due.clear()
        await contribute(b, 2)
        await asyncio.wait_for(due.wait(), 5)  # it is late
        assert (seen().connected, seen().caught_up) == ((), ())
        due.clear()
        await standby.confirm(2)
        assert due.is_set()
        assert (seen().connected, seen().caught_up) == ((NAME,), (NAME,))
        due.clear()
        await standby.leave()
        await asyncio.wait_for(due.wait(), 5)
        assert (seen().connected, seen().caught_up) == ((), ())


async def test_a_standby_counts_as_connected_once_it_confirms_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicated(tmp_path, requires=()) as (b, _):
        standbys, now = b.run.standbys, [0.0]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])

        def is_connected_after(seconds: float, acknowledged: int, held: int) -> bool:
            now[0] += seconds
            assert standbys.acknowledge(acknowledged)
            standbys.confirm("standby-b", held)
            return "standby-b" in standbys.describe().connected

        standbys.acknowledge(10)
        standbys.confirm("standby-b", 0)
        assert not is_connected_after(5, 20, 12)  # its copy took long
        assert not is_connected_after(0.4, 25, 19)  # it has 20 later than in time
        assert not is_connected_after(0.4, 30, 24)
        assert is_connected_after(0.4, 40, 33)


async def test_a_standby_that_is_late_again_and_again_joins_later_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicated(tmp_path, requires=()) as (b, _):
        confirmations, now = b.run.standbys, [0.0]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
        rounds = iter(range(1, 10_000))

        def join_and_be_late() -> float:
            """Return the seconds until the standby may join, after which it is late."""
            began = now[0]
            while "standby-b" not in confirmations.describe().connected:
                now[0] += 1.0
                confirmations.confirm("standby-b", next(rounds))
            require(b, confirmations.required.number + 1, "standby-b")
            joined = now[0] - began
            now[0] += 3.0
            confirmations.note_late(next(rounds), is_stuck=False)
            require(b, confirmations.required.number + 1)
            return joined

        with structlog.testing.capture_logs() as logs:
            seconds = [join_and_be_late() for _ in range(10)]
            now[0] += standbys.STEADY_SECONDS + standbys.MAX_BACKOFF_SECONDS
            seconds += [join_and_be_late() for _ in range(2)]
        assert seconds == [2, 1, 4, 8, 16, 32, 64, 128, 256, 300, 1, 1]
        assert [line["not_in_sync_seconds"] for line in logs] == [4, 8, 16, 32, 64, 128, 256, 300, 300, 4]
        assert {line["standby"] for line in logs} == {"standby-b"}


async def test_an_update_waits_for_a_standby_that_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicated(tmp_path, requires=()) as (b, standby):
        monkeypatch.setattr(standbys, "CATCH_UP_SECONDS", 30.0)
        await contribute(b, 1)
        await b.get(0, 1)  # the standby has confirmed round 0
        await contribute(b, 2)
        get = begin(b.get(0, 2))
        assert await is_waiting(get)
        await standby.confirm(1)
        await get
        monkeypatch.setattr(standbys, "CATCH_UP_SECONDS", 0.0)
        await contribute(b, 3)
        await b.get(0, 3)
        monkeypatch.setattr(standbys, "CATCH_UP_SECONDS", 30.0)
        b.run.standbys._joins_until[NAME] = 0.0  # it has had its time
        await contribute(b, 4)
        await b.get(0, 4)


async def test_a_standby_of_the_round_that_waits_for_a_lost_one_may_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later round comes, which it would otherwise have to receive."""
    monkeypatch.setattr(standbys, "LATE_SECONDS", SOON)
    monkeypatch.setattr(standbys, "STUCK_SECONDS", 2 * SOON)
    async with replicated(tmp_path) as (b, standby):
        await contribute(b, 1)
        await standby.receive(1)
        other = Standby(b, "standby-b", after=1)
        await other.confirm(1)
        await until(lambda: b.run.standbys.describe().connected == ("standby-b",))
        require(b, 2, "standby-b")
        await b.get(0, 1)


async def test_refused_confirmations(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (b, standby):
        for changes, code in (
            ({"run": "run7"}, "stale_run"),
            ({"attempt": 1}, "stale_run"),
            ({"after": 1}, "future_round"),
            ({"digest": "0" * 32}, "diverged"),
            ({"after": -1}, "invalid_message"),
        ):
            answer = await standby.confirm(0, **changes)
            assert answer.json()["code"] == code, changes
        await contribute(b, 1)
        assert await is_waiting(begin(b.get(0, 1, wait_seconds=2 * SOON)))
        await standby.confirm(1)
        await b.run.end(TrainerLost("trainer 1 is lost"), is_failure=True)
        assert (await standby.confirm(1)).json()["code"] == "trainer_lost"


async def test_a_replica_of_confirmed_updates_has_the_bits_of_what_trainers_got(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (b, standby):
        shard, history, _ = await read_copy(b)
        for round_ in (1, 2, 3):
            await contribute(b, round_)
            await standby.receive(round_)
            update, data = standby.updates[-1]
            replay_update(shard, history, update, data, keep=1)
            await standby.confirm(round_)
            blocks, _ = decode(await b.get(0, round_))
            await b.get(1, round_)
            for name, values in blocks.items():
                assert (shard.block(name).flatten() == values).all()
        assert shard.digest() == b.run.shard.digest()


@pytest.mark.parametrize("kind", ["clipped", "delayed"])
async def test_without_standbys_a_run_has_the_bits_of_one_with_a_log(tmp_path: Path, kind: str) -> None:
    digests = []
    for durability in ("log", "replicated"):
        options = {"nonfinite": "skip_round", **KINDS[kind], "durability": durability}
        async with logging(tmp_path / durability, **options) as b:
            await play(b, 1, 6)
            digests.append(b.run.shard.digest())
    assert digests[0] == digests[1]
