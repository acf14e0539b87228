"""The queues of an asynchronous run: one with a worker for each block, and the jobs that apply their updates.

A contribution enters all its queues together (ADR 5).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from ps_protocol.encodings import Rows
from ps_protocol.errors import Ended, GradpostError
from ps_protocol.optimizers import HyperParameters
from services.runtime.logs import get_logger

from ..shard.bodies import StagedBlock
from .clocks import Clocks, Committed, PulledState
from .run import Run

log = get_logger()


@dataclass(slots=True)
class BlockUpdate:
    """One trainer's gradient for a block, the pull that it was computed on, and the hyperparameters of its step."""

    name: str  # of the block
    committed: Committed[StagedBlock]
    block: StagedBlock
    pull: PulledState
    hyper_parameters: list[HyperParameters]
    done: asyncio.Future[None] = field(init=False)  # for which the worker of the block waits
    error: Exception | None = None  # of its step


ApplyUpdate: TypeAlias = Callable[[BlockUpdate], Awaitable[None]]


class BlockQueue:
    """A bounded queue that never waits for room: the caller puts a contribution only if all its queues have room.

    `apply` runs an update; if it raises, the block stops, and `failure` has the reason.
    """

    def __init__(self, name: str, *, max_queued: int, apply: ApplyUpdate) -> None:
        self.name = name
        self.failure: GradpostError | None = None
        self.num_updates = 0  # updates that are queued or being applied
        self._queue: asyncio.Queue[BlockUpdate] = asyncio.Queue()
        self._max_queued = max_queued
        # The task alone refers to `apply`, which refers to the run, until it ends.
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._work(apply), name=f"block {name}")

    def __repr__(self) -> str:
        state = "stopped" if self.failure else f"{self.num_updates} of {self._max_queued} queued"
        return f"<BlockQueue {self.name} [{state}]>"

    @property
    def has_room(self) -> bool:
        """True if one more update may be put."""
        return self.num_updates < self._max_queued

    @property
    def is_working(self) -> bool:
        """True if the queued updates will be applied."""
        return self.failure is None and self._task is not None

    def put_update(self, update: BlockUpdate) -> None:
        """Queue an update, for which there is room."""
        self.num_updates += 1
        self._queue.put_nowait(update)

    def close(self) -> None:
        """End the task and drop the queued updates."""
        if self._task is not None:
            self._task.cancel()
            self._task = None  # a cancelled task keeps its frames, and these refer to this queue

    async def _work(self, apply: ApplyUpdate) -> None:
        while self.failure is None:
            update = await self._queue.get()
            await self._apply_update(update, apply)
            del update  # the buffer of its body returns to the pool

    async def _apply_update(self, update: BlockUpdate, apply: ApplyUpdate) -> None:
        try:
            await apply(update)
        except Exception as error:
            log.exception("a block's worker failed; the block has stopped", block=self.name)
            text = f"block {self.name!r} has stopped, because its optimizer failed: {error}"
            self.failure = copy.copy(error) if isinstance(error, Ended) else Ended(text, code="apply_failed")
            while not self._queue.empty():
                self._queue.get_nowait()
                self.num_updates -= 1
        self.num_updates -= 1


