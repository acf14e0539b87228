"""The epochs of a script, beginning after the batches that are in the run. Pure but for loaders and schedules."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from dataclasses import dataclass
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ps_protocol.errors import BadModel
from ps_protocol.vocabulary import Round

from ..engines.engine import StepProgress
from ..session.session import Session

RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Position(NamedTuple):
    """The position of a run."""

    num_rollbacks: int  # the rollbacks that this trainer has followed
    round: Round  # the newest one, or step, that this trainer has begun


@dataclass
class Epoch:
    """One pass over a loader. `begin` and `end` count the steps of the script since the run began."""

    loader: Iterable[Any]
    number: int
    batches_per_step: int
    begin: int
    end: int

    def batches_after(self, num_steps: int) -> Iterator[Any]:
        """Return the batches that come after this many steps."""
        _set_epoch(self.loader, self.number)
        return _skip(self.loader, max(0, num_steps - self.begin) * self.batches_per_step)


class ResumableEpochs:
    """The epochs of a script. A restarted script makes the same calls, and skips the batches that are in the run.

    `position` is called before each batch. After a rollback the batches after the run's new position are repeated, also
    those of earlier epochs.
    """

    def __init__(
        self,
        position: Callable[[], Position],
        steps_per_round: int = 1,
        warn: Callable[[str], object] = warnings.warn,
        note_total: Callable[[Round], object] = lambda _: None,
    ) -> None:
        """`steps_per_round`: the number of local steps, or 0. `warn` is called with a message.

        `note_total` is called with the rounds at the end of a call.
        """
        self._note_total = note_total
        self._position = position
        self._steps_per_round = max(1, steps_per_round)
        self._warn = warn
        self._has_warned = False
        self._epochs: list[Epoch] = []
        self.schedule: _Schedule | None = None  # follows the run

    def iterate(
        self,
        loader: Iterable[Any],
        epochs: int,
        batches_per_step: int = 1,
        schedule: LRScheduler | None = None,
        first_epoch: int = 0,
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield the epochs that are not over, each with its batches that are not in the run.

        The last epoch in the run is not over: what the script does at its end may be missing. A DataLoader does not
        load the skipped batches. With local steps a round that had begun starts again. Raises BadModel for a loader
        without a length.
        """
        self._follow_schedule(schedule, is_loaded=first_epoch > 0)
        for number in range(first_epoch, epochs):
            _set_epoch(loader, number)
            num_steps, begin = _length(loader) // batches_per_step, self._epochs[-1].end if self._epochs else 0
            epoch = Epoch(loader, number, batches_per_step, begin, begin + num_steps)
            self._epochs.append(epoch)
            self._note_total((begin + (epochs - number) * num_steps) // self._steps_per_round)
            if self._num_steps(self._position()) > epoch.end:
                continue
            batches = self._batches_of(epoch)
            try:
                yield number, batches
            finally:
                if getgeneratorstate(batches) != GEN_CLOSED:  # the script has not taken all batches
                    batches.close()
                    epoch.end = max(begin, self._num_steps(self._position()))

    def _num_steps(self, position: Position) -> int:
        return position.round * self._steps_per_round

    def _follow_schedule(self, schedule: LRScheduler | None, *, is_loaded: bool) -> None:
        if not self._epochs and schedule is not None:
            self.schedule = _Schedule(schedule, self._steps_per_round, is_loaded=is_loaded)
        if schedule is not (None if self.schedule is None else self.schedule.schedule):
            raise BadModel(
                "this call of epochs() has another schedule than the first, and after a rollback its loop could not "
                "repeat earlier batches. Join the schedules with torch.optim.lr_scheduler.SequentialLR, and give the "
                "result to every call"
            )

    def _batches_of(self, epoch: Epoch) -> Generator[Any, None, None]:
        """Yield the batches of an epoch, and after a rollback those of earlier epochs that are lost."""
        epochs = [epoch]
        while True:
            begun = self._follow_run()
            for batch in self._batches_after(begun, epochs):
                yield batch
                if self._follow_run().num_rollbacks != begun.num_rollbacks:
                    epochs = self._epochs
                    break
            else:
                return

    def _follow_run(self) -> Position:
        """Return the run's position, after moving the schedule there. Raises BadModel."""
        position = self._position()
        if self.schedule is not None:
            self.schedule.follow(position)
        return position

    def _batches_after(self, position: Position, epochs: Iterable[Epoch]) -> Iterator[Any]:
        num_steps = self._num_steps(position)
        for epoch in epochs:
            if epoch.end > num_steps:
                if num_steps > epoch.begin or position.num_rollbacks:
                    self._warn_of_order(epoch.loader, position.round)
                yield from epoch.batches_after(num_steps)

    def _warn_of_order(self, loader: Iterable[Any], round_: Round) -> None:
        random = (part for part in _parts(loader) if isinstance(part, RANDOM_SAMPLERS))
        if not self._has_warned and not all(hasattr(part, "set_epoch") for part in random):
            self._has_warned = True
            self._warn(
                f"the run is at round {round_}, and this loader shuffles by the process's random state: its order may "
                "differ from that of the batches in the run. Use torch.utils.data.DistributedSampler"
            )


def follow_run(session: Session, progress: StepProgress, num_optimizers: int) -> ResumableEpochs:
    """Return the epochs of a script, each of whose optimizers takes a step with a batch."""
    client = session.client
    return ResumableEpochs(
        lambda: Position(progress.num_rollbacks, progress.begun // num_optimizers),
        client.settings.local_steps,
        client.log.warning,
        lambda rounds: client.coordinator.note_script(total_rounds=rounds * num_optimizers),
    )


class _Schedule:
    """A learning-rate schedule that the script steps after each step of the run."""

    def __init__(self, schedule: LRScheduler, steps_per_round: int, *, is_loaded: bool) -> None:
        """If it `is_loaded`, its steps until now were taken before the run."""
        if not hasattr(schedule, "last_epoch") or isinstance(schedule, ReduceLROnPlateau):
            raise BadModel(
                f"epochs() cannot bring a {type(schedule).__name__} to the run's round, since only steps that its "
                "last_epoch counts, and that need no metric, can be repeated. Leave schedule= out, and restore the "
                "schedule in the script where the run continues"
            )
        self.schedule = schedule
        self._steps_per_round = steps_per_round
        self._start = schedule.last_epoch
        self._before_run = self._start if is_loaded else 0  # steps
        groups = [{**group, "params": ()} for group in schedule.optimizer.param_groups]
        self._saved = copy.deepcopy((schedule.state_dict(), groups))
        self._num_rollbacks: int | None = None  # the rollbacks when the schedule was last moved

    def follow(self, position: Position) -> None:
        """Move the schedule at the start and after a rollback. Raises BadModel unless the script steps it too."""
        begin = self._before_run + position.round * self._steps_per_round
        if position.num_rollbacks != self._num_rollbacks:
            self._move_to(begin)
            self._num_rollbacks = position.num_rollbacks
        elif not begin <= self.schedule.last_epoch < begin + self._steps_per_round:
            raise BadModel(
                "epochs(…, schedule=schedule) expects schedule.step() once after each optimizer.step(). If it is "
                "stepped otherwise, such as for each epoch, leave schedule= out, and bring it to optimizer.round in "
                "the script",
                expected=f"{begin} steps of the schedule after round {position.round}",
                actual=self.schedule.last_epoch,
            )

    def _move_to(self, target: int) -> None:
        """Step the schedule until it has taken `target` steps, from its state at the first call if it is ahead."""
        if self._start > target:
            raise BadModel(
                f"the schedule had taken {self._start} steps before the first call of epochs(), and the run has "
                f"taken {target}. If they are of a checkpoint of the script's own, give first_epoch=, the epoch that "
                "follows it; else create the schedule without loading its state, since epochs() steps it"
            )
        if self.schedule.last_epoch > target:
            state, groups = copy.deepcopy(self._saved)
            self.schedule.load_state_dict(state)
            for group, saved in zip(self.schedule.optimizer.param_groups, groups, strict=True):
                group.update({**saved, "params": group["params"]})
        if self.schedule.last_epoch < target:
            vars(self.schedule.optimizer)["_opt_called"] = True  # an earlier incarnation has stepped, or the rollback
        while self.schedule.last_epoch < target:
            self.schedule.step()


def _set_epoch(loader: Iterable[Any], number: int) -> None:
    for part in _parts(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)


def _parts(loader: Iterable[Any]) -> list[Any]:
    """Return a loader, its samplers, and the samplers that those wrap."""
    parts: list[Any] = [loader]
    for part in parts:  # grows meanwhile
        inner = (getattr(part, name, None) for name in ("sampler", "batch_sampler"))
        parts += [one for one in inner if one is not None and all(one is not known for known in parts)]
    return parts


def _length(loader: Iterable[Any]) -> int:
    """Return the number of batches. Raises BadModel where only an iteration shows it."""
    if isinstance(loader, Sized) and not (
        isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)  # such a length is a guess
    ):
        return len(loader)
    raise BadModel(
        "epochs() needs a loader with a length, and this one streams. Begin the loop at optimizer.round in the script"
    )


def _skip(loader: Iterable[Any], skipped: int) -> Iterator[Any]:
    """Iterate without the first batches; a DataLoader with a batch sampler does not load them."""
    # The loader of accelerate iterates over another one.
    is_plain = getattr(type(loader), "__iter__", None) is DataLoader.__iter__
    if skipped and is_plain and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        rest = copy.copy(loader)
        # A DataLoader refuses the assignment to itself, since its workers may be running; the copy has none.
        vars(rest).update(batch_sampler=islice(loader.batch_sampler, skipped, None), _iterator=None)
        return iter(rest)
    return islice(loader, skipped, None)
