"""The dashboard before, after and without a run, of a cluster without tokens."""

from __future__ import annotations

import sys
from signal import SIGTERM

import pytest
from playwright.sync_api import Browser

from trainer_client.testing import LocalCluster

from .browsing import Visit
from .conftest import SCRIPT

pytestmark = [pytest.mark.cluster, pytest.mark.extended]

WAITS = "text => document.querySelector('#notices').textContent.includes(text)"


def test_the_states_from_an_empty_cluster_to_a_stopped_one(browser: Browser) -> None:
    with (
        LocalCluster(pservers=1, trainers=2, mode="async", on_trainer_loss="fail", lease_seconds=3) as cluster,
        Visit(browser, cluster.address) as visit,
    ):
        page = visit.page
        visit.wait_until_live()  # without a token
        assert not page.is_visible("#sign-in")
        assert not page.is_visible("#forget")
        visit.wait_until(WAITS, "trainer")
        for panel in ("curves", "speed", "trainers", "staleness", "parameters"):
            assert page.is_visible(f"#{panel} > .empty"), panel
            assert not page.is_visible(f"#{panel} .chart"), panel
        assert (page.inner_text("#state"), page.inner_text("#round")) == ("gathering", "0")
        assert page.inner_text("#taking-part") == "0 of 2"

        for rank in range(2):
            cluster.start_trainer(rank, [sys.executable, str(SCRIPT), "1000000", "0.02"])
        visit.wait_until("() => document.querySelector('#state').textContent === 'training'")
        see = "document.querySelector('#staleness').scrollIntoView()"  # again, as more charts come above it
        visit.wait_until(f"() => ({see}, document.querySelector('#staleness-chart .bars path'))")
        staleness = visit.exact("#staleness-note")
        assert sum(staleness.values()) > 0
        drawn = page.evaluate("document.querySelector('#staleness-chart').data[0]")
        assert drawn["x"][:2] == ["0", "1"]
        assert page.inner_text("#behind-label") == "Behind"
        assert visit.exact("#trainers tbody tr:first-child td:nth-child(6)") is not None
        assert visit.errors == []

        cluster.trainers[0].signal(SIGTERM)
        visit.wait_until("() => document.querySelector('#state').textContent === 'failed'")
        visit.wait_until(WAITS, "The run has failed")
        assert "trainer 0" in page.inner_text("#notices .bad")

        cluster.coordinator.signal(SIGTERM)
        visit.page.wait_for_selector("#connection[data-state=gone]")
        assert "does not answer, since" in page.inner_text("#connection")
        assert page.inner_text("#state") == "failed"  # what was known last stays
        cluster.restart_coordinator()
        visit.wait_until_live()
