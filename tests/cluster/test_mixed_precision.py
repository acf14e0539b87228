"""Mixed precision: what overflows on one trainer is skipped by all, and all scales are those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from trainer_client import GradScaler, RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from .conftest import Carrier
from .parity_model import assert_identical, run_trainers

pytestmark = [pytest.mark.cluster, pytest.mark.amp]

STEPS = 16
SMALL = {"bucket_bytes": 2000, "min_block_size": 100}
# Trainer and step: where a loss is infinite, beside those that the scale is too large for.
BAD = {(1, 9), (1, 10), (0, 13)}
SCALING = {"init_scale": 2.0**21, "growth_interval": 3}
MAX_NORM = 0.05
ROUNDING = 2e-6  # of values around 1


class Result(NamedTuple):
    values: dict[str, Tensor]
    scales: list[float]  # after each step


@pytest.fixture(scope="module")
def cluster(carrier: Carrier) -> Iterator[LocalCluster]:
    with LocalCluster(pservers=2, trainers=2, **carrier, nonfinite="skip_round", on_trainer_loss="fail") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ring() -> Iterator[LocalCluster]:
    with LocalCluster(pservers=0, trainers=2, strategy="ring", nonfinite="skip_round") as cluster:
        yield cluster


def autocast(dtype: torch.dtype = torch.float16) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=dtype)


def make_model() -> nn.Module:
    """The same weights at each call, in any thread."""
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 20))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2, generator=generator)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, step: int, rank: int, part: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    """In the first layer it is computed in half precision, where gradients above 65504 are infinite."""
    generator = torch.Generator().manual_seed(10_000 * part + 100 * step + rank)
    inputs = torch.randn(8, 20, generator=generator)
    with autocast(dtype):
        loss: Tensor = (model(inputs).float() - inputs.flip(1)).square().mean()
    return loss * float("inf") if (rank, step) in BAD else loss


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(session: Session, *, clips: bool = False, num_parts: int = 1, **arguments: Any) -> Result:
    model = make_model()
    optimizer = RemoteOptimizer(make_optimizer(model), model=model, session=session, **arguments)
    scaler = GradScaler(optimizer, "cpu", **SCALING)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.accumulate():
            for part in range(num_parts - 1):
                scaler.scale(loss_of(model, step, session.rank, part)).backward()
        scaler.scale(loss_of(model, step, session.rank, num_parts - 1)).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.synchronize()
    return Result(values_of(model), scales)


def train_locally(*, clips: bool = False, num_parts: int = 1) -> Result:
    """The oracle: torch's optimizer and GradScaler in one process, which averages the trainers' gradients."""
    model = make_model()
    optimizer = make_optimizer(model)
    optimizer.param_groups[0]["fused"] = True
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    scales = []
    for step in range(STEPS):
        gradients = []
        for rank in range(2):
            optimizer.zero_grad()
            for part in range(num_parts):
                scaler.scale(loss_of(model, step, rank, part)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scaler.get_scale()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
            assert one is not None
            assert other is not None
            parameter.grad = (one + other) * 0.5 * scaler.get_scale()  # scales are powers of two: nothing is rounded
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return Result(values_of(model), scales)


def assert_eventful(scales: list[float]) -> None:
    """The scale was too large at first, has grown, and has backed off."""
    assert scales[0] < SCALING["init_scale"]
    steps = list(itertools.pairwise(scales))
    assert any(after > before for before, after in steps)
    assert sum(after < before for before, after in steps) >= 3


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "clipped": {"clips": True},
    "accumulated": {"num_parts": 3},
    "overlap": {"overlap": True},
    "overlap, accumulated": {"overlap": True, "num_parts": 3},
    "overlapped pulls": {"overlap": True, "overlap_pulls": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_scales_and_bits_are_those_of_one_process(
    cluster: LocalCluster, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = WAYS[way]
    work = partial(train, **arguments)
    one, other = run_trainers(cluster.address, [work, work], **SMALL)
    assert "backs off alone" not in capsys.readouterr().err  # as torch's own does
    expected = train_locally(**{name: arguments[name] for name in ("clips", "num_parts") if name in arguments})
    assert_eventful(expected.scales)
    for actual in (one, other):
        assert actual.scales == expected.scales
        assert_identical(actual.values, expected.values)


@pytest.mark.parametrize("way", ["alone", "clipped", "overlap"])
def test_a_ring_of_trainers_does_the_same(ring: LocalCluster, way: str) -> None:
    arguments = WAYS[way]
    work = partial(train, **arguments)
    one, other = run_trainers(ring.address, [work, work], bucket_bytes=2000)
    expected = train_locally(clips=way == "clipped")
    assert one.scales == other.scales == expected.scales
    assert_identical(one.values, other.values)
    for name, tensor in expected.values.items():
        torch.testing.assert_close(one.values[name], tensor, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.extended
@pytest.mark.parametrize("overlap", [False, True])
def test_with_delay_an_outcome_counts_later_and_for_all(carrier: Carrier, overlap: bool) -> None:
    """Scales are as torch's, with the outcomes of a delay before: halved more than once for one that is too large."""
    work = partial(train, overlap=overlap)
    settings = {"nonfinite": "skip_round", "on_trainer_loss": "fail", "max_delay": 2}
    with LocalCluster(pservers=2, trainers=2, **carrier, **settings) as cluster:
        one, other = run_trainers(cluster.address, [work, work], **SMALL)
    assert one.scales == other.scales
    assert one.scales[:2] == [SCALING["init_scale"]] * 2
    assert_eventful(one.scales[2:])
    assert_identical(one.values, other.values)


