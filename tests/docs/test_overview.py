"""docs/overview.md: the example of slicing, the costs of a step, the named files."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
import torch

from ps_protocol.optimizers import RULES
from ps_protocol.plan import make_plan
from ps_protocol.slots import slots_under
from ps_protocol.vocabulary import ParameterSpec
from trainer_client import RemoteOptimizer, Session
from trainer_client.pserver_client import WAIT_SECONDS
from trainer_client.settings import BUCKET_BYTES, EARLY_BUCKET_BYTES
from trainer_client.testing import LocalCluster

from .conftest import NUM_PSERVERS, NUM_TRAINERS
from .markdown import ROOT, codes, read, section, table, tables

TEXT = read("overview.md")


def test_the_example_of_slicing() -> None:
    slicing = section(TEXT, "Slicing and placement")
    [command] = [code for code in codes(slicing) if code.startswith("gradpost plan")]
    parameters = [
        ParameterSpec(name, tuple(int(size) for size in shape.split("x")))
        for name, shape in re.findall(r"--param (\w+):(\w+)", command)
    ]
    num_pservers = re.search(r"--pservers (\d+)", command)
    assert num_pservers
    plan = make_plan(parameters, int(num_pservers[1]))
    assert [list(row.values()) for row in tables(slicing)[0]] == [
        [f"`{block.name}`", f"{block.begin} to {block.end}", str(block.pserver)] for block in plan.blocks
    ]


@pytest.mark.cluster
def test_the_measured_step(cluster: LocalCluster) -> None:
    measured = re.search(
        r"with (\d) trainers, (\d) pservers, SGD and the one parameter `w1` \((\d+) bytes\), a step takes each trainer "
        r"(\d+) requests, (\d+) bytes out and (\d+) bytes in",
        section(TEXT, "What a step costs"),
    )
    assert measured
    trainers, pservers, parameter_bytes, *costs = map(int, measured.groups())
    assert (trainers, pservers) == (NUM_TRAINERS, NUM_PSERVERS)
    taken: list[list[float]] = []

    def train(session: Session) -> None:
        parameter = torch.nn.Parameter(torch.zeros(10, 1000))
        assert parameter.nbytes == parameter_bytes
        parameter.grad = torch.ones(10, 1000)
        optimizer = RemoteOptimizer(torch.optim.SGD([("w1", parameter)], lr=0.1), session=session)
        before = count(session)
        optimizer.step()
        taken.append([after - before for before, after in zip(before, count(session), strict=True)])

    run_two(cluster, train)
    assert taken == [costs, costs]


def count(session: Session) -> list[float]:
    metrics = session.client.metrics
    requests = sum(
        s.value for family in metrics.requests.collect() for s in family.samples if s.name.endswith("_total")
    )
    retries = sum(s.value for family in metrics.retries.collect() for s in family.samples if s.name.endswith("_total"))
    [pushed], [pulled] = (
        [s.value for family in counter.collect() for s in family.samples if s.name.endswith("_total")]
        for counter in (metrics.pushed_bytes, metrics.pulled_bytes)
    )
    return [requests - retries, pushed, pulled]  # a retry is only asking again for who is late


def run_two(cluster: LocalCluster, train: Callable[[Session], None]) -> None:
    def run(rank: int) -> None:
        with Session(coordinator=cluster.address, rank=rank, world_size=NUM_TRAINERS) as session:
            train(session)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_TRAINERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_the_constants_in_the_costs() -> None:
    costs = section(TEXT, "What a step costs")
    assert f"({BUCKET_BYTES >> 20} MiB, with `overlap` {EARLY_BUCKET_BYTES >> 20} MiB)" in costs
    assert f"waited for {WAIT_SECONDS:g} seconds" in costs


@pytest.mark.parametrize(
    ("name", "options", "num_slots"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("Adagrad", {}, 1),
        ("RMSprop", {}, 1),
        ("Adam", {}, 2),
        ("AdamW", {}, 2),
        ("Adadelta", {}, 2),
        ("Adamax", {}, 2),
        ("NAdam", {}, 2),
        ("RAdam", {}, 2),
        ("Adam", {"amsgrad": True}, 3),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 3),
    ],
    ids=str,
)
def test_the_slots_of_each_optimizer(name: str, options: dict[str, float], num_slots: int) -> None:
    rows = table(section(TEXT, "What a step costs"), "how much")
    [row] = [row for row in rows if row["what"] == "pserver memory: optimizer state"]
    defaults = dict.fromkeys([*RULES[name].numbers, *RULES[name].flags], 0)
    assert len(slots_under(name, {**defaults, **options})) == num_slots
    word = next((option for option in ("amsgrad", "momentum") if option in options), name)
    [group] = [group for group in re.findall(r"(\d) \(([^)]+)\)", row["how much"]) if int(group[0]) == num_slots]
    assert re.search(rf"\b{word}\b", group[1])


def test_every_named_file_exists() -> None:
    named = [code for code in codes(section(TEXT, "Where the code is")) if "/" in code]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
