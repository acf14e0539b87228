"""Standbys at the coordinator: their leases, the leader that they are answered, and the end of the cluster."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ps_protocol.errors import BadInput, Conflict, TryAgain
from ps_protocol.messages import ClusterStatus
from ps_protocol.routes import REPORT_STANDBY, STATUS
from ps_protocol.standbys import ReportStandby
from ps_protocol.vocabulary import PROTOCOL_VERSION
from services.coordinator.coordinator import Coordinator
from services.coordinator.process import make_coordinator_app
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.state import pservers
from services.coordinator.state.pservers import PserverRegistry
from services.runtime.metrics import ServiceMetrics

from .support import LEASE, beat, change_record, make_cluster, train


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


class Leases(RuleBasedStateMachine):
    """The registry against a model: a standby lives for a lease after its newest report."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = PserverRegistry(1, LEASE)
        self.now = 0.0
        self.seen: dict[str, float] = {}

    @rule(instance=st.sampled_from("abc"), is_stopping=st.booleans())
    def send_report(self, instance: str, is_stopping: bool) -> None:
        message = report(instance, is_stopping=is_stopping)
        self.registry = self.registry.report_standby(message, self.now)
        if is_stopping:
            self.seen.pop(message.instance, None)
        else:
            self.seen[message.instance] = self.now

    @rule(seconds=st.floats(0, 2 * LEASE))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.registry = self.registry.expire(self.now)
        for instance in [key for key, at in self.seen.items() if self.now - at > LEASE]:
            del self.seen[instance]

    @rule()
    def renew(self) -> None:
        self.registry = self.registry.renew_leases(self.now)
        self.seen = dict.fromkeys(self.seen, self.now)

    @invariant()
    def agrees(self) -> None:
        assert {key: standby.seen_at for key, standby in self.registry.standbys.items()} == self.seen


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


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
