"""Mixed precision: an overflow on one trainer skips the step of all, and scales are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ps_protocol.errors import BadModel
from trainer_client import GradScaler, RemoteOptimizer, Session
from trainer_client.testing import LocalCluster

from ..raising import raises_code
from .conftest import StartCluster
from .training import (
    run_all,
    wrap_weight,
)

pytestmark = [pytest.mark.cluster, pytest.mark.amp, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(nonfinite="skip_round", on_trainer_loss="fail")


@pytest.fixture(scope="module")
def ring(shared_cluster: StartCluster) -> LocalCluster:
    return shared_cluster(strategy="ring", nonfinite="skip_round")


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
