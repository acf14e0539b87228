"""A shard's optimizer: the update rules, the ranges in which blocks are stepped, and state that a trainer loads.

A trainer sends loaded optimizer state with its next contribution. The pserver stages and logs the state with the
gradient, and loads it before the step.

The update rules are `torch.optim`'s own functional forms, run on views of a shard's flat float32 tensors. Constructing
an optimizer class would import dynamo (1.5 s and 80 MB in every pserver); the functions do not. Numbers and flags have
the names of https://docs.pytorch.org/docs/stable/optim.html, which are also those of the functions' arguments. Slots
have the names under which `torch.optim` keeps them in its state.

A block of a sparse parameter is stepped as a table of rows, with a coalesced COO tensor, as in torch.

SGD, Adam, AdamW and Adagrad have a fused kernel, which reads each tensor once. The others are a dozen passes with
temporaries of the tensor's size; cut into pieces that fit the cache they take, for 12.5 M elements on one thread
(EPYC, torch 2.13, milliseconds, weight decay and momentum off):

                      RMSprop   Adadelta   Adamax   NAdam   RAdam
    plain                  70        147       79     108     328
    foreach                70        147       61      86      84
    plain, in pieces       23         45       26      41      61
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim._functional import sparse_adam
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from ps_protocol.encodings import Rows
from ps_protocol.optimizers import (
    BUFFER_RULES,
    FRESH,
    HyperParameters,
    OptimizerSpec,
    Options,
    StepState,
    read_states,
    slots_under,
    split_key,
    write_states,
)
from ps_protocol.vocabulary import Rank

from .bodies import StagedBlock, view_bytes
from .layout import ShardLayout
from .shard_state import OptimizerState

PIECE = 1 << 18  # elements: 1 MiB of float32


# ---------------------------------------------------------------------- update rules


@dataclass(frozen=True, slots=True)
class Operands:
    """Parallel lists of float32 views that one call steps: 1-D, or a table (rows, width). All have the same `state`."""

    values: list[Tensor]
    gradients: list[Tensor]  # not written
    slots: Mapping[str, list[Tensor]]
    state: StepState

    @property
    def implementation(self) -> Options:
        """The arguments of a torch function that has a fused kernel for dense gradients."""
        return {"foreach": False, "has_sparse_grad": True} if self.gradients[0].is_sparse else {"fused": True}

    def scalars(self, value: float) -> list[Tensor]:
        """Return a 0-dimensional float32 tensor for each view, the form of torch's own step counts."""
        return list(torch.full((len(self.values),), value, dtype=torch.float32).unbind())

    def stepped(self) -> StepState:
        """Return the state after one more step."""
        return self.state._replace(steps=self.state.steps + 1)


