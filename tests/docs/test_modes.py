"""docs/modes.md names every mode and every setting of one, and its figures are those of the code."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from prometheus_client import CollectorRegistry

from ps_protocol.consistency import Compensation, Consistency, ReadConsistency
from ps_protocol.errors import ERRORS
from ps_protocol.vocabulary import Mode
from services.pserver.async_run import HOLD_SECONDS
from services.pserver.metrics import PserverMetrics
from services.runtime.compute import ComputeExecutor

from .markdown import codes, read, section, tables, without_code

TEXT = without_code(read("modes.md"))


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
