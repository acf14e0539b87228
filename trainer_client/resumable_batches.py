"""Batches of several epochs, beginning after those that a run has taken already. Pure but for the loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset


class Position(NamedTuple):
    """Where a run stands."""

    num_rollbacks: int  # that this trainer has followed
    num_batches: int  # in the rounds, or steps, that this trainer has begun


def iterate_batches(loader: Iterable[Any], epochs: int, position: Callable[[], Position]) -> Iterator[Any]:
    """Yield the batches of `epochs` passes over a loader that are not in the run yet.

    `position` is asked before each batch; after a rollback the batches after the run's new position come again.
    """
    while True:
        begun = position()
        for batch in _batches_after(loader, epochs, begun.num_batches):
            yield batch
            if position().num_rollbacks != begun.num_rollbacks:
                break
        else:
            return


def _batches_after(loader: Iterable[Any], epochs: int, skipped: int) -> Iterator[Any]:
    for epoch in range(epochs):
        length = _length(loader)
        if length is not None and skipped >= length:
            skipped -= length
            continue
        set_epoch: Callable[[int], None] | None = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        for batch in _skip(loader, skipped) if length is not None else loader:
            if length is None and skipped:
                skipped -= 1
                continue
            yield batch
        if length is not None:
            skipped = 0


def _length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches, or None where only an iteration shows it."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # what a length says of it is a guess
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def _skip(loader: Iterable[Any], skipped: int) -> Iterator[Any]:
    """Iterate without the first batches; a DataLoader with a batch sampler does not load them."""
    if skipped and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        rest = copy.copy(loader)
        # A DataLoader refuses the assignment to itself, since its workers may be running; the copy has none.
        rest.__dict__.update(batch_sampler=_Rest(loader.batch_sampler, skipped), _iterator=None)
        yield from rest
        return
    for number, batch in enumerate(loader):
        if number >= skipped:
            yield batch


class _Rest:
    """A batch sampler without its first batches."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler = sampler
        self._skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        return (indices for number, indices in enumerate(self._sampler) if number >= self._skipped)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._skipped)
