"""Looking into a run from another process while it trains: what is read is what the trainers have, of one round."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
import torch
from safetensors.torch import load

from .faulty_run import FaultyRun
from .training import Oracle, assert_identical

pytestmark = pytest.mark.cluster
ROUNDS = 1_000_000  # more than the tests read
WEIGHT = "0.weight"  # in two blocks, one on each pserver


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
        assert len(reply.content) == int(reply.headers["content-length"])
        assert reply.headers["gradpost-round"] == str(round_)
        found, expected = load(reply.content), oracle.after(round_)
        assert len(found) == num_tensors
        assert_identical(found, {name: expected[name] for name in found})
    assert len(rounds) > 3


def test_statistics_are_those_of_torch(run: FaultyRun, http: httpx.Client, oracle: Oracle) -> None:
    for name in oracle.rounds[0]:
        for _ in range(100):  # blocks may be of neighbouring rounds; such an answer stays for a second
            found = http.get(f"/v1/statistics/{name}").json()
            version = found["version"]
            now = oracle.after(version)[name].double()
            if found["norm"] == pytest.approx(float(now.norm())):
                break
            run.wait_for_round(run.round_of(0) + 1)
        assert found["norm"] == pytest.approx(float(now.norm()))
        assert found["mean"] == pytest.approx(float(now.mean()))
        assert found["deviation"] == pytest.approx(float(now.std(unbiased=False)))
        assert (found["minimum"], found["maximum"]) == (float(now.min()), float(now.max()))
        assert found["num_nan"] == found["num_infinite"] == 0
        inner = Counter(
            math.copysign(2.0 ** math.floor(math.log2(abs(x))), x) if x else 0.0 for x in now.flatten().tolist()
        )
        assert {end if end < 0 else begin: count for begin, end, count in found["histogram"]} == inner
