"""The dashboard in a real browser, over a real cluster that wants tokens and trains."""

from __future__ import annotations

import copy
import itertools
import json
import re
import time
from itertools import product
from signal import SIGCONT, SIGSTOP
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from playwright.sync_api import Browser, Route

from ..soaking import parametrize_sampled
from .browsing import Visit
from .conftest import Closed

pytestmark = [pytest.mark.cluster, pytest.mark.extended]


def test_it_asks_for_the_token_once(browser: Browser, closed: Closed) -> None:
    token = closed.token()
    with Visit(browser, closed.address) as visit:
        visit.page.wait_for_selector("#sign-in[open]")
        assert not [r.url for r in visit.requests if "/v1/" in r.url]  # it does not try without one
        assert visit.errors == []
        visit.sign_in("x" * len(token))
        visit.wait_until("() => document.querySelector('#sign-in-problem').textContent.includes('was refused')")
        while not visit.errors:
            visit.page.wait_for_event("console")
        assert all("401" in error for error in visit.errors)
        visit.errors.clear()
        visit.sign_in(token)
        visit.wait_until_live()
        visit.page.reload()
        visit.wait_until_live()
        assert not visit.page.is_visible("#sign-in")
        assert visit.errors == []
        assert not [r.url for r in visit.requests if token in r.url]
        assert visit.hosts == {urlsplit(closed.address).netloc}
        assert visit.page.evaluate("[Object.values(localStorage), document.cookie]") == [[], ""]
        visit.page.click("#forget")
        visit.page.wait_for_selector("#sign-in[open]")


def test_it_lives_while_the_cluster_trains(browser: Browser, closed: Closed) -> None:
    with Visit(browser, closed.address, token=closed.token()) as visit:
        visit.wait_until_live()
        visit.see("#parameters")
        visit.wait_until("() => document.querySelector('#histogram-chart .bars path')")  # drawn, not only known
        version = visit.exact("#parameter-more")
        round_ = visit.exact("#round")
        made = closed.ask("POST", "/v1/checkpoints", "admin").json()["round"]
        visit.wait_until("round => Number(document.querySelector('#round').dataset.value) > round", round_)
        visit.wait_until("old => Number(document.querySelector('#parameter-more').dataset.value) > old", version)
        newest = "document.querySelector('#event-list').textContent.match(/checkpoint of round (\\d+) is complete/)"
        visit.wait_until(f"made => Number(({newest} ?? [])[1]) >= made", made)  # a later one takes its place
        visit.see("#curves")
        lines = "() => document.querySelectorAll('#curve-loss .scatterlayer .trace').length === 2"
        visit.wait_until(lines)
        shown = visit.page.evaluate("document.querySelector('#curve-loss').data[0].x.length")
        visit.wait_until("n => document.querySelector('#curve-loss').data[0].x.length > n", shown)
        for name in ("gradient_norm", "update_ratio", "waiting_share"):
            visit.wait_until(lines.replace("#curve-loss", f'[id="curve-gradpost/{name}"]'))
        assert visit.errors == []


def test_a_paused_run_looks_paused(browser: Browser, closed: Closed) -> None:
    with Visit(browser, closed.address, token=closed.token()) as visit:
        visit.wait_until_live()
        closed.ask("POST", "/v1/controls/pause", "admin").raise_for_status()
        try:
            visit.wait_until("() => document.querySelector('#state').textContent === 'paused'")
            assert visit.page.inner_text("#notices").startswith("Paused")
            assert visit.page.inner_text("#barrier-says") == "The run is paused"
            states = visit.page.eval_on_selector_all("#barrier-ranks li", "all => all.map(one => one.innerText)")
            assert [state.split() for state in states] == [["0", "paused"], ["1", "paused"]]
            cells = "all => all.map(one => one.innerText)"
            assert visit.page.eval_on_selector_all("#trainers td[data-state]", cells) == ["paused"] * 2
        finally:
            closed.ask("POST", "/v1/controls/resume", "admin").raise_for_status()
        visit.wait_until("() => document.querySelector('#state').textContent === 'training'")


