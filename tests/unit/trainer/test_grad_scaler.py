"""Mixed precision: a GradScaler's scale follows from the outcomes of rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.optimizers import HyperParameters
from trainer_client.client.round_results import Outcomes
from trainer_client.engines.engine import StepProgress
from trainer_client.optimizer.grad_scaler import GradScaler, ScalerState

pytestmark = pytest.mark.amp


@settings(deadline=None)
@given(
    scale=st.floats(2.0**-140, 2.0**127, width=32),
    growth_factor=st.floats(1.01, 8),
    backoff_factor=st.floats(0.1, 0.99),
    growth_interval=st.integers(1, 4),
    outcomes=st.lists(st.booleans(), max_size=30),
)
def test_the_scale_is_torchs(
    scale: float, growth_factor: float, backoff_factor: float, growth_interval: int, outcomes: list[bool]
) -> None:
    factors = {"growth_factor": growth_factor, "backoff_factor": backoff_factor}
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval, **factors)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    state = ScalerState(0, scale, 0)
    for number, is_skipped in enumerate(outcomes, start=1):
        scaler.scale(torch.ones(()))
        weight.grad = torch.tensor(float("nan") if is_skipped else 1.0)
        scaler.step(optimizer)
        scaler.update()
        state = state.next(is_skipped=is_skipped, growth_interval=growth_interval, **factors)
        assert state == ScalerState(number, scaler.get_scale(), scaler.state_dict()["_growth_tracker"])


def pushed_state(after: int, scale: float, growth_tracker: int) -> HyperParameters:
    return {"after": after, "scale": scale, "growth_tracker": growth_tracker}


class Remote:
    """The part of a RemoteOptimizer, in a run with rounds, that a GradScaler uses."""

    is_shared, overlap = True, None

    def __init__(
        self, begun: int = 0, pushed: HyperParameters | None = None, *skipped: int, max_delay: int = 0
    ) -> None:
        self.scaling, self.progress = self, StepProgress(begun=begun)
        self.client = SimpleNamespace(
            run=SimpleNamespace(nonfinite="skip_round"),
            results=SimpleNamespace(outcomes=Outcomes(skipped, pushed)),
            settings=SimpleNamespace(overlap=False),
            joined=SimpleNamespace(consistency=SimpleNamespace(max_delay=max_delay)),
        )
        self.session = SimpleNamespace(client=self.client)

    def attach(self, describe: Any, _: Any) -> None:
        self.pushed = describe

    def make_scaler(self) -> GradScaler:
        return GradScaler(self, "cpu", init_scale=8.0, growth_interval=2)  # type: ignore[arg-type]

    def end_round(self, scaler: GradScaler, *skipped: int, new_scale: float | None = None) -> float:
        """Return the scale after the next round, with which the lowest rank pushed another state."""
        scaler.scale(torch.ones(()))
        self.progress.begun += 1
        self.client.results.outcomes = Outcomes(skipped, pushed_state(0, 3.0, 0))
        scaler.update(new_scale)
        return scaler.get_scale()


def test_the_scale_follows_from_the_outcomes_alone() -> None:
    remote = Remote()
    scaler = remote.make_scaler()
    assert [remote.end_round(scaler, *skipped) for skipped in ((), (), (3,), (3,))] == [8.0, 16.0, 8.0, 8.0]
    assert remote.pushed() == pushed_state(4, 8.0, 1)


def test_a_trainer_that_joins_continues_from_the_state_of_the_round() -> None:
    """With max_delay 2 the state pushed in round 9 includes the outcomes up to 6, and those up to 7 count."""
    for skipped, expected in (((), 2048.0), ((7,), 512.0), ((8,), 2048.0)):
        remote = Remote(9, pushed_state(6, 1024.0, 1), *skipped, max_delay=2)
        assert remote.make_scaler().get_scale() == expected


def test_a_rollback_restores_the_state_of_its_round() -> None:
    remote = Remote()
    scaler = remote.make_scaler()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    assert remote.end_round(scaler, 1) == 2.0
    remote.progress.num_rollbacks, remote.progress.begun = 1, 40
    remote.client.results.outcomes = Outcomes((40,), pushed_state(39, 64.0, 1))
    assert scaler.get_scale() == 32.0
    remote.progress.num_rollbacks, remote.progress.begun, remote.client.results.outcomes = 2, 0, Outcomes()
    assert scaler.get_scale() == 4.0


def test_a_scale_set_by_the_script_counts_from_then_on() -> None:
    remote = Remote()
    scaler = remote.make_scaler()
    scales = [remote.end_round(scaler, new_scale=new_scale) for new_scale in (None, 64.0, None)]
    assert scales == [8.0, 64.0, 128.0]
    assert remote.pushed() == pushed_state(3, 128.0, 0)
