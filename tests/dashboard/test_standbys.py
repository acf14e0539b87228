"""The standbys of a cluster in the dashboard, before and after a fail-over."""

from __future__ import annotations

from signal import SIGKILL

import pytest
from playwright.sync_api import Browser

from ..cluster.faulty_run import FaultyRun
from .browsing import Visit
from .conftest import SCRIPT

pytestmark = [pytest.mark.cluster, pytest.mark.extended]


def test_standbys_are_shown_and_one_becomes_the_pserver(browser: Browser) -> None:
    with FaultyRun(1_000_000, script=SCRIPT, durability="replicated") as run:
        run.wait_for_round(5)
        with Visit(browser, run.cluster.address) as visit:
            page = visit.page
            visit.wait_until_live()
            assert not page.is_visible("#standbys")
            run.cluster.start_standby(0)
            visit.wait_until("() => document.querySelector('#standbys td[data-on]')?.textContent === 'in sync'")
            assert page.inner_text("#standbys-note") == "1 of 2 pservers have a standby in sync"
            [status] = visit.hold_answers("/v1/status")
            [standby] = status["standbys"]
            visit.wait_until("value => document.querySelector('#standbys td.number').dataset.value === value",
                             str(standby["round"]))  # fmt: skip
            keys = ("follows", "role", "address", "round", "lag_rounds", "lag_bytes", "lag_seconds")
            assert visit.table("#standbys") == [[*(standby[key] for key in keys), None]]
            assert page.inner_text("#processes tbody").count("standby of 0") == 1
            page.unroute_all()

            run.cluster.pservers[0].signal(SIGKILL)
            title = f"{standby['address']}, incarnation 2"
            visit.wait_until("title => document.querySelector('#pservers tbody td').title === title", title)
            visit.wait_until("() => !document.querySelector('#standbys').checkVisibility()")
            text = f"pserver 0 is replaced by its standby at {standby['address']}"
            visit.wait_until("text => document.querySelector('#event-list').textContent.includes(text)", text)
            before = visit.exact("#round")
            visit.wait_until("round => Number(document.querySelector('#round').dataset.value) > round", before)
            assert visit.errors == []
