"""A trainer's steps on their way: gradients out, parameters in, up to `max_delay` steps behind the computation.

    step t:  begin(t) ──push to every pserver──► pull ──► memory of step t, set t mod (k + 1)
                                                  └─ step t may only return once step t - k has been pulled

Pushes leave in the order of the steps, and so do pulls; a push of step t + 1 and the pull of step t overlap. If a step
fails, all later steps fail with it, and are not pushed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from ps_protocol.vocabulary import Round

from ..client.run_client import RunClient
from ..transport.destinations import PullProgress, write_back
from ..transport.device_copies import GradientCopies, ParameterCopies, is_away
from .engine import StepGradients
from .state_transfer import StateFrames
from .step_exchange import StepExchange
from .step_memory import StepMemory


class Pipeline:
    """The steps of one trainer on their way. The training thread calls all methods; `wait` blocks for the network.

    Gradients are sent from their own memory if the script computes nothing meanwhile and they have their form on the
    wire; else from copies. The memory of step t is not used again until step t + 1 + k begins.
    """

    def __init__(self, client: RunClient, parameters: Mapping[str, Tensor], *, overlap_pulls: bool) -> None:
        """Allocate the memory. `overlap_pulls`: the script computes with parameters while others are missing."""
        self.max_delay = client.joined.consistency.max_delay
        self.newest_pulled: Round = 0  # the newest step whose pull has ended, as far as `wait` has looked
        self._client = client
        self._parameters = parameters
        self._overlap_pulls = overlap_pulls
        self._is_async = client.joined.consistency.is_async
        self._memory = [StepMemory(client, parameters) for _ in range(self.max_delay + 1)]
        self._gradient_copies = GradientCopies()
        self._parameter_copies = ParameterCopies(overlap_pulls=overlap_pulls)
        self._next: StepExchange | None = None  # of the step that begins next, once it has gradients
        self._begun: dict[Round, StepExchange] = {}  # the steps that `wait` has not ended yet, in order
        self._arrivals: dict[Round, PullProgress] = {}  # with `overlap_pulls`, of these steps
        if overlap_pulls or client.settings.overlap or self.max_delay:
            client.io.use_thread()

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
        self.discard_steps()
        self.forget_bases()
        self._client.io.run(self._client.pservers.pull(version, self._memory_of(version).destinations))
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
        dense = {name: parameter for name, parameter in parameters.items() if name in memory.received}
        write_back(dense, memory.received, self._parameter_copies)
        memory.write_rows(parameters)

    def read_rows(self, version: Round) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the rows that the pull of this version has brought: see `StepMemory.read_rows`."""
        return self._memory_of(version).read_rows()

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
        if self._next is None:
            self._next = self._begin_exchange(step)
        self._next.add(name, gradient)

    def discard_gradients(self) -> None:
        """Discard the gradients of a step that has not begun. Pservers keep the blocks that are staged."""
        self._gradient_copies.discard()
        if self._next is not None:
            exchange, self._next = self._next, None
            self._arrivals.pop(exchange.step, None)
            exchange.give_up()

    def begin_step(self, step: Round, pushed: StepGradients, state_frames: Sequence[StateFrames] | None = None) -> None:
        """Start to push all gradients, and optimizer state if there is any; a pull will follow.

        Blocks for copies from and to a device. Raises NonFiniteGradient: see `StepExchange.complete`.
        """
        self._parameter_copies.wait_for_copies(self._parameters)
        gradients = self._copy_to_host(step, pushed.gradients)
        exchange = self._next = self._next or self._begin_exchange(step)
        if self._is_async:
            self._client.coordinator.counted_round = step
        try:
            exchange.complete(gradients, pushed.completion, state_frames, is_finite=pushed.is_finite)
        except BaseException:
            self.discard_gradients()
            raise
        self._next = None
        self._begun[step] = exchange
        self._client.steps = [exchange.started for exchange in self._begun.values()]

    def _copy_to_host(self, step: Round, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        away = {name: gradients[name] for name in reversed(list(gradients)) if is_away(gradients[name])}
        if not away:
            return gradients
        host = self._memory_of(step).gradients
        self._gradient_copies.begin_copies(host, away)
        for arrived, copied in self._gradient_copies.finish():
            self._add(step, arrived, copied)
        return {**gradients, **{name: host[name] for name in away}}

    def _begin_exchange(self, step: Round) -> StepExchange:
        # Gradients stay as they are if no computation runs before the step was pulled.
        borrow = self.max_delay == 0 and not self._overlap_pulls
        arrivals = None
        if self._overlap_pulls:
            arrivals = self._arrivals[step] = PullProgress(self._client.run.plan.blocks_of)
        memory, previous = self._memory_of(step), self._begun.get(step - 1)
        return StepExchange(self._client, step, memory, previous, borrow=borrow, arrivals=arrivals)

    # ------------------------------------------------------------------ parameters in

    def wait(self, step: Round) -> Round:
        """Wait until this step was pulled, and return the newest pulled step. Raises the error of a failed step."""
        try:
            while (exchange := self._begun.get(self.newest_pulled + 1)) is not None:
                if self.newest_pulled >= step and not exchange.started.is_done:
                    break
                self._client.io.wait(exchange.started)
                self.newest_pulled += 1
                del self._begun[self.newest_pulled]
                self._arrivals.pop(self.newest_pulled, None)
        except BaseException:
            self.discard_steps()
            raise
        return self.newest_pulled

    def wait_for(self, step: Round, names: Collection[str]) -> None:
        """Wait until some parameters of the newest step have arrived. Raises the errors of `wait`."""
        if step > self.newest_pulled and not all(map(self._arrivals[step].wait, names)):
            self.wait(step)

    def discard_steps(self) -> bool:
        """Give up all steps and pulls in flight; return False if there were none that have begun."""
        has_begun = bool(self._begun)
        for exchange in self._begun.values():
            exchange.give_up()
        self._begun.clear()
        self._arrivals.clear()
        self.discard_gradients()
        return has_begun