Step: TypeAlias = Callable[[Operands, Options], StepState]  # writes values and slots, returns the new state


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The step function of one optimizer; `ps_protocol.optimizers` has the slots that it needs."""

    step: Step
    max_elements: int | None = PIECE  # of one view; None if one call may step any number


def _step_sgd(on: Operands, options: Options) -> StepState:
    kept = on.slots.get("momentum_buffer", [])
    # None makes torch start a buffer with the gradient itself, undampened; it allocates it, this once.
    buffers: list[Tensor | None] = [*kept] if on.state.has_momentum else [None] * len(on.values)
    sgd(on.values, on.gradients, buffers, **on.implementation, **options)
    if not kept or on.state.has_momentum:
        return on.state
    for slot, buffer in zip(kept, buffers, strict=True):
        assert buffer is not None
        slot.copy_(buffer)
    return on.state._replace(has_momentum=True)


def _make_step(function: Callable[..., None], *slots: str, fused: bool = False) -> Step:
    """Return the step of a torch function that takes these slots, in this order, and the step counts."""
    implementation = {"fused": True} if fused else {"foreach": False}

    def step(on: Operands, options: Options) -> StepState:
        tensors = (on.slots.get(name, []) for name in slots)
        counts = on.scalars(on.state.steps)
        function(on.values, on.gradients, *tensors, counts, **implementation, **_split_betas(options))
        return on.stepped()

    return step


def _step_adagrad(on: Operands, options: Options) -> StepState:
    """Step with sums that were filled before the first step of a block."""
    numbers = {key: value for key, value in options.items() if key != "initial_accumulator_value"}
    adagrad(on.values, on.gradients, on.slots["sum"], on.scalars(on.state.steps), **on.implementation, **numbers)
    return on.stepped()


def _step_nadam(on: Operands, options: Options) -> StepState:
    mu_products = on.scalars(on.state.mu_product)
    nadam(
        on.values, on.gradients, on.slots["exp_avg"], on.slots["exp_avg_sq"], mu_products,
        on.scalars(on.state.steps), foreach=False, **_split_betas(options),
    )  # fmt: skip
    return on.stepped()._replace(mu_product=mu_products[0].item())


def _step_sparse_adam(on: Operands, options: Options) -> StepState:
    steps = [on.state.steps + 1]
    sparse_adam(
        on.values, on.gradients, on.slots["exp_avg"], on.slots["exp_avg_sq"], steps, **_split_betas(options)
    )  # fmt: skip
    return on.stepped()


def _step_buffer(on: Operands, options: Options) -> StepState:
    for value, pushed in zip(on.values, on.gradients, strict=True):
        # Infinity minus infinity is not a number, and a buffer may begin with infinity.
        value.copy_(torch.where(value.isfinite(), value.lerp(pushed, options["lr"]), pushed))
    return on.state


def _split_betas(options: Options) -> Options:
    split = dict(options)
    if "betas" in split:
        split["beta1"], split["beta2"] = split.pop("betas")
    return split


_ADAM = UpdateRule(_make_step(adam, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", fused=True), max_elements=None)

UPDATE_RULES: Mapping[str, UpdateRule] = {
    **dict.fromkeys(BUFFER_RULES, UpdateRule(_step_buffer, max_elements=None)),
    "SGD": UpdateRule(_step_sgd, max_elements=None),
    "Adam": _ADAM,
    "AdamW": _ADAM,  # a flag tells them apart
    "Adagrad": UpdateRule(_step_adagrad, max_elements=None),
    "RMSprop": UpdateRule(_make_step(rmsprop, "square_avg", "grad_avg", "momentum_buffer")),
    "Adadelta": UpdateRule(_make_step(adadelta, "square_avg", "acc_delta")),
    "Adamax": UpdateRule(_make_step(adamax, "exp_avg", "exp_inf")),
    "NAdam": UpdateRule(_step_nadam),
    "RAdam": UpdateRule(_make_step(radam, "exp_avg", "exp_avg_sq")),
    "SparseAdam": UpdateRule(_step_sparse_adam),
}


# ---------------------------------------------------------------------- loaded state


@dataclass(frozen=True, slots=True)
class LoadedState:
    """Optimizer state of the blocks in `states`; a slot of these blocks that is not in `tensors` is empty."""

    states: Mapping[str, StepState]
    tensors: Mapping[str, Tensor]  # by `{slot}/{block}`, of shape (num_elements,), float32; only read

    @classmethod
    def from_staged(cls, staged: Mapping[str, StagedBlock | StepState]) -> LoadedState | None:
        """Return the state in a contribution, as views of the received bodies, or None if there is none."""
        if not staged:
            return None
        states = {split_key(key)[1]: state for key, state in staged.items() if isinstance(state, StepState)}
        tensors = {key: block.tensor() for key, block in staged.items() if isinstance(block, StagedBlock)}
        return cls(states, tensors)

    def describe(self) -> str:
        """Return the description that the log contains, with `parts` behind it."""
        return json.dumps([write_states(self.states), list(self.tensors)])

    def parts(self) -> list[memoryview]:
        """Return the bytes of all tensors, not copied."""
        return [view_bytes(tensor) for tensor in self.tensors.values()]

    @classmethod
    def from_log(cls, description: str, data: memoryview, layout: ShardLayout) -> tuple[LoadedState, memoryview]:
        """Return the state at the end of a record's data, and the data before it."""
        states, keys = json.loads(description)
        tensors: dict[str, Tensor] = {}
        for key in reversed(keys):
            begin = len(data) - torch.float32.itemsize * layout.place[split_key(key)[1]].block.num_elements
            tensors[key] = torch.frombuffer(data[begin:], dtype=torch.float32)
            data = data[:begin]
        return cls(read_states(states), tensors), data


def find_loaded(contributions: Sequence[Mapping[str, StagedBlock | StepState]]) -> LoadedState | None:
    """Return the state that a round loads: the state from the lowest rank that loads any."""
    for slots in contributions:
        if slots:
            return LoadedState.from_staged(slots)
    return None


# ---------------------------------------------------------------------- steps


@dataclass(slots=True)
class _Stepped:
    """Blocks of one group in one state, and their flat ranges."""

    names: list[str] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)


