"""A follower has the bits of its leader, and begins again with a copy when it cannot continue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Scope

from ps_protocol import routes
from ps_protocol.errors import Conflict
from ps_protocol.membership import Membership
from services.pserver.app import make_pserver_app
from services.pserver.following import replica as replica_module
from services.pserver.following.replica import Lag
from services.pserver.run import sync_run
from services.runtime.metrics import ServiceMetrics

from ..support import until
from ..test_replication import KINDS, play, play_and_write
from .support import Standby, following_bench


async def test_it_waits_for_initial_values_and_continues_after_lost_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "SILENCE_SECONDS", 0.2)
    async with following_bench(tmp_path, initial=False) as (b, standby):
        await asyncio.sleep(0.1)
        assert standby.follower.replica is None
        await b.upload_initial()
        await b.play_rounds(1, 2)
        await standby.catch_up()
        replica = standby.replica
        monkeypatch.setattr(replica_module, "POLL_SECONDS", 10.0)  # the leader is silent
        await until(lambda: standby.has_failed("ReadTimeout"))
        monkeypatch.setattr(replica_module, "POLL_SECONDS", 0.05)
        await b.play_rounds(3, 5)
        await standby.catch_up()
        await standby.stop()
        await b.play_round(6)
        standby.start()
        await standby.catch_up()
        assert standby.replica is replica
        assert standby.count("copies") == 1


@pytest.mark.parametrize("has_missed_one", [False, True])
async def test_after_a_rollback_a_replica_is_copied_again(tmp_path: Path, has_missed_one: bool) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        await b.play_rounds(1, 4)
        await standby.catch_up()
        await standby.stop()
        members, attempt = b.install.membership, 1 + has_missed_one
        if has_missed_one:  # its round 2 is not the leader's
            changes = {"attempt": 1, "restore": 1, "number": 2}
            b.install = await b.install_next_run("run1", membership=Membership({0: 1}), **changes)
            await b.play_rounds(2, 3)
        b.install = await b.install_next_run("run1", attempt=attempt, restore=2, number=3, membership=members)
        standby.start()
        await standby.catch_up()
        assert (standby.replica.round, standby.replica.installed.attempt) == (2, attempt)
        assert standby.count("copies") == 2
        await b.play_rounds(3, 4)
        await standby.catch_up()


@pytest.mark.parametrize("is_known", [True, False])
async def test_another_incarnation_is_continued_if_its_log_confirms_the_newest_update(
    tmp_path: Path, is_known: bool
) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 2)
        await standby.catch_up()
        if not is_known:
            standby.diverge()
        standby.name_leader(incarnation=2)
        await until(lambda: standby.has_failed("not the incarnation"))  # the old one is still there
        b.run.installed = b.run.installed.model_copy(update={"incarnation": 2})
        await until(lambda: standby.follower.replica and standby.replica.installed.incarnation == 2)
        assert standby.count("copies") == (1 if is_known else 2)
        await standby.catch_up()


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


async def test_a_missing_record_is_damage(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await b.play_rounds(1, 2)
        await standby.catch_up()
        standby.replica.held_chain = "0" * 32  # so that the next record seems to follow one that is missing
        await b.play_round(3)
        await until(lambda: standby.count("copies") == 2)
        await standby.catch_up()


# ---------------------------------------------------------------------- comparison


@pytest.mark.parametrize("kind", ["sgd", "clipped", "deltas"])
@pytest.mark.parametrize("part", ["values", "slot"])
async def test_a_difference_is_counted_and_begins_with_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, part: str
) -> None:
    monkeypatch.setattr(sync_run, "DIGEST_ROUNDS", 8)
    async with following_bench(tmp_path, **{"nonfinite": "skip_round", **KINDS[kind]}) as (b, standby):
        await play(b, 1, 4)
        await standby.catch_up()
        shard = standby.replica.shard
        place = shard.layout.place["p2.block0"]
        flat = shard.values if part == "values" else next(iter(shard.optimizer.state.slots.values()))
        flat[place.end - 1] += 1.0
        await play(b, 5, 9)
        await until(lambda: standby.count("copies") == 2)
        assert standby.count("differences") == 1
        assert standby.has_failed("the replica differs from pserver 0 after round 7")
        await standby.catch_up()


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


# ---------------------------------------------------------------------- reads


@asynccontextmanager
async def reading(standby: Standby) -> AsyncIterator[httpx.AsyncClient]:
    app = make_pserver_app(standby.pserver, ServiceMetrics("standby"))
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
            assert theirs["digest"].partition("-")[0] == state["digest"].partition("-")[0]


async def test_everything_else_is_refused_with_the_address_of_the_leader(tmp_path: Path) -> None:
    async with following_bench(tmp_path) as (b, standby):
        await standby.catch_up()
        installed = b.install.model_dump_json()
        of_run = {"run": "run1", "attempt": 0, "number": 9}
        messages = {
            routes.RUN: installed,
            routes.FREEZE: json.dumps(of_run),
            routes.MEMBERS: json.dumps({**of_run, "membership": json.loads(installed)["membership"]}),
            routes.WANT_CHECKPOINT: json.dumps({"run": "run1", "round": 9}),
        }
        async with reading(standby) as http:
            for path in (routes.SEND, routes.INITIAL, routes.GET, routes.SLOTS, routes.NORM, routes.BARRIER):
                check_refusal(await http.post(path, content=b"x" * 1000), standby)
            for path, message in messages.items():
                headers = {"content-type": "application/json"}
                check_refusal(await http.put(path, content=message, headers=headers), standby)
            query = {"run": "run1", "attempt": 0, "after": 0}
            for path in (routes.BUFFERS, routes.RESTORABLE, routes.RUN, routes.UPDATES, routes.SHARD_COPY):
                check_refusal(await http.get(path, params=query), standby)


def check_refusal(answer: httpx.Response, standby: Standby) -> None:
    assert (answer.status_code, answer.json()["code"]) == (409, "not_leader")
    assert answer.json()["current"] == standby.address


EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40)


@given(EVENTS)
def test_the_lag_is_counted_from_the_first_report_of_a_missing_round(events: list[tuple[bool, int]]) -> None:
    lag, newest, first_reports, round_ = Lag(), 0, {}, 0
    for now, (is_report, number) in enumerate(events):
        if is_report:
            lag.note_leader(number, now)
            for later in range(max(newest, round_) + 1, number + 1):
                first_reports[later] = now
            newest = max(newest, number)
        else:
            round_ = max(round_, number)
            lag.note_applied(round_)
        missing = [at for later, at in first_reports.items() if later > round_]
        assert lag.rounds == max(0, newest - round_)
        assert lag.seconds(now) == (now - min(missing) if missing else 0)
