"""The gradients that may follow a step that failed."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import ContributionConflict, Ended, NonFiniteGradient, Unreachable
from trainer_client.engines.engine import StepGradients
from trainer_client.engines.unfinished_step import UnfinishedStep


def failed(error: BaseException, *, has_several_steps: bool = False) -> UnfinishedStep:
    """Return the state after a step with the gradient 1.0 failed; the script has changed the gradient since then."""
    step, gradient = UnfinishedStep(leads_host=False), torch.ones(2)
    step.contribution = None if has_several_steps else StepGradients({"w": gradient})
    step.note_failure(error)
    gradient.fill_(5.0)
    return step


def allows(step: UnfinishedStep, value: float | None) -> bool:
    try:
        step.require_same_gradients(3, {} if value is None else {"w": torch.full((2,), value)}, ["w"])
    except ContributionConflict:
        return False
    return True


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Unreachable("pserver 0"), RuntimeError("CUDA")], ids=repr)
def test_a_step_that_may_have_been_counted_allows_its_own_gradients_only(error: BaseException) -> None:
    step = failed(error)
    assert [allows(step, value) for value in (1.0, 2.0, None)] == [True, False, False]
    step.note_failure(error)  # the repetition failed, too
    assert not allows(step, 2.0)
    step.note_pulled()
    assert allows(step, 2.0)


@pytest.mark.parametrize("error", [NonFiniteGradient("NaN"), ContributionConflict("another"), Ended("over")], ids=repr)
def test_a_refused_step_allows_other_gradients(error: BaseException) -> None:
    assert allows(failed(error), 2.0)


def test_a_conflict_after_a_rejection_is_final() -> None:
    step = failed(NonFiniteGradient("NaN in w"))
    with pytest.raises(ContributionConflict, match=r"NaN in w.* cannot be discarded. Restart the script"):
        step.note_failure(ContributionConflict("another gradient"))
    step.note_pulled()
    step.note_failure(ContributionConflict("another gradient"))  # of a later step


def test_lost_gradients_allow_no_step_until_a_rollback() -> None:
    step = failed(KeyboardInterrupt(), has_several_steps=True)
    step.note_pulled()
    assert not allows(step, 1.0)
    step.note_rollback()
    assert allows(step, 2.0)
