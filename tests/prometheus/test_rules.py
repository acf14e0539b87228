"""Alerts fire in time and only for a reason, and Grafana finds its dashboard."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
GRAFANA = DEPLOY / "grafana"
DASHBOARD = GRAFANA / "dashboards" / "gradpost.json"
PANELS = json.loads(DASHBOARD.read_text())["panels"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)"
)


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """Return the rules of a kind, `alert` or `record`, by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule[kind]: rule for group in groups for rule in group["rules"] if kind in rule}


MINUTE = 60
TRAINING = {'gradpost_run_state{state="training"}': "1"}

# What makes each alert fire, by series, as a value that it has from the beginning on (`a+b` grows by b in 15 s), and
# after how many seconds it does.
ALERTS: dict[str, tuple[dict[str, str], int]] = {
    "GradpostCoordinatorDown": ({"gradpost_barrier_missing": "0"}, 2 * MINUTE),
    "GradpostPserverDown": ({'gradpost_members{kind="pserver"}': "1", "gradpost_pservers_wanted": "2"}, MINUTE),
    "GradpostBarrierStuck": ({"gradpost_barrier_waiting_seconds": "61", "gradpost_barrier_missing": "1"}, MINUTE),
    "GradpostTrainerLost": ({"gradpost_trainers_gone": "1", **TRAINING}, MINUTE),
    "GradpostNoStandbyInSync": (
        {'gradpost_standbys_in_sync{pserver="0"}': "1", 'gradpost_standbys_in_sync{pserver="1"}': "0",
         "gradpost_standbys_wanted": "1", **TRAINING}, 5 * MINUTE),
    "GradpostStandbyLag": (
        {'gradpost_replica_lag_seconds{pserver="0"}': "11", 'gradpost_replica_lag_seconds{pserver="1"}': "0"},
        5 * MINUTE),
    "GradpostReplicaDiffers": ({"gradpost_replica_differences_total": "0+1"}, 15),
    "GradpostStalenessHigh": (
        {'gradpost_staleness_bucket{le="32"}': "0", 'gradpost_staleness_bucket{le="64"}': "0+9",
         'gradpost_staleness_bucket{le="+Inf"}': "0+9"}, 10 * MINUTE),
    "GradpostCheckpointFails": ({"gradpost_checkpoint_failures_total": "0+1"}, 15),
    "GradpostCheckpointOld": (  # one shard's is no use without the others
        {'gradpost_checkpoint_time_seconds{pserver="0"}': "1", 'gradpost_checkpoint_time_seconds{pserver="1"}': "1+15",
         **TRAINING}, 65 * MINUTE),
    "GradpostNonFiniteGradients": ({"gradpost_rounds_skipped_total": "0+1"}, 15),
    "GradpostRetriesHigh": (
        {'gradpost_trainer_retries_total{reason="ReadError"}': "0+1",
         'gradpost_trainer_requests_total{route="/v1/get"}': "0+15"}, 10 * MINUTE),
    "GradpostDiskNearlyFull": ({"gradpost_disk_free_bytes": "9", "gradpost_disk_size_bytes": "100"}, 5 * MINUTE),
}  # fmt: skip

# What is just not enough for each of them.
FINISHED = {'gradpost_run_state{state="training"}': "0", 'gradpost_run_state{state="finished"}': "1"}
NEARLY: dict[str, dict[str, str]] = {
    "GradpostCoordinatorDown": {"gradpost_pservers_wanted": "2"},
    "GradpostPserverDown": {'gradpost_members{kind="pserver"}': "2", "gradpost_pservers_wanted": "2"},
    "GradpostBarrierStuck": {"gradpost_barrier_waiting_seconds": "60", "gradpost_barrier_missing": "1"},
    "GradpostTrainerLost": {"gradpost_trainers_gone": "1", **FINISHED},
    "GradpostNoStandbyInSync": {
        'gradpost_standbys_in_sync{pserver="0"}': "0",
        "gradpost_standbys_wanted": "0",
        **TRAINING,
    },
    "GradpostStandbyLag": {"gradpost_replica_lag_seconds": "10"},
    "GradpostReplicaDiffers": {"gradpost_replica_differences_total": "1"},
    "GradpostStalenessHigh": {
        'gradpost_staleness_bucket{le="32"}': "0+9",
        'gradpost_staleness_bucket{le="+Inf"}': "0+9",
    },
    "GradpostCheckpointFails": {"gradpost_checkpoint_failures_total": "3"},
    "GradpostCheckpointOld": {"gradpost_checkpoint_time_seconds": "1", **FINISHED},
    "GradpostNonFiniteGradients": {"gradpost_rounds_skipped_total": "7"},
    "GradpostRetriesHigh": {
        'gradpost_trainer_retries_total{reason="ReadError"}': "0+1",
        'gradpost_trainer_requests_total{route="/v1/get"}': "0+20",
    },
    "GradpostDiskNearlyFull": {"gradpost_disk_free_bytes": "10", "gradpost_disk_size_bytes": "100"},
}


