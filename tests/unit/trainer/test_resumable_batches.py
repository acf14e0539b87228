"""Batches go on where a run stands: without loading what is done, and again after a rollback."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from trainer_client import RemoteOptimizer
from trainer_client.resumable_batches import Position, iterate_batches

EPOCHS = 3


class Numbers(Dataset[int]):
    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def shuffled(data: Numbers) -> DataLoader[int]:
    return DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0, seed=3))


LOADERS: dict[str, Any] = {
    "shuffled": lambda: shuffled(Numbers()),
    "in order, persistent workers": lambda: DataLoader(Numbers(), 3, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), 2),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None),
    "list": lambda: [torch.tensor(4), torch.tensor(5)],
}


def lists(batches: Iterator[Any]) -> list[Any]:
    return [torch.as_tensor(batch).tolist() for batch in batches]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_rest_is_what_an_undisturbed_loop_has_left(make: Any) -> None:
    whole = lists(iterate_batches(make(), EPOCHS, lambda: Position(0, 0)))
    for done in (1, 2, len(whole) // EPOCHS, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 5):
        position = Position(0, done)
        assert lists(iterate_batches(make(), EPOCHS, lambda position=position: position)) == whole[done:]
    if make is LOADERS["shuffled"]:
        assert whole[:3] != whole[3:6]  # another order in each epoch


@pytest.mark.parametrize(("local_steps", "done"), [(0, 6), (2, 12)])
def test_a_round_has_the_batches_of_its_steps(local_steps: int, done: int) -> None:
    client = SimpleNamespace(settings=SimpleNamespace(local_steps=local_steps))
    optimizer: Any = SimpleNamespace(
        _session=SimpleNamespace(client=client), _steps=SimpleNamespace(begun=2, num_rollbacks=0)
    )
    whole = lists(iterate_batches(shuffled(Numbers()), 5, lambda: Position(0, 0)))
    rest = RemoteOptimizer.batches(optimizer, shuffled(Numbers()), epochs=5, batches_per_step=3)
    assert lists(rest) == whole[done:] != []


def test_what_is_done_is_not_loaded() -> None:
    data = Numbers()
    [rest] = iterate_batches(shuffled(data), 2, lambda: Position(0, 5))
    assert data.loaded == rest.tolist()


@pytest.mark.parametrize("back_to", [0, 2, 4])
def test_a_rollback_brings_batches_again(back_to: int) -> None:
    whole = lists(iterate_batches(shuffled(Numbers()), EPOCHS, lambda: Position(0, 0)))
    state = {"rollbacks": 0, "steps": 0}
    taken: list[Tensor] = []
    for batch in iterate_batches(shuffled(Numbers()), EPOCHS, lambda: Position(state["rollbacks"], state["steps"])):
        if state["steps"] == 4 and not state["rollbacks"]:  # the fifth step finds that the run has gone back
            state.update(rollbacks=1, steps=back_to)
            del taken[back_to:]
            continue
        taken.append(batch)
        state["steps"] += 1
    assert lists(iter(taken)) == whole
