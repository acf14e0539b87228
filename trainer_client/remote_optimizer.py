"""The whole change to a training script: an optimizer whose `step()` happens on the pservers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.messages import RunSummary
from ps_protocol.vocabulary import ParameterSpec, Round

from .buckets import Bucket, make_buckets
from .client import completion
from .optimizer_spec import describe_optimizer, read_hyper_parameters
from .session import Session, connect, open_session
from .tensors import lands_directly, wire_dtype, writable_bytes

METADATA_BYTES_PER_GROUP = 256
MAX_KEPT_LAYOUTS = 4  # which parameters have a gradient seldom changes


class RemoteOptimizer(Optimizer):
    """Wraps a `torch.optim` optimizer: gradients go to the pservers, stepped parameters come back.

        optimizer = RemoteOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-3))

    It is a `torch.optim.Optimizer` over the same `param_groups`, so learning-rate schedulers work on it: every push
    carries the groups' current numbers. The wrapped optimizer's own `step()` is never called.

    The constructor joins the run, waits for all trainers and pservers, and pulls the initial values of the lowest
    rank into the parameters (and into the buffers and frozen parameters of `model`, if given), so that everybody
    starts from the same.
    Every argument is also a setting (`GRADPOST_*`); the argument wins.

    Args:
        optimizer: one of the element-wise optimizers of torch.optim; only read.
        model: gives its buffers (batch norm statistics) and frozen parameters their start, and parameters their names.
        session: from `connect()`; by default the open session, or a new one made with `arguments`.
        arguments: `coordinator`, `mode`, `min_block_size`, `placement`, `slice_parameters`, `nonfinite`,
            `bucket_bytes`, `retry_seconds`; those that shape the plan must be the same on all trainers.

    Raises:
        UnsupportedOptimizer, BadModel, ModelMismatch: before anything was sent to a pserver.
        Ended and its children: what ended the run, instead of waiting for ever.

    """

    def __init__(
        self, optimizer: Optimizer, *, model: nn.Module | None = None, session: Session | None = None, **arguments: Any
    ) -> None:
        if isinstance(optimizer, RemoteOptimizer):
            raise BadModel("the optimizer is remote already")
        self.spec = describe_optimizer(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the very same list: schedulers may hold either
        self._named, num_unnamed = _name_parameters(optimizer, model)
        self._stored = _stored_tensors(model, self._named)
        self._session = _use_session(session, arguments)
        if self._session.client.is_declared:
            raise BadModel("a session has one RemoteOptimizer; give it the parameters of all models, as groups")
        if num_unnamed:
            self._session.client.log.info(
                f"{num_unnamed} parameters have no names and are called by their position, such as "
                "group0.parameter0; give the optimizer model.named_parameters(), or RemoteOptimizer the model"
            )
        self._layouts: dict[frozenset[str], list[list[Bucket]]] = {}
        self._change_was_said = False
        self._start()

    @property
    def session(self) -> Session:
        """The place in the run."""
        return self._session

    @property
    def round(self) -> Round:
        """The newest completed round; the next `step()` is `round + 1`."""
        return self._session.round

    def summary(self) -> RunSummary:
        """The run in a few numbers, as the servers saw it."""
        return self._session.summary()

    def __repr__(self) -> str:
        return f"RemoteOptimizer({self.spec.name}, round {self.round}, {self._session!r})"

    # ------------------------------------------------------------------ the start

    def _start(self) -> None:
        client, io = self._session.client, self._session.io
        groups = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        parameters = [
            ParameterSpec(name, tuple(p.shape), wire_dtype(name, p), groups[id(p)]) for name, p in self._named.items()
        ]
        stored = [(name, tuple(t.shape), wire_dtype(name, t)) for name, t in self._stored.items()]
        io.run(client.declare(parameters, self.spec, stored))
        if self._session.rank == client.uploader:
            values = {name: t.detach().to("cpu") for name, t in (self._named | self._stored).items()}
            io.run(client.send_initial(values))
        self._bind()
        io.run(client.pull(0, self._destinations, with_batch_barrier=False))
        self._land(self._named, self._landing)
        if self._stored:
            landing = _landing_of(self._stored)
            io.run(client.pull_buffers({name: writable_bytes(tensor) for name, tensor in landing.items()}))
            self._land(self._stored, landing)

    def _bind(self) -> None:
        """Find the memory that pulls are written to: the parameters' own where that is possible."""
        self._landing = _landing_of(self._named)
        self._destinations = self._session.client.destinations(
            {name: writable_bytes(tensor) for name, tensor in self._landing.items() if tensor.numel()}
        )
        self._bound = {name: _memory_of(parameter) for name, parameter in self._named.items()}

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
        changed = [name for name, parameter in self._named.items() if parameter._version != self._versions[name]]
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

        A parameter whose `grad` is None is skipped, as torch does; anything done to `grad` before is honoured. A
        `closure` is called once, before, and its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look_for_changes()
        client, io, metrics = self._session.client, self._session.io, self._session.client.metrics
        round_ = self.round + 1
        started = time.perf_counter()
        gradients = {name: _flat_gradient(name, p) for name, p in self._named.items() if p.grad is not None}
        numbers = read_hyper_parameters(self.spec, self)
        layout = self._layout(frozenset(gradients))
        pushes: list[Future[None]] = []
        try:
            # Bucket by bucket, so that the network works while the next one is being copied.
            for bucket, shard in _interleave(layout):
                bucket.fill(gradients)
                frame = bucket.frame(completion(shard, numbers) if bucket is shard[-1] else None)
                pushes.append(io.start(client.push(round_, bucket, frame)))
            for push in pushes:
                io.wait(push)
            pushed = time.perf_counter()
            io.run(client.pull(round_, self._destinations, with_batch_barrier=True))
        except BaseException:
            for push in pushes:
                push.cancel()
            # A request that was given up may still be reading its buffer: leave it alone.
            self._layouts.clear()
            raise
        self._land(self._named, self._landing)
        ended = time.perf_counter()
        metrics.push_seconds.observe(pushed - started)
        metrics.pull_seconds.observe(ended - pushed)
        metrics.step_seconds.observe(ended - started)
        metrics.rounds.inc()
        metrics.round.set(round_)
        return loss

    def _layout(self, present: frozenset[str]) -> list[list[Bucket]]:
        layout = self._layouts.get(present)
        if layout is None:
            if len(self._layouts) >= MAX_KEPT_LAYOUTS:
                self._layouts.clear()
            client = self._session.client
            layout = self._layouts[present] = make_buckets(
                client.plan,
                present,
                bucket_bytes=client.settings.bucket_bytes,
                metadata_bytes=METADATA_BYTES_PER_GROUP * len(self.param_groups),
            )
        return layout

    def _land(self, tensors: dict[str, Tensor], landing: dict[str, Tensor]) -> None:
        """Copy what was pulled to where it could not be written directly: other devices, other memory formats."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                if landing[name] is not tensor:
                    tensor.copy_(landing[name])
        # Autograd did not see what the network wrote: a second backward through the old graph must fail, as ever.
        torch.autograd.graph.increment_version([tensor for name, tensor in tensors.items() if landing[name] is tensor])
        self._versions = {name: parameter._version for name, parameter in self._named.items()}

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


def _interleave(layout: list[list[Bucket]]) -> list[tuple[Bucket, list[Bucket]]]:
    """Buckets in the order in which they leave: one of each pserver in turn, so that all of them are busy."""
    longest = max(map(len, layout), default=0)
    return [(shard[i], shard) for i in range(longest) for shard in layout if i < len(shard)]


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


def _landing_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each tensor the memory that its bytes are written to: its own, or some beside it."""
    return {n: t if lands_directly(t) else torch.empty(t.shape, dtype=t.dtype) for n, t in tensors.items()}


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
