"""Steps that end before their parameters are here: modules wait for their own, and whoever does not is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel, TrainerLost
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .conftest import Carrier
from .faulty_run import FaultyRun, expected_result
from .parity_model import assert_identical, run_trainers
from .test_overlap import EARLY, OPTIMIZERS, SMALL, STEPS, WIDTH, Net, loss_of, train, train_locally, values

pytestmark = [pytest.mark.cluster, pytest.mark.overlap]

BOTH = {"overlap": True, "overlap_pulls": True}


@pytest.fixture(scope="module")
def cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=2, **carrier, lease_seconds=2, on_trainer_loss="fail") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lonely(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=1, **carrier, lease_seconds=2, on_trainer_loss="fail") as cluster:
        yield cluster


def overlapping(model: nn.Module, session: Session) -> RemoteOptimizer:
    return RemoteOptimizer(OPTIMIZERS["AdamW"](model.parameters()), model=model, session=session, **BOTH)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_bits_are_those_of_one_process(cluster: LocalCluster, kind: str) -> None:
    for actual in run_trainers(cluster.address, [partial(train, kind=kind, **BOTH)] * 2, **SMALL):
        assert_identical(actual, train_locally(kind))


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_fewer_bytes_are_the_same_ones(cluster: LocalCluster, kind: str) -> None:
    overlapped, other = (
        run_trainers(cluster.address, [partial(train, pull_type=kind, **arguments)] * 2, **SMALL)
        for arguments in (BOTH, {})
    )
    assert_identical(overlapped[0], overlapped[1])
    assert_identical(overlapped[0], other[0])


def test_replicas_of_data_parallel_are_refused(lonely: LocalCluster) -> None:
    def work(session: Session) -> None:
        model = nn.Linear(3, 2)
        overlapping(model, session)
        replica = model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        with pytest.raises(BadModel, match=r"nn.DataParallel copies parameters .* overlap_pulls=False"):
            replica(torch.ones(1, 3))

    run_trainers(lonely.address, [work])


def test_the_first_layer_computes_while_a_pull_goes_on(lonely: LocalCluster) -> None:
    """The pull does not end before that layer has; if it waited for everything, both would wait for ever."""
    gate = threading.Event()

    def work(session: Session) -> None:
        model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
        optimizer = overlapping(model, session)
        pull = session.client.pull

        async def pull_and_wait(*arguments: Any, **options: Any) -> Any:
            pulled = await pull(*arguments, **options)
            assert await session.io.loop.run_in_executor(None, gate.wait, 20), (
                "the first layer waits for the pull's end"
            )
            return pulled

        session.client.pull = pull_and_wait  # type: ignore[method-assign]
        model[0].register_forward_hook(lambda *_: gate.set())
        gate.set()
        model(torch.ones(2, 30)).sum().backward()
        before = values(model)
        gate.clear()
        optimizer.step()
        assert not gate.is_set()
        model(torch.ones(2, 30)).sum().backward()
        assert not torch.equal(before["0.weight"], model[0].weight)
        optimizer.step()

    run_trainers(lonely.address, [work])


def late(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def send(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0.2)
        return await request(*arguments, **options)

    return send


def test_gradients_may_be_reused_as_soon_as_the_step_has_ended(lonely: LocalCluster) -> None:
    def work(session: Session) -> Tensor:
        model = nn.Linear(200, 200, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = RemoteOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model, session=session, **BOTH)
        session.client.push = late(session.client.push)  # type: ignore[method-assign]
        for _ in range(3):
            model(torch.ones(200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        optimizer.synchronize()
        return model.weight.detach()

    [weight] = run_trainers(lonely.address, [work])
    assert torch.equal(weight, torch.full((200, 200), -3.0))


def evaluate(model: Net, optimizer: RemoteOptimizer) -> dict[str, Tensor]:
    """One module is asked, and all have their values: in evaluation some compute with those of others."""
    with torch.no_grad():
        model.hidden(torch.zeros(WIDTH))
    assert not optimizer._steps._pending  # so little lands in one piece
    return values(model)


def test_whoever_looks_at_a_model_as_a_whole_sees_the_newest_values(lonely: LocalCluster) -> None:
    def work(session: Session) -> None:
        model = Net()
        optimizer = overlapping(model, session)
        session.client.pull = late(session.client.pull)  # type: ignore[method-assign]
        for look in (
            lambda: {name: model.state_dict()[name].clone() for name, _ in model.named_parameters()},
            lambda: optimizer.synchronize() or values(model),
            partial(evaluate, model, optimizer),
        ):
            loss_of(model, 1, 0).backward()
            optimizer.step()
            seen = look()
            optimizer.synchronize()
            assert_identical(seen, values(model))
            optimizer.zero_grad()

    run_trainers(lonely.address, [work])


class Attention(nn.Module):
    """A layer that computes with the parameters of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.list = nn.ParameterList([nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.list[0] + self.list[1]
        return result


@pytest.mark.parametrize("compiled", ["no", "wrapped", "in place", "inside"])
def test_modules_that_use_others_parameters_wait_for_them(lonely: LocalCluster, compiled: str) -> None:
    def work(session: Session, *, overlap: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: nn.Module = Attention()
        if compiled == "wrapped":
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        elif compiled == "in place":
            model.compile(backend="eager")
        elif compiled == "inside":
            model.layer = torch.compile(model.layer, backend="eager")
        optimizer = RemoteOptimizer(
            OPTIMIZERS["momentum"](model.parameters()),
            model=model,
            session=session,
            overlap=overlap,
            overlap_pulls=overlap,
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(2, 5, 16, generator=generator)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        assert [spec.name for spec in session.client.plan.parameters] == [
            name for name, _ in Attention().named_parameters()
        ]
        return values(model)

    [overlapped], [other] = (
        run_trainers(lonely.address, [partial(work, overlap=overlap)], **SMALL) for overlap in (True, False)
    )
    assert_identical(overlapped, other)


def test_computing_with_a_parameter_behind_its_modules_back_is_refused(lonely: LocalCluster) -> None:
    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.inner.weight)

    def work(session: Session) -> None:
        model = Sly()
        overlapping(model, session)
        with pytest.raises(BadModel, match=r"computes with 'inner.weight', but does not call.*overlap_pulls=False"):
            model(torch.ones(2, 4)).sum().backward()

    run_trainers(lonely.address, [work])


@pytest.mark.parametrize(
    ("arguments", "with_model", "text"),
    [(BOTH, False, "needs RemoteOptimizer"), ({"overlap_pulls": True}, True, "needs overlap=True")],
)
def test_what_it_needs(lonely: LocalCluster, arguments: dict[str, Any], with_model: bool, text: str) -> None:
    def work(session: Session) -> None:
        model = Net()
        with pytest.raises(BadModel, match=text):
            RemoteOptimizer(
                OPTIMIZERS["AdamW"](model.parameters()),
                model=model if with_model else None,
                session=session,
                **arguments,
            )

    run_trainers(lonely.address, [work])


def test_delayed_pulls_come_behind_already(carrier: Carrier) -> None:
    def work(session: Session) -> None:
        with pytest.raises(BadModel, match="overlap_pulls with max_delay"):
            overlapping(Net(), session)

    with LocalCluster(pservers=1, trainers=1, **carrier, max_delay=1) as cluster:
        run_trainers(cluster.address, [work])


def test_a_forward_pass_does_not_wait_for_ever(carrier: Carrier) -> None:
    """The other trainer fails; this one waits for parameters in the middle of its model, and is told."""
    ready = threading.Barrier(2)

    def fails(session: Session) -> None:
        overlapping(Net(), session)
        ready.wait(20)
        session.close("failed", "its disk is full")

    def waits(session: Session) -> None:
        model = Net()
        optimizer = overlapping(model, session)
        loss_of(model, 0, 0).backward()
        optimizer.step()
        ready.wait(20)
        with pytest.raises(TrainerLost, match="its disk is full"):
            loss_of(model, 1, 0)

    with LocalCluster(pservers=2, trainers=2, **carrier, lease_seconds=2, on_trainer_loss="fail") as cluster:
        run_trainers(cluster.address, [waits, fails])


@pytest.mark.timeout(180)
@pytest.mark.extended
def test_processes_may_die_while_a_forward_pass_waits(carrier: Carrier) -> None:
    with FaultyRun(100, **carrier, environment={**EARLY, "GRADPOST_OVERLAP_PULLS": "true"}) as run:
        run.wait_for_round(10)
        run.kill(run.cluster.pservers[1])
        run.cluster.start_pserver(1)
        run.wait_for_round(30)
        run.kill(run.cluster.trainers[1])
        run.start_trainer(1)
        assert run.results() == [expected_result(100)] * 2


@pytest.mark.parametrize("form", [{"memory_format": torch.channels_last}, {"dtype": torch.float32}], ids=str)
@pytest.mark.parametrize("pull_type", ["float32", "int8"])
def test_the_newest_values_are_in_the_model_when_the_session_has_ended(
    lonely: LocalCluster, form: dict[str, Any], pull_type: str
) -> None:
    """Wherever pulls land before."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2)).to(**form)
    expected: dict[str, tuple[Tensor, Tensor]] = {}  # and by how much the last step has changed it

    def work(session: Session) -> None:
        optimizer = RemoteOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model=model, session=session, pull_type=pull_type, **BOTH
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2, 6, 6)).sum().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                expected[name] = parameter.detach() - parameter.grad, parameter.grad.abs().max()
            optimizer.step()

    run_trainers(lonely.address, [work])
    for name, parameter in model.named_parameters():
        value, change = expected[name]
        assert (parameter.detach() - value).abs().max() < 0.05 * change, name  # 8 bits are not exact


@pytest.mark.extended
def test_the_run_may_go_back_while_later_layers_are_waited_for(carrier: Carrier) -> None:
    """Those that have computed are given other values under a graph whose backward pass is still to come."""
    with LocalCluster(pservers=2, trainers=1, **carrier, lease_seconds=2) as cluster:

        def work(session: Session) -> None:
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            optimizer = overlapping(model, session)

            def take_step() -> None:
                optimizer.zero_grad()
                model(torch.ones(2, 8)).square().sum().backward()
                optimizer.step()

            for _ in range(3):
                take_step()
            optimizer.synchronize()
            made = cluster.view.create_checkpoint()
            for _ in range(2):
                take_step()
            went_back: list[int] = []
            pull = session.client.pull

            async def pull_all_but_the_last_layer(
                round_: int, destinations: Any, on_landed: Callable[[str], None], **options: Any
            ) -> Any:
                await pull(
                    round_,
                    destinations,
                    on_landed=lambda block: None if block.startswith("2.") else on_landed(block),
                    **options,
                )
                session.client.pull = pull  # type: ignore[method-assign]
                went_back.append((await asyncio.to_thread(cluster.view.roll_back, made.round))["round"])
                return await pull(round_, destinations, on_landed=on_landed, **options)

            session.client.pull = pull_all_but_the_last_layer  # type: ignore[method-assign]
            take_step()
            optimizer.synchronize()
            [next_round] = went_back
            assert optimizer.round == next_round - 1 == made.round
            take_step()
            optimizer.synchronize()
            assert optimizer.round == next_round

        run_trainers(cluster.address, [work])
