"""Grafana's dashboard, as far as it can be seen without a Prometheus; test_live.py asks one."""

from __future__ import annotations

import configparser
import re
from typing import Any

import pytest
import yaml

from .configuration import CONFIGURATION, DASHBOARD, GRAFANA, Query, queries, rules

QUERIES = [*queries()]


def test_every_recording_rule_is_shown_or_alerted_on() -> None:
    used = " ".join([*(query.expr for query in QUERIES), *(rule["expr"] for rule in rules("alert").values())])
    assert [name for name in rules("record") if name not in used] == []


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_windows_follow_the_zoom(query: Query) -> None:
    """Grafana makes `$__rate_interval` long enough for the scrape interval, and for each point of the screen."""
    assert set(re.findall(r"\[(.*?)\]", query.expr)) <= {"$__rate_interval"}


def provisioned(kind: str) -> dict[str, Any]:
    [file] = (GRAFANA / "provisioning" / kind).iterdir()
    [only] = yaml.safe_load(file.read_text())["providers" if kind == "dashboards" else kind]
    return only  # type: ignore[no-any-return]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    source = provisioned("datasources")
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    scraped = yaml.safe_load(CONFIGURATION.read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped
    # docker-compose.yml mounts it there (tests/containers).
    assert provisioned("dashboards")["options"]["path"] == "/etc/grafana/dashboards"
    assert settings()["dashboards"]["default_home_dashboard_path"] == f"/etc/grafana/dashboards/{DASHBOARD.name}"


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read_string((GRAFANA / "grafana.ini").read_text())
    return parser


def test_grafana_has_no_password_and_nobody_who_could_change_anything() -> None:
    found = settings()
    assert found.getboolean(
        "security", "disable_initial_admin_creation"
    )  # else there is admin, whose password is admin
    assert found.getboolean("auth", "disable_login_form")
    assert not found.getboolean("auth.basic", "enabled")
    assert found.getboolean("auth.anonymous", "enabled")
    assert found["auth.anonymous"]["org_role"] == "Viewer"
    assert not [key for section in found.values() for key in section if re.search("password|secret|token", key)]
