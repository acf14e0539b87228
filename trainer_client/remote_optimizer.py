"""The whole change to a training script: an optimizer whose `step()` happens on the pservers."""

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
from ps_protocol.vocabulary import ParameterSpec, Round

from .buffer_averages import BufferAverages
from .collectives import choose_device
from .device_copies import check_devices
from .grad_scaler import unscale_gradients
from .host.follower import FollowerSteps
from .host.leader import LeaderSteps
from .local_steps import LocalSteps, check_outer
from .model_tensors import describe_model, find_aliases, frozen_parameters, name_parameters, stored_tensors
from .optimizer_state.remote import RemoteOptimizerState
from .overlap import ForwardWaits, Overlap
from .parameter_watch import Digests, ModelPlaces, ParameterWatch, check_model, digest_values, find_rewritten
from .resumable_batches import Position, ResumableBatches
from .ring.group import Group
from .ring.steps import RingSteps
from .session import Session, connect, open_session
from .steps import Steps
from .tensors import Flattening, wire_dtype
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
    """Wraps a `torch.optim` optimizer: gradients go to the pservers, stepped parameters come back.

        optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3))

    It is a `torch.optim.Optimizer` over the same `param_groups`, so learning-rate schedulers work on it: every push
    carries the groups' current numbers. The wrapped optimizer's own `step()` is called for local steps, and where the
    run's strategy is a ring: then there are no pservers, and the trainers average their gradients among themselves.
    `state_dict()` is what the wrapped optimizer's would be in one process, slots included.

    The constructor joins the run, waits for all trainers and pservers, and pulls the initial values of the lowest
    rank into the parameters (and into the buffers and frozen parameters of `model`, if given), so that everybody
    starts from the same.
    Every argument is also a setting (`GRADPOST_*`); the argument wins.

    Args:
        optimizer: one of the element-wise optimizers of torch.optim; in a ring any but LBFGS. OptimizerState that it has, of a
            checkpoint say, are the run's from its first step on if this trainer brings the initial values, and are
            no more its own.
        model: gives its buffers and frozen parameters their start, and parameters their names. Its float buffers, such
            as the statistics of batch norm, are averaged over all trainers in every step.
        session: from `connect()`; by default the open session, or a new one made with `arguments`.
        outer: with local steps, the optimizer that steps on the pservers, over the same parameters; by default SGD with
            `outer_lr` (1, or 1 / world size in asynchronous modes), `outer_momentum` (0) and `outer_nesterov`.
        arguments: `local_steps` (0: none; else `optimizer` steps here, and every so many steps the difference is
            pushed, as the gradient of `outer`), `coordinator`, `mode`, `min_block_size`, `placement`,
            `slice_parameters`, `nonfinite`, `bucket_bytes`, `retry_seconds`; those that shape the plan must be the
            same on all trainers. `max_grad_norm` (None): clip the aggregated gradient to this norm. `overlap` (False):
            gradients leave while backward still runs, after `accumulate_steps` (1) passes each; `overlap_pulls`
            (False): the modules of `model` wait for what they compute with, instead of `step()` for everything.
            `strategy` and `mode` are what the script expects.

    Raises:
        BadInput, ModelMismatch: before anything was sent to a pserver.
        Ended and its children: what ended the run, instead of waiting for ever.

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
        self._aliases = find_aliases(model, self._named | stored)
        self._session = _use_session(session, arguments)
        self._averages = BufferAverages(model, self._named)
        self._pulled = {**self._named, **self._averages.means}
        self._stored = {name: tensor for name, tensor in stored.items() if name not in self._averages.means}
        self._remote, self._local = self._share_work(optimizer, outer)
        self._own = optimizer if self._is_ring or self._local is not None else None  # steps here
        self.spec = describe_local_optimizer(optimizer) if self._is_ring else describe_optimizer(self._remote)
        names = {id(parameter): name for name, parameter in self._named.items()}
        self._slots = None if self._is_ring else RemoteOptimizerState(self.spec, self._remote, names)
        self._share_state((self if self._own is None else self._own).state)
        share_hooks(self, optimizer, loads_itself=self._own is not None)
        if self._session.client.is_declared:
            raise BadModel("a session has one RemoteOptimizer; give it the parameters of all models, as groups")
        if num_unnamed:
            self._session.client.log.info(
                f"{num_unnamed} parameters have no names and are called by their position, such as "
                "group0.parameter0; give the optimizer model.named_parameters(), or RemoteOptimizer the model"
            )
        if model is None:
            self._session.client.log.info(
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
        if self._local is None:  # whose own optimizer writes to them, and pushes what anyone has written
            check_model(model, self._named.values())
        self._start(model)
        self._members = _identities(self.param_groups)
        self._places = ModelPlaces(model, self._named, self._averages.owners)
        self._values_at_start: Digests | None = digest_values(self._named)  # None after the first step
        self._frozen_at_start = digest_values(frozen_parameters(model, self._named))
        self._model = model
        self._watch = None if self._local else ParameterWatch(self._named, has_samples=self._waits is None)
        self._is_position_known = False  # the script has asked for the run's round
        steps_per_round = max(1, self._session.client.settings.local_steps)
        self._batches = ResumableBatches(
            lambda: Position(self._steps.num_rollbacks, self._steps.begun),
            steps_per_round,
            self._session.client.log.warning,
        )
        self._wrapped = optimizer
        refuse_changes(optimizer, lambda: self._session.is_open)

    @property
    def session(self) -> Session:
        """The place in the run."""
        return self._session

    @property
    def round(self) -> Round:
        """The newest completed round (asynchronous: step); without `max_delay` the next `step()` is `round + 1`.

        Not 0 at the start if this trainer was started again, or the run was resumed: a script whose data and random
        state are functions of (seed, rank, round) goes on where it was. It may go down in `step()`, with a warning,
        when the run is rolled back. With `overlap_pulls` the newest one that was begun.
        """
        self._is_position_known = True
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

        A script that is started again, or resumed, continues behind the batches of the rounds that the run has; after a
        rollback they come again. A script may call this several times, for each epoch or for another loader: each call
        continues behind the batches of those before it, which have been iterated to their end. `set_epoch` of the
        loader and its samplers is called with each epoch, counted over all calls. A DataLoader over a map-style dataset
        does not load what it skips. The order of the data has to be a function of the epoch, as that of a
        DistributedSampler is. A script that accumulates gradients says how many batches it takes for each `step()`, of
        which the batches of a call are a multiple; with local steps a round has `local_steps` times as many, and one
        that was begun starts again.

        A `schedule` that the script steps once after each `step()` is brought to where the batches begin, by stepping
        it, after a rollback from its state at the first call. All calls have the same one. It takes its first step
        with the run; a script may load one that it has saved in the run. ReduceLROnPlateau and
        ChainedScheduler cannot be given.
        """
        self._is_position_known = True
        return self._batches.iterate(loader, epochs, batches_per_step, schedule)

    @property
    def grad_norm(self) -> float | None:
        """With `max_grad_norm`: the 2-norm of the newest round's aggregated gradient before it was clipped.

        NaN if the round was skipped; None before the first round.
        """
        return self._session.client.grad_norm

    def summary(self) -> RunSummary:
        """The run in a few numbers, as the servers saw it."""
        return self._session.summary()

    def __repr__(self) -> str:
        return f"RemoteOptimizer({self.spec.name}, round {self._round}, {self._session!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled: the optimizer is a place in a run."""
        raise TypeError(
            "a RemoteOptimizer cannot be copied or pickled, since it holds a trainer's connections; copy or save its "
            "state_dict() instead"
        )

    # ------------------------------------------------------------------ the start

    def _share_work(self, optimizer: Optimizer, outer: Optimizer | None) -> tuple[Optimizer, LocalSteps | None]:
        """Which optimizer steps on the pservers, and what is done here before."""
        settings, rules = self._session.client.settings, self._session.client.joined.consistency
        if self._is_ring and (settings.local_steps or settings.overlap_pulls):
            raise BadModel("local_steps and overlap_pulls need pservers, and the strategy is ring")
        if settings.local_steps == 0:
            if outer is not None or settings.outer_is_set:
                raise BadModel("an outer optimizer (outer, outer_lr, …) has work only with local_steps")
            return optimizer, None
        if settings.overlap:
            raise BadModel("local_steps with overlap: what is pushed is there only when the last step has been taken")
        if rules.max_delay:
            raise BadModel("local_steps with max_delay: what was stepped here meanwhile would be overwritten")
        if outer is None:
            # Where nothing is averaged, N trainers would move the parameters N times as far.
            mean = 1 / self._session.client.joined.world_size if rules.is_async else 1.0
            outer = torch.optim.SGD(
                list(self._named.values()),
                lr=mean if settings.outer_lr is None else settings.outer_lr,
                momentum=settings.outer_momentum,
                nesterov=settings.outer_nesterov,
            )
        check_outer(optimizer, outer)
        return outer, LocalSteps(optimizer, self._named, settings.local_steps)

    def _start(self, model: nn.Module | None) -> None:
        settings = self._session.client.settings
        if settings.overlap_pulls:
            self._check_overlapping_pulls(model)
        groups = {id(p): i for i, group in enumerate(self._remote.param_groups) for p in group["params"]}
        parameters = [
            ParameterSpec(name, tuple(p.shape), wire_dtype(name, p), groups[id(p)]) for name, p in self._named.items()
        ]
        parameters += self._averages.specs(group=len(self._remote.param_groups))
        stored = [(name, tuple(t.shape), wire_dtype(name, t)) for name, t in self._stored.items()]
        self._steps: Steps | RingSteps | LeaderSteps | FollowerSteps
        if (host := self._session.host) is None:
            self._steps = self._declare(parameters, stored)
        else:
            device = choose_device(self._named).type
            told = describe_model(parameters, stored, self.spec, local_steps=settings.local_steps, device=device)
            mine = self._session, host, self._named, self._averages, self._stored, told
            if host.is_leader:
                self._steps = LeaderSteps(*mine, lambda: self._declare(parameters, stored))
            else:
                self._steps = FollowerSteps(*mine, self._local)
                if self._slots is not None:
                    self._slots.begin(None)
        if settings.overlap_pulls and model is not None:
            self._waits = ForwardWaits(model, self._pulled, self._wait_for_parameters, self.synchronize)
            self._session.finish_last_step = self.synchronize
        if settings.overlap:
            self._overlap = Overlap(
                self._session, self._named, self._send_early, settings.accumulate_steps, self._waits
            )

    def _declare(
        self, parameters: list[ParameterSpec], stored: list[tuple[str, tuple[int, ...], str]]
    ) -> Steps | RingSteps:
        """Say what will be trained, wait for everybody, and take the values that the run begins with."""
        client = self._session.client
        group = Group(self._session, choose_device(self._named)) if self._is_ring else None
        rendezvous = None if group is None else group.offer()
        spec = self.spec.with_means() if self._averages.means else self.spec
        self._session.io.run(client.declare(parameters, spec, stored, self._aliases, rendezvous))
        if group is None:
            steps = Steps(self._session, self._named, self._stored, self._local, self._averages)
            assert self._slots is not None  # there are pservers
            self._slots.begin(steps, leads=self._session.host is not None)
            return steps
        group.open(client.rendezvous)
        ring = RingSteps(self._session, self._named, self._stored, self._remote, group, self._averages)
        self._session.join_others = ring.join_others
        return ring

    def _check_overlapping_pulls(self, model: nn.Module | None) -> None:
        settings, rules = self._session.client.settings, self._session.client.joined.consistency
        if model is None:
            raise BadModel("overlap_pulls needs RemoteOptimizer(…, model=model), whose modules wait for parameters")
        if not settings.overlap:
            raise BadModel("overlap_pulls needs overlap=True")
        if self._session.host is not None:
            raise BadModel(
                "overlap_pulls is for trainers that are one process: the others of this host wait for parameters in "
                "step(). Use overlap without it, or one_trainer_per_host=False"
            )
        if rules.max_delay:
            raise BadModel("overlap_pulls with max_delay: pulls come behind the computation already")

    # ------------------------------------------------------------------ step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. With `overlap` backward passes are counted anew: those before it were for nothing."""
        super().zero_grad(set_to_none)
        if self._overlap is not None:
            self._overlap.begin_again()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Push the gradients, wait until all trainers' are applied, and pull the parameters. Blocks for the round.

        With local steps the wrapped optimizer steps here, and only every so many steps there is such a round.
        A parameter whose `grad` is None is skipped, as torch does; anything done to `grad` before is honoured. A
        `closure` is called once, before, and its loss is returned.

        With `GradScaler.step(optimizer)` the gradients are unscaled here. If they have overflowed, this trainer takes
        part in the round without any, so that all stay in the same one; `nonfinite=skip_round` then skips it for all.

        Raises:
            NonFiniteGradient: under `nonfinite=reject`; what is staged already stays, so that only the same gradient,
                mended where it was not finite, could be tried again.
            Ended and its children: what has ended the run.

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
            if self._watch is not None:
                self._watch.note()
        return loss

    def _check_changes(self) -> None:
        """Take over what was loaded before the first step. Raises BadModel for what was changed later."""
        if _identities(self.param_groups) != self._members:
            raise BadModel(
                "parameters were replaced, added to or removed from param_groups after the optimizer was wrapped; the "
                "slice plan is made once, when the run starts. Save a checkpoint, and start a new run"
            )
        self._places.check()
        self._check_reset()
        self._steps.refresh_parameters()
        if self._values_at_start is not None:
            changed = find_rewritten(self._named, self._values_at_start)
            self._values_at_start = None
            if changed:
                self._steps.replace_values(changed)
            self._warn_of_frozen()
            self._warn_of_own_count()
            self._warn_of_schedule()
        elif self._watch is not None:
            self._watch.check()

    def _warn_of_frozen(self) -> None:
        """Warn before the first step if frozen parameters have changed since they were uploaded."""
        frozen = frozen_parameters(self._model, self._named)
        known = {name: parameter for name, parameter in frozen.items() if name in self._frozen_at_start}
        if changed := find_rewritten(known, self._frozen_at_start):
            self._session.client.log.warning(
                f"the script has changed {len(changed)} frozen parameters since the wrap, such as {min(changed)!r}: "
                "exports, and trainers that do not load the same, have the values of the wrap. Load the model before "
                "RemoteOptimizer(…)"
            )

    def _warn_of_own_count(self) -> None:
        """Warn before the first step if the run has rounds, and the script cannot know how many."""
        if self._steps.begun and not self._is_position_known:
            self._session.client.log.warning(
                f"the run is at round {self._steps.begun}, and this script begins to train without having read "
                "optimizer.round: if it counts its steps from elsewhere, it repeats batches, and the run has more "
                "rounds in the end than it should. Take batches from optimizer.batches(loader, epochs=…), or begin the "
                "loop and its schedules at optimizer.round"
            )

    def _warn_of_schedule(self) -> None:
        """Warn before the first step if the run has rounds, and a schedule that does not follow it is at its start."""
        has_schedule = any(hasattr(one.step, "_wrapped_by_lr_sched") for one in (self, self._wrapped))
        is_at_start = all(group["lr"] == group.get("initial_lr") for group in self.param_groups)
        if self._steps.begun and has_schedule and is_at_start and self._batches.schedule is None:
            self._session.client.log.warning(
                f"the run is at round {self._steps.begun}, and the learning rates are those with which this script's "
                "schedule begins: give it to optimizer.batches(loader, schedule=…), or step it once for each round "
                "of optimizer.round before the loop"
            )

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
        """Of the newest step, before somebody computes with them."""
        assert isinstance(self._steps, Steps)
        assert self._watch is not None  # no local steps
        if self._session.is_open and (landing := self._steps.pending & set(names)):
            trained = landing & self._named.keys()  # the others are buffers
            self._watch.check(trained)
            self._is_rolled_back = self._steps.take(landing) or self._is_rolled_back
            self._watch.note(self._named if self._is_rolled_back else trained)

    def _finish_pull(self) -> bool:
        """Take what has not been waited for; whether the run has gone back, so that these gradients are of no round."""
        self._wait_for_parameters(self._pulled)
        is_void, self._is_rolled_back = self._is_rolled_back, False
        if is_void:
            self._begin_watching()
        return is_void

    def _begin_watching(self) -> None:
        if self._overlap is not None:
            self._overlap.begin()
        if self._waits is not None:
            self._waits.begin()

    def _send_early(self, name: str, gradient: Tensor) -> None:
        if self._waits is not None:
            self._wait_for_parameters(self._pulled)  # what is pushed now says that the round before has been pulled
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
            self._begin_watching()

    # ------------------------------------------------------------------ for a GradScaler

    def attach_scaler(self, unscale: Callable[[Tensor], None], describe: Callable[[], HyperParameters]) -> None:
        """Call `unscale` with every gradient before it leaves early, and push the state that `describe` returns. Once.

        The state goes with the numbers of each round.
        """
        if self._unscale is not None:
            raise BadModel("a RemoteOptimizer has one GradScaler")
        self._unscale, self._describe_scaler = unscale, describe

    def _warn_of_own_scale(self) -> None:
        """Once: torch's own knows nothing of the others' gradients."""
        is_own = self._unscale is None and self.shares_rounds and self._session.world_size > 1
        if is_own and not self._has_warned_of_scale:
            self._has_warned_of_scale = True
            self._session.client.log.warning(
                "torch's GradScaler backs off alone when this trainer's gradients overflow, and scales drift apart; "
                "with trainer_client.GradScaler(optimizer) all trainers have the same one"
            )

    @property
    def overlaps(self) -> bool:
        """Whether gradients leave while backward still runs."""
        return self._overlap is not None

    @property
    def shares_rounds(self) -> bool:
        """Whether every step is a round of all trainers, whose outcome is everybody's."""
        return not self._is_async and self._local is None

    @property
    def outcome_round(self) -> Round:
        """The newest round whose outcome counts for the next step: with `max_delay` it was begun so many before."""
        return max(self._steps.begun - self._session.client.joined.consistency.max_delay, 0)

    @property
    def num_rollbacks(self) -> int:
        """How many rollbacks of the run this trainer has followed."""
        return self._steps.num_rollbacks

    def wait_for_outcome(self) -> None:
        """Wait for that round, if `step` has not."""
        if self._waits is not None:
            self._wait_for_parameters(self._pulled)

    def gradients_here(self) -> list[Tensor]:
        """Those of this step that have not left."""
        left = () if self._overlap is None else self._overlap.left
        return [p.grad for name, p in self._named.items() if p.grad is not None and name not in left]

    def accumulate(self) -> AbstractContextManager[None]:
        """With `overlap`: gradients of the backward passes in the block stay here, and are added to by those after it.

        with optimizer.accumulate():
            loss(first_half).backward()
        loss(second_half).backward()
        optimizer.step()
        """
        return nullcontext() if self._overlap is None else self._overlap.accumulate()

    @property
    def _is_async(self) -> bool:
        return self._session.client.joined.consistency.is_async

    @property
    def _is_ring(self) -> bool:
        return self._session.client.joined.consistency.is_ring

    def _exchange(self, gradients: dict[str, Tensor], *, is_finite: bool = True) -> None:
        started = time.perf_counter()
        numbers = [] if self._is_ring else read_hyper_parameters(self.spec, self._remote)
        if self._averages.means:
            # In asynchronous modes each step of N trainers moves the mean by an N-th of the way.
            numbers.append({"lr": 1 / self._session.world_size if self._is_async else 1.0})
        if self._describe_scaler is not None and self.shares_rounds:
            numbers.append(self._describe_scaler())
        self._steps.begin(gradients, numbers, is_finite=is_finite)
        if self._waits is None:
            self._steps.finish_due_step()
        self._session.client.metrics.step_seconds.observe(time.perf_counter() - started)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait for the steps that are on their way, and take the newest parameters.

        A step that was interrupted or failed is finished, with its own gradient. Else does nothing without `max_delay`
        and `overlap_pulls`.
        """
        if isinstance(self._steps, Steps) and self._steps.is_unfinished:
            try:
                self._steps.finish()
            finally:
                if self._watch is not None:
                    self._watch.note()
        if self._watch is None or self._steps.begun == self._steps.version:
            self._steps.take()
            return
        self._watch.check()
        self._steps.take()
        self._watch.note()

    @contextmanager
    def write_parameters(self) -> Iterator[None]:
        """Within the block the script may write parameters; the next step begins from what they are at its end.

        with optimizer.write_parameters(), torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.01, 0.01)

        All trainers enter it between the same two steps; the values of the lowest rank that changed any count. A script
        that puts the values back within the block changes nothing, and may do so on one trainer alone. Takes the newest
        parameters first (`synchronize`), and passes over all values twice. Before the first step it is not needed.
        Raises BadModel in asynchronous modes, which have no common round, after the first step.
        """
        if self._is_async and self._values_at_start is None and self._local is None:
            raise BadModel(
                "asynchronous modes have no round in which all trainers could write parameters; write them before the "
                "first step"
            )
        self.synchronize()
        if self._watch is None:  # local steps, of which a write is a part
            yield
            return
        changed, before = self._watch.find_changed(), digest_values(self._named)
        yield
        changed.update(find_rewritten(self._named, before))
        if changed:
            self._steps.replace_values(changed)
        self._watch.note()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """What the wrapped optimizer's would be in one process: slots are fetched from the pservers, to host memory.

        Of the newest step, which is waited for (`synchronize`); waits for no other trainer. OptimizerState are float32 even
        where parameters are not. With local steps, and in a ring, it is the wrapped optimizer's own. Where several
        processes of a host are one trainer, only process 0 has slots; with `max_delay` all of them call
        `synchronize` before.
        """
        if self._own is not None or self._slots is None:
            return super().state_dict()
        self._session.check_open("state_dict()")
        if self._session.host is None:
            self.synchronize()
        self._check_reset()
        attempt = self._session.client.membership.news.attempt
        with self._slots.in_state(self):
            if self._watch is not None and self._session.client.membership.news.attempt != attempt:
                self._watch.note()  # the run has gone back
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the groups' numbers, and the slots with the next step: the lowest rank's count. Does not block.

        Others may call it or not; at the start theirs are only looked at. Before this trainer's first step in a run
        that has rounds already (it was started again, or the run resumed) slots are not taken: the run has its own.
        With local steps, and in a ring, they are the wrapped optimizer's own, and all trainers have to load the same.
        Raises BadInput if it does not fit; then nothing has changed.
        """
        handle = self.register_load_state_dict_pre_hook(self._load)  # which is the last one to change what is loaded
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _load(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Load the slots of a state_dict, and return the rest of it, which torch loads."""
        if self._own is not None:
            type(self._own).load_state_dict(self._own, state_dict)
            return {**state_dict, "state": {}}
        assert self._slots is not None  # there are pservers
        slots, numbers = self._slots.read(state_dict)
        self._slots.load(slots)
        return numbers

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what torch has loaded; the list of groups stays the one that schedulers hold."""
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
        """Follow a script that has cleared or replaced `state`: the next step begins without slots.

        Raises BadModel for entries of the script, which the run would not notice.
        """
        shared = self._shared_state
        places = (self,) if self._own is None else (self, self._own)
        replaced = next((one.state for one in places if one.state is not shared), None)
        if isinstance(shared, RemoteState) and (replaced or any(shared.values())):
            refuse_entries()
        if replaced is None and not (isinstance(shared, RemoteState) and shared.was_cleared):
            return
        if self._own is None and self._slots is not None:
            self._slots.load({})
        self._share_state(replaced or {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while being constructed: the plan is made once, when the run starts."""
        if hasattr(self, "_session"):
            refuse_group()
        super().add_param_group(param_group)


def _identities(groups: list[dict[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]


def _use_session(session: Session | None, arguments: dict[str, Any]) -> Session:
    """The given session, the open one, or a new one; arguments that a session already has are refused."""
    session = session or open_session()
    if session is None:
        return connect(**arguments)
    session.client.configure(**arguments)
    return session