class OptimizerBlocks:
    """Steps of a shard's blocks, and their state. Synchronous, not thread-safe."""

    def __init__(self, layout: ShardLayout, spec: OptimizerSpec) -> None:
        self.state = OptimizerState(steps=dict.fromkeys(layout.place, FRESH))
        self._spec = spec
        self._layout = layout
        # Their sums are filled once, and not in each counter's first step.
        self._filled = frozenset(name for name, its in layout.place.items() if spec.rule(its.group) == "Adagrad")

    def apply(
        self,
        values: Tensor,
        gradient: Tensor,
        present: Collection[str],
        hyper_parameters: list[HyperParameters],
        rows: Mapping[str, Rows],
        *,
        counter: Rank | None = None,
    ) -> None:
        """Step the blocks named in `present`, once; `rows` has the gradients of sparse ones.

        `values` and `gradient` are flat float32 tensors of the layout; `values` is written, `gradient` read where
        blocks are present. For buffers it contains the pushed values. `hyper_parameters` has one checked dictionary for
        each parameter group. Steps are counted for each block, or with a `counter` for each block and counter; counters
        share the slots. A new counter begins with the steps of the block before any counter stepped it.
        """
        wanted = frozenset(present)
        for name in self._filled & wanted:
            if self.state.steps[name].steps == 0:  # no counter has stepped it
                place = self._layout.place[name]
                numbers: Options = hyper_parameters[place.group]
                self._slot("sum")[place.step_begin : place.step_end] = numbers["initial_accumulator_value"]
        if counter is None:
            self.state.counted.clear()  # such a step counts for all
        else:
            self.state.steps.update({name: self._begin(name, counter) for name in present})
        for (group, state), stepped in self._find_runs(wanted - rows.keys()).items():
            name = self._spec.rule(group)
            rule = UPDATE_RULES[name]
            options = {**hyper_parameters[group], **self._spec.group_flags[group]}
            pieces = [piece for run in stepped.runs for piece in _cut(*run, rule.max_elements)]
            slots = {slot: _view(self._slot(slot), pieces) for slot in slots_under(name, options)}
            operands = Operands(_view(values, pieces), _view(gradient, pieces), slots, state)
            self.state.steps.update(dict.fromkeys(stepped.names, rule.step(operands, options)))
        for name in rows.keys() & wanted:
            self._step_rows(values, name, rows[name], hyper_parameters)
        if counter is not None:
            self.state.counted.update({(counter, name): self.state.steps[name] for name in present})

    def _step_rows(self, values: Tensor, name: str, rows: Rows, hyper_parameters: list[HyperParameters]) -> None:
        place, state = self._layout.place[name], self.state.steps[name]
        rule = self._spec.rule(place.group)
        options = {**hyper_parameters[place.group], **self._spec.group_flags[place.group]}

        def table(flat: Tensor) -> Tensor:
            return flat[place.begin : place.end].view(-1, place.width)

        slots = {slot: [table(self._slot(slot))] for slot in slots_under(rule, options)}
        checks = torch.sparse.check_sparse_tensor_invariants(False)  # type: ignore[no-untyped-call] # they were checked
        with checks:
            gradient = torch.sparse_coo_tensor(rows.indices[None], rows.values, table(values).shape, is_coalesced=True)
            operands = Operands([table(values)], [gradient], slots, state)
            self.state.steps[name] = UPDATE_RULES[rule].step(operands, options)

    def _begin(self, name: str, counter: Rank) -> StepState:
        """Return a counter's state of a block that it is about to step."""
        before = self.state.counted.setdefault((None, name), self.state.steps[name])
        return self._own_state(name, self.state.counted.get((counter, name), before))

    def _own_state(self, name: str, counted: StepState) -> StepState:
        has_momentum = self.state.steps[name].has_momentum  # the slot is one for all
        return counted if counted.has_momentum == has_momentum else counted._replace(has_momentum=has_momentum)

    def steps_for(self, counter: Rank) -> dict[str, StepState]:
        """Return the step state of every block: the counter's own where it has stepped the block."""
        counted = {name: self.state.counted.get((counter, name), state) for name, state in self.state.steps.items()}
        return {name: self._own_state(name, state) for name, state in counted.items()}

    def load(self, state: OptimizerState) -> None:
        """Replace the state by a copy of another one."""
        self.state = state.clone()

    def load_blocks(self, states: Mapping[str, StepState], slots: Mapping[str, Tensor]) -> None:
        """Replace the counts and slots of these blocks. `{slot}/{block}` tensors of shape (num_elements,) are copied.

        A slot of these blocks without a tensor becomes empty. Every counter begins with these counts.
        """
        for name in states:
            place = self._layout.place[name]
            for slot in self.state.slots.values():
                slot[place.step_begin : place.padded_end] = 0
        for key, values in slots.items():
            slot_name, name = split_key(key)
            place = self._layout.place[name]
            self._slot(slot_name)[place.begin : place.end] = values
        self.state.steps.update(states)
        self.state.counted = {key: state for key, state in self.state.counted.items() if key[1] not in states}

    def _find_runs(self, present: frozenset[str]) -> dict[tuple[int, StepState], _Stepped]:
        """Return the present blocks by group and state.

        Adjacent blocks share a run, unless a parameter ends within a window between them.
        """
        found: dict[tuple[int, StepState], _Stepped] = {}
        places = self._layout.dense
        if len(present) < len(places):
            places = tuple(sorted((self._layout.place[name] for name in present), key=lambda place: place.begin))
        for place in places:
            stepped = found.setdefault((place.group, self.state.steps[place.name]), _Stepped())
            stepped.names.append(place.name)
            if stepped.runs and stepped.runs[-1][1] == place.step_begin:
                stepped.runs[-1] = (stepped.runs[-1][0], place.step_end)
            else:
                stepped.runs.append((place.step_begin, place.step_end))
        return found

    def _slot(self, name: str) -> Tensor:
        if name not in self.state.slots:
            self.state.slots[name] = torch.zeros(self._layout.num_elements)
        return self.state.slots[name]


def _view(flat: Tensor, pieces: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [flat[begin:end] for begin, end in pieces]


def _cut(begin: int, end: int, size: int | None) -> list[tuple[int, int]]:
    if size is None:
        return [(begin, end)]
    return [(at, min(at + size, end)) for at in range(begin, end, size)]
