"""`RemoteOptimizer`: a torch optimizer whose `step()` happens on the pservers, also for several optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ps_protocol.errors import BadModel
from ps_protocol.messages import RunSummary
from ps_protocol.vocabulary import Round

from ..client.arguments import TrainerArguments
from ..client.telemetry import StepMeasures
from ..engines.model_tensors import find_tensors
from ..engines.script_optimizers import CombinedOptimizer
from ..session.script import hide_frames
from ..session.session import Session, use_session
from .choice import check_combination, divide_work, make_state, pause_collection, start_engine
from .epochs import follow_run
from .guard import ScriptGuard
from .overlap import attach_overlap
from .wrapped_optimizer import WrappingOptimizer, check_scaling, describe_hyper_parameters, unscale_gradients


class RemoteOptimizer(WrappingOptimizer):
    """A `torch.optim` optimizer whose gradients go to the pservers, and whose stepped parameters come back.

        optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3))

    It shares the `param_groups` of the wrapped optimizer, so schedulers work on it: every push carries the current
    hyperparameters. With local steps, and in a ring, the wrapped optimizer steps in the trainer.

    The constructor joins the run, waits for all trainers and pservers, and pulls the initial values of the lowest rank
    into the parameters, and into the buffers and frozen parameters of `model`.

    Args:
        optimizer: an element-wise optimizer of torch.optim; in a ring any but LBFGS. Its state, such as that of a
            checkpoint, moves to the run with the first step of the trainer that brings the initial values.
        model: gives the parameters their names, and shares its buffers and frozen parameters. Its float buffers, such
            as the statistics of batch norm, are averaged over all trainers in every step.
        buffers: another choice for float buffers, by names or patterns of `fnmatch`: `average`, `lowest_rank` (all
            trainers take those of the lowest rank) or `leave` (each keeps its own), as in `{"queue*": "leave"}`.
        session: the result of `connect()`; by default the open session, or a new one made with `arguments`.
        outer: with local steps, the optimizer that steps on the pservers, over the same parameters; by default SGD with
            the rate 1, or 1 / world size in asynchronous modes.
        coordinator, arguments: settings of a trainer (docs/settings.md), which win over `GRADPOST_*`: `local_steps`,
            `max_grad_norm`, `overlap`, `nonfinite`, … Those of the run must be the same on all trainers.

    Raises BadInput or ModelMismatch before anything was sent to a pserver, and Ended once the run has ended.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler always calls `step`, with `grad_scale` and `found_inf`

    @hide_frames
    @pause_collection()
    def __init__(
        self,
        optimizer: Optimizer,
        *,
        model: nn.Module | None = None,
        buffers: Mapping[str, str] | None = None,
        session: Session | None = None,
        outer: Optimizer | None = None,
        coordinator: str | None = None,
        **arguments: Unpack[TrainerArguments],
    ) -> None:
        # 1. Join the run, unless a session has. Blocks for the coordinator.
        super().__init__(optimizer)
        tensors = find_tensors(optimizer, model, buffers or {})
        self._session = use_session(session, coordinator, **arguments)
        # 2. Decide what steps where. Nothing is sent, and an error leaves the script's optimizer as it was.
        check_combination(self._session, optimizer, tensors, has_outer=outer is not None)
        self._work = divide_work(self._session, optimizer, outer, tensors)
        # 3. Declare the model, and pull the initial values. Blocks for all trainers and pservers.
        self._session.client.coordinator.note_script(optimizer=describe_hyper_parameters(optimizer))
        started = start_engine(self._session, self._work)
        self._engine, self._pserver_engine = started
        # 4. Attach to the script's optimizer and model, which have the initial values now.
        self._guard = ScriptGuard(self, tensors, self._engine, self._session)
        state = make_state(self._work, started, self._session, self._guard)
        self._take_over(state, lambda: self._session.is_open)
        self._overlap = attach_overlap(self._session, self._work, started, self._guard.watch, self.synchronize)
        self._measures = StepMeasures(self._session.client.coordinator.report_measures)
        self._epochs = follow_run(self._session, self._engine.progress, self._work.num_optimizers)

    @property
    def session(self) -> Session:
        """The session of this trainer."""
        return self._session

    @property
    def round(self) -> Round:
        """The newest completed round (asynchronous: step), with `overlap_pulls` the newest one that has begun.

        Without `max_delay` the next `step()` is `round + 1`. It is not 0 at the start of a restarted trainer or a
        resumed run: a script whose data and random state are functions of (seed, rank, round) continues there. A
        rollback lowers it in `step()`, with a warning.
        """
        self._guard.has_read_position = True
        progress = self._engine.progress
        if self._session.client.settings.overlap_pulls:
            return progress.begun
        return self._session.round if self._session.host is None else progress.version

    def epochs(
        self,
        loader: Iterable[Any],
        epochs: int,
        *,
        first_epoch: int = 0,
        batches_per_step: int = 1,
        schedule: LRScheduler | None = None,
    ) -> Iterator[tuple[int, Iterator[Any]]]:
        """Yield the epochs of a loop that are not over, each with its batches that are not in the run yet.

        for epoch, batches in optimizer.epochs(loader, 10, schedule=schedule):
            for inputs, labels in batches:
                optimizer.zero_grad()
                loss_of(model(inputs), labels).backward()
                optimizer.step()
                schedule.step()
            print(epoch, evaluate(model))

        The loader must have a length. A restarted or resumed script continues after the batches of the run's rounds,
        and may do again what follows the batches of an epoch; a rollback repeats batches. The order of the data must be
        a function of the epoch, as that of a DistributedSampler is: `set_epoch` of the loader and its samplers is
        called. `batches_per_step` is for scripts that accumulate gradients. A `schedule` that the script steps once
        after each `step()` is stepped to the first batch. A script that has loaded a checkpoint of its own, with its
        schedule, gives the `first_epoch` after it. A further call continues after the batches of the calls before.
        """
        self._guard.has_read_position = True
        return self._epochs.iterate(loader, epochs, batches_per_step, schedule, first_epoch)

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the newest round's aggregated gradient before it was clipped; needs `max_grad_norm`.

        In asynchronous modes that of this trainer's newest gradient. NaN if the round was skipped; None before the
        first round.
        """
        return self._session.client.results.grad_norm

    def summary(self) -> RunSummary:
        """Return the results of the run, as the services know them. Blocks for the coordinator."""
        return self._session.summary()

    def __repr__(self) -> str:
        return f"RemoteOptimizer({self._work.spec.name}, round {self._engine.progress.version}, {self._session!r})"

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    @hide_frames
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Push the gradients, wait until those of all trainers are applied, and pull the parameters.

        Blocks for the round; with local steps only every `local_steps` calls take part in one. A parameter whose `grad`
        is None is skipped, as in torch. A `closure` is called once, before the step, and its loss is returned. A
        trainer whose `torch.amp.GradScaler` finds overflow takes part without gradients, and the round is skipped.

        Raises:
            NonFiniteGradient: under `nonfinite=reject`, before anything is pushed. The step may be taken again. If
                other gradients have left early (`overlap`, or gradients on a device), they must be the same again.
            Ended and its children: the run has ended.

        """
        self._session.check_open("step()")
        policy = self._session.client.run.nonfinite if self._work.has_rounds else None
        check_scaling(self, policy, is_overlapped=self._overlap is not None)
        loss = self._begin_step(closure)
        if self._overlap is None or not self._overlap.finish_pull():  # else the gradients are of a step that is lost
            self._take_step(self._work.model.parameters)
        return loss

    def _take_step(self, parameters: Mapping[str, Tensor]) -> None:
        """Step with the gradients of these parameters. Raises the errors of `step`."""
        self._guard.check()
        try:
            if self._overlap is not None:
                self._overlap.finish_passes()
            contribution = self._work.contribute(parameters, unscale_gradients(self, parameters.values()))
            if contribution is not None:
                rate, metrics = self.param_groups[0].get("lr"), self._session.client.metrics
                with self._measures.step(contribution.gradients, rate), metrics.step_seconds.time():
                    self._engine.step(contribution)
        except BaseException:
            if self._pserver_engine is not None:
                self._pserver_engine.discard_gradients()  # those that have left early belong to no later step
            raise
        finally:
            self._guard.note()

    def accumulate(self) -> AbstractContextManager[None]:
        """Keep the gradients of the backward passes in the block until a pass after it, where `overlap` pushes them."""
        return nullcontext() if self._overlap is None else self._overlap.accumulate()

    # ------------------------------------------------------------------ parameters and state

    @torch.no_grad()
    @hide_frames
    def synchronize(self) -> None:
        """Wait for the steps that are on their way, and write the newest parameters.

        An interrupted or failed step is finished first, with its own gradient. Without such a step, `max_delay` and
        `overlap_pulls` it does nothing.
        """
        self._guard.synchronize()

    def write_parameters(self) -> AbstractContextManager[None]:
        """Let the script write parameters within the block; the next step begins from their values at its end.

        with optimizer.write_parameters(), torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.01, 0.01)

        All trainers enter it between the same two steps; the values of the lowest rank that changed any count. A block
        that restores the values may run on one trainer alone. The block begins with `synchronize`, and reads all values
        twice. Before the first step no block is needed. Raises BadModel after the first step of asynchronous modes.
        """
        return self._guard.writing()


