"""`StepMeasures`: gradient norm, learning rate and waiting share of a trainer, as curves.

At most one step a second is measured, and at most a percent of the time is spent on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from structlog.typing import FilteringBoundLogger
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.fields import MAX_OWN_RESULTS, OWN_RESULTS

from ..engines.combined_optimizer import members_of

PERIOD_SECONDS = 1.0
PAUSE = 200  # times the duration of a measure, which grows with the number of parameters


@dataclass
class _Member:
    """One of the script's optimizers."""

    suffix: str  # of the names of its curves
    optimizer: Optimizer
    due: float = 0.0


class StepMeasures:
    """The measures of a trainer's steps; `report` is called with them by name, on the script's thread."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        report: Callable[[dict[str, float]], object],
        log: FilteringBoundLogger,
    ) -> None:
        self._log = log
        self._report = report
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._member_of: dict[str, _Member] = {}  # by the name of a parameter
        for name, one in list(members_of(optimizer).items())[: MAX_OWN_RESULTS // 4]:
            own = [parameter for group in one.param_groups for parameter in group["params"]]
            member = _Member(f"/{name}" if name else "", one)
            self._member_of |= {names[id(parameter)]: member for parameter in own if id(parameter) in names}
        self._waited, self._since = 0.0, perf_counter()

    @contextmanager
    def step(self, gradients: Mapping[str, Tensor]) -> Iterator[None]:
        """Measure the step that the block takes with these gradients. A measure that fails is left out."""
        began = perf_counter()
        try:
            member = self._member_of.get(next(iter(gradients), ""))
            if member is not None and began >= member.due:
                member.due = began + PERIOD_SECONDS
                self._measure(member, gradients, began)
                member.due += PAUSE * (perf_counter() - began)
        except Exception as error:
            self._log.debug(f"a step was not measured: {error!r}")
        began = perf_counter()
        try:
            yield
        finally:
            self._waited += perf_counter() - began

    def _measure(self, member: _Member, gradients: Mapping[str, Tensor], now: float) -> None:
        self._add(member, gradient_norm=float(torch.nn.utils.get_total_norm(list(gradients.values()))))
        rate = member.optimizer.param_groups[0].get("lr")
        if isinstance(rate, float | int | Tensor):  # some optimizers have none, or compute it
            self._add(member, learning_rate=float(rate))
        if self._waited:
            self._report({f"{OWN_RESULTS}waiting_share": self._waited / (now - self._since)})
        self._waited, self._since = 0.0, now

    def _add(self, member: _Member, **values: float) -> None:
        self._report({f"{OWN_RESULTS}{name}{member.suffix}": value for name, value in values.items()})
