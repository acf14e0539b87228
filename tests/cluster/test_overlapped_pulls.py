"""Steps that end before their parameters are here: modules wait for their own, and others raise an error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel, TrainerLost
from trainer_client import RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from .training import (
    NET_STEPS,
    SMALL,
    WIDTH,
    Net,
    assert_identical,
    net_loss,
    run_all,
    run_trainers,
    values,
    wrap_model,
    wrap_net,
)

pytestmark = [pytest.mark.cluster, pytest.mark.overlap]
BOTH = {"overlap": True, "overlap_pulls": True}


def overlapping(model: nn.Module, session: Session) -> RemoteOptimizer:
    return wrap_net(session, model, **BOTH)


def test_replicas_of_data_parallel_are_refused(session: Session) -> None:
    model = nn.Linear(3, 2)
    overlapping(model, session)
    replica = model._replicate_for_data_parallel()
    with pytest.raises(BadModel, match=r"nn.DataParallel copies parameters .* overlap_pulls=False"):
        replica(torch.ones(1, 3))


def test_the_first_layer_computes_while_a_pull_goes_on(session: Session) -> None:
    """The pull does not end before that layer has; if it waited for everything, both would wait for ever."""
    gate = threading.Event()
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    optimizer = overlapping(model, session)
    pull = session.client.pservers.pull

    async def pull_and_wait(*arguments: Any, **options: Any) -> Any:
        pulled = await pull(*arguments, **options)
        has_computed = await session.io.loop.run_in_executor(None, gate.wait, 20)
        assert has_computed, "the first layer waits for the pull's end"
        return pulled

    session.client.pservers.pull = pull_and_wait
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


def late(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def send(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0.2)
        return await request(*arguments, **options)

    return send


def look_at_state(model: Net, optimizer: RemoteOptimizer) -> dict[str, Tensor]:
    return {name: model.state_dict()[name].clone() for name, _ in model.named_parameters()}


def synchronize(model: Net, optimizer: RemoteOptimizer) -> dict[str, Tensor]:
    optimizer.synchronize()
    return values(model)


def evaluate(model: Net, optimizer: RemoteOptimizer) -> dict[str, Tensor]:
    """Call one module, for which all get their values: in evaluation some compute with those of others."""
    with torch.no_grad():
        model.hidden(torch.zeros(WIDTH))
    assert not optimizer._engine.pending  # so little arrives in one piece
    return values(model)


@pytest.mark.parametrize("look", [look_at_state, synchronize, evaluate])
def test_a_look_at_the_model_as_a_whole_sees_the_newest_values(
    session: Session, look: Callable[[Net, RemoteOptimizer], dict[str, Tensor]]
) -> None:
    model = Net()
    optimizer = overlapping(model, session)
    session.client.pservers.pull = late(session.client.pservers.pull)
    net_loss(model, 1, 0).backward()
    optimizer.step()
    seen = look(model, optimizer)
    optimizer.synchronize()
    assert_identical(seen, values(model))


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
def test_modules_that_use_others_parameters_wait_for_them(alone: LocalCluster, compiled: str) -> None:
    def work(session: Session, *, overlap: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: nn.Module = Attention()
        if compiled == "wrapped":
            model = torch.compile(model, backend="eager")
        elif compiled == "in place":
            model.compile(backend="eager")
        elif compiled == "inside":
            model.layer = torch.compile(model.layer, backend="eager")
        optimizer = wrap_net(session, model, kind="momentum", overlap=overlap, overlap_pulls=overlap)
        generator = torch.Generator().manual_seed(1)
        for _ in range(NET_STEPS):
            optimizer.zero_grad()
            model(torch.randn(2, 5, 16, generator=generator)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        assert [spec.name for spec in session.client.run.plan.parameters] == [
            name for name, _ in Attention().named_parameters()
        ]
        return values(model)

    [overlapped], [other] = (run_all(alone, partial(work, overlap=overlap), **SMALL) for overlap in (True, False))
    assert_identical(overlapped, other)


class Sly(nn.Module):
    """A module that computes with the parameters of another without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight)


def test_computing_with_a_parameter_of_a_module_that_is_not_called_is_refused(session: Session) -> None:
    model = Sly()
    overlapping(model, session)
    with pytest.raises(BadModel, match=r"computes with 'inner.weight', but does not call.*overlap_pulls=False"):
        model(torch.ones(2, 4)).sum().backward()


def test_a_forward_pass_does_not_wait_for_ever(pair: LocalCluster) -> None:
    ready = threading.Barrier(2)

    def fail(session: Session) -> None:
        overlapping(Net(), session)
        ready.wait(20)
        session.close("failed", "its disk is full")

    def wait(session: Session) -> None:
        model = Net()
        optimizer = overlapping(model, session)
        net_loss(model, 0, 0).backward()
        optimizer.step()
        ready.wait(20)
        with pytest.raises(TrainerLost, match="its disk is full"):
            net_loss(model, 1, 0)

    run_trainers(pair.address, [wait, fail])


@pytest.mark.parametrize(
    ("form", "pull_type"), [({"memory_format": torch.channels_last}, "float32"), ({"dtype": torch.float32}, "int8")]
)
def test_the_newest_values_are_in_the_model_when_the_session_has_ended(
    alone: LocalCluster, form: dict[str, Any], pull_type: str
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2)).to(**form)
    expected: dict[str, tuple[Tensor, Tensor]] = {}  # and by how much the last step has changed it

    def work(session: Session) -> None:
        optimizer = wrap_model(session, model, lr=1.0, pull_type=pull_type, **BOTH)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2, 6, 6)).sum().backward()
            for name, parameter in model.named_parameters():
                expected[name] = parameter.detach() - parameter.grad, parameter.grad.abs().max()
            optimizer.step()

    run_all(alone, work)
    for name, parameter in model.named_parameters():
        value, change = expected[name]
        assert (parameter.detach() - value).abs().max() < 0.05 * change, name  # 8 bits are not exact


@pytest.mark.extended
def test_the_run_may_go_back_while_later_layers_are_waited_for() -> None:
    """Layers that have computed get other values under a graph whose backward pass is still to come."""
    with LocalCluster(pservers=2, trainers=1, local_transport=False, lease_seconds=2) as cluster:

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
            pull = session.client.pservers.pull

            async def pull_all_but_the_last_layer(
                round_: int, destinations: Any, on_block: Callable[[str], None], **options: Any
            ) -> Any:
                await pull(
                    round_,
                    destinations,
                    on_block=lambda block: None if block.startswith("2.") else on_block(block),
                    **options,
                )
                session.client.pservers.pull = pull
                went_back.append((await asyncio.to_thread(cluster.view.roll_back, made.round))["round"])
                return await pull(round_, destinations, on_block=on_block, **options)

            session.client.pservers.pull = pull_all_but_the_last_layer
            take_step()
            optimizer.synchronize()
            [next_round] = went_back
            assert optimizer.round == next_round - 1 == made.round
            take_step()
            optimizer.synchronize()
            assert optimizer.round == next_round

        run_all(cluster, work)
