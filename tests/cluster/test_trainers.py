"""What a training script meets: clients, buffers, names, uneven data, inspection, TLS; the services are processes."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load
from torch import nn

from ps_protocol.errors import BadModel, ModelMismatch, NonFiniteGradient, TrainerLost
from ps_protocol.optimizers import check_optimizer
from ps_protocol.vocabulary import ParameterSpec
from trainer_client import ParameterClient, RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from ..unit.protocol.test_certificates import Authority
from .conftest import Carrier
from .parity_model import run_trainers

pytestmark = pytest.mark.cluster

SGD = check_optimizer("SGD", [{"nesterov": False, "maximize": False}])
NUMBERS = [{"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}]
SPECS = [ParameterSpec("w", (4, 3)), ParameterSpec("b", (5,)), ParameterSpec("s", ())]


@pytest.fixture(scope="module")
def cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(
        pservers=2, trainers=2, **carrier, lease_seconds=2, min_block_size=4, on_trainer_loss="fail"
    ) as cluster:
        yield cluster


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {spec.name: torch.full(spec.shape, value) for spec in SPECS}


async def start(client: ParameterClient) -> None:
    await client.declare(SPECS, SGD)
    if client.joined.rank == client.uploader:
        await client.send_initial(tensors(10.0))


# ---------------------------------------------------------------------- ParameterClient


@pytest.mark.asyncio
async def test_a_round_of_parameter_clients(cluster: LocalCluster) -> None:
    async def train(rank: int) -> dict[str, torch.Tensor]:
        async with ParameterClient(cluster.address, rank=rank) as client:
            await start(client)
            first = await client.get(0)
            assert torch.equal(first["w"], torch.full((4, 3), 10.0))
            for round_ in (1, 2):
                gradients = tensors(1.0 + rank)
                if round_ == 2:
                    del gradients["b"]  # no gradient in this round
                await client.send(round_, gradients, NUMBERS)
                await client.batch_barrier(round_)
                some = await client.get(round_, ["w"])
                assert list(some) == ["w"]
                await client.fetch_barrier(round_)
            return await client.get(2)

    for values in await asyncio.gather(train(0), train(1)):
        assert torch.equal(values["w"], torch.full((4, 3), 7.0))  # 10 - 1.5 - 1.5
        assert torch.equal(values["b"], torch.full((5,), 8.5))
        assert values["s"].item() == 7.0


@pytest.mark.asyncio
async def test_a_wrong_tensor_is_refused_before_it_leaves(cluster: LocalCluster) -> None:
    async def train(rank: int) -> None:
        async with ParameterClient(cluster.address, rank=rank) as client:
            await start(client)
            with raises_code("wrong_shape"):
                await client.send(1, {"w": torch.zeros(3, 4)}, NUMBERS)

    await asyncio.gather(train(0), train(1))


@pytest.mark.asyncio
async def test_leaving_in_the_middle_of_a_round_is_failing(cluster: LocalCluster) -> None:
    async def leave_early() -> None:
        async with ParameterClient(cluster.address, rank=0) as client:
            await start(client)
            await client.send(1, tensors(1.0), NUMBERS)

    async def wait_for_it() -> None:
        async with ParameterClient(cluster.address, rank=1) as client:
            await start(client)

            async def take_part() -> None:
                await client.send(1, tensors(1.0), NUMBERS)  # the other may have left by now
                await client.batch_barrier(1)
                await client.get(1)

            with pytest.raises(TrainerLost, match="trainer 0 failed: it left in the middle of round 1"):
                await take_part()

    await asyncio.gather(leave_early(), wait_for_it())


# ---------------------------------------------------------------------- RemoteOptimizer


def test_everybody_starts_from_the_values_and_buffers_of_rank_0(cluster: LocalCluster) -> None:
    def train(session: Session) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
        with torch.no_grad():
            for i, tensor in enumerate(model.state_dict().values()):
                tensor.fill_(100 * session.rank + i)
        RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, session=session)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    one, other = run_trainers(cluster.address, [train, train])
    assert one["1.num_batches_tracked"].item() == 6
    assert one["1.running_mean"][0].item() == 4.0
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_parameters_have_float32_masters(cluster: LocalCluster, dtype: torch.dtype) -> None:
    def train(session: Session) -> torch.Tensor:
        weight = nn.Parameter(torch.ones(300, dtype=dtype))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        for _ in range(8):
            weight.grad = torch.full((300,), 2.0**-10, dtype=dtype)
            optimizer.step()
        return weight.detach().clone()

    for weight in run_trainers(cluster.address, [train, train]):
        # Each step alone would vanish in bfloat16; the masters add them up.
        assert torch.equal(weight, torch.full((300,), 1 - 8 * 2.0**-10).to(dtype))


def test_a_trainer_that_is_done_is_not_waited_for(cluster: LocalCluster) -> None:
    def train(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(10))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        for _ in range(2 + 3 * session.rank):  # two rounds together, three more of trainer 1 alone
            weight.grad = torch.full((10,), 1.0 + session.rank)
            optimizer.step()
        return weight[0].item()

    assert run_trainers(cluster.address, [train, train]) == [-3.0, -9.0]


def test_parameters_without_names_are_called_by_position(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(session: Session) -> list[str]:
        model = nn.Linear(3, 2)
        RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), session=session)
        return list(session.client.plan.parameter)

    assert run_trainers(cluster.address, [train, train])[0] == ["group0.parameter0", "group0.parameter1"]
    assert capsys.readouterr().err.count("2 parameters have no names") == 2  # once a trainer


def test_schedulers_work_unmodified(cluster: LocalCluster) -> None:
    def train(session: Session) -> list[float]:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        assert isinstance(optimizer, torch.optim.Optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        seen = []
        for _ in range(3):
            weight.grad = torch.ones(2)
            optimizer.step()
            schedule.step()
            seen.append(weight[0].item())
        return seen

    assert run_trainers(cluster.address, [train, train])[1] == [-1.0, -1.5, -1.75]


def test_a_state_dict_has_the_groups_numbers(cluster: LocalCluster) -> None:
    def train(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(2))
        local = torch.optim.Adam([weight], lr=1.0)
        optimizer = RemoteOptimizer(local, session=session)
        stored = optimizer.state_dict()
        assert stored["state"] == {}
        stored["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(stored)
        assert local.param_groups is optimizer.param_groups
        weight.grad = torch.ones(2)
        optimizer.step()
        return weight[0].item()

    assert run_trainers(cluster.address, [train, train]) == [pytest.approx(-0.5)] * 2


def test_what_cannot_be_trained_is_refused_with_the_reason(cluster: LocalCluster) -> None:
    def train(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(2))
        with raises_code("unsupported_optimizer", match="line search"):
            RemoteOptimizer(torch.optim.LBFGS([weight]), session=session)
        with raises_code("unsupported_optimizer", match="not a class of torch"):
            RemoteOptimizer(type("SGD", (torch.optim.SGD,), {})([weight], lr=1.0), session=session)
        double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        with pytest.raises(BadModel, match="F64"):
            RemoteOptimizer(torch.optim.SGD([("double", double)], lr=1.0), session=session)
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        with pytest.raises(BadModel, match="parameter group cannot be added"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    run_trainers(cluster.address, [train, train])


def test_trainers_with_different_models_are_told_the_difference(cluster: LocalCluster) -> None:
    refusal: Future[BaseException] = Future()

    def train(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(2 + session.rank))
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(RemoteOptimizer, torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
            made.add_done_callback(tell)
            # Whoever declares second is refused; the other waits until it leaves.
            refusal.result(timeout=60)
            session.close("failed", "enough")
            assert made.exception(timeout=30) is not None

    def tell(made: Future[RemoteOptimizer]) -> None:
        error = made.exception()
        if isinstance(error, ModelMismatch):
            refusal.set_result(error)

    run_trainers(cluster.address, [train, train])
    assert re.search(r"differ in parameter 0 .*\[[23]\].*\[[23]\]", str(refusal.result()))


def test_a_non_finite_gradient_names_the_block_and_ends_the_run(cluster: LocalCluster) -> None:
    def train(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(8))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        weight.grad = torch.ones(8)
        if session.rank == 1:
            weight.grad[5] = float("nan")
        optimizer.step()

    def expect(kind: type[Exception], match: str, session: Session) -> None:
        with pytest.raises(kind, match=match):
            train(session)
        if kind is NonFiniteGradient:
            session.close("failed", "its gradient was not finite")

    run_trainers(
        cluster.address,
        [
            lambda session: expect(TrainerLost, "trainer 1 failed: its gradient was not finite", session),
            lambda session: expect(NonFiniteGradient, r"trainer 1 pushed NaN .* block 'weight.block1'", session),
        ],
        min_block_size=4,
    )
    # Both pservers tell of it, with everything that a search for the cause needs.
    lines = [json.loads(line.partition("] ")[2]) for line in cluster.output if '"run failed"' in line]
    told = [{key: line.get(key) for key in ("level", "role", "pserver", "trainer", "round", "code")} for line in lines]
    for index in range(2):
        assert {
            "level": "error", "role": "pserver", "pserver": index, "trainer": [1], "round": 1, "code": "trainer_lost",
        } in told  # fmt: skip
    assert all(len(line["run"]) == 12 for line in lines)


# ---------------------------------------------------------------------- looking inside


def test_live_parameters_are_served_as_safetensors(cluster: LocalCluster) -> None:
    looked = threading.Event()

    def train(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(7, 3))
        optimizer = RemoteOptimizer(torch.optim.SGD([("layer/weight.0", weight)], lr=1.0), session=session)
        weight.grad = torch.arange(21.0).reshape(7, 3)
        optimizer.step()
        if session.rank == 0:
            listed = httpx.get(f"{cluster.address}/v1/parameters").json()
            [entry] = listed["parameters"]
            assert (entry["name"], entry["shape"], entry["dtype"], entry["bytes"]) == (
                "layer/weight.0", [7, 3], "F32", 84,
            )  # fmt: skip
            assert [(b["begin"], b["end"]) for b in entry["blocks"]] == [(0, 11), (11, 21)]
            body = httpx.get(f"{cluster.address}/v1/parameters/layer/weight.0").content
            assert torch.equal(load(body)["layer/weight.0"], weight)
            missing = httpx.get(f"{cluster.address}/v1/parameters/other")
            assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
            looked.set()
        looked.wait(timeout=30)

    run_trainers(cluster.address, [train, train])


# ---------------------------------------------------------------------- TLS


@pytest.mark.extended
@pytest.mark.parametrize("http2", [True, False])
def test_tls_on_every_link(http2: bool, tmp_path: Path, carrier: Carrier) -> None:
    issued = Authority(tmp_path / "authority").issue("service")

    def train(session: Session) -> float:
        weight = nn.Parameter(torch.zeros(100_000))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        weight.grad = torch.ones(100_000)
        optimizer.step()
        assert session.summary().transport == ("HTTP/2" if http2 else "HTTP/1.1")
        return weight.sum().item()

    tls = {"tls_ca": issued.ca, "tls_cert": issued.cert, "tls_key": issued.key}
    with LocalCluster(pservers=2, trainers=2, **carrier, http2=http2, **tls) as cluster:
        assert cluster.address.startswith("https://")
        assert run_trainers(cluster.address, [train, train], tls_ca=issued.ca) == [-100_000.0] * 2
