"""`StepEngine`: the way from one step's gradients to new parameters, whatever computes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Round


class Contribution(NamedTuple):
    """The part of one trainer, or one process, in a step."""

    gradients: Mapping[str, Tensor]  # by parameter name, of shape (numel,); parameters without a gradient are left out
    hyperparameters: list[HyperParameters]  # of each group; and the state of a GradScaler, if there is one
    is_finite: bool = True  # False: the gradients have overflowed, and were cleared


@dataclass
class StepProgress:
    """The position of one trainer in its run. Only its engine changes it."""

    begun: Round = 0  # the newest step that has begun
    version: Round = 0  # the step whose values are in the parameters
    num_rollbacks: int = 0  # rollbacks of the run that this trainer has followed


class StepEngine(Protocol):
    """The steps of a trainer whose model is declared, and whose parameters have the values that the run begins with.

    Memory: the script's parameters and gradients stay the script's. An engine reads a gradient from the call that hands
    it over until `step` returns; with `max_delay` until a copy was made, which is before `step` returns, too. The
    script must not change it meanwhile. Parameters are written within `step`, `synchronize` and, with `overlap_pulls`,
    by the waits before a forward pass; nowhere else.

    All methods are called by one thread at a time. Only `step` and `synchronize` block for other processes; they raise
    the error that ended the run.
    """

    progress: StepProgress

    def check_parameters(self) -> None:
        """Follow parameters that the script has moved to other memory. Raises BadModel for another shape or dtype."""

    def replace_values(self, names: Collection[str]) -> None:
        """Begin the next step from the values that the script has written to these parameters, on all trainers.

        Before the first round the values of the trainer that brings the initial values count, later those of the lowest
        rank that calls it. No step may be on its way.
        """

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add a flat gradient, (numel,), of the next step while backward still runs; it may leave at once."""

    def discard_gradients(self) -> None:
        """Discard the added gradients. What has left cannot be recalled: the step may fail if it is taken again."""

    def step(self, contribution: Contribution) -> None:
        """Push all gradients of the next step, and wait for the parameters of the step that is due.

        That is this step, or with `max_delay` an earlier one; with `overlap_pulls` no step is waited for. Raises
        NonFiniteGradient under `nonfinite=reject`, after which the step may be taken again.
        """

    def synchronize(self) -> bool:
        """Wait for the newest step's parameters; return True if any parameter was written."""
