"""The exchange of one step with the pservers: gradients out, and the parameters of the step in.

Full buckets are sent early. The last bucket of each pserver is kept for the end, because its frame describes the whole
contribution and the hyperparameters, which are known only in `step()`. Where nothing has to happen between the push of
the last frame and the pull, the request that pulls carries it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter

from torch import Tensor

from ps_protocol.errors import BadInput, GradpostError
from ps_protocol.requests import Barrier, Completion
from ps_protocol.vocabulary import PserverIndex, Round

from ..client.buckets import Bucket, FrameParts, count_blocks
from ..client.pserver_group import MAX_CONCURRENT_PUSHES
from ..client.run_client import RunClient
from ..transport.destinations import PullProgress
from ..transport.exchange import Started
from ..transport.work import Batch, Work
from .state_transfer import StateFrames
from .step_memory import StepMemory


class StepExchange:
    """One step's pushes and its pull. `run` is work of the client's `Exchange`; one thread at a time calls the rest.

    With `borrow` gradients are sent from their own memory, and must not change until the step was pulled.
    """

    def __init__(
        self,
        client: RunClient,
        step: Round,
        memory: StepMemory,
        previous: StepExchange | None,
        *,
        borrow: bool,
        arrivals: PullProgress | None,
    ) -> None:
        """Start the exchange without frames. Its pushes wait for those of `previous`, and its pull for that pull.

        `arrivals` counts the blocks of the pull.
        """
        self.step = step
        self.memory = memory
        self._client = client
        self._pservers = client.pservers
        self._buckets = memory.buckets
        self._previous = previous
        self._borrow = borrow
        self._arrivals = arrivals
        self._gradients: dict[str, Tensor] = {}
        self._sent_early: set[Bucket] = set()
        self._frames: deque[tuple[PserverIndex, FrameParts]] = deque()  # that no request carries yet
        self._last: dict[PserverIndex, FrameParts] = {}  # frames that the pulls carry
        self._barrier: Barrier | None = None
        self._has_all_frames = False
        self._is_pushed = False
        self._pservers.begin_pushes(step)
        self.started: Started[None] = client.io.start(self._run())

    def __repr__(self) -> str:
        return f"<StepExchange {self.step} [{'done' if self.started.is_done else 'under way'}]>"

    # ------------------------------------------------------------------ gradients, from the script's thread

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a flat gradient, which must not change any more. A bucket with NaN or infinity is left to `complete`."""
        self._gradients[name] = gradient
        for bucket in self._buckets.holding.get(name, ()):
            is_last = bucket is self._buckets.shards[bucket.pserver][-1]
            if bucket.parameters <= self._gradients.keys() and not is_last and bucket not in self._sent_early:
                bucket.fill(self._gradients, borrow=self._borrow)
                if self._pservers.find_nonfinite(bucket) is None:
                    self._push(bucket.pserver, bucket.frame())
                    self._sent_early.add(bucket)

    def complete(
        self,
        gradients: Mapping[str, Tensor],
        completion: Completion,
        state_frames: Sequence[StateFrames] | None = None,
        *,
        is_finite: bool,
    ) -> None:
        """Push the remaining buckets, without parameters that have no gradient, and the frames of optimizer state.

        `is_finite` is False if the gradients have overflowed, and were cleared. Raises NonFiniteGradient: see
        `PserverGroup.withhold_nonfinite`.
        """
        remaining = [bucket for bucket in self._buckets.in_order if bucket not in self._sent_early]
        for bucket in remaining:
            bucket.fill(gradients, borrow=self._borrow)
        is_finite &= self._pservers.withhold_nonfinite(self.step, remaining)
        for pserver, of_pserver in enumerate(state_frames or ()):
            for frame in of_pserver.frames:
                self._push(pserver, frame)
        for bucket in remaining:
            shard = self._buckets.shards[bucket.pserver]
            if bucket is shard[-1]:
                num_loaded = state_frames[bucket.pserver].num_entries if state_frames else 0
                frame = bucket.frame(count_blocks(shard, completion, num_loaded))
                if self._pservers.takes_whole_steps:
                    self._last[bucket.pserver] = frame
                else:
                    self._push(bucket.pserver, frame)
            elif bucket.present:
                self._push(bucket.pserver, bucket.frame())
        self._barrier = None if self._client.joined.consistency.is_async else Barrier("batch", is_finite)
        self._has_all_frames = True
        self._client.io.notify()

    def _push(self, pserver: PserverIndex, frame: FrameParts) -> None:
        self._frames.append((pserver, frame))
        self._client.io.make_progress()

    def give_up(self) -> None:
        """Give up the step, which is pushed again as a whole. Once this returns, nothing reads the gradients."""
        if not self.started.is_done:
            self._client.io.give_up(self.started)
        self._pservers.forget_pushes(self.step)
        self._gradients.clear()
        self._frames.clear()
        self._last.clear()

    # ------------------------------------------------------------------ work

    def _run(self) -> Work[None]:
        arrivals, coordinator, metrics = self._arrivals, self._client.coordinator, self._client.metrics
        begun = perf_counter()
        try:
            yield from self._push_frames()
            acknowledged = perf_counter()
            coordinator.counted_round = self.step  # the next request carries the batch barrier
            yield from self._pservers.pull(
                self.step,
                self.memory.destinations,
                barrier=self._barrier,
                on_block=None if arrivals is None else arrivals.mark_complete,
                pushed=[self._last[pserver] for pserver in sorted(self._last)],
            )
        except BadInput:
            if len(self._last) == 1:  # it was refused, and its barrier with it
                coordinator.counted_round = 0
            raise
        finally:
            if arrivals is not None:
                arrivals.end()
        metrics.push_seconds.observe(acknowledged - begun)
        metrics.pull_seconds.observe(perf_counter() - acknowledged)
        metrics.rounds.inc()
        metrics.round.set(self.step)

    def _push_frames(self) -> Work[None]:
        """Push all frames but the last ones, and wait until they are acknowledged, and the step before is pulled."""
        previous, self._previous = self._previous, None
        while previous is not None and not previous._is_pushed:
            if previous.started.is_done:
                raise GradpostError(f"step {self.step} was not pushed, because the step before it failed")
            yield math.inf
        pushes: Batch[None] = Batch()
        most = MAX_CONCURRENT_PUSHES * len(self._buckets.shards)
        try:
            while not self._has_all_frames or self._frames or len(pushes):
                while self._frames and len(pushes) < most:
                    pushes.add(self._pservers.push(self.step, *self._frames.popleft()))
                due = pushes.advance()
                if len(pushes) or not self._has_all_frames:
                    yield due
        finally:
            pushes.close()
        self._is_pushed = True
        if previous is not None and not previous.started.is_done:
            yield 0.0  # for the step after this one
            while not previous.started.is_done:
                yield math.inf
        if previous is not None and previous.started.error is not None:
            raise previous.started.error