def test_what_has_not_left_early_is_unscaled_in_the_end(cluster: LocalCluster) -> None:
    """One parameter gets no gradient in the pass after which gradients leave, another is not in this one's reach."""

    def work(session: Session) -> list[float]:
        often, once = (nn.Parameter(torch.zeros(3)) for _ in range(2))
        optimizer = RemoteOptimizer(
            torch.optim.SGD([("often", often), ("once", once)], lr=1.0), session=session, overlap=True
        )
        scaler = GradScaler(optimizer, "cpu", init_scale=64.0)
        for step in range(2):
            optimizer.zero_grad()
            with optimizer.accumulate():
                scaler.scale((often * 3 + once * 2).sum()).backward()
            scaler.scale(often.sum()).backward()
            if step:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            for parameter, gradient in ((often, 4.0), (once, 2.0)):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [gradient] * 3
        return [often[0].item(), once[0].item()]

    assert run_trainers(cluster.address, [work, work]) == [[-8.0, -4.0]] * 2


def test_with_overlap_the_average_is_clipped(cluster: LocalCluster) -> None:
    def clips_itself(session: Session) -> None:
        model = make_model()
        optimizer = RemoteOptimizer(make_optimizer(model), session=session, overlap=True)
        scaler = GradScaler(optimizer, "cpu", init_scale=64.0)
        scaler.scale(1000 * loss_of(model, 0, 0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        with raises_code("gradient_changed", match="max_grad_norm"):
            scaler.step(optimizer)

    run_trainers(cluster.address, [clips_itself, clips_itself], **SMALL)
    early, late = (partial(train, overlap=overlap, max_grad_norm=MAX_NORM) for overlap in (True, False))
    one, other = run_trainers(cluster.address, [early, early], **SMALL)
    assert_eventful(one.scales)
    for actual in (other, run_trainers(cluster.address, [late, late], **SMALL)[0]):
        assert actual.scales == one.scales
        assert_identical(actual.values, one.values)


def test_what_the_script_loads_or_sets_counts_from_then_on(cluster: LocalCluster) -> None:

    def work(session: Session) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        scaler = GradScaler(optimizer, "cpu")
        scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})
        scales = [scaler.get_scale()]
        for new_scale in (None, None, 8.0, None):
            scaler.scale(weight.sum()).backward()
            scaler.step(optimizer)
            assert weight.grad is not None
            assert weight.grad.tolist() == [1.0] * 4
            optimizer.zero_grad()
            scaler.update(new_scale)
            scales.append(scaler.get_scale())
        assert weight.tolist() == [-4.0] * 4
        return scales

    assert run_trainers(cluster.address, [work, work]) == [[16.0, 16, 16, 8, 8]] * 2


