"""Looking into a run from another process while it trains: what is read is what the trainers have, of one round."""

from __future__ import annotations

import asyncio
import io
import json
import math
import platform
import time
from collections.abc import Iterator
from signal import SIGTERM
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load

from .faulty_run import FaultyRun
from .training import Oracle, assert_identical

pytestmark = pytest.mark.cluster
ROUNDS = 400
WEIGHT = "0.weight"  # in two blocks, one on each pserver
BIAS = "0.bias"


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    torch.set_num_threads(1)
    return Oracle()


@pytest.fixture(scope="module")
def run() -> Iterator[FaultyRun]:
    with FaultyRun(ROUNDS, local_transport=False, min_block_size=64) as run:
        run.wait_for_round(5)
        yield run


@pytest.fixture
def http(run: FaultyRun) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=run.cluster.address, timeout=60) as http:
        yield http


def metadata_of(body: bytes) -> dict[str, str]:
    return dict(json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"])


def test_the_status_has_the_figures_of_each_process(run: FaultyRun, http: httpx.Client) -> None:
    def read_figures() -> list[dict[str, Any] | None]:
        status = http.get("/v1/status").json()
        return [status["process"], *(member["process"] for member in status["pservers"] + status["trainers"])]

    figures = read_figures()
    # From two heartbeats; a process may have done nothing in between.
    while not all(process and process["sent_bytes_per_second"] and process["cpu_share"] for process in figures[1:]):
        run.wait_for_round(run.round_of(0) + 5)
        figures = read_figures()
    assert len(figures) == 5
    for process in filter(None, figures):
        assert process["resident_bytes"] > 10_000_000
        assert process["host"] == platform.node()
        assert process["written_bytes_per_second"] is not None
    for process in filter(None, figures[1:]):
        assert process["received_bytes_per_second"] > 0


@pytest.mark.parametrize(("path", "num_tensors"), [(f"parameters/{WEIGHT}", 1), ("model", 4)])
def test_what_is_read_is_of_one_round_bit_for_bit(
    run: FaultyRun, http: httpx.Client, oracle: Oracle, path: str, num_tensors: int
) -> None:
    rounds = set()
    for i in range(20):
        if i % 4 == 0:
            run.wait_for_round(run.round_of(0) + 1)
        reply = http.get(f"/v1/{path}")
        round_ = int(metadata_of(reply.content)["round"])
        rounds.add(round_)
        if path == "model":
            assert len(reply.content) == int(reply.headers["content-length"])
        else:
            assert reply.headers["gradpost-round"] == str(round_)
        found, expected = load(reply.content), oracle.after(round_)
        assert len(found) == num_tensors
        assert_identical(found, {name: expected[name] for name in found})
    assert len(rounds) > 3


@pytest.mark.parametrize(
    ("name", "form"), [(WEIGHT, "safetensors"), (WEIGHT, "npy"), (BIAS, "safetensors"), (BIAS, "npy"), (BIAS, "json")]
)
def test_every_format_has_the_values(http: httpx.Client, oracle: Oracle, name: str, form: str) -> None:
    reply = http.get(f"/v1/parameters/{name}", params={"format": form})
    assert reply.status_code == 200, reply.text
    expected = oracle.after(int(reply.headers["gradpost-round"]))[name]
    if form == "npy":
        found = torch.from_numpy(np.load(io.BytesIO(reply.content), allow_pickle=False))
    elif form == "json":
        document = reply.json()
        assert document["round"] == int(reply.headers["gradpost-round"])
        found = torch.tensor(document["values"])
    else:
        found = load(reply.content)[name]
    assert torch.equal(found, expected)


def test_json_of_a_large_parameter_is_refused(http: httpx.Client) -> None:
    reply = http.get(f"/v1/parameters/{WEIGHT}", params={"format": "json"})
    problem = reply.json()
    assert (reply.status_code, problem["code"]) == (422, "invalid_message")
    assert problem["detail"] == "parameter '0.weight' is too large for JSON; request the format safetensors or npy"
    assert (problem["expected"], problem["actual"]) == ("<= 1,000 elements", "1,280")


def test_a_long_poll_gets_the_next_version(http: httpx.Client, oracle: Oracle) -> None:
    version = int(http.get(f"/v1/parameters/{WEIGHT}").headers["gradpost-round"])
    for _ in range(3):
        reply = http.get(f"/v1/parameters/{WEIGHT}", params={"after_version": version})
        newer = int(reply.headers["gradpost-round"])
        assert newer > version
        assert torch.equal(load(reply.content)[WEIGHT], oracle.after(newer)[WEIGHT])
        version = newer
    late = http.get(f"/v1/parameters/{WEIGHT}", params={"after_version": version + 300, "wait_seconds": 0.2})
    assert late.status_code == 304
    assert not late.content


@pytest.mark.asyncio
async def test_many_waiting_readers_delay_no_other_reader(run: FaultyRun) -> None:
    async with httpx.AsyncClient(base_url=run.cluster.address, timeout=60) as http:
        path = f"/v1/parameters/{WEIGHT}"
        waiting = [asyncio.create_task(http.get(path, params={"after_version": 10**6})) for _ in range(20)]
        await http.get("/healthz")  # they are on their way
        assert (await http.get(path)).status_code == 200
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()


def test_statistics_are_those_of_torch(http: httpx.Client, oracle: Oracle) -> None:
    for name in oracle.rounds[0]:
        found = http.get(f"/v1/statistics/{name}").json()
        now, before = oracle.after(found["version"])[name].double(), oracle.after(found["version"] - 1)[name].double()
        assert found["norm"] == pytest.approx(float(now.norm()))
        assert found["mean"] == pytest.approx(float(now.mean()))
        assert found["deviation"] == pytest.approx(float(now.std(unbiased=False)))
        assert (found["minimum"], found["maximum"]) == (float(now.min()), float(now.max()))
        assert found["num_nan"] == found["num_infinite"] == 0
        assert found["update_ratio"] == pytest.approx(float((now - before).norm() / before.norm()))
        histogram = found["histogram"]
        edges = [histogram["begin"] + i * histogram["width"] for i in range(len(histogram["counts"]) + 1)]
        assert histogram["counts"] == np.histogram(now.numpy(), edges)[0].tolist()
        assert sum(histogram["counts"]) == now.numel()


def test_slots_are_those_of_torch(http: httpx.Client, oracle: Oracle) -> None:
    reply = http.get(f"/v1/slots/{WEIGHT}")
    found, metadata = load(reply.content), metadata_of(reply.content)
    again = Oracle()
    again.after(int(metadata["round"]))
    state = again.optimizer.state[again.model[0].weight]
    assert found.keys() == {"exp_avg", "exp_avg_sq"}
    assert all(torch.equal(found[slot], state[slot]) for slot in found)
    assert int(metadata["steps"]) == int(state["step"])


@pytest.mark.extended
def test_what_has_not_changed_is_not_sent_again(run: FaultyRun, http: httpx.Client, oracle: Oracle) -> None:
    reply = http.get(f"/v1/parameters/{WEIGHT}")
    run.wait_for_round(run.round_of(0) + 2)
    assert http.get(f"/v1/parameters/{WEIGHT}", headers={"if-none-match": reply.headers["etag"]}).status_code == 200
    run.results()
    reply = http.get(f"/v1/parameters/{WEIGHT}")
    assert torch.equal(load(reply.content)[WEIGHT], oracle.after(ROUNDS)[WEIGHT])
    again = http.get(f"/v1/parameters/{WEIGHT}", headers={"if-none-match": f'"x", {reply.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    began = time.monotonic()
    statistics = http.get(f"/v1/statistics/{WEIGHT}").json()
    assert time.monotonic() - began < 1
    assert (statistics["version"], statistics["update_ratio"]) == (ROUNDS, None)
    assert math.isclose(statistics["norm"], float(oracle.after(ROUNDS)[WEIGHT].double().norm()))


@pytest.mark.extended
def test_an_asynchronous_model_is_a_cut_of_each_pserver() -> None:
    """All blocks of a pserver have exactly the steps that the metadata name."""
    settings = {"mode": "async", "min_block_size": 16, "local_transport": False}
    with FaultyRun(300, pservers=2, kind="counting", **settings) as run, httpx.Client(timeout=60) as http:
        run.wait_for_round(10)
        listed = http.get(f"{run.cluster.address}/v1/parameters").json()["parameters"]
        seen = set()
        for i in range(10):
            if i % 2 == 0:
                run.wait_for_round(run.round_of(0) + 1)
            body = http.get(f"{run.cluster.address}/v1/model").content
            model, metadata = load(body), metadata_of(body)
            for pserver in range(2):
                steps = {rank: step for rank, (_, step) in json.loads(metadata[f"pserver{pserver}.history"])[2]}
                seen.add(steps[0])
                for parameter in listed:
                    width = parameter["shape"][1]
                    values = model[parameter["name"]].flatten()
                    for block in parameter["blocks"]:
                        if block["pserver"] == pserver:
                            at = range(block["begin"], block["end"])
                            assert [values[i].item() for i in at] == [steps[i // width] for i in at]
        assert len(seen) > 3
        # In one block: of another, every second update would be by the trainer whose row lies elsewhere.
        found = http.get(f"{run.cluster.address}/v1/statistics/p2").json()
        assert 0 < found["update_ratio"] < 1
        run.results()


@pytest.mark.extended
def test_events_come_as_they_happen() -> None:
    with FaultyRun(60, trainers=1, pservers=1, local_transport=False) as run, httpx.Client(timeout=30) as http:
        seen = []
        with http.stream("GET", f"{run.cluster.address}/v1/events/stream") as stream:
            lines = stream.iter_lines()
            for line in lines:
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    seen.append(event["text"])
                    newest = event["id"]
                    if event["text"] == f"run {event['run']} is finished":
                        break
        order = ["trainer 0 has joined", f"run {event['run']} is training", "trainer 0 is done", seen[-1]]
        assert [text for text in seen if text in order] == order
        listed = http.get(f"{run.cluster.address}/v1/events").json()
        pairs = zip(seen, [*seen[1:], ""], strict=True)
        seen = [
            text for text, later in pairs if not text.startswith("checkpoint") or not later.startswith("checkpoint")
        ]
        assert [event["text"] for event in listed][: len(seen)] == seen
        assert http.get(f"{run.cluster.address}/v1/events", params={"after": newest}).json() == listed[len(seen) :]
        with http.stream(
            "GET", f"{run.cluster.address}/v1/events/stream", headers={"last-event-id": str(listed[2]["id"])}
        ) as stream:
            first = next(line for line in stream.iter_lines() if line.startswith("id: "))
            assert first == f"id: {listed[3]['id']}"
            began = time.monotonic()
            run.cluster.coordinator.signal(SIGTERM)  # an open stream does not hold it up
            assert run.cluster.coordinator.wait(10) == 0
            assert time.monotonic() - began < 3
