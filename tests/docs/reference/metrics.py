"""The tables of docs/metrics.md, from the metrics that each role makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from services.coordinator.metrics import measure_cluster
from services.pserver.metrics import PserverMetrics
from services.runtime.compute import ComputeExecutor
from services.runtime.metrics import ServiceMetrics
from trainer_client.metrics import TrainerMetrics

from ...unit.coordinator.support import make_cluster
from .tables import code, put_table

COLUMNS = ("metric", "type", "labels", "unit", "meaning")
UNITS = ("seconds", "bytes")
ON_THE_PAGE = {"counter": ("counter", "_total"), "info": ("gauge", "_info")}  # its type, and what its name ends in


def renew(text: str) -> str:
    service, coordinator, pserver = ServiceMetrics("any").registry, CollectorRegistry(), CollectorRegistry()
    measure_cluster(make_cluster(), coordinator)
    PserverMetrics(pserver, ComputeExecutor())
    tables = {
        "Every service": _rows(service, "gradpost_"),
        "Coordinator": _rows(coordinator),
        "Pserver": _rows(pserver),
        "Trainer": _rows(TrainerMetrics().registry),
    }
    if sys.platform == "linux":  # elsewhere the client shows less of a process, and what stands there stays
        tables["Process"] = _rows(service, "process_", "python_")
    for heading, rows in tables.items():
        text = put_table(text, heading, COLUMNS, rows)
    return text


def _rows(registry: CollectorRegistry, *prefixes: str) -> Iterator[list[str]]:
    """All metrics of a registry, or those whose names begin so."""
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if family.name.startswith(prefixes or ""):
                type_, ending = ON_THE_PAGE.get(family.type, (family.type, ""))
                unit = next((unit for unit in UNITS if family.name.endswith(f"_{unit}")), "")
                name = code([family.name + ending])
                yield [name, type_, code(_labels(collector, family)), unit, family.documentation]


def _labels(collector: Collector, family: Metric) -> list[str]:
    """Those that it declares, as it shows none before it counts; others make theirs when they are read."""
    shown = [label for sample in family.samples for label in sample.labels]
    return [label for label in dict.fromkeys([*getattr(collector, "_labelnames", ()), *shown]) if label != "le"]
