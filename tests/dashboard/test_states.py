"""The dashboard before, after and without a run, of a cluster without tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from signal import SIGTERM

import httpx
import pytest
from playwright.sync_api import Browser

from trainer_client.testing import LocalCluster

from .browsing import Visit
from .conftest import SCRIPT

FAILING_SCRIPT = SCRIPT.with_name("failing_trainer.py")

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


def test_the_output_of_a_trainer_and_its_traceback_are_shown(browser: Browser, tmp_path: Path) -> None:
    shown = "text => document.querySelector('#output-lines').textContent.includes(text)"
    with (
        LocalCluster(pservers=1, trainers=2, on_trainer_loss="fail", lease_seconds=3) as cluster,
        Visit(browser, cluster.address) as visit,
    ):
        page, end = visit.page, tmp_path / "end"
        for rank in range(2):
            cluster.start_trainer(rank, [sys.executable, str(FAILING_SCRIPT), str(end)], {"RANK": str(rank)})
        page.click("#trainers tbody tr:nth-child(2) button")
        visit.wait_until(shown, "100 %")
        assert page.inner_text("#output-lines") == "trained <b>one</b> step on trainer 1\n100 %"
        assert page.inner_text("#output-title") == "Output of trainer 1"
        assert not page.is_visible("#output-traceback")
        end.touch()
        page.wait_for_selector("#output-traceback:not(:empty)")
        assert page.inner_text("#output-traceback").startswith("Traceback (most recent call last):")
        assert page.inner_text("#output-traceback").endswith("ValueError: the batch has a wrong shape")
        assert "Traceback" not in page.inner_text("#output-lines")
        page.keyboard.press("Tab")
        page.click("#output-close")
        assert not page.is_visible("#output")
        assert page.evaluate("document.activeElement.dataset.rank") == "1"
        assert visit.errors == []


def test_output_is_not_kept_if_a_setting_says_so(tmp_path: Path) -> None:
    end = tmp_path / "end"
    end.touch()
    with LocalCluster(pservers=1, trainers=1, lease_seconds=3, on_trainer_loss="fail") as cluster:
        command = [sys.executable, str(FAILING_SCRIPT), str(end)]
        assert cluster.start_trainer(0, command, {"GRADPOST_KEEP_OUTPUT": "0"}).wait(60) == 1
        output = httpx.get(f"{cluster.address}/v1/trainers/0/output").raise_for_status().json()
        assert (output["lines"], output["traceback"]) == ([], None)


@pytest.mark.ring
def test_a_ring_is_shown_without_what_it_has_not(browser: Browser) -> None:
    with (
        LocalCluster(pservers=0, trainers=2, strategy="ring", lease_seconds=60) as cluster,
        Visit(browser, cluster.address) as visit,
    ):
        page = visit.page
        first, second = (
            cluster.start_trainer(rank, [sys.executable, str(SCRIPT), "1000000", "0.1"], {"RANK": str(rank)})
            for rank in range(2)
        )
        visit.wait_until("() => Number(document.querySelector('#round').dataset.value) > 10")
        assert page.inner_text("#mode") == "sync, in a ring"
        for part in ("pservers", "staleness", "parameters", "num-pservers"):
            assert not page.is_visible(f"#{part}"), part
        for part in ("headline", "trainers", "barrier"):
            assert "pserver" not in page.inner_text(f"#{part}").lower()
        assert (page.inner_text("#taking-part"), page.inner_text("#rounds-more")) == ("2 of 2", "of all trainers")
        visit.wait_until("() => document.querySelectorAll('#curve-loss .scatterlayer .trace').length === 2")

        assert visit.errors == []
        for trainer in (first, second):
            trainer.signal(SIGTERM)
