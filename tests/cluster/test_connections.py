"""Ways to the services: HTTP/1.1, Unix sockets on one host, tokens and TLS."""

from __future__ import annotations

import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from torch import Tensor

from gradpost.tokens import create_tokens
from ps_config.certificates import TlsFiles, client_context
from ps_config.tokens import SCOPES, Scope
from trainer_client import Session
from trainer_client.testing import LocalCluster

from ..unit.protocol.test_certificates import Authority, serial, serial_of_peer
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


@dataclass
class Closed:
    """A cluster, its tokens and its authority."""

    cluster: LocalCluster
    tokens: Path
    authority: Authority
    client: TlsFiles

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """Return the settings that a trainer needs."""
        return {
            "token_file": self.tokens / "train",
            "tls_ca": self.client.ca,
            "tls_client_cert": self.client.cert,
            "tls_client_key": self.client.key,
            "retry_seconds": 5,
        }

    @property
    def newest_serial(self) -> int:
        return serial(self.authority.folder / "service.pem")

    def serial_of(self, address: str) -> int:
        """Return the serial number of the certificate that a new connection receives."""
        url = httpx.URL(address)
        context = client_context(self.client)
        with (
            socket.create_connection((url.host, url.port), 10) as raw,
            context.wrap_socket(raw, server_hostname=url.host) as tls,
        ):
            return serial_of_peer(tls)

    def get(self, url: str, scope: Scope | None, **arguments: Any) -> httpx.Response:
        headers = {} if scope is None else {"authorization": f"Bearer {(self.tokens / scope).read_text().strip()}"}
        return httpx.get(url, headers=headers, verify=client_context(self.client), **arguments)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("closed")
    create_tokens(folder / "tokens", SCOPES, rotate=False)
    authority = Authority(folder / "authority")
    service, client = authority.issue("service"), authority.issue("client")
    with LocalCluster(
        pservers=1,
        trainers=2,
        local_transport=False,
        lease_seconds=2,
        tokens_dir=folder / "tokens",
        tls_ca=authority.ca,
        tls_cert=service.cert,
        tls_key=service.key,
        tls_client_ca=authority.ca,
        tls_client_cert=client.cert,
        tls_client_key=client.key,
    ) as cluster:
        yield Closed(cluster, folder / "tokens", authority, client)


@pytest.mark.extended
def test_training_goes_on_while_everything_is_replaced(closed: Closed) -> None:
    """Tokens, so that the first ones are worth nothing any more, and certificates, which new connections show."""
    together, done = threading.Barrier(2), threading.Event()

    def replace() -> None:
        for _ in range(2):
            create_tokens(closed.tokens, SCOPES, rotate=True)
        closed.authority.issue("client")
        closed.authority.issue("service")

    def show_newest() -> bool:
        addresses = {closed.cluster.address, *(pserver.address for pserver in closed.cluster.status().pservers)}
        return {closed.serial_of(address) for address in addresses} == {closed.newest_serial}

    def train(session: Session) -> tuple[int, float]:
        weight, optimizer = wrap_weight(session, 10_000)
        for step in itertools.count():
            if together.wait(30) == 0 and step == 2:
                replace()
            elif step > 2 and session.rank == 0 and show_newest():
                done.set()
            together.wait(30)
            if done.is_set():
                break
            step_with(optimizer, weight)
            time.sleep(0.1)
        return step, weight.sum().item()

    first = closed.newest_serial
    (steps, total), other = run_trainers(closed.cluster.address, [train, train], **closed.trainer_settings)
    assert (steps, total) == other == (steps, -10_000.0 * steps)
    assert steps > 2
    assert closed.newest_serial != first


def test_strangers_get_nothing(closed: Closed) -> None:
    status = closed.cluster.status()
    for address in (closed.cluster.address, *(pserver.address for pserver in status.pservers)):
        assert closed.get(f"{address}/healthz", None).status_code == 200
        assert closed.get(f"{address}/metrics", None).status_code == 401
        assert closed.get(f"{address}/metrics", "read").status_code == 200
        with (
            pytest.raises(httpx.TransportError),
            httpx.Client(verify=client_context(TlsFiles(closed.client.ca))) as http,
        ):
            http.get(f"{address}/healthz")
