"""Standbys at the coordinator: leases, the leader that they are answered, further indices, and who may lead."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from ps_protocol import routes
from ps_protocol.errors import BadInput, Conflict, TryAgain
from ps_protocol.membership import PserverRegistered
from ps_protocol.messages import ClusterStatus
from ps_protocol.routes import REPORT_STANDBY, STATUS
from ps_protocol.standbys import ReportStandby
from ps_protocol.vocabulary import PROTOCOL_VERSION
from services.coordinator.coordinator import Coordinator
from services.coordinator.process import make_coordinator_app
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.state import pservers
from services.coordinator.state.cluster import Cluster as State
from services.coordinator.state.pservers import PserverRegistry
from services.runtime.metrics import ServiceMetrics

from ...raising import raises_code
from .coordinating import eventually, heartbeat
from .support import LEASE, beat, change_record, make_cluster, registration, train
from .test_failover import APPLIED, Cluster, hold, running


def report(instance: str = "a", **changes: Any) -> ReportStandby:
    values = {"protocol": PROTOCOL_VERSION, "instance": f"standby {instance}", "address": f"http://{instance}:1"}
    return ReportStandby(**{**values, "follows": 0, **changes})


def test_a_standby_waits_while_no_pserver_serves_the_run() -> None:
    cluster = make_cluster()
    assert cluster.report_standby(report(), 0.0).leader is None
    train(cluster)
    answer = cluster.report_standby(report(follows=1), 0.0)
    assert (answer.leader, answer.run, answer.attempt, answer.incarnation) == ("http://1:1", "run1", 0, 1)
    cluster.pserver_heartbeat(1, beat(run="run1", round_=7), 1)
    assert cluster.report_standby(report(follows=1), 0.0).round == 7
    change_record(cluster, attempt=1)  # a rollback, which the pserver has not installed yet
    assert cluster.report_standby(report(follows=1), 0.0).leader is None
    change_record(cluster, attempt=0)
    cluster.tick(LEASE * 3)
    assert cluster.report_standby(report(follows=1), 0.0).leader is None


def test_refusals() -> None:
    with pytest.raises(Conflict, match="no pserver 2") as caught:
        make_cluster().report_standby(report(follows=2), 0.0)
    assert caught.value.code == "world_mismatch"
    with pytest.raises(Conflict) as caught:
        make_cluster(num_pservers=0, strategy="ring").report_standby(report(), 0.0)
    assert caught.value.code == "no_pservers"
    with pytest.raises(BadInput):
        make_cluster().report_standby(report().model_copy(update={"protocol": 1}), 0.0)


def test_a_standby_lives_for_a_lease_after_its_newest_report() -> None:
    registry = PserverRegistry(1, LEASE)
    for instance, now in (("a", 0), ("b", 0), ("c", 0), ("b", 5), ("d", 5)):
        registry = registry.report_standby(report(instance), now)
    registry = registry.report_standby(report("d", is_stopping=True), 6)
    assert registry.expire(LEASE) == registry
    registry = registry.expire(LEASE + 1)
    assert list(registry.standbys) == ["standby b"]
    assert registry.renew_leases(20).expire(20 + LEASE).standbys


def test_the_number_of_standbys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pservers, "MAX_STANDBYS", 2)
    registry = PserverRegistry(1, LEASE)
    for instance in "aba":
        registry = registry.report_standby(report(instance), 0)
    with pytest.raises(TryAgain, match="limit"):
        registry.report_standby(report("c"), 1)


async def test_the_status_lists_standbys() -> None:
    async with httpx.AsyncClient() as unused:
        coordinator = Coordinator(CoordinatorSettings(), unused)
        app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
            message = report(run="run1", round=5, lag_rounds=2, lag_seconds=0.5)
            answer = await http.post(REPORT_STANDBY, content=message.model_dump_json())
            assert answer.json()["leader"] is None
            status = ClusterStatus.from_answer((await http.get(STATUS)).content)
            [standby] = status.standbys
            assert (standby.follows, standby.round, standby.lag_rounds) == (0, 5, 2)
            await http.post(REPORT_STANDBY, content=report(is_stopping=True).model_dump_json())
            assert ClusterStatus.from_answer((await http.get(STATUS)).content).standbys == ()


# ---------------------------------------------------------------------- roles


LIMIT = 300.0  # the rejoin time-out


def forget_standbys(state: State) -> None:
    """Forget the standbys, as a coordinator that was restarted, or whose standbys are cut off."""
    state.registry = replace(state.registry, standbys={})


# ---------------------------------------------------------------- further indices


@pytest.mark.parametrize(("index", "follow"), [(2, 0), (3, 1), (4, 0), (5, 1)])
def test_a_process_with_a_further_index_follows_a_pserver(index: int, follow: int) -> None:
    registry = PserverRegistry(2, 10.0, num_standbys=2)
    with raises_code("superseded") as caught:
        registry.register(registration(index=index), 0)
    assert caught.value.facts["follow"] == follow


@pytest.mark.parametrize(("num_standbys", "index"), [(0, 2), (1, 4)])
def test_a_larger_index_is_refused(num_standbys: int, index: int) -> None:
    with raises_code("world_mismatch"):
        PserverRegistry(2, 10.0, num_standbys=num_standbys).register(registration(index=index), 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "log"),
        ({"mode": "async"}, "none"),
        ({"standbys": 1}, "replicated"),
    ],
)
def test_with_standbys_the_default_durability_is_replicated(given: dict[str, Any], expected: str) -> None:
    assert CoordinatorSettings(**given).log_durability == expected


@pytest.mark.parametrize(
    "given",
    [{"durability": "none"}, {"durability": "log"}, {"strategy": "ring"}, {"mode": "async"}, {"mode": "ssp"}],
)
def test_standbys_need_durability_replicated(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="standbys"):
        CoordinatorSettings(standbys=1, **given)


@pytest.mark.parametrize("durability", ["log", "fsync", "replicated"])
def test_asynchronous_modes_have_no_log(durability: str) -> None:
    text = (
        f"durability {durability} needs the synchronous mode.*Omit durability {durability}, and set checkpoint_rounds"
    )
    with pytest.raises(ValidationError, match=text):
        CoordinatorSettings(mode="ssp", durability=durability)
    assert CoordinatorSettings(mode="ssp", durability="none").log_durability == "none"


# ---------------------------------------------------------------- after a fail-over


@asynccontextmanager
async def after_fail_over() -> AsyncIterator[Cluster]:
    """A standby has become pserver 0, with incarnation 2, and serves the run."""
    async with running("s", rejoin_timeout_seconds=LIMIT) as cluster:
        await cluster.join("s")
        cluster.processes.down.add("0")
        await cluster.report("s", lost=1)
        await eventually(cluster.is_replaced)
        await cluster.beat("", incarnation=2)
        yield cluster


def lose(cluster: Cluster, index: int = 0, seconds: float = 0.0, **changes: Any) -> None:
    """Let the lease of a pserver expire, whose last heartbeat was so long ago."""
    state = cluster.coordinator.cluster
    known = state.registry.known
    lost = replace(known[index], is_lost=True, seen_at=cluster.coordinator.now() - seconds, **changes)
    state.registry = replace(state.registry, known={**known, index: lost})


async def register(cluster: Cluster, previous: int, *, is_empty: bool = False) -> int:
    held = None if is_empty else hold(cluster.run, 0)
    request = registration("new", index=0, previous=previous, held=held)
    return PserverRegistered.from_answer(await cluster.send(routes.REGISTER_PSERVER, request)).incarnation


@pytest.mark.parametrize("previous", [1, 0])  # a former leader, and one that has become a standby since
async def test_a_process_with_an_older_folder_waits_for_the_newest_one(previous: int) -> None:
    async with after_fail_over() as cluster:
        lose(cluster)
        with pytest.raises(TryAgain, match="of pserver 0 was at http://s:1; this process has an older state"):
            await register(cluster, previous)
        registry = cluster.coordinator.cluster.registry
        assert await register(cluster, 2) == 3
        cluster.coordinator.cluster.registry = registry
        lost = replace(registry.known[0], seen_at=cluster.coordinator.now() - LIMIT / 2 - 1)
        cluster.coordinator.cluster.registry = replace(registry, known={**registry.known, 0: lost})
        assert await register(cluster, previous) == 3


async def test_a_standby_joins_only_while_the_run_trains() -> None:
    async with after_fail_over() as cluster:
        state = cluster.coordinator.cluster
        report = ReportStandby(protocol=PROTOCOL_VERSION, instance="standby t", address="http://t:1", follows=0)
        assert state.report_standby(report, 0.0).is_joining
        state.registry = state.registry.change_replicas(0, lambda one: replace(one, in_sync=frozenset({"standby t"})))
        assert not state.report_standby(report, 0.0).is_joining
        state.registry = state.registry.clear_replicas()
        state.run = state.run.with_change(state="finished")
        assert not state.report_standby(report, 0.0).is_joining  # there is no further update


# ---------------------------------------------------------------- restarted pservers


@pytest.mark.parametrize("lost", ["run", "tail", "short"])
async def test_a_restarted_pserver_that_lost_updates_is_replaced(lost: str) -> None:
    async with running("s") as cluster:
        await cluster.join("s")
        held = {"run": None, "tail": hold(cluster.run, 0, 3), "short": hold(cluster.run, 0, is_short=True)}[lost]
        with pytest.raises(TryAgain, match="does not hold all updates"):
            await cluster.send(routes.REGISTER_PSERVER, registration("new", index=0, previous=1, held=held))
        await eventually(cluster.is_replaced)


@pytest.mark.parametrize("holder", ["member", "trainer"])
async def test_a_restarted_pserver_without_a_round_that_another_process_has_does_not_lead(holder: str) -> None:
    """After a power failure the end of its log is lost, which its newest heartbeat may not have named."""
    async with running("s", rejoin_timeout_seconds=LIMIT) as cluster:
        await cluster.join("s")
        cluster.processes.down.add("0")
        if holder == "member":
            await cluster.report("s", round=APPLIED + 3)
        else:
            heartbeat(cluster.coordinator, 0, APPLIED + 1)
            forget_standbys(cluster.coordinator.cluster)
        request = registration("new", index=0, previous=1, held=hold(cluster.run, 0))
        with pytest.raises(TryAgain, match="does not hold all" if holder == "member" else "does not report, and may"):
            await cluster.send(routes.REGISTER_PSERVER, request)


async def test_a_restarted_pserver_does_not_wait_for_a_member_without_the_current_attempt() -> None:
    """It missed a rollback, as did its standby, which no fence could promote."""
    async with running("s") as cluster:
        await cluster.join("s")
        await cluster.report("s", run=None, round=0)
        request = registration("new", index=0, previous=1, held=hold(cluster.run, 7))
        await cluster.send(routes.REGISTER_PSERVER, request)
        assert cluster.replicas.leader == "pserver new"


async def test_a_restarted_pserver_waits_until_its_members_have_reported_to_a_restarted_coordinator() -> None:
    async with running("s") as cluster:
        await cluster.join("s")
        registry = cluster.coordinator.cluster.registry
        member = replace(registry.members[0], is_restored=True)
        cluster.coordinator.cluster.registry = replace(registry, known={**registry.known, 0: member})
        forget_standbys(cluster.coordinator.cluster)
        request = registration("new", index=0, previous=1, held=hold(cluster.run, 0))
        with pytest.raises(TryAgain, match="does not report"):
            await cluster.send(routes.REGISTER_PSERVER, request)
        await cluster.report("s")
        await cluster.send(routes.REGISTER_PSERVER, request)
        assert cluster.replicas.leader == "pserver new"
