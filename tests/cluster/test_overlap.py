"""Gradients that leave while backward runs, and pulls that end later: the same bits, or an error for the script."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradpost import RemoteOptimizer, Session
from ps_protocol.errors import BadModel
from ps_protocol.frames import parse_frame
from trainer_client.client.buckets import FrameParts
from trainer_client.optimizer.overlap import ModuleHook
from trainer_client.testing import LocalCluster
from trainer_client.transport.work import Work, pause

from ..raising import raises_code
from .conftest import StartCluster
from .training import (
    NET_STEPS,
    SMALL,
    WIDTH,
    Net,
    Wait,
    assert_identical,
    net_loss,
    run_all,
    train_net,
    train_net_locally,
    values,
    wrap_model,
    wrap_net,
)

pytestmark = [pytest.mark.cluster, pytest.mark.overlap]

BOTH = {"overlap": True, "overlap_pulls": True}


def test_the_bits_are_those_of_one_process(pair: LocalCluster) -> None:
    for actual in run_all(pair, partial(train_net, **BOTH), **SMALL):
        assert_identical(actual, train_net_locally())


@pytest.fixture
def beside_one_pserver(shared_cluster: StartCluster) -> Iterator[Session]:
    """A session in a cluster whose last bucket, which leaves with step(), has the first layer's bias."""
    cluster = shared_cluster(pservers=1, trainers=1, on_trainer_loss="fail")
    with Session(coordinator=cluster.address, rank=0, world_size=1) as session:
        yield session


def test_every_layer_but_the_first_is_pushed_while_backward_runs(beside_one_pserver: Session) -> None:
    session, num_layers, arrived = beside_one_pserver, 4, set[str]()
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(num_layers)))
    optimizer = wrap_model(session, model, overlap=True, bucket_bytes=100)
    parameter_of = {block.name: block.parameter for block in session.client.run.plan.blocks}
    push = session.client.pservers.push

    def push_and_record(round_: int, pserver: int, frame: FrameParts) -> Work[None]:
        yield from push(round_, pserver, frame)
        arrived.update(parameter_of[tensor.name] for tensor in parse_frame(b"".join(frame)).tensors)

    session.client.pservers.push = push_and_record
    for _ in range(3):
        optimizer.zero_grad()
        hidden = torch.ones(2, 40)
        for index, layer in enumerate(model):
            hidden = layer(hidden)
            if index + 1 < num_layers:  # this layer's backward waits until the next one's gradients have arrived
                behind = {f"{index + 1}.{name}" for name in ("weight", "bias")}
                hidden = Wait.apply(hidden, partial(behind.issubset, arrived))
        hidden.sum().backward()
        optimizer.step()
        arrived.clear()


def pass_again(model: Net, optimizer: RemoteOptimizer) -> None:
    net_loss(model, 0, 0).backward()


def clip(model: Net, optimizer: RemoteOptimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def forget(model: Net, optimizer: RemoteOptimizer) -> None:
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (pass_again, r"another backward pass reached '[\w.]+'.*optimizer\.accumulate.*use_reentrant=False"),
        (clip, r"gradient of '[\w.]+' was changed after it was sent.*max_grad_norm"),
        (forget, "was changed after it was sent"),
    ],
)
def test_a_gradient_that_has_left_may_not_change(
    session: Session, change: Callable[[Net, RemoteOptimizer], None], said: str
) -> None:
    model = Net()
    optimizer = wrap_net(session, model, overlap=True)
    net_loss(model, 0, 0).backward()
    with raises_code("gradient_changed", match=said):
        change(model, optimizer)


# ---------------------------------------------------------------------- overlapped pulls


def overlapping(model: nn.Module, session: Session) -> RemoteOptimizer:
    return wrap_net(session, model, **BOTH)


def test_the_first_layer_computes_while_a_pull_goes_on(session: Session) -> None:
    """The pull does not end before that layer has; if it waited for everything, both would wait for ever."""
    gate = threading.Event()
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    optimizer = overlapping(model, session)
    pull = session.client.pservers.pull

    def pull_and_wait(*arguments: Any, **options: Any) -> Work[None]:
        yield from pull(*arguments, **options)
        deadline = time.monotonic() + 20
        while not gate.is_set():
            assert time.monotonic() < deadline, "the first layer waits for the pull's end"
            yield time.monotonic() + 0.001

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


def save(model: nn.Module) -> nn.Module:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    return torch.load(saved, weights_only=False)


@pytest.mark.parametrize("copy_of", [save, copy.deepcopy])
def test_a_saved_or_copied_model_has_the_newest_values_and_does_not_wait(
    session: Session, copy_of: Callable[[nn.Module], nn.Module]
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = wrap_model(session, model, **BOTH)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    copied = copy_of(model)
    assert_identical(values(copied), values(model))
    optimizer.step()
    copied(torch.randn(4, 3)).sum().backward()  # alone
    assert set(map(type, copied[0]._forward_pre_hooks.values())) == {ModuleHook}
    copied.state_dict()


def late(request: Callable[..., Work[None]]) -> Callable[..., Work[None]]:
    def send(*arguments: Any, **options: Any) -> Work[None]:
        yield from pause(0.2)
        yield from request(*arguments, **options)

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


@pytest.mark.parametrize("compiled", ["no", "wrapped", "inside"])
def test_modules_that_use_others_parameters_wait_for_them(alone: LocalCluster, compiled: str) -> None:
    def work(session: Session, *, overlap: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: nn.Module = Attention()
        if compiled == "wrapped":
            model = torch.compile(model, backend="eager")
        elif compiled == "inside":
            model.layer = torch.compile(model.layer, backend="eager")
        optimizer = wrap_net(session, model, overlap=overlap, overlap_pulls=overlap)
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


def test_the_newest_values_are_in_the_model_when_the_session_has_ended(alone: LocalCluster) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2)).to(memory_format=torch.channels_last)
    expected: dict[str, Tensor] = {}

    def work(session: Session) -> None:
        optimizer = wrap_model(session, model, lr=1.0, **BOTH)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2, 6, 6)).sum().backward()
            expected.update((name, parameter.detach() - parameter.grad) for name, parameter in model.named_parameters())
            optimizer.step()

    run_all(alone, work)
    assert_identical(values(model), expected)
