"""A change by an administrator applies from the round that the answer names, to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .conftest import Carrier
from .faulty_run import FaultyRun
from .training import Oracle

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
ROUNDS = 160


class Administrator:
    def __init__(self, run: FaultyRun) -> None:
        self.address = run.cluster.address

    def send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return httpx.request(method, self.address + path, timeout=60, **arguments)

    def ask(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        reply = self.send(method, path, **arguments)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def refused(self, method: str, path: str, **arguments: Any) -> tuple[int, str]:
        reply = self.send(method, path, **arguments)
        return reply.status_code, reply.json()["code"]


@pytest.fixture
def run(carrier: Carrier) -> Iterator[FaultyRun]:
    with FaultyRun(ROUNDS, **carrier, min_block_size=64) as run:
        run.wait_for_round(5)
        yield run


def test_rates_and_frozen_parameters_count_from_the_named_round_on(run: FaultyRun) -> None:
    """One pserver dies meanwhile, and replays what was set from its log; then the coordinator does."""
    admin, oracle = Administrator(run), Oracle()
    faster = admin.ask("PUT", "/v1/controls/rate", json={"rate": 0.05})
    assert faster["controls"]["rates"] == {"0": 0.05}
    oracle.rates[faster["round"]] = 0.05
    stuck = admin.ask("PUT", "/v1/controls/frozen/0.weight")
    oracle.frozen[stuck["round"]] = {"0.weight"}
    assert faster["round"] < stuck["round"]
    run.restart_pserver(1)
    other = admin.ask("PUT", "/v1/controls/frozen/2.weight")
    oracle.frozen[other["round"]] = {"0.weight", "2.weight"}
    run.restart_coordinator()
    assert admin.ask("GET", "/v1/controls")["frozen"] == ["0.weight", "2.weight"]
    free = admin.ask("DELETE", "/v1/controls/frozen/0.weight")
    oracle.frozen[free["round"]] = {"2.weight"}
    usual = admin.ask("PUT", "/v1/controls/rate", json={"rate": None})
    oracle.rates[usual["round"]] = None
    assert usual["round"] < ROUNDS
    assert run.results() == [oracle.result(ROUNDS)] * 2
    audit = admin.send("GET", "/v1/audit").json()
    done = [(entry["action"], entry["round"]) for entry in audit if entry["outcome"] == "done"]
    assert done == [
        ("set rate", faster["round"]),
        ("freeze", stuck["round"]),
        ("freeze", other["round"]),
        ("unfreeze", free["round"]),
        ("set rate", usual["round"]),
    ]
    assert len(audit) == 2 * len(done)


@pytest.mark.extended
def test_a_paused_run_stands_still_and_nobody_is_late(carrier: Carrier) -> None:
    with FaultyRun(60, **carrier, round_timeout_seconds=3) as run:
        run.wait_for_round(5)
        admin = Administrator(run)
        paused = admin.ask("POST", "/v1/controls/pause")
        run.wait_for_round(paused["round"] - 1)
        time.sleep(4)  # longer than a round may take: this is the thing that is tested, not a wait for a condition
        assert [run.round_of(rank) for rank in (0, 1)] == [paused["round"] - 1] * 2
        status = admin.ask("GET", "/v1/status")
        assert {pserver["round"] for pserver in status["pservers"]} == {paused["round"] - 1}
        oracle = Oracle()
        frozen = admin.ask("PUT", "/v1/controls/frozen/0.bias")
        oracle.frozen[frozen["round"]] = {"0.bias"}
        run.kill(run.cluster.pservers[0])  # and stays so
        run.cluster.start_pserver(0)
        resumed = admin.ask("POST", "/v1/controls/resume")
        assert resumed["round"] == frozen["round"] == paused["round"]
        assert run.results() == [oracle.result(60)] * 2


@pytest.mark.extended
def test_all_go_back_to_a_checkpoint(run: FaultyRun) -> None:
    admin, oracle = Administrator(run), Oracle()
    admin.ask("PUT", "/v1/controls/rate", json={"rate": 0.02})
    made = admin.ask("POST", "/v1/checkpoints")
    run.wait_for_round(made["round"] + 10)
    assert admin.refused("POST", "/v1/rollback", json={"round": made["round"] + 1}) == (404, "not_found")
    undone = admin.send("GET", "/v1/parameters/0.weight").headers
    back = admin.ask("POST", "/v1/rollback", json={"round": made["round"]})
    newer = admin.send(
        "GET",
        "/v1/parameters/0.weight",
        params={"after_version": undone["gradpost-round"]},
        headers={"if-none-match": undone["etag"]},
    )
    assert newer.status_code == 200  # what it has is undone, however new
    assert int(newer.headers["gradpost-round"]) < int(undone["gradpost-round"])
    assert newer.headers["etag"].split(".")[1] == "1"
    assert (back["attempt"], back["round"]) == (1, made["round"] + 1)
    audit = admin.send("GET", "/v1/audit").json()
    oracle.rates[audit[1]["round"]] = 0.02
    assert run.results() == [oracle.result(ROUNDS)] * 2


@pytest.mark.extended
def test_a_trainer_that_is_evicted_is_refused_and_may_come_again(carrier: Carrier) -> None:
    with FaultyRun(400, **carrier, pservers=1, trainers=3) as run:
        run.wait_for_round(5)
        admin = Administrator(run)
        admin.ask("POST", "/v1/trainers/2/evict")
        assert run.cluster.trainers[2].wait(30) != 0
        run.wait_for_line("Conflict: trainer 2", of="trainer 2")
        run.wait_for_round(run.round_of(0) + 10)
        assert admin.refused("POST", "/v1/trainers/2/evict") == (404, "not_found")
        admin.ask("POST", "/v1/trainers/1/evict")
        assert admin.refused("POST", "/v1/trainers/0/evict") == (409, "cannot_evict")
        run.start_trainer(2)
        run.wait_for_round(run.round_of(0) + 5, 2)


@pytest.mark.extended
def test_asynchronous_runs_can_be_paused_and_their_rates_set(carrier: Carrier) -> None:
    with FaultyRun(300, **carrier, mode="async", durability="log") as run:
        run.wait_for_round(5)
        admin = Administrator(run)
        assert admin.refused("POST", "/v1/rollback", json={"round": 0}) == (409, "mode_mismatch")
        admin.ask("PUT", "/v1/controls/rate", json={"rate": 0.0})
        admin.ask("POST", "/v1/controls/pause")
        before = admin.ask("GET", "/v1/parameters/0.bias", params={"format": "json"})
        run.restart_pserver(0)
        admin.ask("POST", "/v1/controls/resume")
        run.wait_for_round(run.round_of(0) + 20)
        after = admin.ask("GET", "/v1/parameters/0.bias", params={"format": "json"})
        assert after["round"] > before["round"] + 20
        assert after["values"] == before["values"]  # the rate is 0
        admin.ask("PUT", "/v1/controls/frozen/0.bias")
        admin.ask("PUT", "/v1/controls/rate", json={"rate": None})
        run.wait_for_round(run.round_of(0) + 20)
        frozen = admin.ask("GET", "/v1/parameters/0.bias", params={"format": "json"})
        other = admin.ask("GET", "/v1/statistics/0.weight")
        assert frozen["values"] == before["values"]
        assert other["update_ratio"] > 0
        run.results()


@pytest.mark.extended
def test_statistics_of_what_is_frozen_come_with_those_of_what_moves(carrier: Carrier) -> None:
    """Its blocks are on two pservers, which look at them at different rounds: they are the same in all of these."""
    with FaultyRun(100_000, **carrier, min_block_size=64) as run, ThreadPoolExecutor() as threads:
        run.wait_for_round(5)
        admin = Administrator(run)
        admin.ask("PUT", "/v1/controls/frozen/0.weight")
        for _ in range(3):
            frozen, moving = threads.map(
                lambda name: admin.ask("GET", f"/v1/statistics/{name}"), ("0.weight", "2.weight")
            )
            assert frozen["update_ratio"] is None
            assert moving["update_ratio"] > 0
            assert (frozen["num_elements"], moving["num_elements"]) == (1280, 192)
