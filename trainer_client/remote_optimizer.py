"""The whole change to a training script: an optimizer whose `step()` happens on the pservers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ps_protocol.errors import BadModel, ContributionConflict, NonFiniteGradient, PserverLost, RolledBack
from ps_protocol.messages import RunSummary
from ps_protocol.vocabulary import ParameterSpec, Round

from .grad_scaling import unscale_gradients
from .local_steps import LocalSteps, check_outer
from .optimizer_spec import describe_optimizer, read_hyper_parameters
from .pipeline import Pipeline
from .session import Session, connect, open_session
from .tensors import TORCH_DTYPES, lands_directly, wire_dtype, writable_bytes


class RemoteOptimizer(Optimizer):
    """Wraps a `torch.optim` optimizer: gradients go to the pservers, stepped parameters come back.

        optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3))

    It is a `torch.optim.Optimizer` over the same `param_groups`, so learning-rate schedulers work on it: every push
    carries the groups' current numbers. The wrapped optimizer's own `step()` is called for local steps only.

    The constructor joins the run, waits for all trainers and pservers, and pulls the initial values of the lowest
    rank into the parameters (and into the buffers and frozen parameters of `model`, if given), so that everybody
    starts from the same.
    Every argument is also a setting (`GRADPOST_*`); the argument wins.

    Args:
        optimizer: one of the element-wise optimizers of torch.optim; only read.
        model: gives its buffers (batch norm statistics) and frozen parameters their start, and parameters their names.
        session: from `connect()`; by default the open session, or a new one made with `arguments`.
        outer: with local steps, the optimizer that steps on the pservers, over the same parameters; by default SGD with
            `outer_lr` (1, or 1 / world size in asynchronous modes), `outer_momentum` (0) and `outer_nesterov`.
        arguments: `local_steps` (0: none; else `optimizer` steps here, and every so many steps the difference is
            pushed, as the gradient of `outer`), `coordinator`, `mode`, `min_block_size`, `placement`,
            `slice_parameters`, `nonfinite`, `bucket_bytes`, `retry_seconds`; those that shape the plan must be the
            same on all trainers.

    Raises:
        UnsupportedOptimizer, BadModel, ModelMismatch: before anything was sent to a pserver.
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
        self._named, num_unnamed = _name_parameters(optimizer, model)
        self._stored = _stored_tensors(model, self._named)
        self._aliases = _find_aliases(model, self._named | self._stored)
        self._session = _use_session(session, arguments)
        self._remote, self._local = self._share_work(optimizer, outer)
        self.spec = describe_optimizer(self._remote)
        if self._session.client.is_declared:
            raise BadModel("a session has one RemoteOptimizer; give it the parameters of all models, as groups")
        if num_unnamed:
            self._session.client.log.info(
                f"{num_unnamed} parameters have no names and are called by their position, such as "
                "group0.parameter0; give the optimizer model.named_parameters(), or RemoteOptimizer the model"
            )
        self._landing: list[dict[str, Tensor]] = []  # one set for each step that may be on its way
        self._begun: Round = 0
        self._landed: Round = 0  # the step whose pull is in the parameters
        self._num_steps = 0
        self._applied = 0  # contributions of all trainers, when it was counted last
        self._change_was_said = False
        self._refused: NonFiniteGradient | None = None
        self._has_buffers = False  # those of the run, which no round changes
        self._start()

    @property
    def session(self) -> Session:
        """The place in the run."""
        return self._session

    @property
    def round(self) -> Round:
        """The newest completed round (asynchronous: step); without `max_delay` the next `step()` is `round + 1`.

        Not 0 at the start if this trainer was started again, or the run was resumed: a script whose data and random
        state are functions of (seed, rank, round) goes on where it was. It may go down in `step()`, with a warning,
        when the run is rolled back.
        """
        return self._session.round

    @property
    def num_steps(self) -> int:
        """How many steps the last `step()` counts as for a schedule: 1.

        With `step_count=applied` in an asynchronous mode: how many contributions of all trainers have been applied
        since the one before, so that `for _ in range(optimizer.num_steps): schedule.step()` follows them.
        """
        return self._num_steps

    def summary(self) -> RunSummary:
        """The run in a few numbers, as the servers saw it."""
        return self._session.summary()

    def __repr__(self) -> str:
        return f"RemoteOptimizer({self.spec.name}, round {self.round}, {self._session!r})"

    # ------------------------------------------------------------------ the start

    def _share_work(self, optimizer: Optimizer, outer: Optimizer | None) -> tuple[Optimizer, LocalSteps | None]:
        """Which optimizer steps on the pservers, and what is done here before."""
        settings, rules = self._session.client.settings, self._session.client.joined.consistency
        if settings.local_steps == 0:
            if outer is not None or settings.outer_is_set:
                raise BadModel("an outer optimizer (outer, outer_lr, …) has work only with local_steps")
            return optimizer, None
        if rules.max_delay:
            raise BadModel("local_steps with max_delay: what was stepped here meanwhile would be overwritten")
        if outer is None:
            # Where nothing is averaged, N trainers would move the parameters N times as far.
            mean = 1 / self._session.world_size if rules.is_async else 1.0
            outer = torch.optim.SGD(
                list(self._named.values()),
                lr=mean if settings.outer_lr is None else settings.outer_lr,
                momentum=settings.outer_momentum,
                nesterov=settings.outer_nesterov,
            )
        check_outer(optimizer, outer)
        return outer, LocalSteps(optimizer, self._named, settings.local_steps)

    def _start(self) -> None:
        client, io = self._session.client, self._session.io
        groups = {id(p): i for i, group in enumerate(self._remote.param_groups) for p in group["params"]}
        parameters = [
            ParameterSpec(name, tuple(p.shape), wire_dtype(name, p), groups[id(p)]) for name, p in self._named.items()
        ]
        stored = [(name, tuple(t.shape), wire_dtype(name, t)) for name, t in self._stored.items()]
        io.run(client.declare(parameters, self.spec, stored, self._aliases))
        self._pipeline = Pipeline(client, io)
        self._bind()
        self._begin_after(client.start - 1)

    def _begin_after(self, version: Round) -> None:
        """Take the parameters of this version, or of another if the run goes back meanwhile, as those to go on with."""
        client, io = self._session.client, self._session.io
        while True:
            try:
                if client.must_upload:
                    io.run(client.send_initial(self._initial_values()))
                self._pipeline.pull_start(version)
                self._land(self._named, self._landing[self._pipeline.slot(version)])
                if self._stored and not self._has_buffers:
                    landing = _landing_of(self._stored, {name: tensor.dtype for name, tensor in self._stored.items()})
                    io.run(client.pull_buffers({name: writable_bytes(tensor) for name, tensor in landing.items()}))
                    self._land(self._stored, landing)
                    self._has_buffers = True
            except RolledBack:
                version = io.run(client.go_back())
            else:
                self._begun = self._landed = version
                return

    def _initial_values(self) -> dict[str, Tensor]:
        """What the run begins with. Raises PserverLost if there were rounds: nobody has those values any more."""
        if self._landed > 0:
            text = "the pservers have lost all that was trained, and there is no checkpoint"
            raise PserverLost(f"{text}; this trainer had round {self._landed}")
        begun = self._named if self._local is None else self._local.starting_values
        return {name: tensor.detach().to("cpu") for name, tensor in (begun | self._stored).items()}

    def _bind(self) -> None:
        """Find the memory that pulls are written to: the parameters' own, if nobody computes with them meanwhile.

        A difference is added to what was pulled, and not to what a script may have made of that.
        """
        if self._pipeline.max_delay == 0 and not self._session.client.plan.wire.pulls_differences:
            self._landing = [_landing_of(self._named, self._pulled_dtypes)]
        elif not self._landing:
            shapes = [(name, p.shape, self._pulled_dtypes[name]) for name, p in self._named.items()]
            copies = range(self._pipeline.max_delay + 1)
            self._landing = [{name: torch.empty(shape, dtype=dtype) for name, shape, dtype in shapes} for _ in copies]
        self._pipeline.bind(self._landing)
        self._bound = {name: _memory_of(parameter) for name, parameter in self._named.items()}

    @property
    def _pulled_dtypes(self) -> dict[str, torch.dtype]:
        plan = self._session.client.plan
        return {name: TORCH_DTYPES[plan.pulled(name)] for name in self._named}

    def _look_for_changes(self) -> None:
        """A script may have given a parameter other memory, as `module.to()` does, or another value."""
        if any(_memory_of(parameter) != self._bound[name] for name, parameter in self._named.items()):
            for name, parameter in self._named.items():
                spec = self._session.client.plan.parameter[name]
                if (tuple(parameter.shape), wire_dtype(name, parameter)) != (spec.shape, spec.dtype):
                    raise BadModel(
                        f"parameter {name!r} has become another one; the slice plan is made once, when the run starts",
                        expected=f"{spec.dtype} {list(spec.shape)}",
                        actual=f"{parameter.dtype} {list(parameter.shape)}",
                    )
            self._bind()
        if self._local is not None:
            self._pipeline.forget_versions()
            return  # it is its optimizer that changes them
        changed = [name for name, parameter in self._named.items() if parameter._version != self._versions[name]]
        if changed:
            self._pipeline.forget_versions()
        if changed and not self._change_was_said:
            self._change_was_said = True
            self._session.client.log.warning(
                f"the script has changed {len(changed)} parameters since the last step, such as {changed[0]!r}; "
                "their values are the pservers', so that the change is lost. Load a model before it is wrapped"
            )

    # ------------------------------------------------------------------ step

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look_for_changes()
        has_overflowed = unscale_gradients(self, self._named.values())
        if has_overflowed and self._session.client.nonfinite == "reject" and not self._is_async:
            text = f"the gradients of trainer {self._session.rank} have overflowed, and nonfinite is reject"
            raise NonFiniteGradient(f"{text}: with a GradScaler it has to be skip_round, or allow")
        if has_overflowed:  # takes part with nothing
            for parameter in self._named.values():
                parameter.grad = None
        if self._local is None:
            gradients = {name: _flat_gradient(name, p) for name, p in self._named.items() if p.grad is not None}
            self._exchange(gradients, is_finite=not has_overflowed)
        else:
            if self._local.step():
                self._exchange(self._local.outer_gradients())
            self._num_steps = 1  # of the inner optimizer, whose rate a schedule changes
        return loss

    def _count_steps(self) -> None:
        rules, before = self._session.client.joined.consistency, self._applied
        if rules.is_async and rules.step_count == "applied":
            self._applied = min(pserver.applied for pserver in self._session.client.pservers)
            self._num_steps = self._applied - before
        else:
            self._num_steps = 1

    @property
    def _is_async(self) -> bool:
        return self._session.client.joined.consistency.is_async

    def _exchange(self, gradients: dict[str, Tensor], *, is_finite: bool = True) -> None:
        started = time.perf_counter()
        numbers = read_hyper_parameters(self.spec, self._remote)
        step = self._begun + 1
        self._pipeline.begin(step, gradients, numbers, computed_on=self._landed, is_finite=is_finite)
        self._begun = step
        self._take(step - self._pipeline.max_delay)
        self._count_steps()
        self._session.client.metrics.step_seconds.observe(time.perf_counter() - started)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait for the steps that are on their way, and take the newest parameters. Does nothing without max_delay."""
        self._take(self._begun)

    def _take(self, step: Round) -> None:
        """Wait for a step's parameters, and take the newest that are there."""
        try:
            newest = self._pipeline.wait(step)
        except RolledBack as error:
            self._go_back(error)
            return
        except BaseException as error:
            self._begun = self._pipeline.newest  # a step that fails takes those behind it along
            if isinstance(error, ContributionConflict) and self._refused is not None:
                text = "what was staged when an earlier try of this step was refused cannot be taken back; the script"
                raise ContributionConflict(f"{text} has to end, and may be started again ({self._refused})") from error
            self._refused = error if isinstance(error, NonFiniteGradient) else None
            raise
        self._refused = None
        if newest > self._landed:
            self._landed = newest
            self._land(self._named, self._landing[self._pipeline.slot(newest)])

    def _go_back(self, error: RolledBack) -> None:
        client, before = self._session.client, self._begun
        version = self._session.io.run(client.go_back())
        client.log.warning(
            f"{error.detail}: {before - version} steps of this trainer are lost and have to be taken again; "
            f"the next one is {version + 1}"
        )
        self._begin_after(version)

    def _land(self, tensors: dict[str, Tensor], landing: dict[str, Tensor]) -> None:
        """Copy what was pulled to where it could not be written directly: other devices, other memory formats."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                if landing[name] is not tensor:
                    tensor.copy_(landing[name])
        # Autograd did not see what the network wrote: a second backward through the old graph must fail, as ever.
        torch.autograd.graph.increment_version([tensor for name, tensor in tensors.items() if landing[name] is tensor])
        self._versions = {name: parameter._version for name, parameter in self._named.items()}
        if self._local is not None:
            self._local.begin()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the numbers of the groups, as when a schedule is resumed; raises BadModel if there are slots.

        Slots and steps live on the pservers, so that `state_dict()` has none and none can be loaded here.
        """
        if state_dict["state"]:
            raise BadModel("a remote optimizer's slots live on the pservers; they cannot be loaded from a state_dict")
        shared = self.param_groups
        super().load_state_dict(state_dict)
        shared[:] = self.param_groups  # the wrapped optimizer, and schedulers on it, hold this very list
        self.param_groups = shared

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while being constructed: the plan is made once, when the run starts."""
        if hasattr(self, "_session"):
            _refuse_group()
        super().add_param_group(param_group)


def _refuse_group() -> NoReturn:
    raise BadModel("a parameter group cannot be added: the slice plan is made once, when the run starts")


def _flat_gradient(name: str, parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise BadModel(f"the gradient of {name!r} is sparse; only dense gradients can be pushed")
    return gradient.detach().reshape(-1)


def _use_session(session: Session | None, arguments: dict[str, Any]) -> Session:
    """The given session, the open one, or a new one; arguments that a session already has are refused."""
    session = session or open_session()
    if session is None:
        return connect(**arguments)
    session.client.configure(**arguments)
    return session


def _name_parameters(optimizer: Optimizer, model: nn.Module | None) -> tuple[dict[str, Tensor], int]:
    """Names from the model, from `named_parameters()`, or by position; and how many are by position."""
    from_model = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    named: dict[str, Tensor] = {}
    by_position = 0
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            name = from_model.get(id(parameter)) or (group["param_names"][i] if "param_names" in group else None)
            if name is None:
                name, by_position = f"group{g}.parameter{i}", by_position + 1
            if name in named:
                raise BadModel(f"two parameters are called {name!r}; every parameter needs a name of its own")
            named[name] = parameter
    return named, by_position


def _stored_tensors(model: nn.Module | None, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """What else belongs to the model: the buffers of its state_dict, and parameters that no group trains."""
    if model is None:
        return {}
    in_groups = {id(parameter) for parameter in trained.values()}
    frozen = {name: p for name, p in model.named_parameters() if id(p) not in in_groups}
    state = model.state_dict(keep_vars=True)
    return {**frozen, **{name: buffer for name, buffer in model.named_buffers() if name in state}}


def _find_aliases(model: nn.Module | None, known: dict[str, Tensor]) -> dict[str, str]:
    """Further names that the model's state_dict has for tied tensors: alias -> the name that they are known by."""
    if model is None:
        return {}
    names = {id(tensor): name for name, tensor in known.items()}
    state = model.state_dict(keep_vars=True)
    return {alias: names[id(t)] for alias, t in state.items() if alias not in known and id(t) in names}


def _landing_of(tensors: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """For each tensor where its bytes are written to, in the dtype on the wire: its own memory, or some beside it."""
    return {
        name: tensor
        if lands_directly(tensor) and tensor.dtype == dtypes[name]
        else torch.empty(tensor.shape, dtype=dtypes[name])
        for name, tensor in tensors.items()
    }


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