def test_every_panel_shows_what_the_api_says(browser: Browser, closed: Closed) -> None:
    with Visit(browser, closed.address, token=closed.token()) as visit:
        visit.wait_until_live()
        visit.wait_for_parameters()
        visit.see("#parameters")
        visit.page.click("[id='option-layers.1.mix.weight']")
        visit.wait_until("() => document.querySelector('#parameter-more').dataset.value")
        name = "/v1/statistics/layers.1.mix.weight"
        status, curves, statistics = visit.hold_answers("/v1/status", "/v1/curves", name)
        newest = max(pserver["heartbeat"]["round"] for pserver in status["pservers"])
        visit.wait_until("value => document.querySelector('#round').dataset.value === value", str(newest))
        version = str(statistics["version"])
        visit.wait_until("value => document.querySelector('#parameter-more').dataset.value === value", version)
        check_headline(visit, status)
        check_members(visit, status)
        exact = "all => all.map(one => JSON.parse(one.dataset.value))"
        shown = visit.page.eval_on_selector_all("#statistics dd", exact)
        names = ("norm", "update_ratio", "mean", "deviation", "minimum", "maximum")
        assert shown == [statistics[key] for key in (*names, "num_nan", "num_infinite", "num_zero")]
        visit.see("#histogram-chart")
        counts = json.dumps([count for _, _, count in statistics["histogram"]], separators=(",", ":"))
        drawn = "document.querySelector('#histogram-chart').data?.[0].y"
        visit.wait_until(f"counts => JSON.stringify({drawn}) === counts", counts)
        newest = {rank: curve["value"][-1] for rank, curve in curves["curves"]["loss"].items()}
        wanted = json.dumps(newest, separators=(",", ":"))
        visit.wait_until("wanted => document.querySelector('#curve-loss').dataset.value === wanted", wanted)
        ids = "() => [...document.querySelectorAll('[id]')].map(one => one.id)"
        assert len(known := visit.page.evaluate(ids)) == len(set(known))
        check_parameters(visit, closed.ask("GET", "/v1/parameters").json()["parameters"])
        check_events(visit, closed.ask("GET", "/v1/events?limit=1000").json())


def check_headline(visit: Visit, status: dict[str, Any]) -> None:
    page = visit.page
    assert [visit.exact(f"#{name}") for name in ("state", "mode", "run-name")] == ["training", "sync", status["run"]]
    assert page.inner_text("#taking-part") == "2 of 2"
    assert page.inner_text("#num-pservers") == "2 of 2"
    assert visit.exact("#model-bytes") == status["parameter_bytes"]
    script = status["trainers"][0]["heartbeat"]["script"]
    assert page.inner_text("#fact-name") == script["run_name"] == "nightly"
    assert page.inner_text("#fact-script") == script["command"]
    assert page.inner_text("#fact-optimizer") == "AdamW(lr=0.0003)"
    assert page.inner_text("#fact-rate") == "3.00e−4"
    assert page.inner_text("#fact-torch") == torch.__version__


def check_members(visit: Visit, status: dict[str, Any]) -> None:
    pservers = [(p["index"], p["heartbeat"]) for p in status["pservers"]]
    trainers = [(t["rank"], t["heartbeat"]) for t in status["trainers"]]
    shown = [[*row[:4], row[6]] for row in visit.table("#trainers")]
    assert shown == [[rank, "declared", True, t["round"], t["results"]["loss"]] for rank, t in trainers]
    figures = [[index, None, p["shard_bytes"], p["num_blocks"], p["num_queued"]] for index, p in pservers]
    assert [row[:5] for row in visit.table("#pservers")] == figures
    assert all(p["shard_bytes"] and p["num_blocks"] for _, p in pservers)
    members = [(f"pserver {index}", p["process"]) for index, p in pservers]
    members += [(f"trainer {rank}", t["process"]) for rank, t in trainers]
    processes = [[name, p["host"], p["resident_bytes"]] for name, p in [("coordinator", status["process"]), *members]]
    assert [[*row[:2], row[3]] for row in visit.table("#processes")] == processes


