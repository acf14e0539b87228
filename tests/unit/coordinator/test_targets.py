"""The targets of Prometheus' service discovery."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ps_config.hosts import reachable_host
from ps_protocol.routes import JOIN_TRAINER
from ps_protocol.standbys import ReportStandby
from ps_protocol.vocabulary import PROTOCOL_VERSION
from services.coordinator.coordinator import Coordinator
from services.coordinator.process import describe_targets, is_own_address, make_coordinator_app
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.state.cluster import Cluster
from services.runtime.metrics import ServiceMetrics
from services.runtime.security import KnownHosts, protect

from .support import joining, make_cluster, model, registration


def cluster_of(pservers: list[str], trainers: list[str | None]) -> Cluster:
    cluster = make_cluster(num_trainers=len(trainers), num_pservers=len(pservers), on_trainer_loss="continue")
    for index, address in enumerate(pservers):
        cluster.register_pserver(registration(f"pserver {index}", index=index, address=address), 0)
    for rank, metrics_address in enumerate(trainers):
        answer = cluster.join_trainer(joining(f"trainer {rank}", rank=rank, metrics_address=metrics_address), 0)
        cluster.declare_model(rank, model(answer.incarnation, answer.run), 0.0)
    cluster.start_run_if_complete(0)
    assert cluster.run.record.plan is not None
    cluster.run = cluster.run.begin_training(0)
    cluster.run = cluster.run.finish_change(cluster.run.record.change_number)
    return cluster


def addresses(cluster: Cluster) -> list[str]:
    return [target for group in describe_targets(cluster) for target in group["targets"]]


def test_every_pserver_and_trainer_is_a_target_with_its_role_and_number():
    cluster = cluster_of(["http://10.0.0.1:7071", "http://10.0.0.2:7071"], ["http://10.0.0.3:1", None])
    plain = {"__scheme__": "http", "__metrics_path__": "/metrics"}
    assert describe_targets(cluster) == [
        {"targets": ["10.0.0.1:7071"], "labels": {**plain, "role": "pserver", "pserver": "0"}},
        {"targets": ["10.0.0.2:7071"], "labels": {**plain, "role": "pserver", "pserver": "1"}},
        {"targets": ["10.0.0.3:1"], "labels": {**plain, "role": "trainer", "trainer": "0"}},  # the other serves none
    ]


def test_a_standby_is_a_target():
    cluster = cluster_of(["http://10.0.0.1:7071"], [None])
    report = ReportStandby(
        protocol=PROTOCOL_VERSION, instance="standby number 0", address="http://10.0.0.2:1", follows=0
    )
    cluster.report_standby(report, 0)
    [_, group] = describe_targets(cluster)
    assert (group["targets"], group["labels"]["role"]) == (["10.0.0.2:1"], "standby")
    assert group["labels"]["pserver"] == "0"


OWN = reachable_host("0.0.0.0")


@pytest.mark.parametrize(
    ("client", "listed", "not_listed"),
    [
        (
            "10.0.0.7",
            ["10.0.0.7", "trainer.example", "a.inner"],
            ["10.0.0.8", "169.254.169.254", "b", "localhost", OWN],
        ),
        ("fd00::7", ["[fd00::7]", "[fd00:0::7]"], ["[fd00::8]", "[::1]"]),
        ("::ffff:10.0.0.7", ["10.0.0.7"], ["10.0.0.8"]),
        ("127.0.0.1", ["127.0.0.1", "localhost", "[::1]", OWN], ["169.254.169.254"]),
        ("10.0.0.1", ["127.0.0.1", "10.0.0.1"], ["10.0.0.2"]),  # on the coordinator's machine, by its address
    ],
)
def test_a_trainer_lists_no_host_but_its_own(client: str, listed: list[str], not_listed: list[str]):
    hosts = KnownHosts(["trainer.example", "*.inner"])
    for host in (*listed, *not_listed):
        assert is_own_address(f"http://{host}:1", client, "10.0.0.1", hosts) == (host in listed), host


async def test_the_metrics_of_a_trainer_with_another_host_are_not_listed(tmp_path: Path):
    async with httpx.AsyncClient() as http:
        coordinator = Coordinator(CoordinatorSettings(num_trainers=3, state_dir=tmp_path), http)
        app = make_coordinator_app(coordinator, ServiceMetrics("coordinator"))
        protect(app, CoordinatorSettings(allowed_hosts="trainer.example"), "http://10.0.0.1:7070")
        transport = httpx.ASGITransport(app=app, client=("10.0.0.7", 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1:7070") as trainer:
            for host in ("10.0.0.7", "10.0.0.8", "trainer.example"):
                message = {
                    "protocol": PROTOCOL_VERSION,
                    "instance": f"a process at {host}",
                    "metrics_address": f"http://{host}:1",
                }
                assert (await trainer.post(JOIN_TRAINER, json=message)).status_code == 200
    assert addresses(coordinator.cluster) == ["10.0.0.7:1", "trainer.example:1"]
