"""Ways of blocks to the pservers: HTTP/1.1, Unix sockets on one host, TLS; the bits stay the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from trainer_client import Session
from trainer_client.testing import LocalCluster

from ..unit.protocol.test_certificates import Authority
from .conftest import StartCluster
from .training import Parameters, assert_identical, run_all, step_with, train_locally, train_remotely, wrap_weight

pytestmark = pytest.mark.cluster
OPTIMIZER = "Adam"
LOOK_AT = 5  # in the middle


def test_a_run_over_http1_gives_the_bits_of_a_run_over_http2(own_cluster: StartCluster) -> None:
    def train(session: Session) -> tuple[dict[str, Tensor], str]:
        return train_remotely("AdamW", session, contributor=session.rank), session.summary().transport

    results = [found for http2 in (True, False) for found in run_all(own_cluster(http2=http2), train)]
    assert [transport for _, transport in results] == ["HTTP/2"] * 2 + ["HTTP/1.1"] * 2
    for parameters, _ in results[1:]:
        assert_identical(parameters, results[0][0])


@pytest.mark.extended
def test_tls_on_every_link(tmp_path: Path, own_cluster: StartCluster) -> None:
    """Over HTTP/1.1: a cluster of test_security.py has TLS and HTTP/2."""
    issued = Authority(tmp_path / "authority").issue("service")

    def train(session: Session) -> float:
        weight, optimizer = wrap_weight(session, 100_000)
        step_with(optimizer, weight)
        assert session.summary().transport == "HTTP/1.1"
        return weight.sum().item()

    cluster = own_cluster(http2=False, tls_ca=issued.ca, tls_cert=issued.cert, tls_key=issued.key)
    assert cluster.address.startswith("https://")
    assert run_all(cluster, train, tls_ca=issued.ca) == [-100_000.0] * 2


def count_connections(session: Session, tcp: list[int]) -> None:
    """Count the TCP connections of this process, in which the trainers are threads, to the pservers."""
    ports = {int(pserver.connection.info.address.rpartition(":")[2]) for pserver in session.client.pservers}
    connections = psutil.Process().net_connections("tcp")
    tcp.append(sum(bool(one.raddr) and one.raddr.port in ports for one in connections))


def local_connections(names: set[str]) -> int:
    """Count the local connections that pservers have accepted."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.split()[5] == "03" and line.rpartition("@")[2] in names for line in lines)


def train(session: Session, look: Callable[[Session], None]) -> dict[str, Tensor]:
    def look_in_the_middle(step: int, parameters: Parameters) -> None:
        if step == LOOK_AT and session.rank == 0:
            look(session)

    return train_remotely(OPTIMIZER, session, before_step=look_in_the_middle)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")


@on_linux
@pytest.mark.parametrize(
    ("offered", "wanted"),
    [
        pytest.param(True, True, id="both"),
        pytest.param(True, False, id="pservers", marks=pytest.mark.extended),
    ],
)
def test_blocks_travel_over_unix_sockets_if_both_sides_want_that(offered: bool, wanted: bool) -> None:
    tcp: list[int] = []
    local: list[int] = []

    def look(session: Session) -> None:
        infos = [pserver.connection.info for pserver in session.client.pservers]
        assert all((info.local is not None) == offered for info in infos)
        count_connections(session, tcp)
        local.append(local_connections({info.local for info in infos if info.local is not None}))
        links = [pserver.link.describe() for pserver in session.client.pservers]
        assert all(link.is_local == (offered and wanted) and link.pushes.num_bytes > 0 for link in links)
        local_pservers = session.client.metrics.registry.get_sample_value("gradpost_trainer_local_pservers")
        assert local_pservers == (len(links) if offered and wanted else 0)

    with LocalCluster(pservers=2, trainers=2, on_trainer_loss="fail", local_transport=offered) as cluster:
        trained = run_all(cluster, partial(train, look=look), local_transport=wanted)
    # Each of two trainers has one connection to each of two pservers.
    assert (local, tcp) == (([4], [0]) if offered and wanted else ([0], [4]))
    for actual in trained:
        assert_identical(actual, train_locally(OPTIMIZER))


@on_linux
@pytest.mark.extended
@pytest.mark.parametrize("offers", [True, False])
def test_the_next_life_of_a_pserver_is_reached_as_it_says(offers: bool) -> None:
    tcp: list[int] = []
    names: list[str | None] = []

    def kill(session: Session) -> None:
        names.append(session.client.pservers[0].connection.info.local)
        cluster.pservers[0].signal(9)
        cluster.pservers[0].wait(10)
        cluster.start_pserver(0, GRADPOST_LOCAL_TRANSPORT=str(offers))

    def after(session: Session) -> dict[str, Tensor]:
        trained = train(session, kill)
        if session.rank == 0:
            names.append(session.client.pservers[0].connection.info.local)
            count_connections(session, tcp)
            assert [pserver.link.is_local for pserver in session.client.pservers] == [offers, True]
        return trained

    with LocalCluster(pservers=2, trainers=2, on_trainer_loss="fail", lease_seconds=2) as cluster:
        trained = run_all(cluster, after)
    assert names[0] is not None
    assert names[1] != names[0]
    assert (names[1] is not None) == offers
    assert (tcp == [0]) == offers  # the other trainer may have left before that was counted
    for actual in trained:
        assert_identical(actual, train_locally(OPTIMIZER))
