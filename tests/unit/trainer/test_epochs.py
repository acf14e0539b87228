"""Batches that continue at the round of the run, without loading earlier ones, and are repeated after a rollback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from ps_protocol.errors import BadModel
from trainer_client.optimizer.epochs import Position, ResumableEpochs

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


class Wrapper(DataLoader[int]):
    """A loader around another one, such as accelerate's."""

    def __init__(self, inner: DataLoader[int]) -> None:
        super().__init__(inner.dataset, batch_sampler=inner.batch_sampler)
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)


def shuffled(data: Numbers) -> DataLoader[int]:
    return DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0, seed=3))


def shuffled_in_batch_sampler(data: Numbers) -> DataLoader[int]:
    return DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, 2, 0, seed=3), 2, drop_last=False))


class Buckets(Sampler[int]):
    """A sampler of another length in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 + 3 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


LOADERS: dict[str, Any] = {
    "shuffled": lambda: shuffled(Numbers()),
    "shuffled in a batch sampler": lambda: shuffled_in_batch_sampler(Numbers()),
    "buckets": lambda: DataLoader(Numbers(), 1, sampler=Buckets()),
    "in order, persistent workers": lambda: DataLoader(Numbers(), 3, num_workers=1, persistent_workers=True),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None),
    "wrapper": lambda: Wrapper(DataLoader(Numbers(), 3)),
    "list": lambda: [torch.tensor(4), torch.tensor(5)],
}


def flat(epochs: Iterator[tuple[int, Iterator[Any]]]) -> Iterator[Any]:
    return (batch for _, batches in epochs for batch in batches)


def lists(epochs: Iterator[tuple[int, Iterator[Any]]]) -> list[Any]:
    return [torch.as_tensor(batch).tolist() for batch in flat(epochs)]


def at(round_: int, steps_per_round: int = 1) -> ResumableEpochs:
    return ResumableEpochs(lambda: Position(0, round_), steps_per_round)


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_resumed_loop_gets_the_batches_after_its_round(make: Any) -> None:
    whole = lists(at(0).iterate(make(), EPOCHS))
    for done in (1, 2, len(whole) // EPOCHS, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 5):
        assert lists(at(done).iterate(make(), EPOCHS)) == whole[done:]
    if make in (LOADERS["shuffled"], LOADERS["shuffled in a batch sampler"]):
        assert whole[:3] != whole[3:6]  # another order in each epoch


@pytest.mark.parametrize(("steps_per_round", "done"), [(1, 6), (2, 12)])
def test_a_round_has_the_batches_of_its_steps(steps_per_round: int, done: int) -> None:
    whole = lists(at(0).iterate(shuffled(Numbers()), 5))
    rest = at(2, steps_per_round).iterate(shuffled(Numbers()), 5, batches_per_step=3)
    assert lists(rest) == whole[done:] != []


def test_a_round_of_local_steps_goes_on_in_the_next_epoch() -> None:
    assert lists(at(1, 4).iterate(range(6), 2)) == [4, 5, *range(6)]
    assert lists(at(2, 4).iterate(range(6), 2)) == [2, 3, 4, 5]


def test_batches_of_earlier_rounds_are_not_loaded() -> None:
    data = Numbers()
    [rest] = flat(at(5).iterate(shuffled(data), 2))
    assert data.loaded == rest.tolist()


def make_schedule() -> tuple[Any, LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def take(
    state: dict[str, Any], batches: Iterator[Any], schedule: LRScheduler, stop_at: float | None, back_to: int
) -> bool:
    """Take steps with these batches; return False if the script stops before the last one."""
    for batch in batches:
        if state["round"] == state["lost at"]:
            state.update({"rollbacks": 1, "round": back_to, "lost at": None})
            del state["taken"][back_to:]
            continue
        if state["round"] == stop_at:
            return False
        state["taken"].append((batch.tolist(), schedule.optimizer.param_groups[0]["lr"]))
        state["round"] += 1
        schedule.optimizer.step()
        schedule.step()
    return True


def train(state: dict[str, Any], *, stop_at: int | None = None, back_to: int = 1) -> None:
    """Run a script that takes batches in several calls, of two loaders, and steps a schedule with each."""
    epochs = follow(state)
    _, schedule = make_schedule()
    first, second = shuffled(Numbers()), DataLoader(Numbers(), 3)
    for loader, number in ((first, 0), (first, 1), (second, 0), (first, 2)):
        for _, batches in epochs.iterate(loader, number + 1, 1, schedule, number):
            if not take(state, batches, schedule, stop_at, back_to):
                return


def follow(state: dict[str, Any]) -> ResumableEpochs:
    return ResumableEpochs(lambda: Position(state["rollbacks"], state["round"]))


def new_state(lost_at: int | None = None) -> dict[str, Any]:
    return {"rollbacks": 0, "round": 0, "taken": [], "lost at": lost_at}


def test_each_call_continues_behind_those_before_it() -> None:
    whole = new_state()
    train(whole)
    assert len(whole["taken"]) == 3 * 3 + 4
    assert len({str(batches) for batches in (whole["taken"][:3], whole["taken"][3:6], whole["taken"][-3:])}) == 3
    for stop_at in range(13):
        killed = new_state()
        train(killed, stop_at=stop_at)
        train(killed)  # in another process
        assert killed["taken"] == whole["taken"], stop_at
    for lost_at in range(1, 13):
        for back_to in {0, 1, lost_at // 2, lost_at}:
            back = new_state(lost_at)
            train(back, back_to=back_to)
            assert back["taken"] == whole["taken"], (lost_at, back_to)


def train_epochs(state: dict[str, Any], *, stop_at: float | None = None, first_epoch: int = 0, steps: int = 0) -> None:
    """Run a script with a loop over epochs, which stops before a step, or half a round later at the end of an epoch."""
    epochs = follow(state)
    optimizer, schedule = make_schedule()
    for _ in range(steps):  # as a loaded one has taken
        optimizer.step()
        schedule.step()
    for epoch, rest in epochs.iterate(shuffled(Numbers()), 4, 1, schedule, first_epoch):
        if not take(state, rest, schedule, stop_at, back_to=2) or state["round"] - 0.5 == stop_at:
            return
        state["ends"].append((epoch, state["round"]))


def test_a_resumed_loop_over_epochs_begins_with_the_epoch_that_was_not_over() -> None:
    whole = {**new_state(), "ends": []}
    train_epochs(whole)
    assert whole["ends"] == [(0, 3), (1, 6), (2, 9), (3, 12)]
    for stop_at in (0, 1, 2.5, 3, 4, 5.5, 8.5, 9, 11.5):
        killed = {**new_state(), "ends": []}
        train_epochs(killed, stop_at=stop_at)
        ends = [*killed["ends"]]
        train_epochs(killed, stop_at=None)
        assert killed["taken"] == whole["taken"], stop_at
        # An epoch whose batches are all in the run may end twice, since nothing shows that it has ended.
        assert sorted({*killed["ends"]}) == whole["ends"]
        assert len(killed["ends"]) - len(whole["ends"]) == (ends[-1:] == [(stop_at // 3 - 1, stop_at)]), stop_at
    train_epochs(whole)  # a finished run that is resumed
    assert whole["ends"][4:] == [(3, 12)]
    for lost_at in (3, 5, 7, 11):
        back = {**new_state(lost_at), "ends": []}
        train_epochs(back)
        assert back["taken"] == whole["taken"], lost_at


def test_an_epoch_that_the_script_leaves_ends_there() -> None:
    state = {"rollbacks": 0, "round": 0}
    epochs = follow(state)
    for _, batches in epochs.iterate(range(9), 1):
        for batch in batches:
            state["round"] += 1
            if batch == 3:
                break
    second = epochs.iterate(range(10, 20), 1)
    _, batches = next(second)
    assert next(batches) == 10
    state["round"] = 7
    assert next(batches) == 11
    state.update(rollbacks=1, round=5)
    assert next(batches) == 11


@pytest.mark.parametrize("loader", [DataLoader(Stream(), 2), iter([1])], ids=["stream", "iterator"])
def test_a_loader_without_a_length_is_refused(loader: Any) -> None:
    with pytest.raises(BadModel, match="needs a loader with a length"):
        next(at(0).iterate(loader, 1))


def test_a_schedule_loaded_by_the_script_is_moved_by_the_missing_steps() -> None:
    state = {"rollbacks": 0, "round": 3}
    optimizer, schedule = make_schedule()
    for _ in range(2):
        optimizer.step()
        schedule.step()
    epochs = follow(state).iterate(range(9), 1, 1, schedule)
    _, batches = next(epochs)
    assert (next(batches), optimizer.param_groups[0]["lr"]) == (3, 0.5**3)
    state.update(rollbacks=1, round=2)
    assert (next(batches), optimizer.param_groups[0]["lr"]) == (2, 0.5**2)
    state.update(rollbacks=2, round=1)
    with pytest.raises(BadModel, match=r"had taken 2 steps before the first call .* the run has taken 1"):
        next(batches)


def test_a_schedule_that_is_not_stepped_with_each_step_is_refused() -> None:
    state = {"rollbacks": 0, "round": 0}
    epochs = follow(state).iterate(range(2), 1, 1, make_schedule()[1])
    _, batches = next(epochs)
    next(batches)
    state["round"] = 1
    with pytest.raises(BadModel, match=r"once after each optimizer\.step\(\).* 1 steps .* after round 1"):
        next(batches)


@pytest.mark.parametrize("make", [ReduceLROnPlateau, lambda _: ChainedScheduler([make_schedule()[1]])])
def test_a_schedule_whose_steps_cannot_be_repeated_is_refused(make: Any) -> None:
    with pytest.raises(BadModel, match=r"Leave schedule= out"):
        next(at(0).iterate([1], 1, 1, make(make_schedule()[0])))