# ---------------------------------------------------------------- several optimizers, such as the two of a GAN


class NamedOptimizer(WrappingOptimizer):
    """One of several optimizers of a run. Its `step` is a step of the run with the gradients of its own parameters.

    Made by `wrap_optimizers`. Hyperparameters, schedulers, `zero_grad`, `state_dict` and `load_state_dict` are its own,
    too. The rest of the run (`round`, `epochs`, `synchronize`, …) is that of `remote`, the RemoteOptimizer that all of
    them share. `remote.epochs` expects one step of each optimizer with a batch. A restart between these steps repeats
    the batch.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler calls `step`, which refuses it

    def __init__(self, name: str, wrapped: Optimizer, remote: RemoteOptimizer) -> None:
        """`wrapped` is the member of this name of the CombinedOptimizer that `remote` wraps."""
        super().__init__(wrapped)
        self.name = name
        self.remote = remote
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        parameters = remote._work.model.parameters.items()
        self._parameters = {name: parameter for name, parameter in parameters if id(parameter) in own}
        state = None if remote._remote_state is None else remote._remote_state.of_member(name)
        self._take_over(state, lambda: remote.session.is_open)

    @property
    def session(self) -> Session:
        """The session of this trainer."""
        return self.remote.session

    @torch.no_grad()
    @hide_frames
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step as `RemoteOptimizer.step` does, as if the parameters of the other optimizers had no gradients.

        All trainers step the same optimizer at the same time. Raises BadModel for a GradScaler, and the errors of
        `RemoteOptimizer.step`.
        """
        if getattr(self, "found_inf", None) is not None:
            raise BadModel("a GradScaler needs a run with one optimizer. Use bfloat16, whose losses need no scaling")
        self.session.check_open("step()")
        loss = self._begin_step(closure)
        self.remote._take_step(self._parameters)
        return loss

    def __repr__(self) -> str:
        return f"NamedOptimizer({self.name!r}, {self.remote!r})"


