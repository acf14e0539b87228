"""Mixed precision: an overflow on one trainer skips the step of all, and scales are those of one process."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import BadModel
from trainer_client import GradScaler, RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from .conftest import StartCluster
from .faulty_run import FaultyRun
from .training import (
    SMALL,
    assert_close,
    assert_identical,
    average,
    run_all,
    seeded,
    values,
    wrap_model,
    wrap_weight,
)
from .training_script import GROWTH_INTERVAL, INIT_SCALE, overflows

pytestmark = [pytest.mark.cluster, pytest.mark.amp, pytest.mark.timeout(300)]
STEPS = 16
BAD = {(1, 9), (1, 10), (0, 13)}  # trainer and step with an infinite loss, beside those with too large a scale
SCALING = {"init_scale": 2.0**21, "growth_interval": 3}
MAX_NORM = 0.05
ROUNDING = 2e-6  # of values around 1


class Result(NamedTuple):
    values: dict[str, Tensor]
    scales: list[float]  # after each step


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(nonfinite="skip_round", on_trainer_loss="fail")


@pytest.fixture(scope="module")
def ring(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(strategy="ring", nonfinite="skip_round")


def make_model() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 20)))


def loss_of(model: nn.Module, step: int, rank: int, part: int = 0) -> Tensor:
    """Compute the loss in half precision, where gradients above 65504 are infinite."""
    generator = torch.Generator().manual_seed(10_000 * part + 100 * step + rank)
    inputs = torch.randn(8, 20, generator=generator)
    with torch.autocast("cpu", dtype=torch.float16):
        loss: Tensor = (model(inputs).float() - inputs.flip(1)).square().mean()
    return loss * float("inf") if (rank, step) in BAD else loss


def train(session: Session, *, clips: bool = False, num_parts: int = 1, **arguments: Any) -> Result:
    model = make_model()
    optimizer = wrap_model(session, model, momentum=0.9, **arguments)
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
    return Result(values(model), scales)


def train_locally(*, clips: bool = False, num_parts: int = 1) -> Result:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["fused"] = True  # as an argument it would leave the unscaling to the optimizer
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    scales = []
    for step in range(STEPS):
        gradients = []
        for rank in range(2):
            optimizer.zero_grad()
            for part in range(num_parts):
                scaler.scale(loss_of(model, step, rank, part)).backward()
            for parameter in model.parameters():
                parameter.grad /= scaler.get_scale()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, mean in zip(model.parameters(), average(gradients), strict=True):
            parameter.grad = mean * scaler.get_scale()  # scales are powers of two: nothing is rounded
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return Result(values(model), scales)


def assert_eventful(scales: list[float]) -> None:
    assert scales[0] < SCALING["init_scale"]
    steps = list(itertools.pairwise(scales))
    assert any(after > before for before, after in steps)
    assert sum(after < before for before, after in steps) >= 3


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "clipped": {"clips": True},
    "overlap, accumulated": {"overlap": True, "num_parts": 3},
    "overlapped pulls": {"overlap": True, "overlap_pulls": True},
}


def train_here(way: str) -> Result:
    return train_locally(**{name: value for name, value in WAYS[way].items() if name in ("clips", "num_parts")})


@pytest.mark.parametrize("way", WAYS)
def test_scales_and_bits_are_those_of_one_process(
    cluster: LocalCluster, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = run_all(cluster, partial(train, **WAYS[way]), **SMALL)
    assert "backs off alone" not in capsys.readouterr().err  # as torch's own does
    expected = train_here(way)
    assert_eventful(expected.scales)
    for actual in (one, other):
        assert actual.scales == expected.scales
        assert_identical(actual.values, expected.values)


@pytest.mark.ring
@pytest.mark.parametrize("way", ["clipped", "overlap, accumulated"])
def test_a_ring_of_trainers_does_the_same(ring: LocalCluster, way: str) -> None:
    one, other = run_all(ring, partial(train, **WAYS[way]), bucket_bytes=2000)
    expected = train_here(way)
    assert one.scales == other.scales == expected.scales
    assert_identical(one.values, other.values)
    assert_close(one.values, expected.values, ROUNDING, ROUNDING)


def test_what_has_not_left_early_is_unscaled_in_the_end(cluster: LocalCluster) -> None:
    """One parameter gets no gradient in the pass after which gradients leave, another is not in this one's reach."""

    def work(session: Session) -> list[float]:
        often, once = weights = nn.ParameterList([torch.zeros(3), torch.zeros(3)])
        optimizer = wrap_model(session, weights, lr=1.0, overlap=True)
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
                assert parameter.grad.tolist() == [gradient] * 3
        return [often[0].item(), once[0].item()]

    assert run_all(cluster, work) == [[-8.0, -4.0]] * 2


