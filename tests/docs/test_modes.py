"""docs/modes.md names every mode and every setting of one, and its figures are those of the code."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest
import torch
from prometheus_client import CollectorRegistry

from ps_protocol.consistency import Compensation, Consistency, ReadConsistency
from ps_protocol.errors import ERRORS
from ps_protocol.vocabulary import Mode
from services.pserver.async_run import HOLD_SECONDS
from services.pserver.metrics import PserverMetrics
from services.runtime.compute import ComputeExecutor
from trainer_client import RemoteOptimizer, connect
from trainer_client.testing import LocalCluster

from .markdown import codes, examples, read, section, tables, without_code

DOCUMENT = read("modes.md")
TEXT = without_code(DOCUMENT)
DILOCO, SCHEDULE = (block.text for block in examples(DOCUMENT, "python"))


def test_every_mode_is_in_the_table() -> None:
    assert [codes(row["mode"])[0] for row in tables(TEXT)[0]] == list(get_args(Mode))


def test_every_setting_and_choice_is_named() -> None:
    named = set(codes(TEXT))
    assert {field.name for field in fields(Consistency)} - {"mode", "slice_parameters"} <= named
    assert {*get_args(Compensation), *get_args(ReadConsistency)} <= named
    assert "after 10 seconds sends it away" in section(TEXT, "Asynchronous: `async`")
    assert HOLD_SECONDS == 10


def test_every_error_and_metric_is_one() -> None:
    registry = CollectorRegistry()
    compute = ComputeExecutor()
    PserverMetrics(registry, compute)
    compute.close()
    metrics = {family.name for family in registry.collect()}
    for word in codes(TEXT):
        if word.startswith("gradpost_"):
            assert word in metrics
    named = {"mode_mismatch", "queue_full", "apply_failed", "round_pending", "round_timeout"}
    assert named <= ERRORS.keys() & set(codes(TEXT))


@pytest.mark.cluster
def test_local_steps_with_an_outer_optimizer_and_a_schedule() -> None:
    model = torch.nn.Linear(4, 2)
    before = model.weight.detach().clone()
    names: dict[str, Any] = {"torch": torch, "RemoteOptimizer": RemoteOptimizer, "model": model}
    with LocalCluster(pservers=1, trainers=1) as cluster, connect(cluster.address):
        exec(DILOCO, names)
        optimizer = names["optimizer"]
        names["schedule"] = torch.optim.lr_scheduler.ExponentialLR(names["inner"], 0.9)
        for step in range(50):
            assert optimizer.round == 0, step
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            exec(SCHEDULE, names)
    assert optimizer.round == 1
    assert names["schedule"].get_last_lr() == [pytest.approx(1e-3 * 0.9**50)]
    assert not torch.equal(model.weight, before)
