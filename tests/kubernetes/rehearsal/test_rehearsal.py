"""The pods of an overlay as real processes, with their commands, variables, volumes, probes and network rules.

Unlike in Kubernetes names come from a hosts file, a Service is the address of its pod, and volumes are folders.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ..rendering import KUBERNETES, Object, render_folder
from .cluster import Cluster

pytestmark = [pytest.mark.extended, pytest.mark.alone, pytest.mark.timeout(400)]

LAST_LINE = r"^trained: mode=sync transport=HTTP/2 accuracy=0\.9\d+ rounds=\d+ seconds=[\d.]+$"


def render_with_checkpoints(overlay: str, folder: Path) -> list[Object]:
    """Render an overlay over ours, as the examples are too short for a checkpoint every 1,000 rounds."""
    patch = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "gradpost-settings"},
        "data": {"GRADPOST_CHECKPOINT_ROUNDS": "40"},
    }
    kustomization = {
        "resources": [os.path.relpath(KUBERNETES / overlay, folder)],
        "patches": [{"target": {"kind": "ConfigMap"}, "patch": yaml.safe_dump(patch)}],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render_folder(folder)


@pytest.fixture(
    params=[
        "examples",
        *(pytest.param(f"overlays/{name}", marks=pytest.mark.soak) for name in ("laptop", "mutual-tls")),
    ]
)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with rehearse(request.param, tmp_path_factory.mktemp("rehearsal")) as cluster:
        yield cluster


@contextmanager
def rehearse(overlay: str, folder: Path) -> Iterator[Cluster]:
    for parent in folder.parents[:2]:  # pytest excludes other users, such as that of the pods
        parent.chmod(0o755)
    objects = render_with_checkpoints(overlay, folder)
    with Cluster(objects, folder / "machine") as cluster:
        yield cluster


def test_training_succeeds_although_a_pserver_moves(cluster: Cluster) -> None:
    pods = cluster.pods
    cluster.wait_for(r"^epoch  2 of 8")
    before = pods["pserver-0"].address
    pserver = cluster.replace("pserver-0")
    assert pserver.address != before
    assert not [line for _, line in cluster.lines if line.startswith(("epoch  7", "epoch  8"))], "it came too late"

    lines = cluster.wait_for(LAST_LINE, 2)
    trainers = [pod for pod in pods.values() if pod.role == "trainer"]
    assert {name for name, _ in lines} == {pod.name for pod in trainers}
    assert len({line for _, line in lines}) == 1, lines
    assert [pod.process.wait(30) for pod in trainers] == [0, 0], cluster.describe()
    assert cluster.wait_for("restored from disk")[0][0] == "pserver-0"

    cluster.wait_until_ready()
    services = [pod for pod in pods.values() if pod.role != "trainer"]
    assert [pod.failures for pod in services] == [[], [], []]
    assert not [line for _, line in cluster.lines if "may be read by others" in line]
    assert [pod.stop() for pod in services] == [0, 0, 0], cluster.describe()
    for secret in cluster.secrets["gradpost-tokens"].values():
        assert not [line for _, line in cluster.lines if secret.decode() in line]


def read_status(cluster: Cluster) -> dict[str, Any]:
    """Return the status of the cluster, as `gradpost status` in the coordinator's pod gets it."""
    token = cluster.secrets["gradpost-tokens"]["read"].decode()
    url = f"http://{cluster.pods['coordinator-0'].address}:7070/v1/status"
    headers = {"authorization": f"Bearer {token}"}
    with ThreadPoolExecutor(1, initializer=cluster.wires.node.enter) as pool:  # the thread of a kubelet
        answer = pool.submit(httpx.get, url, headers=headers, trust_env=False).result()
    return answer.raise_for_status().json()  # type: ignore[no-any-return]


def wait_for_standbys(cluster: Cluster, number: int) -> dict[str, Any]:
    """Wait until so many standbys are in sync, and return the status."""
    cluster.wait_for("members installed")
    until = time.monotonic() + 60
    while True:
        status = read_status(cluster)
        if sum(standby["role"] == "in_sync" for standby in status["standbys"]) == number:
            return status
        assert time.monotonic() < until, f"{status['standbys']}\n{cluster.describe()}"
        time.sleep(0.1)


def test_a_standby_replaces_a_pserver_whose_machine_fails(tmp_path_factory: pytest.TempPathFactory) -> None:
    with rehearse("overlays/gpu-trainers", tmp_path_factory.mktemp("rehearsal")) as cluster:
        before = wait_for_standbys(cluster, 2)
        followed = {standby["address"]: standby["follows"] for standby in before["standbys"]}
        assert followed == {f"http://{cluster.pods[f'pserver-{2 + index}'].address}:7071": index for index in range(2)}
        removed = cluster.remove("pserver-0")
        assert not [line for _, line in cluster.lines if line.startswith(("epoch  7", "epoch  8"))], "it came too late"
        cluster.wait_for("a standby was promoted")
        cluster.start_again("pserver-0", removed)
        lines = cluster.wait_for(LAST_LINE, 2)
        assert len({line for _, line in lines}) == 1, lines
        until = time.monotonic() + 60
        while not (following := [s for s in read_status(cluster)["standbys"] if s["follows"] == 0]):
            assert time.monotonic() < until, cluster.describe()
            time.sleep(0.1)
        assert cluster.pods["pserver-0"].address in following[0]["address"]
        leader, other = read_status(cluster)["pservers"]
        assert cluster.pods["pserver-2"].address in leader["address"]
        assert (leader["incarnation"], other["incarnation"]) == (2, 1)
