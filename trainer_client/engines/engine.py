"""`StepEngine`: the interface that turns one step's gradients into new parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from ps_protocol.requests import Completion
from ps_protocol.vocabulary import Round


class StepGradients(NamedTuple):
    """The contribution of one trainer, or one process, to a step."""

    # By parameter name, of shape (numel,), or for sparse parameters coalesced COO tensors in host memory. Parameters
    # without a gradient are left out.
    gradients: Mapping[str, Tensor]
    completion: Completion = Completion(0, [])  # PserverEngine sets `computed_on`, `count_blocks` the counts
    is_finite: bool = True  # False: the gradients have overflowed, and were cleared


@dataclass
class StepProgress:
    """The position of one trainer in its run. Only its engine changes it."""

    begun: Round = 0  # the newest step that has begun
    version: Round = 0  # the step whose values are in the parameters
    num_rollbacks: int = 0  # rollbacks of the run that this trainer has followed


class StepEngine(Protocol):
    """The steps of a trainer whose model is declared, and whose parameters have the values that the run begins with.

    Memory: parameters and gradients belong to the script. An engine reads a gradient from the call that passes it until
    `step` returns, and the script must not change it meanwhile. Afterwards the engine has its own copy if it still
    needs one. Parameters are written within `step` and `synchronize` only. With `overlap_pulls` the network may write
    to a parameter from `step` on, until a wait before the next forward pass has ended.

    All methods are called by one thread at a time. Only `step` and `synchronize` block for other processes; they raise
    the error that ended the run.
    """

    progress: StepProgress

    def follow_parameters(self) -> None:
        """Use the memory that the script has moved parameters to. Their shapes and dtypes stay."""

    def replace_values(self, names: Collection[str]) -> None:
        """Begin the next step from the values that the script has written to these parameters, on all trainers.

        Before the first round the values of the trainer that brings the initial values count, later those of the lowest
        rank that calls it. No step may be on its way.
        """

    def step(self, contribution: StepGradients) -> None:
        """Push all gradients of the next step, and wait for the parameters of the step that is due.

        The step that is due is this step, or with `max_delay` an earlier step. With `overlap_pulls` no step is due.
        Raises NonFiniteGradient under `nonfinite=reject`, after which the step may be taken again.
        """

    def synchronize(self) -> bool:
        """Wait for the newest step's parameters; return True if any parameter was written."""
