"""Services behind proxies: training as docs/deploy.md describes it, and requests that would be another client's."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from signal import SIGTERM

import httpx
import pytest
import torch

from gradpost.tokens import create_tokens
from ps_config.tokens import SCOPES
from ps_protocol.routes import AUDIT, CONTROLS, STATUS
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..docs.markdown import code_blocks, read, section
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
CONFIGURATIONS = {"nginx": NGINX, "haproxy": HAPROXY}
ARGUMENTS = {"nginx": ["-e", "stderr", "-c"], "haproxy": ["-db", "-f"]}
DOCUMENTED = section(read("deploy.md"), "Behind proxies")
# What stands around the part that the document shows.
AROUND = {
    "nginx": "user root; worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log stderr; events {{ }}\n"
    "http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; "
    "fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;\n{shown} }}",
    "haproxy": "{shown}",
}
ATTEMPTS = 10


@contextmanager
def running_proxy(name: str, port: int, text: str, folder: Path) -> Iterator[str]:
    """Run a proxy with this configuration, which listens on this port; yields the proxy's address."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    config = folder / f"{name}.conf"
    config.write_text(text)
    process = subprocess.Popen([name, *ARGUMENTS[name], str(config)])
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


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_pserver_is_trained_with_through_a_proxy_as_documented(name: str, tmp_path: Path) -> None:
    [shown] = code_blocks(DOCUMENTED, name)
    port, own = free_port(), free_port()
    text = shown.text.replace("10.0.0.5:7071", f"127.0.0.1:{own}")
    text = text.replace("listen 7071", f"listen 127.0.0.1:{port}").replace("bind :7071", f"bind 127.0.0.1:{port}")
    with (
        running_proxy(name, port, AROUND[name].format(folder=tmp_path, shown=text), tmp_path) as proxy,
        LocalCluster(pservers=1, trainers=1, http2=name != "nginx", local_transport=False) as cluster,
    ):
        cluster.pservers[0].signal(SIGTERM)
        cluster.pservers[0].wait(30)
        cluster.start_pserver(0, GRADPOST_PORT=str(own), GRADPOST_ADVERTISE_ADDRESS=proxy)
        with Session(coordinator=cluster.address, rank=0, world_size=1) as session:
            weight = torch.nn.Parameter(torch.zeros(1_000_000))  # more than nginx takes unless told otherwise
            optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
            for _ in range(3):
                weight.grad = torch.ones(1_000_000)
                optimizer.step()
            [pserver] = cluster.status().pservers
        assert pserver.address == proxy
        assert torch.equal(weight.detach(), torch.full((1_000_000,), -3.0))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_is_paused_by_a_request_that_is_smuggled_through_a_proxy(name: str, tmp_path: Path) -> None:
    """Without a token, through the connection on which the proxy forwards an administrator's next request."""
    tokens, port = tmp_path / "tokens", free_port()
    create_tokens(tokens, SCOPES, rotate=False)
    admin = {"authorization": f"Bearer {(tokens / 'admin').read_text().strip()}"}
    with (
        LocalCluster(pservers=1, trainers=1, tokens_dir=tokens) as cluster,
        running_proxy(
            name,
            port,
            CONFIGURATIONS[name].format(folder=tmp_path, port=port, service=cluster.address.rpartition(":")[2]),
            tmp_path,
        ) as proxy,
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
