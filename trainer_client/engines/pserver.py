"""The engine of a trainer with pservers: its steps begin, are pulled, and are lost when the run rolls back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES, is_finite
from ps_protocol.errors import BadModel, ContributionConflict, Ended, GradpostError, NonFiniteGradient, RolledBack
from ps_protocol.norms import EPSILON
from ps_protocol.optimizers import MASTER
from ps_protocol.vocabulary import Round

from ..session.session import Session
from ..transport.destinations import make_destinations, write_back
from ..transport.device_copies import ParameterCopies
from ..transport.tensors import elements_of, writable_bytes
from .engine import StepGradients, StepProgress
from .model_tensors import TrainedModel
from .pipeline import Pipeline
from .script_optimizers import LocalSteps
from .state_transfer import Loading, pull_optimizer_state
from .torch_state import ParameterStates
from .unfinished_step import UnfinishedStep


class PserverEngine:
    """The engine of one trainer: gradients are pushed to the pservers, and parameters are pulled from them."""

    def __init__(self, session: Session, model: TrainedModel, local: LocalSteps | None) -> None:
        """Pull the values that the run begins with. Blocks for the pservers."""
        self.progress = StepProgress()
        self._client = session.client
        self._leads_host = session.host is not None  # its other processes are needed to finish a step
        self._averages = model.averages
        self._parameters = model.pulled
        self._stored = model.stored  # no round changes these tensors
        self._local = local
        self._overlap_pulls = self._client.settings.overlap_pulls
        self._is_async = self._client.joined.consistency.is_async
        self._pipeline = Pipeline(self._client, self._parameters, overlap_pulls=self._overlap_pulls)
        self._unfinished = UnfinishedStep(leads_host=self._leads_host)
        self.pending: set[str] = set()  # parameters without the newest step's values
        self._has_stored = False
        self._is_going_back = False  # until the values that the run went back to are in the parameters
        self._pushed: StepGradients | None = None  # of the newest step, with buffers
        self._has_all_rows = False  # pulled since `take_rows` was called
        self._loading = Loading(self._client, self._parameters)
        self._start_after(self._client.run.start - 1)

    # ------------------------------------------------------------------ the start, and rollbacks

    def _start_after(self, version: Round, *, bumps_version: bool = True) -> None:
        """Pull this version, or an earlier one if the run goes back meanwhile; the next step follows it."""
        while True:
            try:
                if self._client.must_upload:
                    bucket_bytes = self._client.settings.chosen_bucket_bytes
                    self._client.io.run(self._client.pservers.send_initial(self._initial_values(), bucket_bytes))
                self._pipeline.pull_start(version)
                self._has_all_rows = True
                self._write_back(version, set(self._parameters), bumps_version=bumps_version)
                if self._stored and not self._has_stored:
                    self._pull_stored()
            except RolledBack:
                version = self._client.go_back()
            else:
                self.progress.begun = self.progress.version = version
                self._loading.note_rollback(version)
                self._averages.write_back()
                return

    def _initial_values(self) -> dict[str, Tensor]:
        """Return the values that the run begins with. Raises `pserver_lost` after the first round."""
        if self.progress.version > 0:
            text = "the pservers have lost all rounds, and there is no checkpoint"
            raise Ended(f"{text}; this trainer had round {self.progress.version}", code="pserver_lost")
        begun = {} if self._local is None else self._local.starting_values
        values = {**self._parameters, **begun, **self._stored}
        return {name: tensor.detach().to("cpu") for name, tensor in values.items()}

    def _pull_stored(self) -> None:
        received = make_destinations(self._stored, {name: tensor.dtype for name, tensor in self._stored.items()})
        memory = {name: writable_bytes(tensor) for name, tensor in received.items()}
        self._client.io.run(self._client.pservers.pull_buffers(memory))
        write_back(self._stored, received, ParameterCopies(overlap_pulls=False))
        self._has_stored = True

    def _write_back(self, version: Round, names: set[str], *, bumps_version: bool = True) -> None:
        self._pipeline.write_back(version, names, bumps_version=bumps_version)
        self.pending = self.pending - names
        if self._local is not None:
            self._local.begin_count()

    def _go_back(self, error: RolledBack) -> bool:
        """Follow a rollback and return True. Return False if it is over the newest step alone, which begins again."""
        step, contribution, pushed = self.progress.begun, self._unfinished.contribution, self._pushed
        self._restart()
        if contribution is not None and pushed is not None and self.progress.version == step - 1:
            self._client.log.info(f"{error.detail}: step {step} of this trainer is pushed again")
            self._push(step, contribution, pushed)
            return False
        self._note_lost_steps(step, error.detail)
        return True

    def _restart(self) -> None:
        self._is_going_back = True
        self._unfinished.note_rollback()
        # The rollback may come in the middle of a forward pass. The gradients of its backward pass are dropped.
        self._start_after(self._client.go_back(), bumps_version=not self._overlap_pulls)
        self._is_going_back = False

    def _finish_rollback(self) -> bool:
        """Finish a rollback that an interrupt or error has left unfinished; return False if there is none."""
        if not self._is_going_back:
            return False
        step = self.progress.begun
        self._restart()
        self._note_lost_steps(step, "a rollback was interrupted or had failed")
        return True

    def _note_lost_steps(self, step: Round, reason: str) -> None:
        self.progress.num_rollbacks += 1
        version = self.progress.version
        self._client.log.warning(
            f"{reason}: {step - version} steps of this trainer are lost and must be repeated; the next step is "
            f"{version + 1}"
        )

    # ------------------------------------------------------------------ the parameters

    def follow_parameters(self) -> None:
        """Implement `StepEngine.follow_parameters`."""
        self._pipeline.follow_parameters()

    def replace_values(self, names: Collection[str]) -> None:
        """Implement `StepEngine.replace_values`."""
        self._pipeline.forget_bases()
        if self._local is not None:
            self._local.begin_count()
        values = {name: self._parameters[name].detach().to("cpu", copy=True).reshape(-1) for name in names}
        masters = {name: value.float() for name, value in values.items()}
        self._loading.load_masters({**masters, **self._keep_masters(values)}, self.progress.begun)

    def _keep_masters(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return new masters of parameters that are rounded ones: those of the run where the script changed nothing."""
        plan, kept = self._client.run.plan, {}
        wires = {name: TORCH_DTYPES[plan.pulled(name)] for name in values}
        rounded = [name for name, wire in wires.items() if wire != torch.float32 and self.progress.begun > 0]
        if rounded:
            with suppress(RolledBack):  # the next step goes back, and these values are lost with it
                state = pull_optimizer_state(self._client, self.progress.version, rounded, [MASTER])
                held = self._client.io.run(state)
                for name in rounded:
                    master, value = held[name].slots[MASTER], values[name]
                    kept[name] = torch.where(master.to(wires[name]) == value, master, value.float())
        return kept

    def take_rows(self) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Return the rows of sparse parameters that have changed since the last call; None: any may have.

        There is one call after each step.
        """
        has_all, self._has_all_rows = self._has_all_rows, False
        return None if has_all else self._pipeline.read_rows(self.progress.version)

    # ------------------------------------------------------------------ the step

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add a flat gradient, (numel,), of the next step while backward still runs; it may be sent immediately.

        A gradient on a device is sent with a later one, or in `step`.
        """
        if self._is_going_back:
            return  # the gradient is void
        step = self.progress.begun + 1
        self._unfinished.require_same_gradients(step, {name: gradient}, (name,))
        self._pipeline.add(step, name, gradient)

    def discard_gradients(self) -> None:
        """Discard the added gradients. Pservers keep those that were sent."""
        self._pipeline.discard_gradients()

    def step(self, contribution: StepGradients) -> None:
        """Implement `StepEngine.step`."""
        with self._noting_interrupts():
            if self._finish_rollback():
                return  # the gradients are void
            self._begin(contribution)
            if not self._overlap_pulls:
                self._finish(self.progress.begun - self._pipeline.max_delay)

    def synchronize(self) -> bool:
        """Implement `StepEngine.synchronize`. An interrupted or failed step is first repeated as it was."""
        kept = self._unfinished.kept
        is_behind = kept is not None or self.progress.begun > self.progress.version
        with self._noting_interrupts():
            if self._finish_rollback():
                return True
            if kept is not None:
                self._begin(kept)
            self._finish(self.progress.begun)
        return is_behind

    @contextmanager
    def _noting_interrupts(self) -> Iterator[None]:
        """Give up steps that an interrupt leaves on their way, before the script changes their gradients."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and self._pipeline.discard_steps():
                self._note_failure(error)
            raise

    def wait_for_parameters(self, names: set[str]) -> bool:
        """Wait for the newest step's values of pending parameters; return True if the run went back instead."""
        if self._finish_rollback():
            return True
        step = self.progress.begun
        if names == self.pending:  # the last ones: the step ends, and `progress` advances
            return self._finish(step)
        try:
            self._pipeline.wait_for(step, names)
            self._write_back(step, names)
        except BaseException as error:
            return self._go_back_or_raise(error)
        return False

    def _begin(self, contribution: StepGradients) -> None:
        """Begin the next step. Blocks for gradients that are on a device, which are copied."""
        step = self.progress.begun + 1
        if self._pipeline.newest_pulled > self.progress.version and not self._overlap_pulls:
            raise ContributionConflict(
                f"an interrupt has left parameters without the values of round {self._pipeline.newest_pulled}. Call "
                "synchronize(), and then compute the gradient again"
            )
        self._unfinished.require_same_gradients(step, contribution.gradients, self._parameters)
        clipped = self._clip(contribution.gradients) if self._is_async else contribution.gradients
        if self._local is not None:  # the local optimizer has changed the parameters
            self._pipeline.forget_bases()
        completion = replace(contribution.completion, computed_on=self.progress.version if self._is_async else None)
        gradients = {**clipped, **self._averages.changed_values()}
        self._push(step, contribution, contribution._replace(gradients=gradients, completion=completion))

    def _push(self, step: Round, contribution: StepGradients, pushed: StepGradients) -> None:
        is_only_step = self._pipeline.max_delay == 0 and not self._overlap_pulls
        self._unfinished.contribution, self._pushed = contribution if is_only_step else None, pushed
        try:
            self._pipeline.begin_step(step, pushed, self._loading.frames_for(step))
        except BaseException as error:
            may_have_left = not isinstance(error, GradpostError) and self._client.pservers.pushed_round == step
            if may_have_left or isinstance(error, NonFiniteGradient):
                self._unfinished.note_failure(error)
            raise
        self.progress.begun = step
        self.pending = set(self._parameters)

    def _clip(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the gradients as `clip_grad_norm_` leaves them, and note their norm, if there is a `max_grad_norm`.

        Gradients that will be rejected stay as they are: their norm would spread NaN to all of them.
        """
        max_norm = self._client.run.max_grad_norm
        if max_norm is None:
            return gradients
        elements = [*map(elements_of, gradients.values())]
        norm = torch.nn.utils.get_total_norm(elements)
        is_suspect = self._client.run.nonfinite == "reject" and not torch.isfinite(norm)
        if is_suspect and not all(map(is_finite, elements)):
            return gradients
        self._client.results.grad_norm = float(norm)
        coefficient = torch.clamp(max_norm / (norm + EPSILON), max=1.0)  # float32, whose bits are those of torch
        return {name: gradient * coefficient.to(gradient.device) for name, gradient in gradients.items()}

    def _finish(self, step: Round) -> bool:
        """Wait for a step, and write the newest pulled step to the parameters; return True if the run went back."""
        try:
            newest = self._pipeline.wait(step)
        except BaseException as error:
            return self._go_back_or_raise(error) or self._finish(step)
        if newest > self.progress.version:
            self._unfinished.note_pulled()
            self._loading.note_pulled(newest)
            self._write_back(newest, self.pending if self._overlap_pulls else set(self._parameters))
            if newest == self.progress.begun:
                if not self._is_async and newest not in self._client.results.skipped:
                    self._averages.warn_of_differences(self._client.log)
                if not self._overlap_pulls:  # else later forward passes have changed the buffers
                    self._averages.write_back()
            self.progress.version = newest  # last, so that `synchronize` repeats what an interrupt has ended
        return False

    def _go_back_or_raise(self, error: BaseException) -> bool:
        """Follow a rollback: see `_go_back`. Raises any other error, with which all steps on their way have failed."""
        if isinstance(error, RolledBack):
            return self._go_back(error)
        self._note_failure(error)
        raise error

    def _note_failure(self, error: BaseException) -> None:
        self.progress.begun = self._pipeline.newest_pulled  # the steps after a failed step have failed with it
        self.pending = set()
        self._unfinished.note_failure(error)

    def warn_of_last_steps(self) -> None:
        """Warn of steps that the run lacks, or whose parameters the script did not get. The trainer is done."""
        log, begun, version = self._client.log, self.progress.begun, self.progress.version
        if self._local is not None and self._local.num_pending:
            log.warning(
                f"the last {self._local.num_pending} local steps of this trainer are not in the run, whose parameters "
                "differ from those of this trainer. Make the number of steps a multiple of local_steps "
                f"({self._client.settings.local_steps})"
            )
        if version < begun:
            log.warning(
                f"this trainer holds the parameters of step {version}, but its last step was {begun}, because "
                "max_delay delays pulls. Call optimizer.synchronize() after the last step"
            )

    # ------------------------------------------------------------------ optimizer state

    def load_optimizer_state(self, names: Collection[str], states: ParameterStates) -> None:
        """Push this state of these parameters with the first step, unless the run has rounds. Does not block."""
        self._loading.load_states(names, states, self.progress.begun)

    def pull_optimizer_state(self, names: Collection[str]) -> ParameterStates:
        """Wait for the newest step and return the state of these parameters, or before the first step the loaded state.

        A host's leader waits for no step, and does not go back, without the other processes: raises BadModel if steps
        are on their way, RolledBack if the run goes back.
        """
        self._finish_rollback()
        while True:
            if not self._leads_host:
                self._finish(self.progress.begun)
            elif self.progress.version < self.progress.begun:
                raise BadModel("steps are in flight. Call synchronize() in all processes of the host first")
            try:
                pulled = self._client.io.run(pull_optimizer_state(self._client, self.progress.version, names))
            except RolledBack as error:
                if self._leads_host:
                    raise
                self._go_back(error)
            else:
                return {**pulled, **self._loading.states}
