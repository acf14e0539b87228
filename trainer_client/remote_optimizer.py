"""`RemoteOptimizer`: a torch optimizer whose `step()` happens on the pservers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ps_protocol.errors import BadModel, GradpostError, NonFiniteGradient
from ps_protocol.messages import RunSummary
from ps_protocol.optimizers import HyperParameters
from ps_protocol.vocabulary import Round

from .buffer_averages import BufferAverages
from .combinations import check_combination, divide_work
from .device_copies import check_devices
from .grad_scaler import unscale_gradients
from .model_tensors import find_aliases, name_parameters, stored_tensors
from .optimizer_state.remote import RemoteOptimizerState
from .overlap import ForwardWaits, Overlap
from .parameter_watch import ParameterWatch, check_model, digest_values, find_rewritten
from .resumable_batches import Position, ResumableBatches
from .script_guard import ScriptGuard
from .session import Session, connect, open_session
from .start import TrainedModel, start_steps
from .steps import Steps
from .tensors import Flattening
from .wrapped_optimizer import (
    InitializedState,
    RemoteState,
    describe_local_optimizer,
    describe_optimizer,
    read_hyper_parameters,
    refuse_changes,
    refuse_entries,
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
        self._named, num_unnamed = name_parameters(optimizer, model)
        stored = stored_tensors(model, self._named)
        check_devices(self._named)
        aliases = find_aliases(model, self._named | stored)
        self._session = _use_session(session, arguments)
        client = self._session.client
        self._is_ring = client.joined.consistency.is_ring
        self._is_async = client.joined.consistency.is_async
        averages = BufferAverages(model, self._named)
        self._pulled = {**self._named, **averages.means}
        stored = {name: tensor for name, tensor in stored.items() if name not in averages.means}
        check_combination(self._session, has_model=model is not None, has_outer=outer is not None)
        self._remote, self._local = divide_work(self._session, optimizer, outer, self._named)
        self._own = optimizer if self._is_ring or self._local is not None else None  # steps in the trainer
        self.spec = describe_local_optimizer(optimizer) if self._is_ring else describe_optimizer(self._remote)
        names = {id(parameter): name for name, parameter in self._named.items()}
        self._remote_state = None if self._is_ring else RemoteOptimizerState(self.spec, self._remote, names)
        self._share_state((self if self._own is None else self._own).state)
        share_hooks(self, optimizer, loads_itself=self._own is not None)
        if client.is_declared:
            raise BadModel("a session has one RemoteOptimizer; give it the parameters of all models, as groups")
        if num_unnamed:
            client.log.info(
                f"{num_unnamed} parameters have no names and are called by their position, such as "
                "group0.parameter0; give the optimizer model.named_parameters(), or RemoteOptimizer the model"
            )
        if model is None:
            client.log.info(
                "buffers, such as the statistics of batch norm, are not part of the run without RemoteOptimizer(…, "
                "model=model); if the model has any, exported and resumed models lack them"
            )
        self._is_rolled_back = False  # the run has gone back since this step's forward pass began
        self._flattening = Flattening()
        self._overlap: Overlap | None = None
        self._waits: ForwardWaits | None = None
        self._unscale: Callable[[Tensor], None] | None = None  # of a GradScaler
        self._describe_scaler: Callable[[], HyperParameters] | None = None
        self._has_warned_of_scale = False
        if self._local is None:
            check_model(model, self._named.values())
        trained = TrainedModel(self._named, averages, stored, aliases)
        self._steps = start_steps(self._session, trained, self._remote, self.spec, self._local, self._remote_state)
        self._averages = averages
        self._start_overlap(model)
        self._guard = ScriptGuard(self, model, self._named, averages, client.log)
        if self._local is None:
            self._guard.watch = ParameterWatch(self._named, has_samples=self._waits is None)
        self._batches = ResumableBatches(
            lambda: Position(self._steps.num_rollbacks, self._steps.begun),
            max(1, client.settings.local_steps),
            client.log.warning,
        )
        self._wrapped = optimizer
        refuse_changes(optimizer, lambda: self._session.is_open)

    def _start_overlap(self, model: nn.Module | None) -> None:
        settings = self._session.client.settings
        if settings.overlap_pulls and model is not None:
            self._waits = ForwardWaits(model, self._pulled, self._wait_for_parameters, self.synchronize)
            self._session.finish_last_step = self.synchronize
        if settings.overlap:
            self._overlap = Overlap(
                self._session, self._named, self._send_early, settings.accumulate_steps, self._waits
            )

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
        if self._waits is not None:
            return self._steps.begun
        return self._session.round if self._session.host is None else self._steps.version

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
        if self._waits is not None and self._finish_pull():
            return loss
        self._check_changes()
        try:
            self._step()
        finally:
            self._guard.note()
        return loss

    def _check_changes(self) -> None:
        """Take over values that were loaded before the first step. Raises BadModel for later changes."""
        is_first = self._guard.is_before_first_step
        self._guard.check_structure()
        self._check_reset()
        self._steps.refresh_parameters()
        if changed := self._guard.check_values():
            self._steps.replace_values(changed)
        if is_first:
            follows_schedule = self._batches.schedule is not None
            self._guard.warn_before_first_step(self._steps.begun, self._wrapped, follows_schedule=follows_schedule)

    def _step(self) -> None:
        if self._overlap is not None:
            self._check_early()
        if getattr(self, "found_inf", None) is not None:
            self._warn_of_own_scale()
        has_overflowed = unscale_gradients(self, self._named.values())
        policy = self._session.client.nonfinite
        if has_overflowed and policy != "skip_round" and self.shares_rounds:
            rank = self._session.client.joined.rank
            text = f"the gradients of trainer {rank} have overflowed, and nonfinite is {policy}"
            raise NonFiniteGradient(f"{text}: with a GradScaler it has to be skip_round, so that all skip the round")
        if has_overflowed:  # takes part with nothing
            for parameter in self._named.values():
                parameter.grad = None
        if self._local is None:
            gradients = {
                name: self._flattening.flat(name, p.grad) for name, p in self._named.items() if p.grad is not None
            }
            self._exchange(gradients, is_finite=not has_overflowed)
        elif self._local.step():
            self._exchange(self._local.outer_gradients())

    def _wait_for_parameters(self, names: Collection[str]) -> None:
        """Wait for the newest step's values of these parameters. A module calls it before it computes with them."""
        assert isinstance(self._steps, Steps)
        watch = self._guard.watch
        assert watch is not None  # no local steps
        if self._session.is_open and (pending := self._steps.pending & set(names)):
            trained = pending & self._named.keys()  # the others are buffers
            watch.check(trained)
            self._is_rolled_back = self._steps.take(pending) or self._is_rolled_back
            watch.note(self._named if self._is_rolled_back else trained)

    def _finish_pull(self) -> bool:
        """Wait for the rest of the newest step; return whether the run went back, which makes the gradients void."""
        self._wait_for_parameters(self._pulled)
        is_rolled_back, self._is_rolled_back = self._is_rolled_back, False
        if is_rolled_back:
            self._begin_overlap()
        return is_rolled_back

    def _begin_overlap(self) -> None:
        if self._overlap is not None:
            self._overlap.begin()
        if self._waits is not None:
            self._waits.begin()

    def _send_early(self, name: str, gradient: Tensor) -> None:
        if self._waits is not None:
            self._wait_for_parameters(self._pulled)  # a push implies that the round before was pulled
        if self._unscale is not None:
            self._unscale(gradient)
        if not self._is_rolled_back:
            self._steps.add(name, self._flattening.flat(name, gradient))

    def _check_early(self) -> None:
        assert self._overlap is not None
        try:
            if getattr(self, "found_inf", None) is not None:
                raise BadModel(
                    "with overlap=True gradients have left before torch's GradScaler unscales them; use "
                    "trainer_client.GradScaler(optimizer), bfloat16, which needs none, or overlap=False"
                )
            self._overlap.check()
        except GradpostError:
            self._steps.forget_gradients()
            raise
        finally:
            self._begin_overlap()

    def _exchange(self, gradients: dict[str, Tensor], *, is_finite: bool = True) -> None:
        started = time.perf_counter()
        hyperparameters = [] if self._is_ring else read_hyper_parameters(self.spec, self._remote)
        if self._averages.means:
            # In asynchronous modes each step of N trainers moves the mean by an N-th of the way.
            hyperparameters.append({"lr": 1 / self._session.world_size if self._is_async else 1.0})
        if self._describe_scaler is not None and self.shares_rounds:
            hyperparameters.append(self._describe_scaler())
        self._steps.begin(gradients, hyperparameters, is_finite=is_finite)
        if self._waits is None:
            self._steps.finish_due_step()
        self._session.client.metrics.step_seconds.observe(time.perf_counter() - started)

    # ------------------------------------------------------------------ for a GradScaler

    def attach_scaler(self, unscale: Callable[[Tensor], None], describe: Callable[[], HyperParameters]) -> None:
        """Attach a GradScaler: `unscale` is called with every gradient before it is pushed early.

        The state that `describe` returns is pushed with the hyperparameters of each round. Raises BadModel for a
        second one.
        """
        if self._unscale is not None:
            raise BadModel("a RemoteOptimizer has one GradScaler")
        self._unscale, self._describe_scaler = unscale, describe

    def _warn_of_own_scale(self) -> None:
        """Warn once that torch's GradScaler ignores the gradients of the other trainers."""
        is_own = self._unscale is None and self.shares_rounds and self._session.world_size > 1
        if is_own and not self._has_warned_of_scale:
            self._has_warned_of_scale = True
            self._session.client.log.warning(
                "torch's GradScaler backs off alone when this trainer's gradients overflow, and scales drift apart; "
                "with trainer_client.GradScaler(optimizer) all trainers have the same one"
            )

    @property
    def overlaps(self) -> bool:
        """True if gradients are pushed while backward still runs."""
        return self._overlap is not None

    @property
    def shares_rounds(self) -> bool:
        """True if every step is a round of all trainers, which have its outcome in common."""
        return not self._is_async and self._local is None

    @property
    def outcome_round(self) -> Round:
        """The newest round whose outcome counts for the next step: `max_delay` rounds before the newest one."""
        return max(self._steps.begun - self._session.client.joined.consistency.max_delay, 0)

    @property
    def num_rollbacks(self) -> int:
        """The number of rollbacks of the run that this trainer has followed."""
        return self._steps.num_rollbacks

    def wait_for_outcome(self) -> None:
        """Wait for `outcome_round`, if `step` has not."""
        if self._waits is not None:
            self._wait_for_parameters(self._pulled)

    def unsent_gradients(self) -> list[Tensor]:
        """Return the gradients of this step that have not been pushed."""
        left = () if self._overlap is None else self._overlap.left
        return [p.grad for name, p in self._named.items() if p.grad is not None and name not in left]

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
        if isinstance(self._steps, Steps) and self._steps.is_unfinished:
            try:
                self._steps.finish()
            finally:
                self._guard.note()
        watch = self._guard.watch
        if watch is None or self._steps.begun == self._steps.version:
            self._steps.take()
            return
        watch.check()
        self._steps.take()
        watch.note()

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
        watch = self._guard.watch
        if watch is None:  # a write is part of the local steps
            yield
            return
        changed, before = watch.find_changed(), digest_values(self._named)
        yield
        changed.update(find_rewritten(self._named, before))
        if changed:
            self._steps.replace_values(changed)
        watch.note()

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
        news = self._session.client.membership.news
        attempt = news.attempt
        with self._remote_state.in_state(self):
            if news.attempt != attempt:  # the run has gone back
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
        self._share_state((self if self._own is None else self._own).state)

    def _share_state(self, state: Mapping[Tensor, Any]) -> None:
        self.state = self._shared_state = (RemoteState if self._own is None else InitializedState)(dict, state)
        if self._own is not None:
            self._own.state = self.state

    def _check_reset(self) -> None:
        """Begin the next step without optimizer state if the script has cleared or replaced `state`.

        Raises BadModel for entries that the script has added, which the run would not notice.
        """
        shared = self._shared_state
        places = (self,) if self._own is None else (self, self._own)
        replaced = next((one.state for one in places if one.state is not shared), None)
        if isinstance(shared, RemoteState) and (replaced or any(shared.values())):
            refuse_entries()
        if replaced is None and not (isinstance(shared, RemoteState) and shared.was_cleared):
            return
        if self._own is None and self._remote_state is not None:
            self._remote_state.load({})
        self._share_state(replaced or {})

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
