"""Metrics of a running cluster, and the configurations of Prometheus in `docs/metrics.md`."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..cluster.training import run_trainers
from ..unit.protocol.test_certificates import Authority
from .apps import read_bytes, read_json
from .conftest import NUM_TRAINERS
from .markdown import examples, read
from .stage import run_gradpost

TEXT = read("metrics.md")
OPEN, CLOSED = (block.text for block in examples(TEXT, "yaml"))
ROUNDS = 3
ELEMENTS = 10_000


class Page:
    """The metrics of one process."""

    def __init__(self, text: str) -> None:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self._values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}

    def value(self, name: str, /, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]


def read_pages(cluster: LocalCluster) -> dict[str, Page]:
    """Return the pages of the coordinator and, by its targets, of a pserver and a trainer."""
    found = {"coordinator": Page(read_bytes(f"{cluster.address}/metrics").decode())}
    for group in read_json(f"{cluster.address}/v1/targets"):
        labels = group["labels"]
        url = f"{labels['__scheme__']}://{group['targets'][0]}/metrics"
        found.setdefault(labels["role"], Page(read_bytes(url).decode()))
    return found


@pytest.mark.cluster
def test_a_run_is_counted_by_each_role(cluster: LocalCluster) -> None:
    all_have_trained = threading.Barrier(NUM_TRAINERS)

    def train(session: Session) -> dict[str, Page]:
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
    coordinator, pserver, trainer = pages["coordinator"], pages["pserver"], pages["trainer"]
    assert pserver.value("gradpost_service_info", role="pserver") == 1
    assert pserver.value("gradpost_rounds_applied_total") >= ROUNDS
    assert pserver.value("gradpost_http_requests_total", route="/v1/send", method="POST", code="2xx") >= 2 * ROUNDS
    assert pserver.value("gradpost_round") == ROUNDS
    assert pserver.value("gradpost_barrier_missing") == 0
    assert pserver.value("gradpost_pooled_bytes") > 0  # two contributions were staged and applied
    assert trainer.value("gradpost_trainer_rounds_total") == trainer.value("gradpost_trainer_round") == ROUNDS
    assert trainer.value("gradpost_trainer_step_seconds_count") == ROUNDS
    assert trainer.value("gradpost_trainer_pulled_bytes_total") > (1 + ROUNDS) * 4 * ELEMENTS
    assert trainer.value("gradpost_trainer_reported", name="loss") == 0.25
    assert coordinator.value("gradpost_members", kind="pserver") == 2
    assert coordinator.value("gradpost_members", kind="trainer") == 2
    assert coordinator.value("gradpost_members_missing") == 0
    for state in ("gathering", "training", "finished", "failed"):
        assert coordinator.value("gradpost_run_state", state=state) == (state == "training")


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