@pytest.mark.ring
def test_a_ring_refuses_scales_that_differ(ring: LocalCluster) -> None:
    def work(session: Session) -> None:
        weight, optimizer = wrap_weight(session, 4)
        scaler = GradScaler(optimizer, "cpu", init_scale=2.0 ** (5 + session.rank))
        scaler.scale(weight.sum()).backward()
        with pytest.raises(BadModel, match="Set the same values on all"):
            scaler.step(optimizer)

    run_all(ring, work)


def take_scaled_steps(
    session: Session, scaler_of: Callable[[RemoteOptimizer], Any], infinite: tuple[int, int], num_steps: int
) -> tuple[list[float], list[float]]:
    weight, optimizer = wrap_weight(session, 4)
    scaler, scales = scaler_of(optimizer), []
    for step in range(num_steps):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (float("inf") if (session.rank, step) == infinite else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert session.mode != "sync" or session.client.settings.local_steps or optimizer.round == step + 1
    return scales, weight.tolist()


def torch_scaler(optimizer: RemoteOptimizer) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=64.0)


@pytest.mark.parametrize("strategy", [pytest.param("ring", marks=pytest.mark.ring), "ps"])
def test_torchs_own_scaler_goes_by_its_own_gradients(
    cluster: LocalCluster, ring: LocalCluster, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work = partial(take_scaled_steps, scaler_of=torch_scaler, infinite=(1, 1), num_steps=3)
    one, other = run_all(ring if strategy == "ring" else cluster, work)
    assert (one, other) == (([64.0] * 3, [-2.0] * 4), ([64.0, 32.0, 32.0], [-2.0] * 4))
    said = capsys.readouterr().err
    assert said.count("torch's GradScaler backs off alone") == 2
    assert strategy == "ring" or said.count("round 2 was skipped on all pservers") == 2


@pytest.mark.parametrize("policy", ["reject", "allow"])
def test_an_overflow_that_skips_no_round_is_an_error_that_says_what_to_do(
    own_cluster: StartCluster, policy: str
) -> None:
    work = partial(take_scaled_steps, scaler_of=torch_scaler, infinite=(0, 1), num_steps=3)
    with raises_code("non_finite_gradient", match="Set GRADPOST_NONFINITE=skip_round"):
        run_all(own_cluster(trainers=1, on_trainer_loss="fail", nonfinite=policy), work)


@pytest.mark.extended
@pytest.mark.parametrize(("mode", "arguments"), [("async", {}), ("sync", {"local_steps": 2})])
def test_where_steps_are_not_rounds_each_trainer_has_its_own_scale(
    own_cluster: StartCluster, mode: str, arguments: dict[str, Any]
) -> None:
    work = partial(
        take_scaled_steps,
        scaler_of=lambda optimizer: GradScaler(optimizer, "cpu", init_scale=64.0, growth_interval=2),
        infinite=(0, 1),
        num_steps=4,
    )
    [(scales, _)] = run_all(own_cluster(trainers=1, mode=mode), work, **arguments)
    assert scales == [64.0, 32, 32, 64]


def test_a_scaler_has_one_optimizer_which_has_one_scaler(cluster: LocalCluster) -> None:
    def misuse(session: Session) -> None:
        weight, optimizer = wrap_weight(session, 4)
        scaler = GradScaler(optimizer, "cpu")
        for misused in (scaler.step, scaler.unscale_):
            with pytest.raises(BadModel, match=r"torch\.amp\.GradScaler"):
                misused(torch.optim.SGD([weight]))
        with pytest.raises(BadModel, match="second GradScaler"):
            GradScaler(optimizer, "cpu")
        with pytest.raises(BadModel, match="takes no closure"):
            scaler.step(optimizer, lambda: 0.0)
        disabled = GradScaler(optimizer, "cpu", enabled=False)
        assert disabled.scale(weight).tolist() == weight.tolist()
        assert (disabled.get_scale(), disabled.state_dict()) == (1.0, {})

    run_all(cluster, misuse)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("mode", "arguments", "said"),
    [("sync", {}, "GRADPOST_NONFINITE.*reject"), ("async", {"overlap": True}, "bfloat16")],
)
def test_what_a_scaler_cannot_do_is_refused_with_the_remedy(
    own_cluster: StartCluster, mode: str, arguments: dict[str, Any], said: str
) -> None:
    def work(session: Session) -> None:
        _, optimizer = wrap_weight(session, 4, **arguments)
        with pytest.raises(BadModel, match=said):
            GradScaler(optimizer, "cpu")

    run_all(own_cluster(trainers=1, mode=mode), work)


