"""The tensors of a model that take part in a run: parameters, averaged buffers, other stored tensors, and tied names.

Float buffers, such as the statistics of batch norm, are averaged over all trainers unless the script chooses otherwise.
They are parameters of the plan with an update rule of their own: each step pushes their values instead of gradients.
Pulls, exports and checkpoints have the result. Tensors that the wire has no form for stay where they are.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from structlog.typing import FilteringBoundLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from ps_protocol.errors import BadModel
from ps_protocol.optimizers import BUFFER_RULES, LOWEST_RANK, MEAN, OptimizerSpec
from ps_protocol.vocabulary import PARAMETER_DTYPES, ParameterSpec

from ..transport.device_copies import check_devices, is_away
from ..transport.tensors import WIRE_DTYPES, check_form, wire_dtype
from .script_optimizers import CombinedOptimizer, members_of

CHOICES = {"average": MEAN, "lowest_rank": LOWEST_RANK, "leave": ""}  # for float buffers, with their update rules
MAX_NAMED = 5  # buffers in a message
STATISTICS = {"running_mean", "running_var"}  # buffers of modules whose float buffers are all statistics
SAME = 1e-3  # relative difference of values that are rounded


@dataclass(frozen=True)
class TrainedModel:
    """The tensors of a model that take part in a run, by name."""

    module: nn.Module | None  # None if the script has not passed it
    parameters: Mapping[str, Tensor]
    num_unnamed: int  # parameters that are called by their position
    averages: BufferAverages
    stored: Mapping[str, Tensor]  # pulled once: other buffers, and frozen parameters
    sparse: frozenset[str]  # the parameters with sparse gradients
    aliases: Mapping[str, str]  # further names of tied tensors

    @property
    def names(self) -> dict[int, str]:
        """The names of the parameters, by id."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    @property
    def pulled(self) -> dict[str, Tensor]:
        """The tensors that each step pulls: parameters, and the means of buffers in host memory."""
        return {**self.parameters, **self.averages.means}

    def describe(self, optimizer: Optimizer) -> tuple[list[ParameterSpec], list[tuple[str, tuple[int, ...], str]]]:
        """Return what a trainer declares: the parameters in the groups of `optimizer`, and the stored tensors."""
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        parameters = [
            ParameterSpec(name, tuple(p.shape), wire_dtype(name, p), groups[id(p)], name in self.sparse)
            for name, p in self.parameters.items()
        ]
        parameters += self.averages.specs(group=len(optimizer.param_groups))
        return parameters, [(name, tuple(t.shape), wire_dtype(name, t)) for name, t in self.stored.items()]


def find_tensors(optimizer: Optimizer, model: nn.Module | None, buffers: Mapping[str, str]) -> TrainedModel:
    """Return the tensors of an optimizer and its model. Raises BadModel for what cannot be used, also of `buffers`."""
    named, num_unnamed = name_parameters(optimizer, model)
    stored = stored_tensors(model, named)
    check_devices(named)
    averages = BufferAverages(model, stored, buffers)
    aliases = find_aliases(model, named | stored)
    rest = {name: tensor for name, tensor in stored.items() if name not in averages.means}
    return TrainedModel(model, named, num_unnamed, averages, rest, _find_sparse(optimizer, model, named), aliases)


