"""`gradpost doctor` at clusters that are well, and at some that are not."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest

from gradpost.doctor import Finding, check_cluster
from ps_protocol.errors import Unreachable
from trainer_client.testing import LocalCluster

from ..unit.cli.conftest import run_process
from .test_security import Closed, closed  # noqa: F401 - a fixture

pytestmark = pytest.mark.cluster


def doctor(cluster: LocalCluster, exit_code: int = 0, **environment: str) -> dict[str, dict[str, Any]]:
    """Return the findings of the command, by check."""
    outcome = run_process("-m", "gradpost", "doctor", "--json", "--coordinator", cluster.address, **environment)
    assert outcome.exit_code == exit_code, outcome.stdout
    return {finding["check"]: finding for finding in json.loads(outcome.stdout)["checks"]}


def examine(cluster: LocalCluster) -> dict[str, Finding]:
    """Return the findings about the cluster, of this process."""
    return {finding.check: finding for finding in check_cluster(cluster.address)}


def await_event(cluster: LocalCluster, text: str) -> str:
    """Wait for an event whose description begins so; return the rest of it."""
    while True:
        with suppress(Unreachable):  # a connection may break off
            for event in cluster.view.follow_events():
                if event["text"].startswith(text):
                    return str(event["text"].removeprefix(text))


def await_pservers(cluster: LocalCluster) -> list[str]:
    """Wait for both pservers; return their addresses."""
    return [await_event(cluster, f"pserver {index} is here, at ") for index in range(2)]


@pytest.mark.extended
@pytest.mark.parametrize("http2", [True, False])
def test_a_cluster_is_well(http2: bool) -> None:
    with LocalCluster(http2=http2) as cluster:
        addresses = await_pservers(cluster)
        found = examine(cluster)
    for index, address in enumerate(addresses):
        finding = found[f"pserver {index}"]
        assert finding.detail == f"{address} answers over HTTP/{'2' if http2 else '1.1'}"
        assert finding.level == ("ok" if http2 else "warning")
    for check in ("coordinator", "versions", "addresses", "clocks"):
        assert found[check].level == "ok", found[check]
    assert "3 services" in found["clocks"].detail
    assert found["pserver disks"].detail.endswith(" are free on each of 2") or found["pserver disks"].advice


@pytest.mark.extended
def test_a_pserver_that_hangs_costs_seconds() -> None:
    with LocalCluster(lease_seconds=60) as cluster:
        await_pservers(cluster)
        cluster.pservers[1].signal(SIGSTOP)
        began = time.monotonic()
        found = examine(cluster)
        assert time.monotonic() - began < 20
        assert found["pserver 0"].level == "ok"
        assert found["pserver 1"].detail.endswith(" is not reached from here: no answer within 5 s")
        cluster.pservers[1].signal(SIGCONT)


@pytest.mark.extended
def test_a_pserver_behind_the_address_of_another() -> None:
    with LocalCluster() as cluster:
        first, _ = await_pservers(cluster)
        cluster.pservers[1].stop()
        cluster.start_pserver(1, GRADPOST_ADVERTISE_ADDRESS=first)
        await_event(cluster, f"pserver 1 is here, at {first}")
        found = doctor(cluster, exit_code=1)
        assert found["pserver 0"]["level"] == "ok"
        assert found["pserver 1"]["level"] == "broken"
        expected = f"{first} answers as pserver 0 of incarnation 1, not as pserver 1 of incarnation 2"
        assert found["pserver 1"]["detail"] == expected
        assert found["addresses"]["detail"] == f"pservers 0, 1 advertise the same address, {first}"


@pytest.mark.extended
def test_unknown_names_and_addresses_without_a_service() -> None:
    with LocalCluster() as cluster:
        await_pservers(cluster)
        for index, address in enumerate(("http://ps-0.invalid:7071", "http://127.0.0.1:1")):
            cluster.pservers[index].stop()
            cluster.start_pserver(index, GRADPOST_ADVERTISE_ADDRESS=address)
            await_event(cluster, f"pserver {index} is here, at {address}")
        found = examine(cluster)
    assert "the name ps-0.invalid is not known here: " in found["pserver 0"].detail
    assert "http://127.0.0.1:1 is not reached from here: " in found["pserver 1"].detail
    assert found["addresses"].detail.startswith("pserver 1 (http://127.0.0.1:1): a loopback address")


@pytest.mark.extended
def test_a_closed_cluster(closed: Closed) -> None:  # noqa: F811
    """The doctor sends the token and shows the certificate."""
    await_event(closed.cluster, "pserver 0 is here")
    tls = {
        f"GRADPOST_TLS_{name}": str(path)
        for name, path in (
            ("CA", closed.client.ca), ("CLIENT_CERT", closed.client.cert), ("CLIENT_KEY", closed.client.key),
        )
    }  # fmt: skip
    found = doctor(closed.cluster, GRADPOST_TOKENS_DIR=str(closed.tokens), **tls)
    assert found["pserver 0"]["detail"] == f"{closed.cluster.status().pservers[0].address} answers over HTTP/2"
    found = doctor(closed.cluster, exit_code=1, **tls)
    assert found["coordinator"]["advice"].startswith("send a token of scope read")
    assert "pserver 0" not in found