def test_rates_are_the_difference_of_two_answers(browser: Browser, closed: Closed) -> None:
    status = closed.ask("GET", "/v1/status").json()
    seconds = itertools.count()
    with Visit(browser, closed.address, token=closed.token()) as visit:

        def answer(route: Route) -> None:
            second = next(seconds)
            moved = copy.deepcopy(status)
            moved["at"] += second
            moved["round"] += 10 * second
            for pserver in moved["pservers"]:
                of_pserver = {"pushed_bytes": 3000, "pulled_bytes": 2000, "num_applies": 4, "apply_seconds": 1.0}
                for name, growth in of_pserver.items():
                    pserver["heartbeat"][name] += growth * second
                pserver["heartbeat"]["process"]["cpu_seconds"] += 0.5 * second
            for trainer in moved["trainers"]:
                trainer["heartbeat"]["round"] = (5 + trainer["rank"]) * second
                trainer["heartbeat"]["script"]["total_rounds"] = 10_000
            route.fulfill(json=moved)

        visit.page.route("**/v1/status", answer)
        visit.wait_until("() => document.querySelector('#rounds-per-second').dataset.value === '10'")
        assert visit.exact("#steps-per-second") == 11
        assert [row[5:] for row in visit.table("#pservers")] == [[0.25, None, 3000, 2000, None]] * 2
        assert [row[4] for row in visit.table("#trainers")] == [5, 6]
        assert [row[2] for row in visit.table("#processes")] == [0, 0.5, 0.5, 0, 0]
        assert re.fullmatch(r"3\d min \d\d s", visit.page.inner_text("#fact-remaining"))
        visit.see("#speed")
        drawn = "document.querySelector('#speed-chart').data?.map(one => one.y.at(-1)).join()"
        visit.wait_until(f"() => {drawn} === '10,11'")


def check_parameters(visit: Visit, parameters: list[dict[str, Any]]) -> None:
    rows = visit.page.eval_on_selector_all(
        "#parameter-list > *", "all => all.map(row => [row.dataset.key, row.querySelector('.shape').textContent])"
    )
    assert rows == [[p["name"], "×".join(map(str, p["shape"]))] for p in parameters]
    names = visit.page.eval_on_selector_all(  # the end is never cut
        "#parameter-list .name", "all => all.map(name => [name.firstChild.textContent, name.lastChild.textContent])"
    )
    assert names == [[p["name"][:-16], p["name"][-16:]] for p in parameters]


def check_events(visit: Visit, events: list[dict[str, Any]]) -> None:
    shown = visit.page.eval_on_selector_all(
        "#event-list > *", "all => all.map(line => [Number(line.dataset.key), line.querySelector('.text').textContent])"
    )
    listed = [[event["id"], event["text"]] for event in reversed(events)]
    assert shown
    if shown[0][1].startswith("checkpoint") and shown[0] not in listed:
        del shown[0]  # a later checkpoint has replaced it
    assert [one for one in listed if one[0] <= shown[0][0]] == shown