def promtool(*arguments: str | Path, folder: Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def case(name: str, series: Mapping[str, str], seconds: int, *, fires: bool) -> dict[str, Any]:
    """Return a test of promtool: whether an alert fires with these series after this time."""
    severity = rules("alert")[name]["labels"]["severity"]
    firing = f'group(ALERTS{{alertname="{name}",alertstate="firing",severity="{severity}"}})'
    expected = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "name": f"{name} {'fires' if fires else 'does not fire'} after {seconds} s",
        "interval": "15s",
        "input_series": [{"series": one, "values": f"{value}x400"} for one, value in series.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": f"{seconds}s", "exp_samples": expected}],
    }


@needs_promtool
def test_the_rules_are_well_formed(tmp_path: Path) -> None:
    promtool("check", "rules", RULES, folder=tmp_path)


@needs_promtool
def test_alerts_fire_in_time_and_only_for_a_reason(tmp_path: Path) -> None:
    assert rules("alert").keys() == ALERTS.keys() == NEARLY.keys()
    cases = []
    for name, (series, seconds) in ALERTS.items():
        late = seconds + 2 * MINUTE
        cases += [case(name, series, late, fires=True), case(name, NEARLY[name], late, fires=False)]
        if seconds > 15:
            cases.append(case(name, series, seconds // 2, fires=False))
    tests = {"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": cases}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    promtool("test", "rules", "tests.yml", folder=tmp_path)


def test_kubernetes_has_the_same_rules() -> None:
    manifest = DEPLOY / "kubernetes" / "components" / "monitoring" / "rules.yaml"
    assert yaml.safe_load(manifest.read_text())["spec"] == yaml.safe_load(RULES.read_text())


# ---------------------------------------------------------------------- dashboard


def test_queries_and_rules_use_existing_metrics_and_every_recording_rule() -> None:
    """The page of the metrics is generated from the code."""
    known = set(re.findall(r"`(\w+)`", (DEPLOY.parent / "docs" / "metrics.md").read_text()))
    exprs = [*QUERIES, *(rule["expr"] for kind in ("alert", "record") for rule in rules(kind).values())]
    used = {name for expr in exprs for name in re.findall(r"\b(?:gradpost|process)_\w+", expr)}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in used} - known == set()
    shown = " ".join([*QUERIES, *(rule["expr"] for rule in rules("alert").values())])
    assert [name for name in rules("record") if name not in shown] == []


def test_windows_follow_the_zoom() -> None:
    """Grafana makes `$__rate_interval` long enough for the scrape interval, and for each point of the screen."""
    assert {window for expr in QUERIES for window in re.findall(r"\[(.*?)\]", expr)} == {"$__rate_interval"}


def provisioned(kind: str, key: str) -> dict[str, Any]:
    [file] = (GRAFANA / "provisioning" / kind).iterdir()
    [only] = yaml.safe_load(file.read_text())[key]
    return only  # type: ignore[no-any-return]


def test_grafana_finds_prometheus_and_the_dashboard_and_lets_visitors_look_only() -> None:
    source = provisioned("datasources", "datasources")
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped
    # docker-compose.yml mounts it there (tests/containers).
    assert provisioned("dashboards", "providers")["options"]["path"] == "/etc/grafana/dashboards"
    settings = configparser.ConfigParser()
    settings.read_string((GRAFANA / "grafana.ini").read_text())
    assert settings["dashboards"]["default_home_dashboard_path"] == f"/etc/grafana/dashboards/{DASHBOARD.name}"
    assert settings["security"]["disable_initial_admin_creation"] == "true"  # else there is admin with password admin
    assert settings["auth"]["disable_login_form"] == "true"
    assert settings["auth.basic"]["enabled"] == "false"
    assert dict(settings["auth.anonymous"]) == {"enabled": "true", "org_role": "Viewer"}
    assert not [key for section in settings.values() for key in section if re.search("password|secret|token", key)]
