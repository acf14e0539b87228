"""`gradpost doctor` at clusters that are well, and at some that are not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
import torch

from gradpost.doctor.cluster import examine_cluster
from gradpost.doctor.finding import Finding
from gradpost.status import find_connection
from ps_protocol.errors import Unreachable
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..unit.cli.conftest import run_process
from .conftest import Carrier
from .test_security import Closed, closed  # noqa: F401 - a fixture

pytestmark = pytest.mark.cluster

ELEMENTS = 1_000_000  # 4 MB: half of them on each pserver
ROUNDS = 3


@contextmanager
def training(cluster: LocalCluster) -> Iterator[None]:
    """Two trainers that have trained, told so, and are still here."""
    sessions = [Session(coordinator=cluster.address, rank=rank, world_size=2) for rank in range(2)]

    def train(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
        parameter.grad = torch.ones(ELEMENTS)
        optimizer = RemoteOptimizer(torch.optim.SGD([("w", parameter)], lr=0.1), session=session)
        for _ in range(ROUNDS):
            optimizer.step()

    threads = [threading.Thread(target=train, args=(session,)) for session in sessions]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for session in sessions:
            session.summary()  # a heartbeat goes before it
        yield
    finally:
        for session in sessions:
            session.close()


def doctor(cluster: LocalCluster, *options: str, exit_code: int = 0, **environment: str) -> dict[str, Any]:
    """What it says, with all findings of one check in a list."""
    outcome = run_process(
        "-m", "gradpost", "doctor", "--json", "--coordinator", cluster.address, *options, **environment
    )
    answer = json.loads(outcome.stdout)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in answer["checks"]:
        found.setdefault(finding["check"], []).append(finding)
    assert outcome.exit_code == exit_code, outcome.stdout
    return {**found, "all links": answer["links"]}


def examine(cluster: LocalCluster, *, with_speed: bool = False) -> dict[str, Finding]:
    """The part that looks at the cluster, in this process."""
    found = examine_cluster(find_connection(cluster.address), cluster.status(), with_speed=with_speed)
    return {finding.check: finding for finding in found}


def await_event(cluster: LocalCluster, text: str) -> str:
    """Wait until something has happened whose description begins so; returns the rest of it."""
    while True:
        with suppress(Unreachable):  # a connection may break off
            for event in cluster.view.follow_events():
                if event["text"].startswith(text):
                    return str(event["text"].removeprefix(text))


@pytest.mark.extended
@pytest.mark.parametrize("http2", [True, False])
def test_a_cluster_that_trains_is_well(http2: bool, carrier: Carrier) -> None:
    with LocalCluster(**carrier, http2=http2) as cluster, training(cluster):
        found = doctor(cluster)
        text = {check: finding[0]["detail"] for check, finding in found.items() if check != "all links"}
        levels = {check: finding[0]["level"] for check, finding in found.items() if check != "all links"}
    version = "HTTP/2" if http2 else "HTTP/1.1"
    for index in range(2):
        assert " is it, " in text[f"pserver {index}"]
        assert f", {version}, " in text[f"pserver {index}"]
        assert text[f"pserver {index}"].endswith(" MB/s back")
        assert levels[f"pserver {index}"] == ("ok" if http2 else "warning")
    for check in ("coordinator", "versions", "addresses", "clocks", "links", "pserver disks"):
        assert levels[check] == "ok", text[check]
    assert text["versions"].endswith(": 6 processes")
    links = {(link["trainer"], link["pserver"]): link for link in found["all links"]}
    assert links.keys() == {(rank, pserver) for rank in range(2) for pserver in range(2)}
    for link in links.values():
        assert 0 < link["round_trip_seconds"] < 5
        assert link["pushes"]["num_bytes"] >= ROUNDS * 2 * ELEMENTS
        assert link["pulls"]["num_bytes"] >= (ROUNDS + 1) * 2 * ELEMENTS
        assert 0 < link["pushes"]["seconds"] < 60


@pytest.mark.extended
def test_a_pserver_that_hangs_costs_seconds() -> None:
    with LocalCluster(lease_seconds=60) as cluster, training(cluster):
        cluster.pservers[1].signal(SIGSTOP)
        began = time.monotonic()
        found = examine(cluster, with_speed=True)
        assert time.monotonic() - began < 20
        assert found["pserver 0"].level == "ok"
        assert found["pserver 1"].level == "warning"
        assert found["pserver 1"].detail.endswith(" is not reached from here: no answer within 5 s")
        cluster.pservers[1].signal(SIGCONT)


@pytest.mark.extended
def test_a_pserver_that_is_another_one() -> None:
    """Both tell the same address: whoever wants the one talks to the other."""
    with LocalCluster() as cluster:
        first = await_event(cluster, "pserver 0 is here, at ")
        await_event(cluster, "pserver 1 is here")
        cluster.pservers[1].stop()
        cluster.start_pserver(1, GRADPOST_ADVERTISE_ADDRESS=first)
        await_event(cluster, f"pserver 1 is here, at {first}")
        found = examine(cluster)
        assert found["pserver 0"].level == "ok"
        assert found["pserver 1"].level == "broken"
        assert f"{first} answers as pserver 0 in life 1, and should be pserver 1 in life 2" in found["pserver 1"].detail
        assert (found["addresses"].level, found["addresses"].detail) == (
            "broken", f"pserver 0 and pserver 1 tell the same address, {first}"
        )  # fmt: skip
        assert doctor(cluster, "--no-speed", exit_code=1)["pserver 1"][0]["why"]


@pytest.mark.extended
def test_names_that_are_not_known_and_nobody_behind_an_address() -> None:
    with LocalCluster() as cluster:
        await_event(cluster, "pserver 0 is here")
        await_event(cluster, "pserver 1 is here")
        for index, address in enumerate(("http://ps-0.invalid:7071", "http://127.0.0.1:1")):
            cluster.pservers[index].stop()
            cluster.start_pserver(index, GRADPOST_ADVERTISE_ADDRESS=address)
            await_event(cluster, f"pserver {index} is here, at {address}")
        found = examine(cluster)
    assert found["pserver 0"].level == found["pserver 1"].level == "broken"
    assert "the name ps-0.invalid is not known here: " in found["pserver 0"].detail
    assert "http://127.0.0.1:1 is not reached from here: " in found["pserver 1"].detail
    assert found["addresses"].detail.startswith("pserver 1 (http://127.0.0.1:1) told the coordinator an address of")


@pytest.mark.extended
def test_a_closed_cluster(closed: Closed) -> None:  # noqa: F811
    """Tokens and mutual TLS, which the doctor has to bring along."""
    await_event(closed.cluster, "pserver 0 is here")
    tls = {
        f"GRADPOST_TLS_{name}": str(path)
        for name, path in (
            ("CA", closed.client.ca), ("CLIENT_CERT", closed.client.cert), ("CLIENT_KEY", closed.client.key),
        )
    }  # fmt: skip
    found = doctor(closed.cluster, GRADPOST_TOKENS_DIR=str(closed.tokens), **tls)
    assert f"{closed.cluster.status().pservers[0].address} is it, " in found["pserver 0"][0]["detail"]
    found = doctor(closed.cluster, exit_code=1, **tls)
    assert found["coordinator"][0]["advice"].startswith("show a token of scope read")
    assert "pserver 0" not in found
