"""What an administrator sets in a run while it trains. It stands over what trainers push until it is lifted.

It rides on a numbered change of members, so that every pserver goes by it from the same round on.
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import Controls
from .optimizers import HyperParameters
from .vocabulary import Round

NONE = Controls()


def override_rates(controls: Controls, groups: list[HyperParameters]) -> list[HyperParameters]:
    """The numbers of all parameter groups that count instead of those that were pushed.

    >>> override_rates(Controls(rates={1: 0.5}), [{"lr": 0.1}, {"lr": 0.2, "eps": 1e-8}])
    [{'lr': 0.1}, {'lr': 0.5, 'eps': 1e-08}]
    """
    if not controls.rates:
        return groups
    rates = controls.rates
    return [{**group, "lr": rates[index]} if index in rates else group for index, group in enumerate(groups)]


def controls_at(all_: Sequence[Controls], round_: Round) -> Controls:
    """Those that a round goes by; `all_` stand in the order of their rounds.

    >>> controls_at([Controls(since=3, is_paused=True), Controls(since=7)], 6).is_paused
    True
    """
    return next((controls for controls in reversed(all_) if controls.since <= round_), NONE)


def succeed(before: Sequence[Controls], after: Controls, first: Round) -> tuple[Controls, ...]:
    """Return the controls that a pserver may still need for rounds from `first` on, once `after` is set.

    `after` counts from a round that no pserver has applied, and replaces those that were to count from it on.

    >>> before = [Controls(since=1), Controls(since=4), Controls(since=9)]
    >>> [controls.since for controls in succeed(before, Controls(since=8), first=6)]
    [4, 8]
    """
    older = [controls for controls in before if controls.since < after.since]
    needed = [c for c, later in zip(older, [*older[1:], after], strict=False) if later.since > first]
    return (*needed, after)
