"""Batches of several epochs, beginning after the batches that are in the run. Pure but for loaders and schedules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ps_protocol.errors import BadModel
from ps_protocol.vocabulary import Round

RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Position(NamedTuple):
    """The position of a run."""

    num_rollbacks: int  # the rollbacks that this trainer has followed
    round: Round  # the newest one, or step, that this trainer has begun


@dataclass
class Call:
    """The batches of one call: `epochs` passes over a loader, of which each round takes `batches_per_round`."""

    loader: Iterable[Any]
    epochs: int
    batches_per_round: int
    first_epoch: int  # counted over all calls
    begin: Round  # the rounds of all calls before
    end: Round | None = None  # the rounds of this one, too; None: not known yet


class ResumableBatches:
    """The batches of all calls of a script: each call continues after the batches of earlier calls.

    A restarted script makes the same calls, and each call skips its batches that are in the run. `position` is called
    before each batch. After a rollback the batches after the run's new position are repeated, also those of earlier
    calls.
    """

    def __init__(
        self,
        position: Callable[[], Position],
        steps_per_round: int = 1,
        warn: Callable[[str], object] = warnings.warn,
        note_total: Callable[[Round], object] = lambda _: None,
    ) -> None:
        """`steps_per_round`: the number of local steps, or 0. `warn` is called with a message.

        `note_total` is called with the rounds at the end of a call, if the loader has a length.
        """
        self._note_total = note_total
        self._position = position
        self._steps_per_round = max(1, steps_per_round)
        self._warn = warn
        self._has_warned: set[str] = set()
        self._calls: list[Call] = []
        self.schedule: _Schedule | None = None  # follows the run

    def iterate_epochs(
        self,
        loader: Iterable[Any],
        epochs: int,
        batches_per_step: int = 1,
        schedule: LRScheduler | None = None,
        first_epoch: int = 0,
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield the epochs that are not over, each with the batches that `iterate` yields for it.

        The last epoch in the run is not over: what the script does at its end may be missing.
        """
        for epoch in range(first_epoch, epochs):
            length, newest = _length(loader), self._position().round
            if length is not None:
                begin, rounds = self._end_of_calls(), length // (batches_per_step * self._steps_per_round)
                self._note_total(begin + (epochs - epoch) * rounds)
                if newest > begin + rounds:
                    self._begin_call(loader, 1, batches_per_step, schedule, first_epoch).end = begin + rounds
                    continue
            batches = self.iterate(loader, 1, batches_per_step, schedule, first_epoch)
            yield epoch, batches
            batches.close()

    def iterate(
        self,
        loader: Iterable[Any],
        epochs: int,
        batches_per_step: int = 1,
        schedule: LRScheduler | None = None,
        first_epoch: int = 0,
    ) -> Generator[Any, None, None]:
        """Yield the batches of `epochs` passes over a loader that are not in the run yet.

        The order of the data must be a function of the epoch, as that of a DistributedSampler is: `set_epoch` of the
        loader and its samplers is called with each epoch, counted over all calls. Each further call continues after the
        batches of the earlier calls, which must have been iterated to their end. A DataLoader over a map-style dataset
        does not load the skipped batches. `batches_per_step` is for scripts that accumulate gradients; the batches of a
        call must be a multiple of it. With local steps a round that had begun starts again.

        A `schedule` that the script steps once after each `step()` is stepped to the first batch; after a rollback it
        starts from its state at the first call. All calls must pass the same one. ReduceLROnPlateau and
        ChainedScheduler are refused.

        `first_epoch` is for a script that has loaded a checkpoint of its own: the number of the run's first epoch. The
        schedule's state at the first call is then that of the run's start.
        """
        call = self._begin_call(loader, epochs, batches_per_step, schedule, first_epoch)
        length = _length(loader)
        if length is not None and epochs > 1:  # else there may be a call for each epoch
            self._note_total(call.begin + epochs * length // call.batches_per_round)
        num_yielded, start = 0, self._position()
        try:
            while True:
                begun = self._follow()
                for batch in self._batches_after(begun):
                    num_yielded += 1
                    yield batch
                    if self._follow().num_rollbacks != begun.num_rollbacks:
                        break
                else:
                    break
            if begun.num_rollbacks == start.num_rollbacks:
                self._warn_of_steps(num_yielded, self._position().round - start.round, call.batches_per_round)
        finally:
            if num_yielded or call.end is None:  # else the run has all of them
                call.end = max(call.begin, self._position().round)

    def _end_of_calls(self) -> Round:
        end = self._calls[-1].end if self._calls else 0
        if end is None:
            raise BadModel(
                "an earlier batches() iterator is unfinished. Iterate it to its end, or close() it, before using "
                "the next one"
            )
        return end

    def _begin_call(
        self,
        loader: Iterable[Any],
        epochs: int,
        batches_per_step: int,
        schedule: LRScheduler | None,
        first_epoch: int,
    ) -> Call:
        epoch = self._calls[-1].first_epoch + self._calls[-1].epochs if self._calls else first_epoch
        call = Call(loader, epochs, batches_per_step * self._steps_per_round, epoch, self._end_of_calls())
        if not self._calls and schedule is not None:
            self.schedule = _Schedule(schedule, self._steps_per_round, is_loaded=first_epoch > 0)
        if schedule is not (None if self.schedule is None else self.schedule.schedule):
            raise BadModel(
                "this call of batches() has another schedule than the first, and after a rollback its loop could not "
                "repeat earlier batches. Join the schedules with torch.optim.lr_scheduler.SequentialLR, and give the "
                "result to every call"
            )
        self._calls.append(call)
        return call

    def _follow(self) -> Position:
        """Return the run's position, after moving the schedule there. Raises BadModel."""
        position = self._position()
        if self.schedule is not None:
            self.schedule.move_to(position)
        return position

    def _batches_after(self, position: Position) -> Iterator[Any]:
        for call in self._calls:
            if call.end is None or call.end > position.round:
                skipped = max(0, position.round - call.begin) * call.batches_per_round
                if skipped or position.num_rollbacks:
                    self._warn_of_order(call.loader, position.round)
                left = yield from _batches_of(call.loader, call.first_epoch, call.epochs, skipped)
                if left:  # the run has more than this call
                    call.end = position.round - -(-left // call.batches_per_round)

    def _warn_of_order(self, loader: Iterable[Any], round_: Round) -> None:
        """Warn once if the order of the loader depends on the random state of the process."""
        random = (part for part in _parts(loader) if isinstance(part, RANDOM_SAMPLERS))
        if not all(hasattr(part, "set_epoch") for part in random):
            self._warn_once(
                f"the run is at round {round_}, and this loader shuffles by the process's random state: its order may "
                "differ from that of the batches in the run. Use torch.utils.data.DistributedSampler"
            )

    def _warn_of_steps(self, num_batches: int, num_rounds: int, batches_per_round: int) -> None:
        """Warn once if the script took fewer steps than its batches are for: it would continue at another batch."""
        if num_rounds and num_batches >= (num_rounds + 1) * batches_per_round:
            self._warn_once(
                f"{num_batches} batches were taken for {num_rounds} steps of the run, and a resumed script would skip "
                f"{batches_per_round} for each. Give batches_per_step= if the script accumulates gradients"
            )

    def _warn_once(self, text: str) -> None:
        subject = text.partition(",")[2]  # without its numbers
        if subject not in self._has_warned:
            self._has_warned.add(subject)
            self._warn(text)


class _Schedule:
    """A learning-rate schedule that is stepped after each step of the run."""

    def __init__(self, schedule: LRScheduler, steps_per_round: int, *, is_loaded: bool) -> None:
        """If it `is_loaded`, its steps until now were taken before the run."""
        if not hasattr(schedule, "last_epoch") or isinstance(schedule, ReduceLROnPlateau):
            raise BadModel(
                f"batches() cannot bring a {type(schedule).__name__} to the run's round, since only steps that its "
                "last_epoch counts, and that need no metric, can be repeated. Leave schedule= out, and restore the "
                "schedule in the script where the run continues"
            )
        self.schedule = schedule
        self._steps_per_round = steps_per_round
        self._start = schedule.last_epoch
        self._before_run = self._start if is_loaded else 0  # steps
        self._state = copy.deepcopy(schedule.state_dict())
        self._groups = [_numbers(group) for group in schedule.optimizer.param_groups]
        self._num_rollbacks: int | None = None  # the rollbacks when the schedule was last moved

    def move_to(self, position: Position) -> None:
        """Move the schedule at the start and after a rollback. Raises BadModel unless the script steps it too."""
        if position.num_rollbacks != self._num_rollbacks:
            self._move_to(position.round)
            self._num_rollbacks = position.num_rollbacks
            return
        begin = self._before_run + position.round * self._steps_per_round
        if not begin <= self.schedule.last_epoch < begin + self._steps_per_round:
            raise BadModel(
                "batches(…, schedule=schedule) expects schedule.step() once after each optimizer.step(). If it is "
                "stepped otherwise, such as for each epoch, leave schedule= out, and bring it to optimizer.round in "
                "the script",
                expected=f"{begin} steps of the schedule after round {position.round}",
                actual=self.schedule.last_epoch,
            )

    def _move_to(self, round_: Round) -> None:
        """Step the schedule to the end of this round, from its state at the first call if it is ahead."""
        target = self._before_run + round_ * self._steps_per_round
        if self._start > target:
            raise BadModel(
                f"the schedule had taken {self._start} steps before the first call of batches(), and the run has "
                f"taken {target}. If they are of a checkpoint of the script's own, give first_epoch=, the epoch that "
                "follows it; else create the schedule without loading its state, since batches() steps it"
            )
        if self.schedule.last_epoch > target:
            self.schedule.load_state_dict(copy.deepcopy(self._state))
            for group, numbers in zip(self.schedule.optimizer.param_groups, self._groups, strict=True):
                group.update(numbers)
        if self.schedule.last_epoch < target:
            vars(self.schedule.optimizer)["_opt_called"] = True  # an earlier incarnation has stepped, or the rollback
        while self.schedule.last_epoch < target:
            self.schedule.step()


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _batches_of(loader: Iterable[Any], first_epoch: int, epochs: int, skipped: int) -> Generator[Any, None, int]:
    """Yield the batches after the skipped ones; return the number of batches that remain to be skipped."""
    for epoch in range(first_epoch, first_epoch + epochs):
        for part in _parts(loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        length = _length(loader)  # of this epoch
        if length is not None and skipped >= length:
            skipped -= length
            continue
        for batch in _skip(loader, skipped) if length is not None else loader:
            if length is None and skipped:
                skipped -= 1
                continue
            yield batch
        if length is not None:
            skipped = 0
    return skipped


def _parts(loader: Iterable[Any]) -> list[Any]:
    """Return a loader, its samplers, and the samplers that those wrap."""
    parts: list[Any] = [loader]
    for part in parts:  # grows meanwhile
        inner = (getattr(part, name, None) for name in ("sampler", "batch_sampler"))
        parts += [one for one in inner if one is not None and all(one is not known for known in parts)]
    return parts


def _length(loader: Iterable[Any]) -> int | None:
    """Return the number of batches, or None where only an iteration shows it."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # such a length is a guess
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def _skip(loader: Iterable[Any], skipped: int) -> Iterator[Any]:
    """Iterate without the first batches; a DataLoader with a batch sampler does not load them."""
    # The loader of accelerate iterates over another one.
    is_plain = getattr(type(loader), "__iter__", None) is DataLoader.__iter__
    if skipped and is_plain and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        rest = copy.copy(loader)
        # A DataLoader refuses the assignment to itself, since its workers may be running; the copy has none.
        rest.__dict__.update(batch_sampler=islice(loader.batch_sampler, skipped, None), _iterator=None)
        yield from rest
        return
    yield from islice(loader, skipped, None)
