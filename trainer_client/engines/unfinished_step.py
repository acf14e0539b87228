"""The fate of a step that failed: pservers may have counted its gradients, or keep them staged."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ps_protocol.errors import ContributionConflict, Ended, NonFiniteGradient, Unreachable
from ps_protocol.vocabulary import Round

from .engine import StepGradients


class UnfinishedStep:
    """The state of a step that failed. It decides which gradients the next try may have.

    =====  =================================================  =============================================
    state  reached by                                         the next try may have
    =====  =================================================  =============================================
    none   any other error                                    any gradients
    kept   an interrupt, or a pserver that is unreachable:    the kept gradients, which `synchronize` pushes
           pservers may have counted the step
    lost   the same with several steps on their way, whose    none
           gradients were not kept
    =====  =================================================  =============================================

    A step that is pulled ends `kept`. A rollback ends all states.
    """

    def __init__(self, *, leads_host: bool) -> None:
        """Keep nothing. `leads_host`: other processes are needed to finish a step."""
        self.kept: StepGradients | None = None
        self._leads_host = leads_host
        self.contribution: StepGradients | None = None  # of the newest try, not copied; None with several steps
        self._is_lost = False

    def note_pulled(self) -> None:
        """Note that the step was pulled after all."""
        self.kept = self.contribution = None

    def note_rollback(self) -> None:
        """Note that the run has gone back to before the step."""
        self.note_pulled()
        self._is_lost = False

    def note_failure(self, error: BaseException) -> None:
        """Note why the newest try failed.

        Gradients that pservers may have counted are copied, before the script changes them.
        """
        if isinstance(error, NonFiniteGradient | ContributionConflict | Ended) and not isinstance(error, Unreachable):
            return
        if self.kept is not None:
            return  # the newest try has the same gradients
        if self.contribution is None:
            self._is_lost = True
            return
        copies = {name: gradient.clone() for name, gradient in self.contribution.gradients.items()}
        self.kept, self.contribution = self.contribution._replace(gradients=copies), None

    def require_same_gradients(self, step: Round, gradients: Mapping[str, Tensor], names: Collection[str]) -> None:
        """Raise ContributionConflict unless the gradients of these parameters may be pushed for the step.

        A pserver that has applied a round accepts any other gradient for it as a repetition, and drops it.
        """
        if self._is_lost:
            raise ContributionConflict(
                "step() was interrupted or failed with several steps in flight, and pservers may have counted "
                "some of them. Restart the script"
            )
        if self.kept is None:
            return
        for name in names:
            old, new = self.kept.gradients.get(name), gradients.get(name)
            if old is not new and (old is None or new is None or not _are_equal(old, new)):
                finish = "Call synchronize() to finish that round, and then compute the gradient again"
                remedy = "Restart the script" if self._leads_host else finish
                raise ContributionConflict(
                    f"step() was interrupted or failed in round {step}, and pservers may have counted its gradient of "
                    f"{name!r}, which differs from the new gradient. {remedy}"
                )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.is_sparse and other.is_sparse:
        return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())
    return torch.equal(one, other)
