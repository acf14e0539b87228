"""Gradients that leave while backward runs: the bits are the same, and a script that changes them gets an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from ps_protocol.frames import parse_frame
from trainer_client import RemoteOptimizer, Session
from trainer_client.client.buckets import FrameParts
from trainer_client.engines import pipeline
from trainer_client.testing import LocalCluster
from trainer_client.transport import destinations
from trainer_client.transport.device_copies import GradientCopies, ParameterCopies

from ..raising import raises_code
from .conftest import StartCluster
from .training import (
    NET_OPTIMIZERS,
    NET_STEPS,
    SMALL,
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
    wrap_weight,
)

pytestmark = [pytest.mark.cluster, pytest.mark.overlap]
BOTH = {"overlap": True, "overlap_pulls": True}


@pytest.mark.parametrize("arguments", [{"overlap": True}, BOTH], ids=" ".join)
@pytest.mark.parametrize("kind", NET_OPTIMIZERS)
def test_the_bits_are_those_of_one_process(pair: LocalCluster, kind: str, arguments: dict[str, Any]) -> None:
    for actual in run_all(pair, partial(train_net, kind=kind, **arguments), **SMALL):
        assert_identical(actual, train_net_locally(kind))


@pytest.mark.parametrize(
    ("wire", "arguments"),
    [
        *(({"push_type": kind}, {"overlap": True}) for kind in ("int8", "topk")),
        ({"pull_type": "int8"}, BOTH),
    ],
    ids=str,
)
def test_fewer_bytes_are_the_same_ones(pair: LocalCluster, wire: dict[str, str], arguments: dict[str, Any]) -> None:
    one, other = run_all(pair, partial(train_net, **arguments, **wire), **SMALL)
    assert_identical(one, other)
    assert_identical(one, run_all(pair, partial(train_net, **wire), **SMALL)[0])


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Treat all parameters as if they were in a device's own memory; return how many copies were made."""
    counts = {"out": 0, "in": 0}
    begin, copy = GradientCopies.begin_copies, ParameterCopies.copy

    def begin_and_count(self: GradientCopies, host: Any, gradients: Any) -> None:
        counts["out"] += len(gradients)
        begin(self, host, gradients)

    def copy_and_count(self: ParameterCopies, parameter: Tensor, host: Tensor) -> None:
        counts["in"] += 1
        copy(self, parameter, host)

    monkeypatch.setattr(GradientCopies, "begin_copies", begin_and_count)
    monkeypatch.setattr(ParameterCopies, "copy", copy_and_count)
    monkeypatch.setattr(pipeline, "is_away", lambda _: True)
    monkeypatch.setattr(destinations, "is_away", lambda _: True)
    monkeypatch.setattr(destinations, "has_wire_layout", lambda _: False)
    return counts


@pytest.mark.parametrize("arguments", [{}, BOTH], ids=["in step", "overlap"])
def test_copies_from_and_to_a_device_change_no_bit(
    pair: LocalCluster, counts: dict[str, int], arguments: dict[str, Any]
) -> None:
    for actual in run_all(pair, partial(train_net, **arguments), **SMALL):
        assert_identical(actual, train_net_locally("AdamW"))
    assert counts["out"] > 0
    assert counts["in"] > 0


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

    async def push_and_record(round_: int, pserver: int, frame: FrameParts) -> bool:
        is_finite = await push(round_, pserver, frame)
        arrived.update(parameter_of[tensor.name] for tensor in parse_frame(b"".join(frame)).tensors)
        return is_finite

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


@pytest.mark.parametrize("by_number", [False, True])
def test_accumulated_gradients_leave_once(pair: LocalCluster, by_number: bool) -> None:
    def work(session: Session) -> dict[str, Tensor]:
        model = Net(seed=session.rank)
        accumulate_steps = 3 if by_number else None
        optimizer = wrap_net(session, model, kind="momentum", overlap=True, accumulate_steps=accumulate_steps)
        for step in range(NET_STEPS):
            optimizer.zero_grad()
            if by_number:
                for part in range(3):
                    net_loss(model, step, session.rank, part).backward()
            else:
                with optimizer.accumulate():
                    for part in range(2):
                        net_loss(model, step, session.rank, part).backward()
                net_loss(model, step, session.rank, 2).backward()
            optimizer.step()
        return values(model)

    for actual in run_all(pair, work, **SMALL):
        assert_identical(actual, train_net_locally("momentum", num_parts=3))


@pytest.mark.parametrize("strategy", [pytest.param("ring", marks=pytest.mark.ring), "ps"])
def test_gradients_of_dropped_passes_do_not_count(own_cluster: StartCluster, strategy: str) -> None:
    def work(session: Session) -> float:
        weight, optimizer = wrap_weight(session, 100, overlap=True, accumulate_steps=3)
        for num_passes in (3, 2, 3, 1, 3):
            for _ in range(num_passes):
                weight.sum().backward()
            if num_passes == 3:
                optimizer.step()
            optimizer.zero_grad()
        return float(weight.unique().item())

    assert run_all(own_cluster(strategy=strategy), work) == [-9.0, -9.0]


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
        (pass_again, r"another backward pass reached '[\w.]+'.*accumulate_steps"),
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


def test_torch_s_own_gradscaler_is_refused(session: Session) -> None:
    weight, optimizer = wrap_weight(session, 4, overlap=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(BadModel, match=r"overlap=True.*GradScaler"):
        scaler.step(optimizer)


def test_a_parameter_may_be_unfrozen(alone: LocalCluster) -> None:
    def work(session: Session, *, overlap: bool) -> dict[str, Tensor]:
        model = Net()
        optimizer = wrap_net(session, model, overlap=overlap)
        for step in range(NET_STEPS):
            model.frozen.requires_grad_(step >= 3)
            optimizer.zero_grad()
            net_loss(model, step, 0).backward()
            optimizer.step()
        return values(model)

    [overlapped], [other] = (run_all(alone, partial(work, overlap=overlap), **SMALL) for overlap in (True, False))
    assert_identical(overlapped, other)


def test_a_model_goes_on_when_the_session_is_closed(session: Session) -> None:
    model = Net()
    optimizer = RemoteOptimizer(NET_OPTIMIZERS["AdamW"](model.parameters()), session=session, overlap=True)
    net_loss(model, 0, 0).backward()
    optimizer.step()
    session.close()
    for _ in range(2):
        net_loss(model, 0, 0).backward()
