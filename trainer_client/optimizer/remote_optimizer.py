"""`RemoteOptimizer`: a torch optimizer whose `step()` happens on the pservers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ps_protocol.errors import BadModel
from ps_protocol.messages import RunSummary
from ps_protocol.vocabulary import Round

from ..engines.engine import Contribution
from ..engines.model_tensors import find_tensors, log_names
from ..session.session import Session, use_session
from ..transport.tensors import Flattening
from .choice import check_combination, divide_work, start_engine
from .grad_scaler import StepScaling
from .overlap import attach_overlap
from .resumable_batches import Position, ResumableBatches
from .script_guard import ScriptGuard
from .wrapped_optimizer import WrappingOptimizer
from .wrapped_state import StateInTrainer, StateOnPservers, WrappedState


class RemoteOptimizer(WrappingOptimizer):
    """A `torch.optim` optimizer whose gradients go to the pservers, and whose stepped parameters come back.

        optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3))

    It shares the `param_groups` of the wrapped optimizer, so learning-rate schedulers work on it: every push carries
    the current hyperparameters. With local steps, and in a ring, the wrapped optimizer steps in the trainer.
    `state_dict()` is that of the wrapped optimizer in a single process, optimizer state included.

    The constructor joins the run, waits for all trainers and pservers, and pulls the initial values of the lowest rank
    into the parameters, and into the buffers and frozen parameters of `model`. Every argument is also a setting
    (`GRADPOST_*`); the argument wins.

    Args:
        optimizer: an element-wise optimizer of torch.optim; in a ring any but LBFGS. Its state, such as that of a
            checkpoint, moves to the run with the first step of the trainer that brings the initial values.
        model: gives the parameters their names, and shares its buffers and frozen parameters. Its float buffers, such
            as the statistics of batch norm, are averaged over all trainers in every step.
        session: the result of `connect()`; by default the open session, or a new one made with `arguments`.
        outer: with local steps, the optimizer that steps on the pservers, over the same parameters; by default SGD with
            `outer_lr` (1, or 1 / world size in asynchronous modes), `outer_momentum` (0) and `outer_nesterov`.
        arguments: `local_steps` (0): `optimizer` steps in the trainer, and every so many steps the change of the
            parameters is pushed as the gradient of `outer`. `max_grad_norm` (None): clip the aggregated gradient to
            this norm. `overlap` (False): push gradients while backward still runs, after `accumulate_steps` (1) passes
            each. `overlap_pulls` (False): the modules of `model` wait for their own parameters, instead of `step()` for
            all. `strategy` and `mode` are those that the script expects. Further ones: `coordinator`,
            `min_block_size`, `placement`, `slice_parameters`, `nonfinite`, `bucket_bytes`, `retry_seconds`. The
            settings of the plan must be the same on all trainers.

    Raises:
        BadInput, ModelMismatch: before anything was sent to a pserver.
        Ended and its children: the run has ended.

    """

    _step_supports_amp_scaling = True  # a GradScaler leaves scale and overflow to `step`

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        model: nn.Module | None = None,
        session: Session | None = None,
        outer: Optimizer | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(optimizer)
        model_tensors = find_tensors(optimizer, model)
        self._session = use_session(session, arguments)
        client = self._session.client
        check_combination(self._session, model_tensors, has_outer=outer is not None)
        self._work = divide_work(self._session, optimizer, outer, model_tensors)
        log_names(client.log, model_tensors)
        started = start_engine(self._session, model_tensors, self._work)
        self._engine = started.engine
        self._local = self._work.local
        self._named = model_tensors.parameters
        if self._work.initial_state:
            self._work.optimizer.state.clear()
        state: WrappedState = (
            StateInTrainer(self, optimizer)
            if self._work.is_wrapped_stepping
            else StateOnPservers(self, self._work.spec, model_tensors.names, started.pserver)
        )
        self.share(state, lambda: self._session.is_open)
        self._flattening = Flattening()
        self._guard = ScriptGuard(self, model_tensors, self._engine, client.settings, client.log)
        self._overlap = attach_overlap(
            self._session, model_tensors, started, self._flattening, self._guard.watch, self.synchronize
        )
        progress = self._engine.progress
        self.scaling = StepScaling(self, progress, self._overlap, is_shared=self._work.shares_rounds)
        self._batches = ResumableBatches(
            lambda: Position(progress.num_rollbacks, progress.begun),
            max(1, client.settings.local_steps),
            client.log.warning,
        )

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
        self._guard.note_position_read()
        return self._round

    @property
    def _round(self) -> Round:
        progress = self._engine.progress
        if self._session.client.settings.overlap_pulls:
            return progress.begun
        return self._session.round if self._session.host is None else progress.version

    def batches(
        self,
        loader: Iterable[Any],
        *,
        epochs: int = 1,
        batches_per_step: int = 1,
        schedule: LRScheduler | None = None,
    ) -> Iterator[Any]:
        """Yield the batches of `epochs` passes over a loader that are not in the run yet.

        for inputs, labels in optimizer.batches(loader, epochs=3, schedule=schedule):
            optimizer.zero_grad()
            loss_of(model(inputs), labels).backward()
            optimizer.step()
            schedule.step()

        A restarted or resumed script continues after the batches of the run's rounds; a rollback repeats batches. The
        order of the data must be a function of the epoch, as that of a DistributedSampler is: `set_epoch` of the loader
        and its samplers is called with each epoch, counted over all calls. Each further call continues after the
        batches of the earlier calls, which must have been iterated to their end. A DataLoader over a map-style dataset
        does not load the skipped batches. `batches_per_step` is for scripts that accumulate gradients; the batches of a
        call must be a multiple of it. With local steps a round that had begun starts again.

        A `schedule` that the script steps once after each `step()` is stepped to the first batch; after a rollback it
        starts from its state at the first call. All calls must pass the same one. ReduceLROnPlateau and
        ChainedScheduler are refused.
        """
        self._guard.note_position_read()
        return self._batches.iterate(loader, epochs, batches_per_step, schedule)

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the newest round's aggregated gradient before it was clipped; needs `max_grad_norm`.

        NaN if the round was skipped; None before the first round.
        """
        return self._session.client.grad_norm

    def summary(self) -> RunSummary:
        """Return the results of the run, as the services know them. Blocks for the coordinator."""
        return self._session.summary()

    def __repr__(self) -> str:
        return f"RemoteOptimizer({self._work.spec.name}, round {self._round}, {self._session!r})"

    # ------------------------------------------------------------------ step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as torch does. With `overlap` the passes until now do not count any more."""
        super().zero_grad(set_to_none)
        if self._overlap is not None:
            self._overlap.discard_passes()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Push the gradients, wait until those of all trainers are applied, and pull the parameters.

        Blocks for the round; with local steps only every `local_steps` calls take part in one. A parameter whose `grad`
        is None is skipped, as in torch. A `closure` is called once, before the step, and its loss is returned. A
        GradScaler unscales the gradients here. If they have overflowed, this trainer takes part in the round without
        gradients, which `nonfinite=skip_round` then skips for all trainers.

        Raises:
            NonFiniteGradient: under `nonfinite=reject`. Gradients that are staged stay, so only the same gradient with
                the faulty elements replaced may be tried again.
            Ended and its children: the run has ended.

        """
        self._session.check_open("step()")
        vars(self._wrapped)["_opt_called"] = True  # else its learning-rate schedulers would warn
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._overlap is not None and self._overlap.finish_pull():
            return loss
        self._state.check_reset()
        self._guard.check(self._wrapped, follows_schedule=self._batches.schedule is not None)
        try:
            self._step()
        finally:
            self._guard.note()
        return loss

    def _step(self) -> None:
        if self._overlap is not None:
            self._overlap.finish_passes(is_scaled=getattr(self, "found_inf", None) is not None)
        is_finite = self.scaling.unscale(self._named.values())
        if self._local is None:
            gradients = self._flattening.flatten(self._named)
        elif self._local.step():
            gradients, is_finite = self._local.outer_gradients(), True
        else:
            return
        started = time.perf_counter()
        hyperparameters = [*self._work.hyperparameters(), *self.scaling.describe()]
        self._engine.step(Contribution(gradients, hyperparameters, is_finite))
        self._session.client.metrics.step_seconds.observe(time.perf_counter() - started)

    def accumulate(self) -> AbstractContextManager[None]:
        """Keep the gradients of the backward passes in the block until a pass after it, where `overlap` pushes them.

        with optimizer.accumulate():
            loss(first_half).backward()
        loss(second_half).backward()
        optimizer.step()
        """
        return nullcontext() if self._overlap is None else self._overlap.accumulate()

    # ------------------------------------------------------------------ parameters and state

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait for the steps that are on their way, and write the newest parameters.

        An interrupted or failed step is finished first, with its own gradient. Without such a step, `max_delay` and
        `overlap_pulls` it does nothing.
        """
        self._guard.synchronize()

    @contextmanager
    def write_parameters(self) -> Iterator[None]:
        """Let the script write parameters within the block; the next step begins from their values at its end.

        with optimizer.write_parameters(), torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.01, 0.01)

        All trainers enter it between the same two steps; the values of the lowest rank that changed any count. A block
        that restores the values may run on one trainer alone. The block begins with `synchronize`, and reads all values
        twice. Before the first step no block is needed. Raises BadModel after the first step of asynchronous modes.
        """
        if self._work.is_async and not self._guard.is_before_first_step and self._local is None:
            raise BadModel(
                "asynchronous modes have no round in which all trainers could write parameters; write them before the "
                "first step"
            )
        self.synchronize()
        if self._local is not None:  # a write is part of the local steps
            yield
            return
        with self._guard.adopting_writes():
            yield

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the `state_dict` of the wrapped optimizer in a single process, with state fetched from the pservers.

        The state is that of the newest step, for which this method waits; it is float32, in host memory. With local
        steps, and in a ring, it is the wrapped optimizer's own. Where several processes of a host are one trainer, only
        process 0 has state; with `max_delay` all of them must call `synchronize` before. Blocks for the pservers only.
        """
        if not isinstance(self._state, StateOnPservers):
            return super().state_dict()
        self._session.check_open("state_dict()")
        if self._session.host is None:
            self.synchronize()
        self._state.check_reset()
        num_rollbacks = self._engine.progress.num_rollbacks
        with self._state.shown():
            if self._engine.progress.num_rollbacks != num_rollbacks:
                self._guard.note()
            return super().state_dict()
