"""`StepMeasures`: gradient norm, update ratio, learning rate and waiting share of a trainer, as curves.

At most one step a second is measured, which reads its gradients once, and a sample of the parameters twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.fields import MAX_OWN_RESULTS, OWN_RESULTS

from ..engines.combined_optimizer import CombinedOptimizer
from ..transport.device_copies import is_away
from .parameter_watch import view_in_memory

PERIOD_SECONDS = 1.0
SAMPLED = 4096  # elements of a parameter


@dataclass
class _Measured:
    """One of the script's optimizers."""

    suffix: str  # of the names of its curves
    group: dict[str, Any]  # its first one
    parameters: list[Tensor]
    due: float = 0.0


class StepMeasures:
    """The measures of a trainer's steps; `report` is called with them by name, on the script's thread."""

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, Tensor], report: Callable[[dict[str, float]], object]
    ) -> None:
        self._report = report
        members = {"": optimizer}
        if isinstance(optimizer, CombinedOptimizer):
            members = {f"/{name}": member for name, member in optimizer.members.items()}
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._measured: dict[str, _Measured] = {}  # by the name of a parameter
        for suffix, member in list(members.items())[: MAX_OWN_RESULTS // 4]:
            own = [parameter for group in member.param_groups for parameter in group["params"]]
            measured = _Measured(suffix, member.param_groups[0], own)
            self._measured |= {names[id(parameter)]: measured for parameter in own if id(parameter) in names}
        self._sampled: tuple[_Measured, Tensor] | None = None  # before the step that was measured
        self._waited, self._since = 0.0, perf_counter()

    @contextmanager
    def step(self, gradients: Mapping[str, Tensor]) -> Iterator[None]:
        """Measure the step that the block takes with these gradients."""
        if self._sampled is not None:
            measured, before = self._sampled
            self._sampled = None
            change, norm = torch.dist(_sample(measured.parameters), before), before.norm()
            self._tell(measured, update_ratio=float(change / norm) if norm else math.nan)
        began = perf_counter()
        measured_now = self._measured.get(next(iter(gradients), ""))
        if measured_now is not None and began >= measured_now.due:
            measured_now.due = began + PERIOD_SECONDS
            self._measure(measured_now, gradients, began)
        try:
            yield
        finally:
            self._waited += perf_counter() - began

    def _measure(self, measured: _Measured, gradients: Mapping[str, Tensor], now: float) -> None:
        self._tell(
            measured,
            gradient_norm=float(torch.nn.utils.get_total_norm(list(gradients.values()))),
            learning_rate=float(measured.group["lr"]),
        )
        if self._waited:
            self._report({f"{OWN_RESULTS}waiting_share": self._waited / (now - self._since)})
        self._waited, self._since = 0.0, now
        self._sampled = measured, _sample(measured.parameters)

    def _tell(self, measured: _Measured, **values: float) -> None:
        self._report({f"{OWN_RESULTS}{name}{measured.suffix}": value for name, value in values.items()})


def _sample(parameters: list[Tensor]) -> Tensor:
    """Return at most `SAMPLED` evenly spaced elements of each parameter, weighted by the elements that each stands for.

    The square of the norm of the result is an estimate of that of all elements.
    """
    found = []
    for parameter in parameters:
        sample = flat = view_in_memory(parameter)
        if flat.numel() > SAMPLED:
            sample = flat[:: -(-flat.numel() // SAMPLED)].to(torch.float64)
            sample = sample * math.sqrt(flat.numel() / sample.numel())  # the sample may be a view of the parameter
        found.append(sample.cpu() if is_away(sample) else sample)
    return torch.cat(found).to(torch.float64)