def _find_sparse(optimizer: Optimizer, model: nn.Module | None, named: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the parameters of SparseAdam, and of modules such as `nn.Embedding(sparse=True)`."""
    modules = () if model is None else model.modules()
    tables = (module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    found = {id(table.weight) for table in tables if table.sparse}
    for member in members_of(optimizer).values():
        if isinstance(member, torch.optim.SparseAdam):
            found.update(id(parameter) for group in member.param_groups for parameter in group["params"])
    return frozenset(name for name, parameter in named.items() if id(parameter) in found)


def log_names(log: FilteringBoundLogger, model: TrainedModel) -> None:
    """Log what a run lacks without the names, or without the buffers, of a model."""
    if model.num_unnamed:
        log.info(
            f"{model.num_unnamed} parameters have no names and are called by their position, such as "
            "group0.parameter0; give the optimizer model.named_parameters(), or RemoteOptimizer the model"
        )
    if model.module is None:
        log.info(
            "buffers, such as the statistics of batch norm, are not part of the run without RemoteOptimizer(…, "
            "model=model); if the model has any, exported and resumed models lack them"
        )


def name_parameters(optimizer: Optimizer, model: nn.Module | None) -> tuple[dict[str, Tensor], int]:
    """Return names from the model, `named_parameters()` or the position, and the number of names by position.

    Without a model, the names of several optimizers begin with that of the optimizer.
    """
    from_model = {} if model is None else {id(p): _plain(name) for name, p in model.named_parameters()}
    named: dict[str, Tensor] = {}
    by_position = 0
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            name = from_model.get(id(parameter)) or (
                _plain(group["param_names"][i]) if "param_names" in group else None
            )
            if name is None:
                name, by_position = f"group{g}.parameter{i}", by_position + 1
            if isinstance(optimizer, CombinedOptimizer) and id(parameter) not in from_model:
                name = f"{optimizer.owner(parameter)}.{name}"
            if name in named:
                raise BadModel(f"two parameters are called {name!r}; every parameter needs a name of its own")
            named[name] = parameter
    if from_model:  # the order in which it computes, most likely, and not that of the groups
        place = {identity: i for i, identity in enumerate(from_model)}
        named = dict(sorted(named.items(), key=lambda item: place.get(id(item[1]), len(place))))
    return named, by_position


def stored_tensors(model: nn.Module | None, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the other tensors of the model: buffers of its state_dict, and parameters that no group trains.

    Those that the wire has no form for, such as complex and sparse ones, are left out.
    """
    if model is None:
        return {}
    in_groups, state = {id(parameter) for parameter in trained.values()}, model.state_dict(keep_vars=True)
    tensors = {
        **{_plain(name): parameter for name, parameter in model.named_parameters() if id(parameter) not in in_groups},
        **{_plain(name): buffer for name, buffer in model.named_buffers() if name in state},
    }
    return {name: t for name, t in tensors.items() if t.dtype in WIRE_DTYPES and t.layout == torch.strided}


def find_aliases(model: nn.Module | None, known: dict[str, Tensor]) -> dict[str, str]:
    """Return further names of tied tensors in the model's state_dict: alias -> the known name."""
    if model is None:
        return {}
    names = {id(tensor): name for name, tensor in known.items()}
    state = {_plain(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    return {alias: names[id(t)] for alias, t in state.items() if alias not in known and id(t) in names}


def _plain(name: str) -> str:
    """Return the name without the prefix of `torch.compile`, so that trainers agree and checkpoints load."""
    return name.replace("_orig_mod.", "")


class BufferAverages:
    """The float buffers of a model's `state_dict()`, and their newest pulled means. Without a model there are none."""

    def __init__(self, model: nn.Module | None, stored: Mapping[str, Tensor], choices: Mapping[str, str]) -> None:
        """`stored` has the buffers, and `choices` what happens to them, by patterns of names. Raises BadModel."""
        modules = () if model is None else model.modules()
        owners = {id(buffer): (module, key) for module in modules for key, buffer in module._buffers.items()}
        found = [n for n, t in stored.items() if id(t) in owners and WIRE_DTYPES[t.dtype] in PARAMETER_DTYPES]
        chosen = _choose(found, choices, model)
        taken = {rule: [name for name in found if chosen.get(name, MEAN) == rule] for rule in BUFFER_RULES}
        self.rules = {name: rule for rule, names in taken.items() for name in names}  # by name, in the order of groups
        self.owners = {name: owners[id(stored[name])] for name in self.rules}
        self.means: Mapping[str, Tensor] = {  # host memory that pulls are written to
            name: stored[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name in self.rules
        }
        self._pushed: Mapping[str, Tensor] = {}  # in the newest step
        self._doubtful = [  # buffers that the script has not chosen, and that may be no statistics
            name
            for name, (module, _) in self.owners.items()
            if name not in chosen and not STATISTICS & module._buffers.keys()
        ]

    @property
    def groups(self) -> list[str]:
        """The update rule of each group of buffers."""
        return list(dict.fromkeys(self.rules.values()))

    def specs(self, group: int) -> list[ParameterSpec]:
        """Return the buffers as parameters of groups from this one on."""
        groups = {rule: group + i for i, rule in enumerate(self.groups)}
        return [
            ParameterSpec(name, tuple(mean.shape), wire_dtype(name, mean), groups[self.rules[name]])
            for name, mean in self.means.items()
        ]

    def _buffers(self) -> list[Tensor]:
        """Return the buffers as they are now: a module may replace one by another tensor. Raises BadModel."""
        buffers = []
        for (name, mean), (module, key) in zip(self.means.items(), self.owners.values(), strict=True):
            buffer = module._buffers.get(key)
            buffers.append(check_form(name, buffer, mean.shape, mean.dtype))
        return buffers

    def changed_values(self) -> dict[str, Tensor]:
        """Return flat host copies of the buffers that are no longer their mean, by name. Raises BadModel.

        A buffer with NaN or infinity is left out: it would spoil the mean for all trainers.
        """
        if not self.means:
            return {}
        copies = dict(zip(self.means, _copy_flat(self._buffers(), torch.device("cpu")), strict=True))
        are_finite = bool(torch.cat(list(copies.values())).isfinite().all())
        self._pushed = {
            name: copy
            for name, copy in copies.items()
            if not torch.equal(copy, self.means[name].view(-1)) and (are_finite or bool(copy.isfinite().all()))
        }
        return self._pushed

    def warn_of_differences(self, log: FilteringBoundLogger) -> None:
        """Log once that trainers have written other values than this one to buffers that are no statistics."""
        different = sorted(name for name in self._pushed.keys() & self._doubtful if self._differs(name))
        if different:
            self._doubtful.clear()
            choice = dict.fromkeys(different[:MAX_NAMED], "lowest_rank")
            log.warning(
                f"trainers write different values to {len(different)} of the model's buffers, and each step averages "
                f"them. Choose RemoteOptimizer(…, buffers={choice}) or 'leave' for buffers that must not hold a mean, "
                "else 'average'"
            )

    def _differs(self, name: str) -> bool:
        pushed, mean = self._pushed[name].float(), self.means[name].view(-1).float()
        rounding = max(SAME, 2 * torch.finfo(self.means[name].dtype).eps)
        return bool(torch.dist(pushed, mean) > rounding * pushed.norm())

    def write_back(self) -> None:
        """Copy the means to the buffers. Autograd does not notice, so a graph of an earlier pass stays valid."""
        if not self.means:
            return
        buffers, means = [buffer.data for buffer in self._buffers()], list(self.means.values())
        if is_away(buffers[0]):
            copies = _copy_flat(means, buffers[0].device)
            means = [copy.view(mean.shape) for copy, mean in zip(copies, means, strict=True)]
        torch._foreach_copy_(buffers, means)


def _choose(names: Sequence[str], choices: Mapping[str, str], model: nn.Module | None) -> dict[str, str]:
    """Return the choice of each float buffer that a pattern matches. The first such pattern counts."""
    if not choices:
        return {}
    if model is None:
        raise BadModel("choices for buffers need model=model. Pass the model to RemoteOptimizer")
    chosen: dict[str, str] = {}
    for pattern, choice in choices.items():
        if choice not in CHOICES:
            raise BadModel(f"{choice!r} is no choice for buffers {pattern!r}; use average, lowest_rank or leave")
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise BadModel(
                f"{pattern!r} matches no buffer that is exchanged: a dense float32, float16 or bfloat16 one of the "
                f"state_dict, such as {', '.join(map(repr, names[:MAX_NAMED]))}"
            )
        chosen = dict.fromkeys(matched, CHOICES[choice]) | chosen
    return chosen


def _copy_flat(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return flat copies on a device. Tensors of one dtype and device take a single transfer."""
    flat = torch.cat([tensor.detach().reshape(-1).to(tensors[0].device) for tensor in tensors]).to(device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def digest_model(
    model: TrainedModel, optimizer: Optimizer, spec: OptimizerSpec, local_steps: int, device: torch.device
) -> str:
    """Return a digest of what must be the same in all processes of a host."""
    parameters, stored = model.describe(optimizer)
    described = [(p.name, p.shape, p.dtype, p.group, p.is_sparse) for p in parameters]
    text = json.dumps([described, stored, spec.to_json(), local_steps, device.type], default=str)
    return xxhash.xxh3_64_hexdigest(text.encode())
