"""Disks, networks and clocks that fail: the services log what to do, and the run goes on without a loss."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from signal import SIGTERM

import pytest
import torch

from services.runtime.checkpoints import complete_checkpoints
from services.runtime.storage import open_checkpoint_storage
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..docs.markdown import code_blocks, read, section
from .faulty_run import FaultyRun
from .surroundings import HOST, Direction, Namespace, SmallDisk, namespace, small_disk
from .trainer_processes import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(300)]


# What a damaged log or checkpoint costs is in tests/unit/pserver/durable and, for a whole cluster, in test_faults.py.
# Gateways that answer pages for a service are in tests/chaos.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def test_a_round_waits_for_the_log_and_goes_on_without_a_checkpoint(tmp_path: Path) -> None:
    full = "log.append.before=enospc@10,checkpoint.shard=enospc@2"
    with FaultyRun(60, state_dir=tmp_path, checkpoint_rounds=5) as run:
        run.wait_for_round(3)
        run.restart_pserver(1, GRADPOST_FAILPOINTS=full)
        for text in (
            "the log cannot be written; the round waits",
            "a checkpoint could not be written; training continues",
        ):
            assert "No space left on device" in run.wait_for_line(text, of="pserver 1")
        run.check_results()
        place = open_checkpoint_storage(str(tmp_path / "checkpoints"))
        assert complete_checkpoints(place, run.cluster.status().run)[0].round == 60


def test_a_disk_that_stays_full_ends_the_run(disk: SmallDisk) -> None:
    settings = {"round_timeout_seconds": 3, "rejoin_timeout_seconds": 1}
    with FaultyRun(1000, state_dir=disk.path, **settings) as run:
        run.wait_for_round(100)  # the coordinator has written down by now that rounds were ended
        disk.fill()
        assert [trainer.wait(30) for trainer in run.cluster.trainers] == [1, 1]
        for rank in (0, 1):
            run.wait_for_line(f"[trainer {rank}] gradpost.StorageFailed: ")
        run.wait_for_line('"event": "run failed"', of="coordinator")
        status = run.cluster.status()
        assert status.state == "failed"
        assert status.failure is not None
        assert (status.failure["code"], status.failure["status"]) == ("storage_failed", 507)
        assert "cannot log round" in status.failure["detail"] or "cannot be written" in status.failure["detail"]
        assert not [line for line in run.lines if "Traceback" in line and "[trainer" not in line]
        reports = [line for line in run.lines if "the log cannot be written" in line]
        assert len(reports) <= 2  # one of each pserver, although it tries again every 0.5 s
        assert all(str(disk.path) in line for line in reports)


LOG_BYTES = 64 * 1024
KEEP = 2


def measure(path: Path) -> tuple[int, int]:
    """Return size and inode of a file."""
    try:
        return path.stat().st_size, path.stat().st_ino
    except FileNotFoundError:  # deleted, or renamed, meanwhile
        return 0, 0


class DiskUse:
    """The largest sizes of the log of a pserver, and of all of its checkpoints."""

    def __init__(self, state: Path) -> None:
        self.log, self.checkpoints, self.largest = 0, 0, 0
        self._state = state

    def look(self) -> None:
        for index in (0, 1):
            log = sum(measure(path)[0] for path in self._state.glob(f"pserver-{index}/log/*.log"))
            own = self._state.glob(f"pserver-{index}/log/*.safetensors")
            shared = self._state.glob(f"checkpoints/*/*/pserver-{index}-of-2.*")
            sizes = [size for size, _ in {measure(path) for path in (*own, *shared)}]  # a file may have two names
            self.log = max(self.log, log)
            self.checkpoints = max(self.checkpoints, sum(sizes))
            self.largest = max([self.largest, *sizes])


def test_the_disk_that_a_pserver_takes_is_bounded_as_documented(tmp_path: Path) -> None:
    """The coordinator, which completes the checkpoints, is away for most of the run."""
    settings = {"max_log_bytes": LOG_BYTES, "keep_checkpoints": KEEP, "rejoin_timeout_seconds": 60}
    use = DiskUse(tmp_path)

    def look_until(round_: int) -> None:
        """Look with every line of a trainer."""
        run.wait_for(lambda: use.look() or run.round_of(0) >= round_, f"round {round_}")

    with FaultyRun(300, state_dir=tmp_path, **settings) as run:
        look_until(30)
        run.kill(run.cluster.coordinator)
        look_until(250)
        run.cluster.restart_coordinator()
        look_until(300)
        run.check_results()
    assert use.log <= (KEEP + 2) * LOG_BYTES
    assert use.checkpoints <= 3 * (KEEP + 1) * use.largest
    assert use.log > LOG_BYTES  # it would have been far more


# ---------------------------------------------------------------------- networks and clocks

LEASE = 3


@pytest.fixture
def apart() -> Iterator[Namespace]:
    with namespace() as apart:
        yield apart


def start_apart(rounds: int, apart: Namespace, **settings: object) -> FaultyRun:
    """Begin a run whose trainer 1 is in the namespace."""
    run = FaultyRun(
        rounds, host=HOST, insecure=True, lease_seconds=LEASE, round_timeout_seconds=4, **settings
    )  # fmt: skip
    run.prefix[1] = apart.prefix
    return run


def port_of(run: FaultyRun, pserver: int) -> int:
    return int(run.cluster.status().pservers[pserver].address.rpartition(":")[2])


@pytest.mark.alone
def test_a_partition_that_heals_within_the_lease_costs_nothing_but_time(apart: Namespace) -> None:
    directions: tuple[Direction, ...] = ("out", "in", "both")
    with start_apart(100, apart) as run:
        for direction in directions:
            run.wait_for_round(run.round_of(0) + 10)
            apart.cut(port_of(run, 0), direction)
            stands_at = run.round_of(0)
            time.sleep(LEASE / 3)
            assert run.round_of(0) <= stands_at + 1
            apart.heal()
        run.check_results()
        assert not [line for line in run.lines if "was lost" in line or "although alive" in line]


@pytest.mark.alone
def test_a_trainer_that_stays_cut_off_is_named_and_waited_for(apart: Namespace) -> None:
    with start_apart(60, apart) as run:
        run.wait_for_round(10)
        apart.cut(port_of(run, 0), "both")
        assert "within the round time-out of 4 s, although alive" in run.wait_for_line("trainer 1 did not reach")
        run.wait_for(lambda: run.cluster.status().waiting_for == ("trainer 1",), "the status to name trainer 1")
        apart.heal()
        run.check_results()


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


def find_libfaketime() -> str:
    found = sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip("libfaketime is not installed (the Debian package of this name)")
    return str(found[0])


def days_ahead(run: FaultyRun, checkpoints: Path) -> int:
    """Return how far the coordinator's clock was ahead of ours when it completed its newest checkpoint."""
    newest = complete_checkpoints(open_checkpoint_storage(str(checkpoints)), run.cluster.status().run)[0]
    return round((datetime.fromisoformat(newest.created) - datetime.now(UTC)) / timedelta(days=1))


def test_the_date_does_not_matter(tmp_path: Path) -> None:
    offset, checkpoints = tmp_path / "offset", tmp_path / "checkpoints"
    offset.write_text("+0d\n")
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GRADPOST_")},
        "LD_PRELOAD": find_libfaketime(),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1",  # seconds until it looks into the file again
    }
    run = FaultyRun(80, environ=environ, lease_seconds=10, checkpoints=checkpoints, checkpoint_rounds=5)
    run.prefix = {rank: ["env", "--unset=LD_PRELOAD"] for rank in (0, 1)}
    with run:
        run.wait_for_round(10)
        for days in (1, -1):
            offset.write_text(f"{days:+}d\n")
            run.wait_for(lambda days=days: days_ahead(run, checkpoints) == days, f"a checkpoint {days} days ahead")
        run.check_results()
        assert not [line for line in run.lines if "was lost" in line or "is silent" in line or "paused" in line]
