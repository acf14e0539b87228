"""A trainer's steps on their way: gradients out, parameters in, up to `max_delay` steps behind the computation.

    step t:  begin(t) ──push to every pserver──► pull ──► memory of step t, set t mod (k + 1)
                                                  └─ step t may only return once step t - k has been pulled

Pushes leave in the order of the steps, and so do pulls; a push of step t + 1 and the pull of step t overlap. If a step
fails, all later steps fail with it, and are not pushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from time import perf_counter

from torch import Tensor

from ps_protocol.errors import BadInput
from ps_protocol.requests import Barrier
from ps_protocol.vocabulary import Round

from ..client.run_client import RunClient
from ..session.io_thread import IoThread
from ..transport.destinations import PullProgress, write_back
from ..transport.device_copies import GradientCopies, ParameterCopies, is_away
from .engine import StepGradients
from .outgoing import Outgoing, note_task
from .state_transfer import StateFrames
from .step_memory import StepMemory


class Pipeline:
    """The pushes and pulls of one trainer. The training thread calls all methods; `wait` blocks for the network.

    Gradients are sent from their own memory if the script computes nothing meanwhile and they have their form on the
    wire; else from copies. The memory of step t is not used again until step t + 1 + k begins.
    """

    def __init__(
        self, client: RunClient, io: IoThread, parameters: Mapping[str, Tensor], *, overlap_pulls: bool
    ) -> None:
        """Allocate the memory. `overlap_pulls`: the script computes with parameters while others are missing."""
        self.max_delay = client.joined.consistency.max_delay
        self.newest_pulled: Round = 0  # the newest step whose pull has ended, as far as `wait` has looked
        self._client = client
        self._pservers = client.pservers
        self._io = io
        self._parameters = parameters
        self._overlap_pulls = overlap_pulls
        self._is_async = client.joined.consistency.is_async
        self._memory = [StepMemory(client, parameters) for _ in range(self.max_delay + 1)]
        self._gradient_copies = GradientCopies()
        self._parameter_copies = ParameterCopies(overlap_pulls=overlap_pulls)
        self._outgoing: Outgoing | None = None  # the step that begins next, once it has gradients
        self._previous_pushes: asyncio.Future[bool] | None = None  # those of the newest step that has begun
        self._pulls: dict[Round, Future[None]] = {}  # the pulls that `wait` has not ended yet, in order
        self._arrivals: dict[Round, PullProgress] = {}  # with `overlap_pulls`, of the steps in `_pulls`
        self._newest_pull: Future[None] | None = None

    def _memory_of(self, step: Round) -> StepMemory:
        return self._memory[step % len(self._memory)]

    # ------------------------------------------------------------------ the parameters. No step may be on its way.

    def follow_parameters(self) -> None:
        """Use the memory that the parameters have now."""
        for memory in self._memory:
            memory.follow_parameters()

    def forget_bases(self) -> None:
        """Pull all blocks the next time, because the script has changed the received values."""
        for memory in self._memory:
            memory.forget_base()

    def pull_start(self, version: Round) -> None:
        """Pull `version`, from which the next step starts. Discard all steps and pulls in flight."""
        self._discard_steps()
        self.forget_bases()
        self._io.run(self._pservers.pull(version, self._memory_of(version).destinations))
        self.newest_pulled = version

    def write_back(self, version: Round, names: Collection[str], *, bumps_version: bool) -> None:
        """Write a pulled version to these parameters.

        Parameters that the pull left out, because they have not changed, stay untouched. Unless `bumps_version`,
        autograd does not see the write. In both cases the graph of an earlier pass stays valid.
        """
        memory = self._memory_of(version)
        if not self._overlap_pulls:  # else the pull may not have ended
            names = memory.changed.intersection(names)
        parameters = {name: self._parameters[name] for name in names}
        if not bumps_version:
            parameters = {name: parameter.data for name, parameter in parameters.items()}
        write_back(parameters, memory.received, self._parameter_copies)

    # ------------------------------------------------------------------ gradients out

    def add(self, step: Round, name: str, gradient: Tensor) -> None:
        """Add a flat gradient of the next step. It may be sent immediately, and must not change any more."""
        if not is_away(gradient):
            self._add(step, name, gradient)
            return
        self._gradient_copies.begin_copies(self._memory_of(step).gradients, {name: gradient})
        for arrived, host in self._gradient_copies.arrived():
            self._add(step, arrived, host)

    def _add(self, step: Round, name: str, gradient: Tensor) -> None:
        if self._outgoing is None:
            self._outgoing = self._begin_pushes(step)
        self._outgoing.add(name, gradient)

    def discard_gradients(self) -> None:
        """Discard the gradients of a step that has not begun. Pservers keep the blocks that are staged."""
        self._gradient_copies.discard()
        if self._outgoing is not None:
            self._outgoing.cancel()
            self._memory_of(self._outgoing.step).discard_pushes()
            self._outgoing = None

    def begin_step(self, step: Round, pushed: StepGradients, state_frames: Sequence[StateFrames] | None = None) -> None:
        """Start to push all gradients, and optimizer state if there is any; a pull will follow.

        Blocks for copies from and to a device.
        """
        self._parameter_copies.wait_for_copies(self._parameters)
        gradients = self._copy_to_host(step, pushed.gradients)
        outgoing = self._outgoing = self._outgoing or self._begin_pushes(step)
        if self._is_async:
            self._client.coordinator.counted_round = step
        try:
            outgoing.complete(gradients, pushed.completion, state_frames)
        except BaseException:
            self.discard_gradients()
            raise
        self._outgoing = None
        self._previous_pushes = outgoing.pushes_done  # only now: no step waits for a step that could not begin
        arrivals = PullProgress(self._client.run.plan.blocks_of) if self._overlap_pulls else None
        pull = self._io.start(self._pull(outgoing, self._newest_pull, pushed.is_finite, arrivals))
        if arrivals is not None:
            self._arrivals[step] = arrivals
            pull.add_done_callback(lambda _: arrivals.end())
        self._pulls[step] = self._newest_pull = pull

    def _copy_to_host(self, step: Round, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        away = {name: gradients[name] for name in reversed(list(gradients)) if is_away(gradients[name])}
        if not away:
            return gradients
        host = self._memory_of(step).gradients
        self._gradient_copies.begin_copies(host, away)
        for arrived, copied in self._gradient_copies.finish():
            self._add(step, arrived, copied)
        return {**gradients, **{name: host[name] for name in away}}

    def _begin_pushes(self, step: Round) -> Outgoing:
        self._pservers.begin_pushes(step)
        # Gradients stay as they are if no computation runs before the step was pulled.
        borrow = self.max_delay == 0 and not self._overlap_pulls
        buckets = self._memory_of(step).buckets
        return Outgoing(self._pservers, self._io, step, buckets, self._previous_pushes, borrow=borrow)

    # ------------------------------------------------------------------ parameters in

    async def _pull(
        self, outgoing: Outgoing, previous_pull: Future[None] | None, is_finite: bool, arrivals: PullProgress | None
    ) -> None:
        note_task(self._client.unfinished)
        step, pushed = outgoing.step, outgoing.take_whole()
        is_finite_everywhere = await outgoing.join()
        self._client.coordinator.counted_round = step  # the next request carries the batch barrier
        acknowledged = perf_counter()
        if previous_pull is not None:
            await asyncio.wrap_future(previous_pull)
        try:
            await self._pservers.pull(
                step,
                self._memory_of(step).destinations,
                barrier=None if self._is_async else Barrier("batch", is_finite and is_finite_everywhere),
                on_block=None if arrivals is None else arrivals.mark_complete,
                pushed=pushed,
            )
        except BadInput:
            if len(pushed) == 1:  # it was refused, and its barrier with it
                self._client.coordinator.counted_round = 0
            raise
        metrics, ended = self._client.metrics, perf_counter()
        metrics.push_seconds.observe(acknowledged - outgoing.begun)
        metrics.pull_seconds.observe(ended - acknowledged)
        metrics.rounds.inc()
        metrics.round.set(step)

    def wait(self, step: Round) -> Round:
        """Wait until this step was pulled, and return the newest pulled step. Raises the error of a failed step."""
        try:
            while (pull := self._pulls.get(self.newest_pulled + 1)) is not None:
                if self.newest_pulled >= step and not pull.done():
                    break
                self._io.wait(pull)
                self.newest_pulled += 1
                del self._pulls[self.newest_pulled]
                self._arrivals.pop(self.newest_pulled, None)
        except BaseException:
            self._discard_steps()
            raise
        return self.newest_pulled

    def wait_for(self, step: Round, names: Collection[str]) -> None:
        """Wait until some parameters of the newest step have arrived. Raises the errors of `wait`."""
        if step > self.newest_pulled and not all(map(self._arrivals[step].wait, names)):
            self.wait(step)

    def _discard_steps(self) -> None:
        """Cancel all steps and pulls in flight."""
        for step, pull in self._pulls.items():
            pull.cancel()
            self._memory_of(step).discard_pushes()
        self._pulls.clear()
        self._arrivals.clear()
        self._newest_pull = self._previous_pushes = None
        self.discard_gradients()
