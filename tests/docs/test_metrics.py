"""Metrics of a running cluster, and the configurations of Prometheus in `docs/metrics.md`."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import yaml

from gradpost import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..cluster.training import run_trainers
from ..unit.protocol.test_access import Authority
from .apps import read_bytes, read_json
from .conftest import NUM_TRAINERS
from .markdown import examples, read
from .stage import run_gradpost

TEXT = read("metrics.md")
OPEN, CLOSED = (block.text for block in examples(TEXT, "yaml"))
ROUNDS = 3
ELEMENTS = 10_000


def read_pages(cluster: LocalCluster) -> dict[str, str]:
    """Return the pages of the coordinator and, by its targets, of a pserver and a trainer."""
    found = {"coordinator": read_bytes(f"{cluster.address}/metrics").decode()}
    for group in read_json(f"{cluster.address}/v1/targets"):
        labels = group["labels"]
        url = f"{labels['__scheme__']}://{group['targets'][0]}/metrics"
        found.setdefault(labels["role"], read_bytes(url).decode())
    return found


# Samples after three rounds, of which two contributions were staged in the same buffers.
SAMPLES = {
    "pserver": r"""
        gradpost_service_info{role="pserver"} 1.0
        gradpost_rounds_applied_total [3-9]
        gradpost_http_requests_total{code="2xx",method="POST",route="/v1/get"} ([6-9]|\d\d)
        gradpost_round 3.0
        gradpost_barrier_missing 0.0
        gradpost_pooled_bytes [1-9]""",
    "trainer": r"""
        gradpost_trainer_rounds_total 3.0
        gradpost_trainer_round 3.0
        gradpost_trainer_step_seconds_count 3.0
        gradpost_trainer_pulled_bytes_total 1[6-9]\d\d\d\d
        gradpost_trainer_reported{name="loss"} 0.25""",
    "coordinator": r"""
        gradpost_members{kind="pserver"} 2.0
        gradpost_members{kind="trainer"} 2.0
        gradpost_members_missing 0.0
        gradpost_run_state{state="training"} 1.0
        gradpost_run_state{state="gathering"} 0.0""",
}


@pytest.mark.cluster
def test_a_run_is_counted_by_each_role(cluster: LocalCluster) -> None:
    all_have_trained = threading.Barrier(NUM_TRAINERS)

    def train(session: Session) -> dict[str, str]:
        parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
        parameter.grad = torch.ones(ELEMENTS)
        optimizer = RemoteOptimizer(torch.optim.SGD([("w", parameter)], lr=0.1), session=session)
        for _ in range(ROUNDS):
            optimizer.step()
        session.report(loss=0.25)
        all_have_trained.wait(60)
        pages = read_pages(cluster) if session.rank == 0 else {}
        all_have_trained.wait(60)
        return pages

    pages, _ = run_trainers(cluster.address, [train] * NUM_TRAINERS)
    for role, samples in SAMPLES.items():
        for sample in filter(None, map(str.strip, samples.splitlines())):
            name, value = sample.rsplit(" ", 1)
            assert re.search(f"^{re.escape(name)} {value}", pages[role], re.MULTILINE), (sample, pages[role])


@pytest.mark.cluster
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_touched_rows_are_counted_and_shown_and_pulled_alone(mode: str) -> None:
    with LocalCluster(pservers=2, trainers=1, mode=mode) as cluster, Session(coordinator=cluster.address) as session:
        model = torch.nn.Sequential(torch.nn.Embedding(4096, 4, sparse=True), torch.nn.Linear(4, 1))
        optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, session=session)
        pulled = []
        for rows in ([5, 3000], [8, 7, 4000, 7]):
            optimizer.zero_grad()
            model(torch.tensor(rows)).sum().backward()
            optimizer.step()
            pulled.append(session.client.metrics.pulled_bytes.collect()[0].samples[0].value)
        targets = [group["targets"][0] for group in read_json(f"{cluster.address}/v1/targets")]
        pages = [read_bytes(f"http://{target}/metrics").decode() for target in targets]
        printed = run_gradpost("params", "0.weight", "--coordinator", cluster.address)
        dense = read_json(f"{cluster.address}/v1/statistics/1.weight")
    counted = [re.search(r"^gradpost_touched_rows_total (\S+)", page, re.MULTILINE) for page in pages]
    assert sorted(float(found[1]) for found in counted if found) == [2, 3]  # in rows 2048 to 4095, and 0 to 2047
    assert pulled[1] - pulled[0] < 4096  # a 16th of all rows
    assert re.search(r"^num_touched +3$", printed, re.MULTILINE), printed
    assert dense["num_touched"] is None


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")
@pytest.mark.parametrize("with_tokens", [False, True])
def test_the_configuration_of_prometheus_is_valid(with_tokens: bool, tmp_path: Path) -> None:
    configuration = yaml.safe_load(OPEN)
    if with_tokens:
        run_gradpost("token", "create", "--dir", str(tmp_path / "tokens"))
        Authority(tmp_path)  # the named files have to exist
        added = yaml.safe_load(CLOSED.replace("/run/gradpost", str(tmp_path)))
        for job in configuration["scrape_configs"]:
            job.update(added)
            for discovery in job.get("http_sd_configs", []):
                discovery.update(added)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration) if with_tokens else OPEN)
    command = ["promtool", "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