@hide_frames
def wrap_optimizers(
    *,
    model: nn.Module | None = None,
    buffers: Mapping[str, str] | None = None,
    session: Session | None = None,
    **optimizers: Optimizer,
) -> tuple[NamedOptimizer, ...]:
    """Join the run with several optimizers, and return what the script uses in their place, in the same order.

        optimizer_d, optimizer_g = gradpost.wrap_optimizers(D=optimizer_d, G=optimizer_g)

    The optimizers may be of different classes. A step of one does not change the parameters of another. Blocks as
    `RemoteOptimizer` does, and raises the same errors.

    Args:
        model: as of `RemoteOptimizer`: with it buffers take part, such as `nn.ModuleDict({"D": net_d, "G": net_g})`.
            Without it the names of parameters begin with that of their optimizer: `D.0.weight`.
        buffers, session: as of `RemoteOptimizer`. Settings are those of `connect` or of the environment.
        optimizers: by the names that checkpoints, the inspection and `gradpost rate --optimizer` have.

    Raises BadModel also if two optimizers have the same parameter, and in asynchronous modes, with `max_delay`, local
    steps and `overlap`.
    """
    if not optimizers:
        raise BadModel(
            "wrap_optimizers needs optimizers by name, such as wrap_optimizers(D=optimizer_d, G=optimizer_g)"
        )
    remote = RemoteOptimizer(CombinedOptimizer(optimizers), model=model, buffers=buffers, session=session)
    return tuple(NamedOptimizer(name, optimizer, remote) for name, optimizer in optimizers.items())
