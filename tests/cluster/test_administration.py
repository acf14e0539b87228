"""A run is administered, and inspected, from another process while it trains."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from signal import SIGINT, SIGKILL
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load

from .faulty_run import ROOT, FaultyRun
from .training import Oracle, assert_identical

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROUNDS = 300


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


@pytest.fixture
def run() -> Iterator[FaultyRun]:
    with FaultyRun(ROUNDS, local_transport=False, min_block_size=64) as run:
        run.wait_for_round(5)
        yield run


@pytest.mark.extended
def test_rates_and_frozen_parameters_count_from_the_named_round_on(run: FaultyRun) -> None:
    """One pserver dies meanwhile, and replays what was set from its log; then the coordinator does."""
    admin, oracle = Administrator(run), Oracle()
    faster = admin.ask("PUT", "/v1/controls/rate", json={"rate": 0.05})
    assert faster["controls"]["rates"] == {"0": 0.05}
    oracle.rates[faster["round"]] = 0.05
    stuck = admin.ask("PUT", "/v1/controls/frozen/0.weight")
    oracle.frozen[stuck["round"]] = {"0.weight"}
    assert faster["round"] < stuck["round"]
    events = [event["text"] for event in admin.send("GET", "/v1/events").json() if event["kind"] == "change"]
    assert events == [
        f"set rate 0.05: from round {faster['round']} on",
        f"freeze parameter 0.weight: from round {stuck['round']} on",
    ]
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
    requests = [event["facts"] for event in admin.send("GET", "/v1/events").json() if event["by"]]
    done = [(facts["action"], facts["round"]) for facts in requests if facts["outcome"] == "done"]
    assert done == [
        ("unfreeze", free["round"]),
        ("set rate", usual["round"]),
    ]


@pytest.mark.extended
def test_a_paused_run_stands_still_and_no_trainer_is_late() -> None:
    with FaultyRun(60, local_transport=False, round_timeout_seconds=2) as run:
        run.wait_for_round(5)
        admin = Administrator(run)
        paused = admin.ask("POST", "/v1/controls/pause")
        run.wait_for_round(paused["round"] - 1)
        time.sleep(2.5)  # longer than a round may take: this is the thing that is tested, not a wait for a condition
        assert [run.round_of(rank) for rank in (0, 1)] == [paused["round"] - 1] * 2
        status = admin.ask("GET", "/v1/status")
        assert {pserver["heartbeat"]["round"] for pserver in status["pservers"]} == {paused["round"] - 1}
        assert (status["is_paused"], status["prospects"]) == (True, [])
        oracle = Oracle()
        frozen = admin.ask("PUT", "/v1/controls/frozen/0.bias")
        oracle.frozen[frozen["round"]] = {"0.bias"}
        run.kill(run.cluster.pservers[0])  # and stays so
        run.cluster.start_pserver(0)
        resumed = admin.ask("POST", "/v1/controls/resume")
        assert resumed["round"] == frozen["round"] == paused["round"]
        assert run.results() == [oracle.result(60)] * 2


@pytest.mark.extended
def test_events_are_followed_over_a_restart_of_the_coordinator() -> None:
    command = [sys.executable, "-P", "-m", "gradpost", "events", "--follow", "--json"]
    with FaultyRun(100_000) as run:
        environment = {**run.cluster.environment(), "PYTHONPATH": str(ROOT)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as follow:
            found: list[dict[str, Any]] = [json.loads(follow.stdout.readline())]
            while "trainer 1 has joined" not in found[-1]["text"]:
                found.append(json.loads(follow.stdout.readline()))
            run.cluster.coordinator.signal(SIGKILL)
            assert "is unreachable; trying again until Ctrl-C" in follow.stderr.readline()
            run.cluster.restart_coordinator()
            assert json.loads(follow.stdout.readline())["id"] > found[-1]["id"]
            follow.send_signal(SIGINT)
            assert follow.wait(30) == 0
            assert follow.stderr.read() == ""


# ---------------------------------------------------------------------- inspection


ENDLESS = 1_000_000  # more than the tests read
WEIGHT = "0.weight"  # in two blocks, one on each pserver


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    torch.set_num_threads(1)
    return Oracle()


@pytest.fixture(scope="module")
def trained() -> Iterator[FaultyRun]:
    with FaultyRun(ENDLESS, local_transport=False, min_block_size=64) as trained:
        trained.wait_for_round(5)
        yield trained


@pytest.fixture
def http(trained: FaultyRun) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=trained.cluster.address, timeout=60) as http:
        yield http


def metadata_of(body: bytes) -> dict[str, str]:
    return dict(json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"])


@pytest.mark.parametrize(("path", "num_tensors"), [(f"parameters/{WEIGHT}", 1), ("model", 4)])
def test_what_is_read_is_of_one_round_bit_for_bit(
    trained: FaultyRun, http: httpx.Client, oracle: Oracle, path: str, num_tensors: int
) -> None:
    rounds = set()
    for i in range(20):
        if i % 4 == 0:
            trained.wait_for_round(trained.round_of(0) + 1)
        reply = http.get(f"/v1/{path}")
        round_ = int(metadata_of(reply.content)["round"])
        rounds.add(round_)
        assert len(reply.content) == int(reply.headers["content-length"])
        assert reply.headers["gradpost-round"] == str(round_)
        found, expected = load(reply.content), oracle.after(round_)
        assert len(found) == num_tensors
        assert_identical(found, {name: expected[name] for name in found})
    assert len(rounds) > 3


def test_statistics_are_those_of_torch(trained: FaultyRun, http: httpx.Client, oracle: Oracle) -> None:
    for name in oracle.rounds[0]:
        for _ in range(100):  # blocks may be of neighbouring rounds; such an answer stays for a second
            found = http.get(f"/v1/statistics/{name}").json()
            version = found["version"]
            now = oracle.after(version)[name].double()
            if found["norm"] == pytest.approx(float(now.norm())):
                break
            trained.wait_for_round(trained.round_of(0) + 1)
        assert found["norm"] == pytest.approx(float(now.norm()))
        assert found["mean"] == pytest.approx(float(now.mean()))
        assert found["deviation"] == pytest.approx(float(now.std(unbiased=False)))
        assert (found["minimum"], found["maximum"]) == (float(now.min()), float(now.max()))
        assert found["num_nan"] == found["num_infinite"] == 0
        inner = Counter(
            math.copysign(2.0 ** math.floor(math.log2(abs(x))), x) if x else 0.0 for x in now.flatten().tolist()
        )
        assert {end if end < 0 else begin: count for begin, end, count in found["histogram"]} == inner
