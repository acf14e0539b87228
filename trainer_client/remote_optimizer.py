"""`RemoteOptimizer`: a torch optimizer whose `step()` happens on the pservers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ps_protocol.errors import BadModel
from ps_protocol.messages import RunSummary
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Round

from .engines.choice import check_combination, divide_work, start_engine
from .engines.engine import Contribution, StepProgress
from .engines.pserver import PserverEngine
from .grad_scaler import StepScaling
from .model_tensors import find_tensors, log_names
from .optimizer_state.remote import RemoteOptimizerState
from .overlap import ForwardWaits, Overlap
from .parameter_watch import ParameterWatch, check_model
from .resumable_batches import Position, ResumableBatches
from .script_guard import ScriptGuard
from .session import Session, connect, open_session
from .tensors import Flattening
from .wrapped_optimizer import (
    SharedState,
    describe_local_optimizer,
    describe_optimizer,
    read_hyper_parameters,
    refuse_changes,
    refuse_group,
    share_hooks,
)


class RemoteOptimizer(Optimizer):
    """A `torch.optim` optimizer whose gradients go to the pservers, and whose stepped parameters come back.

        optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3))

    It shares the `param_groups` of the wrapped optimizer, so learning-rate schedulers work on it: every push carries
    the current hyperparameters. The wrapped optimizer steps in the trainer for local steps and with strategy ring,
    where the trainers average gradients without pservers. `state_dict()` is that of the wrapped optimizer in a single
    process, optimizer state included.

    The constructor joins the run, waits for all trainers and pservers, and pulls the initial values of the lowest rank
    into the parameters, and into the buffers and frozen parameters of `model`.
    Every argument is also a setting (`GRADPOST_*`); the argument wins.

    Args:
        optimizer: an element-wise optimizer of torch.optim; in a ring any but LBFGS. State that it has, such as that of
            a checkpoint, moves to the run with the first step of the trainer that brings the initial values.
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
        if isinstance(optimizer, RemoteOptimizer):
            raise BadModel("the optimizer is remote already")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the very same list: schedulers may hold either
        self._wrapped = optimizer
        tensors = find_tensors(optimizer, model)
        self._session = _use_session(session, arguments)
        client = self._session.client
        check_combination(self._session, has_model=model is not None, has_outer=outer is not None)
        self._named, self._has_means = tensors.parameters, bool(tensors.averages.means)
        self._stepped, self._local = divide_work(self._session, optimizer, outer, self._named)
        is_ring = client.joined.consistency.is_ring
        self._own = optimizer if is_ring or self._local is not None else None  # steps in the trainer
        self.spec = describe_local_optimizer(optimizer) if is_ring else describe_optimizer(self._stepped)
        names = {id(parameter): name for name, parameter in self._named.items()}
        self._remote_state = None if is_ring else RemoteOptimizerState(self.spec, self._stepped, names)
        self._shared_state = SharedState(self, self._own)
        share_hooks(self, optimizer, loads_itself=self._own is not None)
        if client.is_declared:
            raise BadModel("a session has one RemoteOptimizer; give it the parameters of all models, as groups")
        log_names(client.log, tensors)
        if self._local is None:
            check_model(model, self._named.values())
        self._engine = start_engine(self._session, tensors, self._stepped, self.spec, self._local, self._remote_state)
        has_waits = client.settings.overlap_pulls
        watch = None if self._local is not None else ParameterWatch(self._named, has_samples=not has_waits)
        self._waits: ForwardWaits | None = None
        if has_waits:
            assert isinstance(self._engine, PserverEngine)  # else the combination is refused
            assert watch is not None
            self._waits = ForwardWaits(self._session, tensors, self._engine, watch, self.synchronize)
            self._session.finish_last_step = self.synchronize
        self._overlap: Overlap | None = None
        if client.settings.overlap:
            self._overlap = Overlap(self._session, self._named, self._engine, self._waits)
        self._flattening = Flattening()
        self._scaling = StepScaling(self)
        self._guard = ScriptGuard(self, tensors, watch, client.log)
        progress = self._engine.progress
        self._batches = ResumableBatches(
            lambda: Position(progress.num_rollbacks, progress.begun),
            max(1, client.settings.local_steps),
            client.log.warning,
        )
        refuse_changes(optimizer, lambda: self._session.is_open)

    @property
    def session(self) -> Session:
        """The session of this trainer."""
        return self._session

    @property
    def round(self) -> Round:
        """The newest completed round (asynchronous: step); without `max_delay` the next `step()` is `round + 1`.

        It is not 0 at the start if this trainer was restarted or the run was resumed: a script whose data and random
        state are functions of (seed, rank, round) continues there. A rollback lowers it in `step()`, with a warning.
        With `overlap_pulls` it is the newest round that has begun.
        """
        self._guard.has_read_position = True
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

        A script that is restarted or resumed continues after the batches of the run's rounds; after a rollback they are
        repeated. Each further call, for another epoch or loader, continues after the batches of the earlier calls,
        which must have been iterated to their end. `set_epoch` of the loader and its samplers is called with each
        epoch, counted over all calls. A DataLoader over a map-style dataset does not load the skipped batches. The
        order of the data must be a function of the epoch, as that of a DistributedSampler is. A script that accumulates
        gradients passes the number of batches for each `step()`; the batches of a call must be a multiple of it. With
        local steps a round has `local_steps` times as many, and a round that had begun starts again.

        A `schedule` that the script steps once after each `step()` is moved to the first batch by stepping it; after a
        rollback it starts from its state at the first call. All calls must pass the same one, whose first step comes
        with the run. The script may load one that it saved in the run. ReduceLROnPlateau and ChainedScheduler are
        refused.
        """
        self._guard.has_read_position = True
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
        return f"RemoteOptimizer({self.spec.name}, round {self._round}, {self._session!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: the optimizer is a place in a run."""
        raise TypeError(
            "a RemoteOptimizer cannot be copied or pickled, since it holds a trainer's connections; copy or save its "
            "state_dict() instead"
        )

    # ------------------------------------------------------------------ step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as torch does. With `overlap` the passes until now do not count any more."""
        super().zero_grad(set_to_none)
        if self._overlap is not None:
            self._overlap.discard_passes()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Push the gradients, wait until those of all trainers are applied, and pull the parameters.

        Blocks for the round. With local steps the wrapped optimizer steps here, and only every `local_steps` calls take
        part in a round. A parameter whose `grad` is None is skipped, as in torch. Changes of `grad` before the call
        count. A `closure` is called once, before the step, and its loss is returned.

        `GradScaler.step(optimizer)` unscales the gradients here. If they have overflowed, this trainer takes part in
        the round without gradients; `nonfinite=skip_round` then skips it for all trainers.

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
        self._check_changes()
        try:
            self._step()
        finally:
            self._guard.note()
        return loss

    def _check_changes(self) -> None:
        """Adopt values that were loaded before the first step. Raises BadModel for later changes."""
        is_first = self._guard.is_before_first_step
        self._guard.check_structure()
        self._check_reset()
        self._engine.check_parameters()
        if changed := self._guard.check_values():
            self._engine.replace_values(changed)
        if is_first:
            follows_schedule = self._batches.schedule is not None
            begun = self._engine.progress.begun
            self._guard.warn_before_first_step(begun, self._wrapped, follows_schedule=follows_schedule)

    def _step(self) -> None:
        if self._overlap is not None:
            self._overlap.finish_passes(is_scaled=getattr(self, "found_inf", None) is not None)
        is_finite = self._scaling.unscale(self._named.values())
        if self._local is None:
            present = {name: p.grad for name, p in self._named.items() if p.grad is not None}
            gradients = {name: self._flattening.flat(name, gradient) for name, gradient in present.items()}
        elif self._local.step():
            gradients, is_finite = self._local.outer_gradients(), True
        else:
            return
        started = time.perf_counter()
        self._engine.step(Contribution(gradients, self._hyperparameters(), is_finite))
        self._session.client.metrics.step_seconds.observe(time.perf_counter() - started)

    def _hyperparameters(self) -> list[HyperParameters]:
        """Return those of each group, of averaged buffers, and the state of a GradScaler."""
        found = [] if self._remote_state is None else read_hyper_parameters(self.spec, self._stepped)
        if self._has_means:
            # In asynchronous modes each step of N trainers moves the mean by an N-th of the way.
            found.append({"lr": 1 / self._session.world_size if self._is_async else 1.0})
        return found + self._scaling.describe()

    @property
    def _is_async(self) -> bool:
        return self._session.client.joined.consistency.is_async

    @property
    def shares_rounds(self) -> bool:
        """True if every step is a round of all trainers, which have its outcome in common."""
        return not self._is_async and self._local is None

    def attach_scaler(self, describe: Callable[[], HyperParameters]) -> tuple[StepProgress, Overlap | None]:
        """Attach a GradScaler, whose state is pushed in each round, and return what it follows.

        Raises BadModel for a second one.
        """
        self._scaling.attach(describe)
        return self._engine.progress, self._overlap

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
        """Wait for the steps that are on their way, and take the newest parameters.

        An interrupted or failed step is finished first, with its own gradient. Without such a step, `max_delay` and
        `overlap_pulls` it does nothing.
        """
        progress = self._engine.progress
        if progress.begun != progress.version:
            self._guard.check_unchanged()
        is_written = True
        try:
            is_written = self._engine.synchronize()
        finally:
            if is_written:
                self._guard.note()

    @contextmanager
    def write_parameters(self) -> Iterator[None]:
        """Let the script write parameters within the block; the next step begins from their values at its end.

        with optimizer.write_parameters(), torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.01, 0.01)

        All trainers enter it between the same two steps; the values of the lowest rank that changed any count. A script
        that restores the values within the block changes nothing, and may do so on one trainer alone. The block begins
        with `synchronize`, and reads all values twice. Before the first step it is not needed. Raises BadModel in
        asynchronous modes after the first step, because they have no common round.
        """
        if self._is_async and not self._guard.is_before_first_step and self._local is None:
            raise BadModel(
                "asynchronous modes have no round in which all trainers could write parameters; write them before the "
                "first step"
            )
        self.synchronize()
        if self._local is not None:  # a write is part of the local steps
            yield
            return
        with self._guard.find_writes() as changed:
            yield
        if changed:
            self._engine.replace_values(changed)
        self._guard.note()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the `state_dict` of the wrapped optimizer in a single process, with state fetched from the pservers.

        The state is that of the newest step, which is waited for (`synchronize`), and lies in host memory. It is
        float32 even if parameters are not. With local steps, and in a ring, it is the wrapped optimizer's own. Where
        several processes of a host are one trainer, only process 0 has state; with `max_delay` all of them must call
        `synchronize` before. Blocks for the pservers only.
        """
        if self._own is not None or self._remote_state is None:
            return super().state_dict()
        self._session.check_open("state_dict()")
        if self._session.host is None:
            self.synchronize()
        self._check_reset()
        num_rollbacks = self._engine.progress.num_rollbacks
        with self._remote_state.in_state(self):
            if self._engine.progress.num_rollbacks != num_rollbacks:
                self._guard.note()
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the hyperparameters now, and the state with the next step: that of the lowest rank. Does not block.

        Other trainers may call it or not; at the start their state is only checked. Before the first step of a trainer
        that was restarted, or in a resumed run, state is not loaded: the run has its own. With local steps, and in a
        ring, the state is the wrapped optimizer's own, and all trainers must load the same. Raises BadInput for a
        `state_dict` that does not fit; then nothing has changed.
        """
        handle = self.register_load_state_dict_pre_hook(self._load)  # the last hook that changes the argument
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _load(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Load the state, and return the rest of the argument, which torch loads."""
        if self._own is not None:
            type(self._own).load_state_dict(self._own, state_dict)
            return {**state_dict, "state": {}}
        assert self._remote_state is not None  # there are pservers
        state, rest = self._remote_state.read(state_dict)
        self._remote_state.load(state)
        return rest

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state that torch has loaded. Schedulers keep their list of groups."""
        shared = self.param_groups
        super().__setstate__(state)
        if self._own is not None:
            self.param_groups, self._own.param_groups = self._own.param_groups, shared
        shared[:] = self.param_groups
        self.param_groups = shared
        self._shared_state.adopt_loaded()

    def _check_reset(self) -> None:
        """Begin the next step without optimizer state if the script has cleared or replaced `state`."""
        if self._shared_state.was_reset() and self._own is None and self._remote_state is not None:
            self._remote_state.load({})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; only the constructor may, because the plan is made once."""
        if hasattr(self, "_session"):
            refuse_group()
        super().add_param_group(param_group)


def _use_session(session: Session | None, arguments: dict[str, Any]) -> Session:
    """Return the given session, the open one, or a new one. Raises TypeError for arguments that come too late."""
    session = session or open_session()
    if session is None:
        return connect(**arguments)
    session.client.configure(**arguments)
    return session