class UpdateJobs:
    """The jobs that apply updates. Those of one contribution are stepped together, and a failure stops all of them.

    Stepping a small block takes less time than a job, a call of the optimizer and a notification of the waiting
    requests. So the updates that are due in one turn of the event loop share these three. The layout makes the bits of
    a block independent of the blocks that are stepped with it.
    """

    def __init__(self, run: Run, schedule: Clocks[StagedBlock]) -> None:
        self._run = run
        self._schedule = schedule
        self._shard = run.shard
        self._rules = run.installed.consistency
        self._due: list[BlockUpdate] = []  # in this turn of the event loop
        self._newest: asyncio.Task[None] | None = None

    async def apply(self, update: BlockUpdate) -> None:
        """Apply an update of a block, for its worker. Raises the error of its step."""
        if not self._due:
            self._newest = asyncio.create_task(self._apply_due(), name="updates")
        update.done = asyncio.get_running_loop().create_future()
        self._due.append(update)
        await update.done

    async def _apply_due(self) -> None:
        due = [each for each in self._due if not each.done.cancelled()]  # a queue that is closed cancels its worker
        self._due = []
        if not due:
            return
        begin = perf_counter()
        try:
            await self._run.run_update(self._step_all, due)
        except Exception as error:  # before any step, as once the compute thread is closed; no worker waits for ever
            for each in due:
                each.error = error
        seconds = perf_counter() - begin
        metrics, before = self._run.metrics, self._schedule.applied
        for each in due:
            if each.error is None:
                metrics.apply_seconds.observe(seconds)
                self._schedule.count_applied_block(each.committed)
        self._shard.version = self._schedule.applied
        metrics.rounds.inc(self._schedule.applied - before)
        metrics.updates.inc(sum(each.error is None for each in due))
        for each in due:
            if each.done.cancelled():
                continue
            if each.error is None:
                each.done.set_result(None)
            else:
                each.done.set_exception(each.error)
        await asyncio.sleep(0)  # the workers go first: the waiting requests read the queues
        await self._run.waits.notify()

    def _step_all(self, due: Sequence[BlockUpdate]) -> None:
        """Step blocks, each of them once, as a job."""
        together: dict[tuple[int, int], list[BlockUpdate]] = {}  # with the same hyperparameters and counter
        for each in due:
            staleness = self._shard.versions[each.name] - each.pull.versions[each.name]
            self._run.metrics.staleness.observe(staleness)
            divisor = staleness if self._rules.compensation == "divide" else 1
            together.setdefault((each.committed.number, divisor), []).append(each)
        for (_, divisor), group in together.items():
            try:
                self._step(group, divisor)
            except Exception as error:
                for each in group:
                    each.error = error

    def _step(self, group: Sequence[BlockUpdate], divisor: int) -> None:
        rules, shard, gradients, rows = self._rules, self._shard, dict[str, Tensor](), dict[str, Rows]()
        for each in group:
            if each.block.rows is not None:
                rows[each.name] = each.block.rows
                continue
            gradient, place = each.block.tensor(), shard.layout.place[each.name]
            if rules.compensation == "dc" and not place.buffer_rule:
                assert each.pull.values is not None
                pulled = each.pull.values[place.begin : place.end]
                gradient = compensate_gradient(gradient, shard.block(each.name), pulled, rules.dc_lambda)
            gradients[each.name] = gradient
        first = group[0]
        rates = divide_rates(first.hyper_parameters, divisor)
        shard.apply_blocks(gradients, rates, rows, counter=first.committed.rank)
        self._run.metrics.touched_rows.inc(shard.changes.num_newest)


def divide_rates(hyper_parameters: Sequence[HyperParameters], staleness: int) -> list[HyperParameters]:
    """Return the groups' hyperparameters with every learning rate divided by the staleness, or by 1 if it is 0.

    Zhang, Gupta, Lian, Liu: Staleness-aware async-SGD for distributed deep learning (IJCAI 2016), eq. 6.
    """
    return [{**group, "lr": group["lr"] / max(1, staleness)} for group in hyper_parameters]  # type: ignore[operator]


def compensate_gradient(gradient: Tensor, values: Tensor, pulled: Tensor, strength: float) -> Tensor:
    """Return the DC-ASGD gradient `g + λ·g⊙g⊙(w - w_pulled)`, an estimate of the gradient on the current values.

    All tensors are of one block, of shape (num_elements,), and are only read. The result is a new float32 tensor.

    Zheng et al.: Asynchronous stochastic gradient descent with delay compensation (ICML 2017), eq. 10.
    """
    total = gradient.to(torch.float32, copy=True)
    return total.addcmul_(total.square(), values - pulled, value=strength)