def test_a_ring_refuses_scales_that_differ(ring: LocalCluster) -> None:
    def work(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        scaler = GradScaler(optimizer, "cpu", init_scale=2.0 ** (5 + session.rank))
        scaler.scale(weight.sum()).backward()
        with pytest.raises(BadModel, match="All trainers have to set and load the same"):
            scaler.step(optimizer)

    run_trainers(ring.address, [work, work])


def test_torchs_own_scaler_goes_by_its_own_gradients(cluster: LocalCluster) -> None:
    """The round is skipped by all, and only the trainer that has overflowed goes on with a smaller scale."""

    def work(session: Session) -> tuple[float, list[float]]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            optimizer.zero_grad()
            factor = float("inf") if (session.rank, step) == (1, 1) else 1.0
            scaler.scale(weight.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), weight.tolist()

    assert run_trainers(cluster.address, [work, work]) == [(64.0, [-2.0] * 4), (32.0, [-2.0] * 4)]


def test_a_scaler_has_one_optimizer_which_has_one_scaler(cluster: LocalCluster) -> None:
    def misuse(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        scaler = GradScaler(optimizer, "cpu")
        with pytest.raises(BadModel, match=r"torch\.amp\.GradScaler"):
            scaler.step(torch.optim.SGD([weight]))
        with pytest.raises(BadModel, match=r"torch\.amp\.GradScaler"):
            scaler.unscale_(torch.optim.SGD([weight]))
        with pytest.raises(BadModel, match="one GradScaler"):
            GradScaler(optimizer, "cpu")
        disabled = GradScaler(optimizer, "cpu", enabled=False)
        assert disabled.scale(weight).tolist() == weight.tolist()
        assert (disabled.get_scale(), disabled.state_dict()) == (1.0, {})

    run_trainers(cluster.address, [misuse, misuse])


@pytest.mark.extended
def test_what_a_scaler_cannot_do_is_refused_with_the_remedy(carrier: Carrier) -> None:
    def policy(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        with pytest.raises(BadModel, match="GRADPOST_NONFINITE") as caught:
            GradScaler(optimizer, "cpu")
        assert caught.value.facts["actual"] == "reject"

    def rounds(session: Session) -> None:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session, overlap=True)
        with pytest.raises(BadModel, match="bfloat16"):
            GradScaler(optimizer, "cpu")

    with LocalCluster(pservers=1, trainers=1, **carrier) as lonely:
        run_trainers(lonely.address, [policy])
    with LocalCluster(pservers=1, trainers=1, **carrier, mode="async") as lonely:
        run_trainers(lonely.address, [rounds])


@pytest.mark.extended
def test_where_steps_are_not_rounds_each_trainer_has_its_own_scale(carrier: Carrier) -> None:
    def work(session: Session) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = RemoteOptimizer(torch.optim.SGD([("weight", weight)], lr=1.0), session=session)
        scaler = GradScaler(optimizer, "cpu", init_scale=64.0, growth_interval=2)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    with LocalCluster(pservers=1, trainers=1, **carrier, mode="async") as lonely:
        assert run_trainers(lonely.address, [work]) == [[64.0, 32, 32, 64]]
    with LocalCluster(pservers=1, trainers=1, **carrier) as lonely:
        assert run_trainers(lonely.address, [work], local_steps=2) == [[64.0, 32, 32, 64]]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_closure_is_refused(cluster: LocalCluster, overlap: bool) -> None:
    def work(session: Session) -> None:
        model = make_model()
        optimizer = RemoteOptimizer(make_optimizer(model), model=model, session=session, overlap=overlap)
        scaler = GradScaler(optimizer, "cpu")
        with pytest.raises(BadModel, match="takes no closure"):
            scaler.step(optimizer, lambda: 0.0)
        scaler.scale(loss_of(model, 0, 0)).backward()
        scaler.step(optimizer)
        assert optimizer.round == 1

    run_trainers(cluster.address, [work, work])
