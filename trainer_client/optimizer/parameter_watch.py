"""Notices what a script writes to parameters beside the optimizer's steps.

Version counters show each write that autograd can see. Writes through `.data` do not count there, so a sample of
elements is compared as well: up to 16 of each parameter, at other positions in each step. A write through `.data` that
changes few elements may stay unnoticed for some steps, or for good if the next step overwrites it.
https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import TypeAlias

import torch
import xxhash
from torch import Tensor, nn

from ps_protocol.errors import BadModel

from ..transport.tensors import writable_bytes

SAMPLED = 16  # elements of a parameter, in each step
NUM_TURNS = 8  # steps after which the same positions are sampled again
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # compared as such: NaN equals itself

Digests: TypeAlias = Mapping[str, int]
_Order: TypeAlias = tuple[int, ...]


class ParameterWatch:
    """The state in which the optimizer left parameters. Nothing here blocks, or passes over all values."""

    def __init__(self, parameters: Mapping[str, Tensor], *, has_samples: bool = True) -> None:
        """`has_samples`: no thread of ours writes to the parameters between two calls of `note`."""
        self._parameters = parameters
        self._has_samples = has_samples
        self._versions: dict[str, int] = {}
        self._memory: list[int] = []
        self._samples: list[_Samples] = []
        self._turn = 0
        self.note()

    def note(self, names: Iterable[str] | None = None) -> None:
        """Remember the parameters, or some of them, as they are now."""
        for name in self._parameters if names is None else names:
            self._versions[name] = self._parameters[name]._version
        if self._has_samples and names is None:
            memory = [parameter.data_ptr() for parameter in self._parameters.values()]
            if memory != self._memory:
                self._memory, self._samples = memory, _group_samples(self._parameters)
            self._turn = (self._turn + 1) % NUM_TURNS
            for samples in self._samples:
                samples.copy_values(self._turn)

    def check(self, names: Iterable[str] | None = None) -> None:
        """Raise BadModel if a parameter, or one of these, has been written to since `note`."""
        if changed := self.find_changed(names):
            raise BadModel(
                f"the script has changed {len(changed)} parameters since the last step, such as {min(changed)!r}, and "
                "the next pull would overwrite that. Write parameters before the first step, or on all trainers within "
                "`with optimizer.write_parameters():`"
            )

    def find_changed(self, names: Iterable[str] | None = None) -> set[str]:
        """Return the parameters, or those of these, that have been written to since `note`."""
        checked = self._parameters if names is None else names
        changed = {name for name in checked if self._parameters[name]._version != self._versions[name]}
        if names is None and self._has_samples:
            has_moved = [parameter.data_ptr() for parameter in self._parameters.values()] != self._memory
            for samples in self._samples:
                if not samples.are_same(self._turn, has_moved=has_moved):
                    changed.update(samples.find_changed(self._turn))
        return changed


class ModelPlaces:
    """The modules with trained parameters and averaged buffers: with others there, the run would not be the model's."""

    def __init__(
        self, model: nn.Module, trained: Mapping[str, Tensor], averaged: Mapping[str, tuple[nn.Module, str]]
    ) -> None:
        """`averaged` are the module and the key of each averaged buffer."""
        self._model = model
        self._names = {id(parameter): name for name, parameter in trained.items()}
        self._averaged = averaged
        self._note()

    def _note(self) -> None:
        self._modules = modules = dict.fromkeys(self._model.modules())
        self._averaged = {name: place for name, place in self._averaged.items() if place[0] in modules}
        self._places = [
            (module, key, parameter)
            for module in modules
            if isinstance(module._parameters, dict)  # a scripted module has another mapping
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in self._names
        ]
        self._parents = [module for module in modules if isinstance(module._modules, dict) and module._modules]
        self._children = self._find_children()

    def _find_children(self) -> list[nn.Module | None]:
        return [child for parent in self._parents for child in parent._modules.values()]

    def check(self) -> None:
        """Raise BadModel if a parameter, or the module of one or of an averaged buffer, was replaced.

        `torch.nn.utils.parametrize` and `prune` may move a parameter. A module may be wrapped by another, or removed.
        """
        moved = [place for place in self._places if place[0]._parameters.get(place[1]) is not place[2]]
        children = self._find_children()
        has_same_children = len(children) == len(self._children) and all(map(is_, children, self._children))
        if not moved and has_same_children:
            return
        present = {id(tensor) for tensor in chain(self._model.parameters(), self._model.buffers())}
        others = (module for module in self._model.modules() if module not in self._modules)
        has_others = any(module._parameters or module._buffers for module in others)
        for module, key, parameter in self._places:
            now = module._parameters.get(key)
            is_lost = id(parameter) not in present and (now is None or has_others)
            if is_lost or (now is not None and now is not parameter):
                raise BadModel(
                    f"parameter {self._names[id(parameter)]!r} was replaced in the model after the optimizer was "
                    "wrapped, and the run would train one that the model no longer has. Load without assign=True, or "
                    "change the model before RemoteOptimizer(…)"
                )
        for name, (module, key) in self._averaged.items():
            if has_others and id(module._buffers.get(key)) not in present:
                raise BadModel(
                    f"the module of buffer {name!r} was replaced in the model after the optimizer was wrapped, and the "
                    "run would average one that the model no longer has. Change the model before RemoteOptimizer(…)"
                )
        self._note()


