"""A follower has the bits of its leader, and begins again with a copy when it cannot continue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Scope

from ps_protocol import routes
from ps_protocol.errors import BadInput, Conflict, TrainerLost, TryAgain
from ps_protocol.membership import PserverRegistered
from ps_protocol.standbys import FenceStandby
from services.pserver.app import make_pserver_app
from services.pserver.following import follower as following
from services.pserver.following import leader as leading
from services.pserver.following.app import REFUSED, make_follower_app
from services.pserver.following.replica import Replica, restore_copy
from services.runtime.metrics import ServiceMetrics

from ..support import until
from ..test_replication import KINDS, play, play_and_write
from .support import Standby, following_bench


@pytest.mark.parametrize("kind", KINDS)
async def test_a_follower_has_the_bits_of_its_leader(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following_bench(tmp_path, **{"nonfinite": "skip_round", **KINDS[kind]}) as (b, standby):
        await play(b, 1, 3)
        await standby.catch_up()
        await play(b, 4, 8)
        await standby.catch_up()
        assert standby.count("copies") == 1
        before = standby.count("comparisons")
        standby.follower._compared_at, standby.follower._num_unchecked = 0.0, 1  # due when the leader is idle
        await until(lambda: standby.count("comparisons") > before)
        assert standby.count("differences") == 0


async def test_a_large_shard_is_stepped_on_the_compute_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.pserver.shard.shard.SMALL_ELEMENTS", 0)
    monkeypatch.setattr(following, "COMPARED_UPDATES", 3)
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        await b.play_rounds(1, 20)
        await standby.catch_up()
        assert (standby.count("copies"), standby.count("updates"), standby.count("differences")) == (1, 20, 0)
        assert standby.count("comparisons") >= 2


async def test_it_waits_for_initial_values_and_continues_after_lost_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "SILENCE_SECONDS", 0.2)
    async with following_bench(tmp_path, initial=False) as (b, standby):
        await asyncio.sleep(0.1)
        assert standby.follower.replica is None
        await b.upload_initial()
        await b.play_rounds(1, 2)
        await standby.catch_up()
        replica = standby.replica
        monkeypatch.setattr(leading, "POLL_SECONDS", 10.0)  # the leader is silent
        await until(lambda: standby.has_failed("ReadTimeout"))
        monkeypatch.setattr(leading, "POLL_SECONDS", 0.05)
        await b.play_rounds(3, 5)
        await standby.catch_up()
        await standby.stop()
        await b.play_round(6)
        standby.start()
        await standby.catch_up()
        assert standby.replica is replica
        assert standby.count("copies") == 1


async def test_a_rollback_begins_with_a_copy_of_the_resume_round(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 4)
        await standby.catch_up()
        await b.install_next_run("run1", attempt=1, restore=2, number=2)
        await standby.catch_up()
        assert (standby.replica.round, standby.replica.installed.attempt) == (2, 1)
        assert standby.count("copies") == 2


@pytest.mark.parametrize("is_known", [True, False])
async def test_another_incarnation_is_continued_if_its_log_confirms_the_newest_update(
    tmp_path: Path, is_known: bool
) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 2)
        await standby.catch_up()
        if not is_known:
            standby.replica.chain = None
        standby.name_leader(incarnation=2)
        await until(lambda: standby.has_failed("not the incarnation"))  # the old one is still there
        b.run.installed = b.run.installed.model_copy(update={"incarnation": 2})
        await until(lambda: standby.follower.replica and standby.replica.installed.incarnation == 2)
        assert standby.count("copies") == (1 if is_known else 2)
        await standby.catch_up()


async def test_a_pserver_that_restarted_since_its_copy_is_not_followed(tmp_path: Path) -> None:
    def restart(scope: Scope, message: Message) -> Message:
        if scope["path"] != routes.UPDATES or message["type"] != "http.response.start":
            return message
        return {**message, "headers": [(k, b"2" if k == b"gradpost-incarnation" else v) for k, v in message["headers"]]}

    async with following_bench(tmp_path) as (b, standby):
        standby.change = restart
        await until(lambda: standby.has_failed("another incarnation now"))
        await b.play_round(1)
        assert standby.replica.round == 0


@pytest.mark.parametrize("change", [{"run": "run2"}, {"attempt": 1}, {"durability": "fsync"}])
async def test_a_replica_continues_only_what_it_was_copied_from(tmp_path: Path, change: dict[str, Any]) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        assert standby.replica.continues(b.install.model_copy(update={"number": 9}))
        assert not standby.replica.continues(b.install.model_copy(update=change))


async def test_a_log_that_does_not_reach_back_begins_with_a_copy(tmp_path: Path) -> None:
    async with following_bench(tmp_path, checkpoint_rounds=2, keep_checkpoints=1) as (b, standby):
        await standby.catch_up()
        await play_and_write(b, 1, 2)
        await standby.catch_up()
        await standby.stop()
        await play_and_write(b, 3, 9)
        standby.start()
        await standby.catch_up()
        assert standby.count("copies") == 2


async def test_another_update_of_the_same_round_begins_with_a_copy(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        await b.play_rounds(1, 2)
        await standby.catch_up()
        await standby.stop()
        standby.replica.chain = "0" * 32
        standby.start()
        await until(lambda: standby.count("copies") == 2)
        await standby.catch_up()


async def test_an_end_of_the_run_keeps_the_replica(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 3)
        await standby.catch_up()
        standby.failures.clear()
        await b.run.end(TrainerLost("trainer 1 is lost"), is_failure=True)
        await until(lambda: len(standby.failures) > 0)
        assert standby.failures[0] == "TrainerLost: trainer 1 is lost"
        assert standby.replica.round == 3


async def test_damage_on_the_way_begins_with_a_copy(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 2)
        await standby.catch_up()

        def damage(scope: Scope, message: Message) -> Message:
            body = message.get("body", b"")
            if scope["path"] != routes.UPDATES or len(body) < 500:
                return message
            standby.change = None
            return {**message, "body": body[:400] + bytes([body[400] ^ 1]) + body[401:]}

        standby.change = damage
        await b.play_round(3)
        await until(lambda: standby.count("copies") == 2)
        await b.play_round(4)
        await standby.catch_up()


async def test_a_stream_that_breaks_during_an_update_is_continued_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.pserver.shard.shard.SMALL_ELEMENTS", 0)  # the compute thread applies updates
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        release, is_cut = threading.Event(), asyncio.Event()
        busy = asyncio.ensure_future(standby.compute.run(release.wait))
        await b.play_round(1)
        await until(lambda: standby.compute.num_jobs == 2)  # the update waits for the thread

        def cut(scope: Scope, message: Message) -> Message:
            if scope["path"] == routes.UPDATES:
                is_cut.set()
                raise ConnectionError
            return message

        standby.change = cut
        await asyncio.wait_for(is_cut.wait(), 10)
        standby.change = None
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await until(lambda: standby.compute.num_jobs == 3)  # of another stream
        release.set()
        await busy
        await standby.catch_up()
        await b.play_round(2)
        await standby.catch_up()
        assert standby.count("copies") == 1


async def test_a_missing_record_is_damage(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 2)
        await standby.catch_up()
        standby.replica.held = 1  # so that the next record seems to skip a round
        await b.play_round(3)
        await until(lambda: standby.count("copies") == 2)
        await standby.catch_up()


# ---------------------------------------------------------------------- comparison


@pytest.mark.parametrize("kind", ["sgd", "clipped", "deltas"])
@pytest.mark.parametrize("part", ["values", "slot", "version"])
async def test_a_difference_names_its_block_and_begins_with_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, part: str
) -> None:
    monkeypatch.setattr(following, "COMPARED_UPDATES", 4)
    async with following_bench(tmp_path, **{"nonfinite": "skip_round", **KINDS[kind]}) as (b, standby):
        await play(b, 1, 4)
        await standby.catch_up()
        shard = standby.replica.shard
        place = shard.layout.place["p2.block0"]
        if part == "version":
            shard.versions[place.name] += 1
        else:
            slots = shard.optimizer.state.slots
            flat = shard.values if part == "values" else next(iter(slots.values()))
            flat[place.end - 1] += 1.0
        await play(b, 5, 9)
        await until(lambda: standby.count("copies") == 2)
        assert standby.count("differences") == 1
        assert standby.has_failed("'p2.block0' of the replica differs")
        await standby.catch_up()


async def test_a_busy_leader_is_compared_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "COMPARED_UPDATES", 1)
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()

        requests: list[Any] = []

        async def refuse(replica: Replica) -> Any:
            requests.append(replica.round)
            raise TryAgain("busy")

        await b.play_round(1)
        await until(lambda: standby.count("comparisons") == 1)
        with monkeypatch.context() as patch:
            patch.setattr(leading.Leader, "read_digests", lambda _, replica: refuse(replica))
            await b.play_round(2)
            await until(lambda: requests == [2])
        await b.play_round(3)
        await standby.catch_up()
        await until(lambda: standby.count("comparisons") == 2)
        assert (standby.count("copies"), standby.count("differences")) == (1, 0)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["torch", "cpu"])
async def test_another_build_of_torch_is_refused(tmp_path: Path, name: str) -> None:
    def pretend(scope: Scope, message: Message) -> Message:
        if scope["path"] != routes.RUN or message["type"] != "http.response.body":
            return message
        before, _, after = message["body"].partition(f'"{name}":"'.encode())
        return {**message, "body": before + f'"{name}":"X'.encode() + after[1:]}

    async with following_bench(tmp_path) as (_, standby):
        standby.change = pretend
        with pytest.raises(Conflict, match="use the same torch and CPU") as caught:
            await asyncio.wait_for(standby.task, 5)  # type: ignore[arg-type]
        assert caught.value.code == "replica_mismatch"


async def test_a_run_without_a_log_is_refused(tmp_path: Path) -> None:
    async with following_bench(tmp_path, durability="none") as (_, standby):
        with pytest.raises(Conflict) as caught:
            await asyncio.wait_for(standby.task, 5)  # type: ignore[arg-type]
        assert caught.value.code == "no_update_log"


async def test_a_copy_of_another_shard_is_refused(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        data = await leading.Leader(standby.address, standby.follower._http, standby.follower._http).read_copy(
            "run1", 0
        )
        with pytest.raises(BadInput, match="another shard"):
            restore_copy(b.install, 1, data)


# ---------------------------------------------------------------------- reads


@asynccontextmanager
async def reading(standby: Standby) -> AsyncIterator[httpx.AsyncClient]:
    app = make_follower_app(standby.follower, standby.promotion, ServiceMetrics("standby"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
        yield http


async def test_reads_are_those_of_the_leader(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await play(b, 1, 4)
        await standby.catch_up()
        async with reading(standby) as own, httpx.AsyncClient(base_url=standby.address) as leader:
            for path in ("/v1/shard?name=p1.block0&name=p3.block0", "/v1/shard"):
                answer = await own.get(path)
                assert answer.status_code == 200
                assert answer.content == (await leader.get(path)).content
            assert (await own.get("/v1/statistics?name=p3.block0")).json()[0]["num_elements"] == 130
            assert (await own.get("/v1/shard?name=x")).json()["code"] == "unknown_block"
            assert (await own.get("/readyz")).status_code == 200
            standby.name_leader(is_joining=True)
            assert (await own.get("/readyz")).json()["waiting_for"] == "pserver 0 to have this standby in sync"
            state, theirs = [(await http.get("/v1/state?digest=true")).json() for http in (own, leader)]
            assert (state["index"], state["round"], state["leader"]) == (0, theirs["round"], standby.address)
            assert theirs["digest"].startswith(state["digest"])


async def test_reads_of_a_coming_round_wait_for_it(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 2)
        await standby.catch_up()
        async with reading(standby) as http:
            path = "/v1/shard?wait_seconds=5&round="
            coming = asyncio.create_task(http.get(path + "3"))
            assert (await http.get(path + "1")).json()["code"] == "stale_round"
            assert (await http.get("/v1/shard?round=9")).json()["code"] == "round_pending"
            assert (await http.get(path + "2")).status_code == 200
            await asyncio.sleep(0.05)
            await b.play_round(3)
            await b.play_round(4)
            assert b'"round":"3"' in (await coming).content.replace(b" ", b"")


async def test_everything_else_is_refused_with_the_address_of_the_leader(tmp_path: Path) -> None:
    def list_routes(app: Any) -> set[tuple[str, str]]:
        return {(method, r.path) for r in app.routes for method in getattr(r, "methods", ()) if method != "HEAD"}

    async with following_bench(tmp_path) as (b, standby):
        app = make_follower_app(standby.follower, standby.promotion, ServiceMetrics("standby"))
        own = {("PUT", routes.FENCE_STANDBY), ("PUT", routes.PROMOTE_STANDBY)}
        theirs = list_routes(make_pserver_app(b.pserver, ServiceMetrics("pserver")))
        assert list_routes(app) - own == theirs
        async with reading(standby) as http:
            for method, path in REFUSED:
                answer = await http.request(method, path, content=b"x" * 1000)
                assert (answer.status_code, answer.json()["code"]) == (409, "not_leader")
                assert answer.json()["current"] == standby.address


async def test_requests_to_a_fenced_standby_are_repeated_since_it_may_be_promoted(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (_, standby), reading(standby) as http:
        await standby.catch_up()
        await standby.promotion.fence(FenceStandby(run="run1", attempt=0, incarnation=1))
        assert (await http.post(routes.SEND)).json()["code"] == "try_again"
        standby.follower.release_replica(PserverRegistered(index=0, incarnation=2, lease_seconds=1))
        assert (await http.post(routes.SEND)).json()["code"] == "try_again"


async def test_without_a_replica_reads_are_not_ready(tmp_path: Path) -> None:
    async with following_bench(tmp_path, initial=False) as (_, standby), reading(standby) as http:
        await standby.stop()
        assert (await http.get("/v1/shard")).json()["waiting_for"] == "a copy of the shard of pserver 0"
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/v1/state?digest=true")).json()["run"] is None
        standby.name_leader(leader=None)
        assert (await http.get("/readyz")).status_code == 200  # there is no run to copy
        standby.name_leader(is_joining=True)
        assert (await http.get("/readyz")).json()["waiting_for"] == "a copy of the shard of pserver 0"
        standby.follower.leader = None
        assert (await http.put("/v1/run")).json()["current"] is None
