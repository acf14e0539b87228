"""Disks that fail, and proxies: the services log what to do, and the run goes on without a loss."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGTERM

import psutil
import pytest
import torch

from gradpost import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..docs.markdown import code_blocks, read, section
from .faulty_run import FaultyRun
from .trainer_processes import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(300)]


# What a damaged log or checkpoint costs is in tests/unit/pserver/durable and, for a whole cluster, in test_faults.py.
# Networks, clocks and disks that fail for a while are in tests/chaos.


def test_a_disk_that_stays_full_ends_the_run() -> None:
    """A limit on the size of files stands for the full disk: every write fails."""
    with FaultyRun(1000, round_timeout_seconds=3, rejoin_timeout_seconds=1) as run:
        run.wait_for_round(20)
        for pserver in run.cluster.pservers:
            psutil.Process(pserver.pid).rlimit(psutil.RLIMIT_FSIZE, (1, psutil.RLIM_INFINITY))
        assert [trainer.wait(30) for trainer in run.cluster.trainers] == [1, 1]
        for rank in (0, 1):
            run.wait_for_line(f"[trainer {rank}] gradpost.StorageFailed: ")
        run.wait_for_line('"event": "run failed"', of="coordinator")
        status = run.cluster.status()
        assert status.state == "failed"
        assert status.failure is not None
        assert (status.failure["code"], status.failure["status"]) == ("storage_failed", 507)
        assert "cannot log round" in status.failure["detail"]
        assert not [line for line in run.lines if "Traceback" in line and "[trainer" not in line]
        reports = [line for line in run.lines if "the log cannot be written" in line]
        assert len(reports) <= 2  # one of each pserver, although it tries again every 0.5 s


ARGUMENTS = {"nginx": ["-e", "stderr", "-c"], "haproxy": ["-db", "-f"]}
DOCUMENTED = section(read("deploy.md"), "Behind proxies")


# What stands around the part that the document shows.
AROUND = {
    "nginx": "user root; worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log stderr; events {{ }}\n"
    "http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; "
    "fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;\n{shown} }}",
    "haproxy": "{shown}",
}


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


@pytest.mark.parametrize("name", ARGUMENTS)
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
