"""Steps as a script sees them: begun, on their way, in its parameters; and back again when the run goes back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from ps_protocol.errors import (
    BadModel,
    ContributionConflict,
    Ended,
    GradpostError,
    NonFiniteGradient,
    RolledBack,
    Unreachable,
)
from ps_protocol.optimizers import HyperParameters, StepState
from ps_protocol.vocabulary import Round

from .buffer_averages import BufferAverages
from .destinations import Destinations, make_destinations, write_back
from .device_copies import GradientCopies, ParameterCopies, is_away
from .local_steps import LocalSteps
from .optimizer_state.loading import Loading
from .optimizer_state.torch_state import OptimizerState
from .optimizer_state.transfer import pull_optimizer_state
from .pipeline import Pipeline
from .session import Session
from .tensors import writable_bytes


class Contribution(NamedTuple):
    """The arguments of a step."""

    gradients: Mapping[str, Tensor]  # flat, by parameter name
    numbers: list[HyperParameters]
    is_finite: bool


class Steps:
    """The steps of one trainer whose model is declared. All methods block for the network unless stated otherwise."""

    def __init__(
        self,
        session: Session,
        parameters: Mapping[str, Tensor],
        stored: Mapping[str, Tensor],
        local: LocalSteps | None,
        averages: BufferAverages,
    ) -> None:
        """`stored` is what else belongs to the model, and is pulled once. Pulls the values that the run begins with."""
        self._client, self._io = session.client, session.io
        self._leads = session.host is not None  # other processes, without which it finishes no step
        self._averages = averages
        self._parameters = parameters = {**parameters, **averages.means}
        self._stored = stored
        self._local = local
        self._is_by_parameter = self._client.settings.overlap_pulls
        self._pipeline = Pipeline(self._client, self._io, by_parameter=self._is_by_parameter)
        self._destinations = Destinations(
            parameters, self._client.plan, self._pipeline.max_delay, are_awaited=self._is_by_parameter
        )
        self._copies = GradientCopies(self._pipeline.max_delay + 1)
        self._pipeline.bind(self._destinations.sets)
        self.begun: Round = 0  # the newest one
        self.version: Round = 0  # the step whose pull is in the parameters
        self.num_rollbacks = 0  # that this trainer has followed
        self._pending: set[str] = set()  # by parameter: those that the newest step's pull has not been taken into
        self._refused: NonFiniteGradient | None = None
        self._under_way: Contribution | None = None  # of the newest step, where `step` waits for it
        self._unfinished: Contribution | None = None  # a copy, of a step that failed after its push had begun
        self._has_lost_steps = False  # several had begun when one failed
        self._has_stored = False  # no round changes it
        self._loading = Loading(self._client, self._parameters)
        self._begin_after(self._client.start - 1)

    def _begin_after(self, version: Round, *, is_noticed: bool = True) -> None:
        """Take the parameters of this version, or of another if the run goes back meanwhile, as those to go on with."""
        while True:
            try:
                if self._client.must_upload:
                    self._io.run(self._client.send_initial(self._initial_values()))
                self._pipeline.pull_start(version)
                self._land(version, set(self._parameters), is_noticed=is_noticed)
                if self._stored and not self._has_stored:
                    self._pull_stored()
            except RolledBack:
                version = self._io.run(self._client.go_back())
            else:
                self.begun = self.version = version
                self._loading.note_rollback(version)
                self._averages.write_back()
                return

    def _initial_values(self) -> dict[str, Tensor]:
        """Return the values that the run begins with. Raises `pserver_lost` after the first round."""
        if self.version > 0:
            text = "the pservers have lost all that was trained, and there is no checkpoint"
            raise Ended(f"{text}; this trainer had round {self.version}", code="pserver_lost")
        begun = {} if self._local is None else self._local.starting_values
        values = {**self._parameters, **begun, **self._stored}
        return {name: tensor.detach().to("cpu") for name, tensor in values.items()}

    def _pull_stored(self) -> None:
        landing = make_destinations(self._stored, {name: tensor.dtype for name, tensor in self._stored.items()})
        self._io.run(self._client.pull_buffers({name: writable_bytes(tensor) for name, tensor in landing.items()}))
        write_back(self._stored, landing, ParameterCopies(are_awaited=False))
        self._has_stored = True

    def refresh_parameters(self) -> None:
        """Follow parameters that the script has given other memory. Does not block."""
        if self._destinations.has_moved():
            self._pipeline.bind(self._destinations.sets)
        if self._local is not None:  # whose optimizer changes them
            self._pipeline.forget_versions()

    def replace_values(self, names: Collection[str]) -> None:
        """Begin the next step from the values that these parameters have now, on all trainers. Does not block.

        Before the first round those of the trainer that brings the initial values count, later those of the lowest
        rank that calls it. No step may be on its way.
        """
        self._pipeline.forget_versions()
        if self._local is not None:
            self._local.begin()
        values = {name: self._parameters[name].detach().to("cpu", torch.float32, copy=True) for name in names}
        self._loading.load_masters({name: value.reshape(-1) for name, value in values.items()}, self.begun)

    @property
    def pending(self) -> Set[str]:
        """The parameters that the newest step's pull has not been taken into, if they are waited for one by one."""
        return self._pending if self._is_by_parameter else frozenset()

    def add(self, name: str, gradient: Tensor) -> None:
        """Take a flat gradient of the next step, before that begins. Does not block.

        One that is on a device leaves when a later one is added, or the step begins: once it has been copied.
        """
        self._check_repeated({name: gradient}, (name,))
        if not is_away(gradient):
            self._pipeline.add(self.begun + 1, name, gradient)
            return
        self._copies.begin(self.begun + 1, {name: gradient})
        for arrived, host in self._copies.arrived():
            self._pipeline.add(self.begun + 1, arrived, host)

    def forget_gradients(self) -> None:
        """Give up what was added; what is staged already stays. Does not block."""
        self._copies.forget()
        self._pipeline.forget_gradients()

    def begin(self, gradients: Mapping[str, Tensor], numbers: list[HyperParameters], *, is_finite: bool) -> None:
        """Begin the next step, with all its flat gradients. Blocks for those that are on a device, and have to come."""
        step = self.begun + 1
        self._check_repeated(gradients, self._parameters)
        if self._pipeline.max_delay == 0 and not self._is_by_parameter:
            self._under_way = Contribution(gradients, numbers, is_finite)
        self._destinations.begin()
        gradients = {**gradients, **self._averages.changed_values()}
        away = {name: gradients[name] for name in reversed(list(gradients)) if is_away(gradients[name])}
        if away:
            self._copies.begin(step, away)
            for arrived, host in self._copies.finish():
                self._pipeline.add(step, arrived, host)
            gradients = {**gradients, **{name: self._copies.host(step, name) for name in away}}
        slots = self._loading.frames_for(step)
        try:
            self._pipeline.begin(step, gradients, numbers, computed_on=self.version, is_finite=is_finite, slots=slots)
        except BaseException as error:
            if not isinstance(error, GradpostError):
                self._keep_contribution()
            raise
        self.begun = step
        self._pending = set(self._parameters)

    def _check_repeated(self, gradients: Mapping[str, Tensor], names: Collection[str]) -> None:
        """Raise ContributionConflict unless these gradients are those of the step that did not finish, if one did not.

        A pserver that has applied a round accepts any other gradient for it as a repetition, and drops it.
        """
        if self._has_lost_steps:
            raise ContributionConflict(
                "step() was interrupted or failed while several steps were on their way, and pservers may have counted "
                "some of them: the script has to end, and may be started again"
            )
        before = {} if self._unfinished is None else self._unfinished.gradients
        for name in names if self._unfinished is not None else ():
            old, new = before.get(name), gradients.get(name)
            if old is not new and (old is None or new is None or not torch.equal(old, new)):
                finish = (
                    "Call synchronize() to finish that round, and then compute this gradient again on its parameters"
                )
                remedy = "The script has to end, and may be started again" if self._leads else finish
                raise ContributionConflict(
                    f"step() was interrupted or failed in round {self.begun + 1}, whose gradient of {name!r} pservers "
                    f"may have counted, and this one is another. {remedy}"
                )

    @property
    def is_unfinished(self) -> bool:
        """True if a step was interrupted or failed after its push had begun."""
        return self._unfinished is not None

    def finish(self) -> None:
        """Take the unfinished step once more, with the gradient that it had."""
        assert self._unfinished is not None
        gradients, numbers, is_finite = self._unfinished
        self.begin(gradients, numbers, is_finite=is_finite)
        self._take(self.begun)

    def load_optimizer_state(self, slots: OptimizerState) -> None:
        """Push these with the next step, if they are this trainer's to push. Does not block."""
        self._loading.load(slots, self.begun)

    def pull_optimizer_state(self, needed: Callable[[str, StepState], Sequence[str]], *, leads: bool) -> OptimizerState:
        """The slots as of the newest step, which is taken first; those that were loaded and have not left, if any.

        Where it `leads` other processes it takes nothing, and does not go back, without them: raises BadModel if steps
        are on their way, RolledBack if the run goes back.
        """
        while True:
            if not leads:
                self.take()
            elif self.version < self.begun:
                raise BadModel("steps are on their way: all processes of the host have to call synchronize() before")
            if self._loading.slots is not None:
                return self._loading.slots
            try:
                return self._io.run(pull_optimizer_state(self._client, self.version, needed))
            except RolledBack as error:
                if leads:
                    raise
                self._go_back(error)

    def finish_due_step(self) -> None:
        """Wait for the step that is due, `max_delay` steps behind the newest, and take the newest that is there."""
        self._take(self.begun - self._pipeline.max_delay)

    def take(self, names: Collection[str] | None = None) -> bool:
        """Wait for the newest step's parameters, or some of them. Whether the run has gone back instead."""
        if names is None:
            return self._take(self.begun)
        wanted = self._pending.intersection(names)
        return bool(wanted) and self._take(self.begun, wanted)

    def _take(self, step: Round, names: set[str] | None = None) -> bool:
        """Wait for a step, and take the newest one that is there, or for some of its parameters."""
        try:
            if names is not None and names != self._pending:
                self._pipeline.wait_for(step, names)
                self._land(step, names)
                return False
            newest = self._pipeline.wait(step)
        except RolledBack as error:
            self._go_back(error)
            return True
        except BaseException as error:
            self._copies.forget()
            self.begun = self._pipeline.newest  # a step that fails takes those behind it along
            self._pending = set()
            if isinstance(error, ContributionConflict) and self._refused is not None:
                text = "what was staged when an earlier try of this step was refused cannot be taken back; the script"
                raise ContributionConflict(f"{text} has to end, and may be started again ({self._refused})") from error
            self._refused = error if isinstance(error, NonFiniteGradient) else None
            is_final = isinstance(error, NonFiniteGradient | ContributionConflict | Ended)
            if isinstance(error, Unreachable) or not is_final:
                self._keep_contribution()
            raise
        self._refused = self._unfinished = self._under_way = None
        if newest > self.version:
            self.version = newest
            self._loading.note_pulled(newest)
            self._land(newest, self._pending if self._is_by_parameter else set(self._parameters))
            if newest == self.begun and not self._is_by_parameter:
                self._averages.write_back()  # else later forward passes have changed the buffers
        return False

    def _keep_contribution(self) -> None:
        """Copy the gradients of the newest step, which pservers may have counted, before the script changes them."""
        if self._unfinished is not None:
            return  # it was taken once more
        if self._under_way is None:
            self._has_lost_steps = True
            return
        copies = {name: gradient.clone() for name, gradient in self._under_way.gradients.items()}
        self._unfinished, self._under_way = self._under_way._replace(gradients=copies), None

    def _go_back(self, error: RolledBack) -> None:
        before = self.begun
        self._unfinished, self._under_way, self._has_lost_steps = None, None, False
        self.num_rollbacks += 1
        self._copies.forget()
        version = self._io.run(self._client.go_back())
        self._client.log.warning(
            f"{error.detail}: {before - version} steps of this trainer are lost and have to be taken again; "
            f"the next one is {version + 1}"
        )
        # In the middle of a forward pass its backward pass is still to come; its gradients are dropped.
        self._begin_after(version, is_noticed=not self._is_by_parameter)

    def _land(self, version: Round, names: set[str], *, is_noticed: bool = True) -> None:
        with torch.no_grad():
            self._destinations.write_back(self._pipeline.slot(version), names, is_noticed=is_noticed)
        self._pending = self._pending - names
        if self._local is not None:
            self._local.begin()