def test_a_barrier_says_for_whom_it_waits_and_since_when(browser: Browser, closed: Closed) -> None:
    child = closed.run.cluster.trainers[1]
    with Visit(browser, closed.address, token=closed.token()) as visit:
        visit.wait_until_live()
        child.signal(SIGSTOP)
        try:
            visit.page.wait_for_selector("#notices .warn")
            waiting = [p["heartbeat"] for p in closed.ask("GET", "/v1/status").json()["pservers"]]
            assert [(p["batch_barriers"], p["missing"]) for p in waiting] == [([0], [1])] * 2
            assert "Waiting for trainer 1" in visit.page.inner_text("#notices")
            assert visit.page.inner_text("#barrier-says") == "1 of 2 have arrived"
            assert "since" in visit.page.inner_text("#barrier-since")
            said = visit.exact("#barrier-says")
            assert (said["round"], said["arrived"], said["missing"]) == (waiting[0]["round"] + 1, [0], [1])
            assert time.time() - said["waiting_since"] > 2
            assert [row[5] for row in visit.table("#trainers")] == ["arrived", "missing"]
            states = visit.page.eval_on_selector_all("#barrier-ranks li", "all => all.map(one => one.innerText)")
            assert [state.split() for state in states] == [["0", "arrived"], ["1", "missing"]]
        finally:
            child.signal(SIGCONT)
        visit.page.wait_for_selector("#notices .warn", state="detached")
        visit.wait_until("round => Number(document.querySelector('#round').dataset.value) > round", said["round"])


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour.startsWith("rgba(0, 0, 0, 0") ? ground(element.parentElement) : colour;
  };
  const found = [];
  for (const element of document.querySelectorAll("main *:not(.chart *), body > header *, footer *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${element.tagName}#${element.id}.${element.className} ${ratio.toFixed(2)}`);
  }
  return found;
}"""


@parametrize_sampled(("theme", "width"), product(("light", "dark"), (1280, 390)), [("light", 1280), ("dark", 390)])
def test_it_can_be_read(browser: Browser, closed: Closed, theme: Any, width: int) -> None:
    size = {"width": width, "height": 850}
    with Visit(browser, closed.address, token=closed.token(), color_scheme=theme, viewport=size) as visit:
        visit.wait_until_live()
        visit.wait_for_parameters()
        visit.page.wait_for_selector("#event-list li")
        visit.see("#event-list")  # the line of a checkpoint is replaced by that of the next one
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        background = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(245, 246, 248)", "dark": "rgb(16, 20, 24)"}[theme]
        assert visit.page.evaluate(CONTRAST) == []
        after = "getComputedStyle(document.querySelector('#trainers > header'), '::after').content"
        assert ("scrolls" in visit.page.evaluate(after)) == (width == 390)
        visit.page.keyboard.press("t")  # auto, light, dark
        if theme == "light":
            visit.page.keyboard.press("t")
        assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") != background
        visit.see("#curves")
        visit.wait_until("() => document.querySelector('#curve-loss .scatterlayer .trace')")
        assert visit.errors == []


def test_it_can_be_used_from_the_keyboard(browser: Browser, closed: Closed) -> None:
    with Visit(browser, closed.address, token=closed.token()) as visit:
        page = visit.page
        visit.wait_until_live()
        visit.wait_for_parameters()
        reached: list[str] = []
        while "event-list" not in reached and len(reached) < 100:
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('href')"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", reached
        wanted = ["#main", "forget", "theme", "filter", "parameter-list", "event-kind", "event-list"]
        assert [name for name in reached if name in wanted] == wanted, reached
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "filter"
        page.keyboard.type("layers.2.")
        names = page.eval_on_selector_all("#parameter-list > *", "all => all.map(row => row.dataset.key)")
        assert names == ["layers.2.mix.weight", "layers.2.mix.bias", "layers.2.out.weight", "layers.2.out.bias"]
        page.keyboard.press("Tab")
        for key, name in (("ArrowDown", names[0]), ("ArrowDown", names[1]), ("End", names[3]), ("ArrowUp", names[2])):
            page.keyboard.press(key)
            assert page.inner_text("#parameter-name") == name
        visit.wait_until("() => document.querySelector('#statistics dd')")
        page.focus("#curve-names [data-key='accuracy']")
        page.keyboard.press("Enter")
        assert page.get_attribute("#curve-names [data-key='accuracy']", "aria-pressed") == "false"
        assert not page.is_visible("#curve-accuracy")


def test_terms_are_explained_by_keyboard_pointer_and_touch(browser: Browser, closed: Closed) -> None:
    with Visit(browser, closed.address, token=closed.token(), has_touch=True) as visit:
        page = visit.page
        visit.wait_until_live()
        terms = page.eval_on_selector_all("[data-term][tabindex]", "all => all.map(one => one.dataset.term)")
        assert {"round", "barrier", "staleness", "queue", "apply", "wait", "shard", "heartbeat"} <= set(terms)
        described = "all => all.map(one => document.getElementById(one.getAttribute('aria-describedby')).textContent)"
        assert all(page.eval_on_selector_all("[data-term][tabindex]", described))
        tip, apply, queue = "#term-tip", page.locator("[data-term=apply]"), page.locator("[data-term=queue]")
        queue.focus()
        page.keyboard.press("Tab")
        assert page.inner_text(tip).startswith("The mean time in which the pserver aggregates")
        assert page.eval_on_selector(tip, "one => one.getBoundingClientRect().bottom <= innerHeight")
        page.keyboard.press("Escape")
        assert not page.is_visible(tip)
        queue.hover()
        assert page.inner_text(tip).startswith("Gradients that wait on this pserver")
        page.mouse.move(1, 1)
        page.wait_for_selector(tip, state="hidden")
        apply.tap()
        assert page.inner_text(tip).startswith("The mean time in which the pserver aggregates")
        assert visit.errors == []


def test_curves_are_shown_as_chosen(browser: Browser, closed: Closed) -> None:
    def curve(value: list[float | None], count: list[int], after: float = 0) -> dict[str, list[Any]]:
        return {"round": [1, 2, 4], "at": [100.0 + after, 102.0 + after, 104.0 + after], "value": value, "count": count}

    curves = {"loss": {"0": curve([8, 4, None], [1, 1, 2]), "1": curve([4, 1, 1], [3, 2, 2], 0.5)}}
    answer = {"run": "r", "curves": curves | {"accuracy": {"0": curve([0.5, 0.75, 1], [1, 1, 1])}}}
    drawn = "wanted => JSON.stringify(document.querySelector('#curve-loss')?.data?.map(one => one.y)) === wanted"

    def wait_for(visit: Visit, *lines: list[float | None]) -> None:
        visit.wait_until(drawn, json.dumps(lines, separators=(",", ":")))

    with Visit(browser, closed.address, token=closed.token()) as visit:
        page = visit.page
        page.route("**/v1/curves?*", lambda route: route.fulfill(json=answer))
        wait_for(visit, [8, 4, None], [4, 1, 1])
        assert page.is_visible("#curve-accuracy")
        visit.wait_until("() => document.querySelector('#curve-loss')._fullLayout.xaxis.type === 'linear'")
        page.check("#curve-mean")  # weighted by the counts
        wait_for(visit, [5, 2, None])
        page.select_option("#curve-x", "time")
        page.check("#curve-log")
        page.fill("#curve-smoothing", "0.5")
        page.click("#curve-names button:has-text('accuracy')")
        wait_for(visit, [5, 2, None], [5, 3, None])
        page.reload()
        wait_for(visit, [5, 2, None], [5, 3, None])
        axes = "['xaxis', 'yaxis'].map(axis => document.querySelector('#curve-loss')._fullLayout[axis].type)"
        assert page.evaluate(axes) == ["date", "log"]
        assert not page.is_visible("#curve-accuracy")
        assert visit.errors == []


def test_it_asks_nothing_while_nobody_looks(browser: Browser, closed: Closed) -> None:
    with Visit(browser, closed.address, token=closed.token()) as visit:
        visit.wait_until_live()
        hide = "is => { Object.defineProperty(document, 'hidden', { value: is, configurable: true });"
        tell = "document.dispatchEvent(new Event('visibilitychange')); }"
        visit.page.evaluate(hide + tell, True)
        visit.page.wait_for_timeout(500)  # what was under way
        before = len(visit.requests)
        visit.page.wait_for_timeout(2500)
        assert len(visit.requests) == before
        visit.page.evaluate(hide + tell, False)
        with visit.page.expect_request("**/v1/status"):
            pass


def test_a_path_before_it_changes_nothing(browser: Browser, closed: Closed) -> None:
    with Visit(browser, closed.address, token=closed.token(), path="/team/gradpost/") as visit:
        visit.wait_until_live()
        visit.page.wait_for_selector("#event-list li")
        visit.wait_until("() => document.querySelector('#curve-loss .scatterlayer .trace')")
        requested = visit.page.evaluate("performance.getEntriesByType('resource').map(one => one.name)")
        assert requested
        assert all(urlsplit(url).path.startswith("/team/gradpost/") for url in requested)
        assert visit.errors == []