class _Samples:
    """Elements of parameters of one dtype on one device."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._orders = {name: _memory_order(parameter) for name, parameter in parameters.items()}
        self._flat = self._view()
        self._views: dict[int, list[Tensor]] = {}  # by turn
        self._kept = torch.empty(0)

    def copy_values(self, turn: int) -> None:
        if turn not in self._views:
            self._views[turn] = _select(self._flat, turn)
        self._kept = torch.cat(self._views[turn])

    def are_same(self, turn: int, *, has_moved: bool) -> bool:
        """Return whether the elements are as they were kept, wherever the parameters are by now."""
        views = _select(self._view(), turn) if has_moved else self._views[turn]
        now = torch.cat([view.to(self._kept.device) for view in views] if has_moved else views)
        return now.dtype != self._kept.dtype or torch.equal(now, self._kept)  # another dtype is refused elsewhere

    def find_changed(self, turn: int) -> list[str]:
        views = _select(self._view(), turn)
        kept = torch.split(self._kept, [len(view) for view in views])
        pairs = zip(self._parameters, views, kept, strict=True)
        return [name for name, view, before in pairs if not torch.equal(view.to(before.device), before)]

    def _view(self) -> list[Tensor]:
        """Return a 1-dimensional view of the bits of each parameter, or copies if it has moved."""
        flat = [view_in_memory(parameter, self._orders[name]) for name, parameter in self._parameters.items()]
        return [each.view(BITS[each.element_size()]) for each in flat]


def _select(flat: Sequence[Tensor], turn: int) -> list[Tensor]:
    """Return views of the elements of each tensor that are compared in a turn: all of them, if they are few."""
    sizes = [(each, each.numel(), each.numel() // SAMPLED) for each in flat]
    return [
        each if num_elements <= SAMPLED else each[turn * stride // NUM_TURNS :: stride][:SAMPLED]
        for each, num_elements, stride in sizes
    ]


def _group_samples(parameters: Mapping[str, Tensor]) -> list[_Samples]:
    groups: dict[tuple[torch.device, int], dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        order = _memory_order(parameter)
        if parameter.numel() and parameter.detach().permute(order).is_contiguous():  # else no view has its elements
            groups.setdefault((parameter.device, parameter.element_size()), {})[name] = parameter
    return [_Samples(group) for group in groups.values()]


def view_in_memory(parameter: Tensor, order: _Order | None = None) -> Tensor:
    """Return all elements in the order of the memory: a view, or a copy of a tensor with gaps. `order` saves time."""
    if order is None and parameter.is_contiguous():
        return parameter.detach().view(-1)
    return parameter.detach().permute(_memory_order(parameter) if order is None else order).reshape(-1)


def _memory_order(tensor: Tensor) -> _Order:
    """Return the dimensions from the outermost in memory to the innermost, such as (0, 2, 3, 1) for channels_last."""
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-int(tensor.stride()[dim]), dim)))


def digest_values(parameters: Mapping[str, Tensor]) -> Digests:
    """Return a digest of all values of each parameter. Passes over all of them, and copies them from a device."""
    return {
        name: xxhash.xxh3_64_intdigest(writable_bytes(parameter.detach().cpu().contiguous()))
        for name, parameter in parameters.items()
    }


def find_rewritten(parameters: Mapping[str, Tensor], before: Digests) -> list[str]:
    """Return the names of parameters whose values differ from the digests."""
    return [name for name, digest in digest_values(parameters).items() if digest != before[name]]


def check_model(model: nn.Module | None, trained: Collection[Tensor]) -> None:
    """Raise BadModel if a module of the model writes to trained parameters in its forward pass."""
    identities = {id(parameter) for parameter in trained}
    for name, module in model.named_modules() if model is not None else ():
        has_max_norm = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        if has_max_norm and id(module.weight) in identities:
            raise BadModel(
                f"module {name!r} has max_norm, which writes to its weight in each forward pass, and the next pull "
                "would overwrite that; normalise the vectors in forward instead, with torch.nn.functional.normalize"
            )
