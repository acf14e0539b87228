"""Ways to the services: HTTP/1.1, Unix sockets on one host, tokens and TLS."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from torch import Tensor

from gradpost import Session
from gradpost.tokens import create_tokens
from ps_config.certificates import TlsFiles, client_context
from trainer_client.testing import LocalCluster

from ..unit.protocol.test_access import Authority
from .training import (
    assert_identical,
    run_all,
    run_trainers,
    step_with,
    train_locally,
    train_remotely,
    wrap_weight,
)

pytestmark = pytest.mark.cluster


def count_tcp_connections(session: Session) -> int:
    """Count the connections of this process, in which the trainers are threads, to the pservers."""
    ports = {int(pserver.connection.info.address.rpartition(":")[2]) for pserver in session.client.pservers.clients}
    connections = psutil.Process().net_connections("tcp")
    return sum(bool(one.raddr) and one.raddr.port in ports for one in connections)


def count_local_connections(names: set[str | None]) -> int:
    """Count the local connections that pservers have accepted."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.split()[5] == "03" and line.rpartition("@")[2] in names for line in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
def test_blocks_travel_over_unix_sockets() -> None:
    def look(step: int, *, session: Session) -> None:
        if step == 5 and session.rank == 0:
            names = {pserver.connection.info.local for pserver in session.client.pservers.clients}
            assert None not in names
            # Each of two trainers has one connection to each of two pservers.
            found = count_local_connections(names), count_tcp_connections(session)
            assert found == (4, 0)
            local_pservers = session.client.metrics.registry.get_sample_value("gradpost_trainer_local_pservers")
            assert local_pservers == 2

    def train(session: Session) -> dict[str, Tensor]:
        return train_remotely("Adam", session, partial(look, session=session))

    with LocalCluster(pservers=2, trainers=2, on_trainer_loss="fail") as cluster:
        for actual in run_all(cluster, train):
            assert_identical(actual, train_locally("Adam"))


# ---------------------------------------------------------------------- tokens and TLS


def test_a_cluster_with_tokens_and_tls_serves_its_trainers_and_no_strangers(tmp_path: Path) -> None:
    create_tokens(tmp_path / "tokens", rotate=False)
    authority = Authority(tmp_path / "authority")
    service, client = authority.issue("service"), authority.issue("client")
    own = {"tls_ca": authority.ca, "tls_client_cert": client.cert, "tls_client_key": client.key}

    def train(session: Session) -> float:
        weight, optimizer = wrap_weight(session, 10_000)
        for _ in range(3):
            step_with(optimizer, weight)
        return weight.sum().item()

    def get(url: str, token: str = "") -> int:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.get(url, headers=headers, verify=client_context(client)).status_code

    with LocalCluster(
        pservers=1, trainers=2, local_transport=False, tokens_dir=tmp_path / "tokens", tls_cert=service.cert,
        tls_key=service.key, tls_client_ca=authority.ca, **own,
    ) as cluster:  # fmt: skip
        token_file = tmp_path / "tokens" / "train"
        assert run_trainers(cluster.address, [train] * 2, token_file=token_file, **own) == [-30_000.0] * 2
        for address in (cluster.address, *(pserver.address for pserver in cluster.status().pservers)):
            assert (get(f"{address}/healthz"), get(f"{address}/metrics")) == (200, 401)
            assert get(f"{address}/metrics", (tmp_path / "tokens" / "read").read_text().strip()) == 200
            with (
                pytest.raises(httpx.TransportError),
                httpx.Client(verify=client_context(TlsFiles(authority.ca))) as stranger,
            ):
                stranger.get(f"{address}/healthz")