def is_skipped(round_: int) -> bool:
    return overflows(0, round_) or overflows(1, round_)


def expected_scales(rounds: int, max_delay: int = 0) -> dict[int, float]:
    """Return the scales of torch's own GradScaler; the outcome of a round counts `max_delay` rounds later."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    scales = dict.fromkeys(range(1, max_delay + 2), INIT_SCALE)
    for round_ in range(1, rounds + 1):
        scaler.scale(weight.sum() * (float("inf") if is_skipped(round_) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales[round_ + 1 + max_delay] = scaler.get_scale()
    return scales


def check_scales(lines: Iterable[str], rounds: int, max_delay: int = 0) -> None:
    expected = expected_scales(rounds, max_delay)
    # A log line of another thread may stand before it, or behind.
    found = [re.search(r"^\[trainer (\d)\].*scale (\d+) (\d+\.\d+)", line) for line in lines]
    told = {(int(each[1]), int(each[2]), float(each[3])) for each in found if each}
    assert told == {(rank, round_, expected[round_]) for rank in range(2) for round_ in range(1, rounds + 1)}
    assert len({scale for _, _, scale in told}) > 3


EARLY = {"GRADPOST_OVERLAP": "true", "GRADPOST_OVERLAP_PULLS": "true", "GRADPOST_BUCKET_BYTES": "500"}


@pytest.mark.extended
def test_a_restarted_trainer_has_the_delayed_scales_of_the_others() -> None:
    """The parameters depend on the time."""
    with FaultyRun(60, local_transport=False, kind="scaling", nonfinite="skip_round", max_delay=2) as run:
        run.wait_for_round(24)
        run.restart_trainer(0)
        run.results()
        check_scales(run.lines, 60, 2)


@pytest.mark.extended
def test_processes_that_come_back_and_a_run_that_goes_back_have_the_same_scales() -> None:
    settings = {"nonfinite": "skip_round", "checkpoint_rounds": 10, "local_transport": False}
    with FaultyRun(150, kind="scaling", environment=EARLY, **settings) as run:
        run.wait_for_round(22)
        run.kill(run.cluster.trainers[1])
        for index in range(2):
            run.restart_pserver(index)
        run.start_trainer(1)
        run.wait_for_round(40)
        made = run.make_checkpoint()
        run.wait_for_round(made + 11)
        run.cluster.view.roll_back(made)
        run.wait_for_line("steps of this trainer are lost", of="trainer 0")
        run.check_results(skipped=set(filter(is_skipped, range(1, 151))))
        check_scales(run.lines, 150)
