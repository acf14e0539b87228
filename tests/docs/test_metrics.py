"""docs/metrics.md lists what each role of a running cluster shows on /metrics, no more and no less."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TypeAlias

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .markdown import codes, read, section, tables
from .reading import read_bytes, read_json

pytestmark = pytest.mark.cluster

TEXT = read("metrics.md")
ROUNDS = 3
ELEMENTS = 10_000

Described: TypeAlias = dict[str, tuple[str, tuple[str, ...]]]  # name -> its type and labels


class Page:
    """What one process shows."""

    def __init__(self, text: str) -> None:
        self.described: Described = {}
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self.sampled: set[str] = set()
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):
                continue
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {key for sample in family.samples for key in sample.labels} - {"le"}
            self.described[name] = (family.type, tuple(sorted(labels)))
            if family.samples:
                self.sampled.add(name)
            for sample in family.samples:
                self.values[sample.name, frozenset(sample.labels.items())] = sample.value

    def value(self, name: str, /, **labels: str) -> float:
        return self.values[name, frozenset(labels.items())]


@pytest.fixture(scope="module")
def pages(cluster: LocalCluster) -> Iterator[dict[str, Page]]:
    """The pages of the coordinator and, found by its targets, of a pserver and a trainer in the middle of a run."""

    def train(session: Session, started: threading.Barrier) -> None:
        parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
        parameter.grad = torch.ones(ELEMENTS)
        optimizer = RemoteOptimizer(torch.optim.SGD([("w", parameter)], lr=0.1), session=session)
        for _ in range(ROUNDS):
            optimizer.step()
        session.report(loss=0.25)
        started.wait(60)

    with ExitStack() as sessions:
        trained = threading.Barrier(3)
        for rank in range(2):
            session = sessions.enter_context(Session(coordinator=cluster.address, rank=rank, world_size=2))
            thread = threading.Thread(target=train, args=(session, trained))
            sessions.callback(thread.join, 60)
            thread.start()
        trained.wait(60)
        found = {"coordinator": Page(read_bytes(f"{cluster.address}/metrics").decode())}
        for group in read_json(f"{cluster.address}/v1/targets"):
            labels = group["labels"]
            url = f"{labels['__scheme__']}://{group['targets'][0]}/metrics"
            found.setdefault(labels["role"], Page(read_bytes(url).decode()))
        yield found


def documented(heading: str) -> Described:
    rows = tables(section(TEXT, heading))[0]
    return {codes(row["metric"])[0]: (row["type"], tuple(sorted(codes(row["labels"])))) for row in rows}


@pytest.mark.parametrize(
    ("role", "headings"),
    [
        ("coordinator", ["Every service", "Coordinator", "Process"]),
        ("pserver", ["Every service", "Pserver", "Process"]),
        ("trainer", ["Trainer"]),
    ],
)
def test_names_types_and_labels(pages: dict[str, Page], role: str, headings: list[str]) -> None:
    expected = {name: what for heading in headings for name, what in documented(heading).items()}
    actual = pages[role].described
    if sys.platform != "linux":
        expected = {name: what for name, what in expected.items() if not name.startswith("process_")}
    assert actual.keys() == expected.keys()
    # A metric that has counted nothing yet does not tell its labels.
    sampled = pages[role].sampled
    assert {n: w for n, w in actual.items() if n in sampled} == {n: w for n, w in expected.items() if n in sampled}
    assert {kind for kind, _ in actual.values()} == {kind for kind, _ in expected.values()}


def test_they_count(pages: dict[str, Page]) -> None:
    pserver, trainer = pages["pserver"], pages["trainer"]
    assert pserver.value("gradpost_service_info", role="pserver") == 1
    assert pserver.value("gradpost_rounds_applied_total") >= ROUNDS
    assert pserver.value("gradpost_http_requests_total", route="/v1/send", method="POST", code="2xx") >= 2 * ROUNDS
    assert trainer.value("gradpost_trainer_rounds_total") == trainer.value("gradpost_trainer_round") == ROUNDS
    assert trainer.value("gradpost_trainer_step_seconds_count") == ROUNDS
    assert trainer.value("gradpost_trainer_pulled_bytes_total") > (1 + ROUNDS) * 4 * ELEMENTS
    assert trainer.value("gradpost_trainer_reported", name="loss") == 0.25


def test_the_coordinator_knows_who_is_here(pages: dict[str, Page]) -> None:
    coordinator = pages["coordinator"]
    assert coordinator.value("gradpost_members", kind="pserver") == 2
    assert coordinator.value("gradpost_members", kind="trainer") == 2
    assert coordinator.value("gradpost_members_missing") == 0
    for state in ("gathering", "training", "finished", "failed"):
        assert coordinator.value("gradpost_run_state", state=state) == (state == "training")


def test_the_pservers_gauges_are_up_to_date(pages: dict[str, Page]) -> None:
    pserver = pages["pserver"]
    assert pserver.value("gradpost_round") == ROUNDS
    assert pserver.value("gradpost_barrier_missing") == 0
    assert pserver.value("gradpost_pooled_bytes") > 0  # two contributions have been staged, and are no more
