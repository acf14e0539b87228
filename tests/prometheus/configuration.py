"""The configuration of Prometheus and Grafana in deploy/: queries, rules, files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
CONFIGURATION = DEPLOY / "prometheus" / "prometheus.yml"
RULES = DEPLOY / "prometheus" / "rules.yml"
GRAFANA = DEPLOY / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "gradpost.json"


@dataclass(frozen=True)
class Query:
    """One query of a panel, with the title of its row."""

    row: str
    panel: str
    expr: str
    legend: str

    def __str__(self) -> str:
        return f"{self.row} / {self.panel} / {self.legend}"


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())  # type: ignore[no-any-return]


def queries() -> Iterator[Query]:
    row = ""
    for panel in dashboard()["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        for target in panel.get("targets", []):
            yield Query(row, panel["title"], target["expr"], target["legendFormat"])


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """Return the rules of a kind, `alert` or `record`, by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule[kind]: rule for group in groups for rule in group["rules"] if kind in rule}
