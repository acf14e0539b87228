"""A real Prometheus scrapes real clusters: discovery, rules, alerts, and every query of Grafana's dashboard.

The tests go on with one another's clusters, in the order in which they stand.
"""

from __future__ import annotations

import math
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from gradpost.tokens import create_tokens
from ps_config.tokens import SCOPES
from tests.cluster.trainer_processes import Plot, Trainer
from trainer_client.testing import LocalCluster

from .configuration import Query, queries, rules
from .server import SCRAPE_SECONDS, Prometheus

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.extended,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus (Debian's package prometheus)"),
]

ASYNCHRONOUS = "Asynchronous modes"  # the row of panels that stay empty in the synchronous mode
WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class Watched:
    """A cluster that trains, and the Prometheus that watches it."""

    cluster: LocalCluster
    trainers: list[Trainer]
    prometheus: Prometheus

    def wait_until_none(self, missing: Callable[[], Any]) -> None:
        """Wait until nothing is missing; Prometheus has nothing to wait on but its answers."""
        until = time.monotonic() + WAIT_SECONDS
        while found := missing():
            assert time.monotonic() < until, found
            for trainer in self.trainers:
                trainer.drain()
            time.sleep(SCRAPE_SECONDS / 2)

    def has(self, query: Query | str) -> bool:
        """Return whether a query returns numbers with all labels of its legend."""
        expr, legend = (
            (query, "") if isinstance(query, str) else (query.at(SCRAPE_SECONDS, SCRAPE_SECONDS), query.legend)
        )
        series = [labels for labels, value in self.prometheus.ask(expr) if math.isfinite(value)]
        return any(labels.keys() >= set(re.findall(r"{{(\w+)}}", legend)) for labels in series)


def watch(stack: ExitStack, folder: Path, num_pservers: int, num_trainers: int, **settings: Any) -> Watched:
    tokens = folder / "tokens"
    create_tokens(tokens, SCOPES, rotate=False)
    cluster = LocalCluster(pservers=num_pservers, trainers=num_trainers, lease_seconds=2, tokens_dir=tokens, **settings)
    stack.enter_context(cluster)
    prometheus = stack.enter_context(Prometheus(cluster.address, tokens, folder))
    trainers = []
    for rank in range(num_trainers):
        trainers.append(
            Trainer(cluster.address, rank, Plot(settings={"tokens_dir": tokens, "metrics_host": "0.0.0.0"}))
        )
        stack.callback(trainers[-1].end)
    return Watched(cluster, trainers, prometheus)


def other_loopback() -> str:
    """Return the IPv6 loopback if there is one, as its addresses have another form in a target."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return "::1"
    except OSError:
        return "127.0.0.1"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Watched]]:
    """Yield one cluster of each kind, once both train."""
    with ExitStack() as stack:
        found = {
            "sync": watch(stack, tmp_path_factory.mktemp("sync"), 2, 2, checkpoint_rounds=20, standbys=1),
            "async": watch(stack, tmp_path_factory.mktemp("async"), 1, 2, mode="async", host=other_loopback()),
        }
        for one in found.values():
            for trainer in one.trainers:
                trainer.wait_for("round", 1, timeout=60)
        for index in range(2):
            found["sync"].cluster.start_standby(index)
        yield found


@pytest.fixture
def synchronous(watched: dict[str, Watched]) -> Watched:
    return watched["sync"]


def test_everybody_is_found_and_scraped(synchronous: Watched) -> None:
    """Services with the read token, which is in a file; trainers at the address of the machine, as in a container."""
    members = [{"role": "coordinator"}]
    members += [{"role": "pserver", "pserver": index} for index in "01"]
    members += [{"role": "standby", "pserver": index} for index in "01"]
    members += [{"role": "trainer", "trainer": rank} for rank in "01"]

    def missing() -> list[dict[str, str]]:
        here = [target["labels"] for target in synchronous.prometheus.targets() if target["health"] == "up"]
        assert len(here) <= len(members)
        return [one for one in members if not any(one.items() <= labels.items() for labels in here)]

    synchronous.wait_until_none(missing)


@pytest.mark.parametrize("name", rules("record"))
def test_every_recording_rule_records(watched: dict[str, Watched], name: str) -> None:
    one = watched["async" if "staleness" in name else "sync"]
    one.wait_until_none(lambda: [] if one.has(name) and one.has(rules("record")[name]["expr"]) else [name])


def test_no_alert_is_raised_while_all_is_well(watched: dict[str, Watched]) -> None:
    """Although there is everything that alerts look at."""
    names = {name for rule in rules("alert").values() for name in re.findall(r"\bgradpost[\w:]+", rule["expr"])}
    for mode, one in watched.items():
        absent = "staleness" if mode == "sync" else "staleness|replica"  # the asynchronous cluster has no standby
        wanted = [name for name in names if not re.search(absent, name)]
        one.wait_until_none(lambda one=one, wanted=wanted: [name for name in wanted if not one.has(name)])  # type: ignore[misc]
        [group] = one.prometheus.get("rules")["groups"]
        assert {rule["name"]: rule["lastError"] for rule in group["rules"] if rule.get("lastError")} == {}
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
        raised = {name: one.prometheus.ask(rule["expr"]) for name, rule in rules("alert").items()}
        disk = shutil.disk_usage("/tmp")
        if disk.free < 0.1 * disk.total:
            del raised["GradpostDiskNearlyFull"]  # which is so
        assert {name: series for name, series in raised.items() if series} == {}


def test_every_query_of_the_dashboard_returns_data(watched: dict[str, Watched]) -> None:
    pserver = watched["sync"].cluster.pservers[1]
    pserver.signal(SIGKILL)  # so that something is tried again
    pserver.wait(10)
    watched["sync"].cluster.start_pserver(1)

    for mode, one in watched.items():
        wanted = [query for query in queries() if (query.row == ASYNCHRONOUS) == (mode == "async")]
        assert wanted
        one.wait_until_none(lambda one=one, wanted=wanted: [str(query) for query in wanted if not one.has(query)])  # type: ignore[misc]


def test_who_is_gone_is_not_scraped_any_more(synchronous: Watched) -> None:
    """Else its numbers would stand still and look alive, and `up` would be 0 for ever."""
    synchronous.trainers.pop().signal(SIGKILL)
    synchronous.wait_until_none(
        lambda: [
            target["labels"] for target in synchronous.prometheus.targets() if target["labels"].get("trainer") == "1"
        ]
    )
