"""`StepMeasures`: gradient norm, update ratio, learning rate and waiting share of a trainer, as curves.

At most one step a second is measured, and at most a percent of the time is spent on it. Such a step reads its gradients
once, and a sample of the parameters twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
SAMPLED = 4096  # elements of a parameter


@dataclass
class _Member:
    """One of the script's optimizers."""

    suffix: str  # of the names of its curves
    optimizer: Optimizer
    parameters: list[Tensor]
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
            member = _Member(f"/{name}" if name else "", one, own)
            self._member_of |= {names[id(parameter)]: member for parameter in own if id(parameter) in names}
        self._sampled: tuple[_Member, Tensor] | None = None  # before the step that was measured
        self._waited, self._since = 0.0, perf_counter()

    @contextmanager
    def step(self, gradients: Mapping[str, Tensor]) -> Iterator[None]:
        """Measure the step that the block takes with these gradients. A measure that fails is left out."""
        began = perf_counter()
        try:
            self._measure_update()
            member = self._member_of.get(next(iter(gradients), ""))
            if member is not None and began >= member.due:
                self._measure(member, gradients, began)
                member.due = began + PERIOD_SECONDS + PAUSE * (perf_counter() - began)
        except Exception as error:
            self._log.debug(f"a step was not measured: {error!r}")
        began = perf_counter()
        try:
            yield
        finally:
            self._waited += perf_counter() - began

    def _measure_update(self) -> None:
        if self._sampled is not None:
            (member, before), self._sampled = self._sampled, None
            change, norm = torch.dist(_sample(member.parameters), before), before.norm()
            self._add(member, update_ratio=float(change / norm) if norm else math.nan)

    def _measure(self, member: _Member, gradients: Mapping[str, Tensor], now: float) -> None:
        self._add(member, gradient_norm=float(torch.nn.utils.get_total_norm(list(gradients.values()))))
        rate = member.optimizer.param_groups[0].get("lr")
        if isinstance(rate, float | int | Tensor):  # some optimizers have none, or compute it
            self._add(member, learning_rate=float(rate))
        if self._waited:
            self._report({f"{OWN_RESULTS}waiting_share": self._waited / (now - self._since)})
        self._waited, self._since = 0.0, now
        self._sampled = member, _sample(member.parameters)

    def _add(self, member: _Member, **values: float) -> None:
        self._report({f"{OWN_RESULTS}{name}{member.suffix}": value for name, value in values.items()})


def _sample(parameters: list[Tensor]) -> Tensor:
    """Return at most `SAMPLED` evenly spaced elements of each parameter, weighted by the elements that each stands for.

    The square of the norm of the result is an estimate of that of all elements.
    """
    found = defaultdict[torch.device, list[Tensor]](list)
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // SAMPLED))].to(torch.float64)
        found[sample.device].append(sample * math.sqrt(flat.numel() / max(1, sample.numel())))
    # A device is waited for once, not for each of its parameters.
    return torch.cat([torch.cat(samples).cpu() for samples in found.values()])
