"""Requests that a proxy could be made to forward as another client's."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from gradpost.tokens import create_tokens
from ps_protocol.routes import AUDIT, CONTROLS, STATUS
from ps_protocol.tokens import SCOPES
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .torchrun import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

# As ingress-nginx writes it: connections to the service are kept, and clients may ask for an upgrade.
NGINX = """
user root; worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log stderr;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    upstream service {{ server 127.0.0.1:{service}; keepalive 32; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://service;
            proxy_http_version 1.1;
            proxy_set_header Host $http_host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }}
    }}
}}
"""
HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    http-reuse always
frontend front
    bind 127.0.0.1:{port}
    default_backend service
backend service
    server one 127.0.0.1:{service}
"""
PROXIES = {"nginx": (NGINX, ["-e", "stderr", "-c"]), "haproxy": (HAPROXY, ["-db", "-f"])}
ATTEMPTS = 10


@contextmanager
def behind_proxy(name: str, address: str, folder: Path) -> Iterator[str]:
    """Run a proxy in front of a service; yields the proxy's address."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    template, arguments = PROXIES[name]
    port = free_port()
    config = folder / f"{name}.conf"
    config.write_text(template.format(folder=folder, port=port, service=address.rpartition(":")[2]))
    process = subprocess.Popen([name, *arguments, str(config)])
    try:
        deadline = time.monotonic() + 30
        while True:
            assert process.poll() is None, f"{name} has ended"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, f"{name} does not listen"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def smuggle(address: str, request: bytes) -> bytes:
    """Send the beginning of a request as the body of one that asks for an upgrade; returns the answer's first bytes."""
    host, port = address.removeprefix("http://").split(":")
    body = b"\r\n" * 40_000 + request  # the server reads the empty lines and the request in separate segments
    head = f"POST /v1/trainers HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    with closing(socket.create_connection((host, int(port)), 10)) as sock:
        sock.sendall(f"{head}Connection: upgrade\r\nUpgrade: x\r\n\r\n".encode() + body)
        return sock.recv(1 << 16)


@pytest.mark.parametrize("name", PROXIES)
def test_nothing_is_paused_by_a_request_that_is_smuggled_through_a_proxy(name: str, tmp_path: Path) -> None:
    """Without a token, through the connection on which the proxy forwards an administrator's next request."""
    tokens = tmp_path / "tokens"
    create_tokens(tokens, SCOPES, rotate=False)
    admin = {"authorization": f"Bearer {(tokens / 'admin').read_text().strip()}"}
    with (
        LocalCluster(pservers=1, trainers=1, tokens_dir=tokens) as cluster,
        behind_proxy(name, cluster.address, tmp_path) as proxy,
        httpx.Client(headers=admin, timeout=30) as http,
        Session(coordinator=cluster.address, rank=0, world_size=1, token_file=tokens / "train") as session,
    ):
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        weight.grad = torch.ones(4)
        optimizer.step()
        for _ in range(ATTEMPTS):
            smuggle(proxy, b"POST /v1/controls/pause HTTP/1.1\r\nHost: localhost\r\nX-Rest: ")
            status = http.get(proxy + STATUS)
            assert status.status_code == 200
            assert status.json()["state"] == "training"
        assert http.get(cluster.address + CONTROLS).json()["is_paused"] is False
        assert http.get(cluster.address + AUDIT).json() == []
