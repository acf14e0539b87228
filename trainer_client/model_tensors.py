"""The tensors of a model: names of its parameters, other stored tensors, and further names of tied tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from ps_protocol.errors import BadModel, ModelMismatch
from ps_protocol.optimizers import OptimizerSpec
from ps_protocol.vocabulary import ParameterSpec


def name_parameters(optimizer: Optimizer, model: nn.Module | None) -> tuple[dict[str, Tensor], int]:
    """Return names from the model, `named_parameters()` or the position, and the number of the latter."""
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
            if name in named:
                raise BadModel(f"two parameters are called {name!r}; every parameter needs a name of its own")
            named[name] = parameter
    if from_model:  # the order in which it computes, most likely, and not that of the groups
        place = {identity: i for i, identity in enumerate(from_model)}
        named = dict(sorted(named.items(), key=lambda item: place.get(id(item[1]), len(place))))
    return named, by_position


def stored_tensors(model: nn.Module | None, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the other tensors of the model: buffers of its state_dict, and parameters that no group trains."""
    if model is None:
        return {}
    state = model.state_dict(keep_vars=True)
    return {
        **frozen_parameters(model, trained),
        **{_plain(name): buffer for name, buffer in model.named_buffers() if name in state},
    }


def frozen_parameters(model: nn.Module | None, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of the model that no group trains, by name."""
    in_groups = {id(parameter) for parameter in trained.values()}
    named = () if model is None else model.named_parameters()
    return {_plain(name): parameter for name, parameter in named if id(parameter) not in in_groups}


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


def describe_model(
    parameters: Sequence[ParameterSpec], stored: Sequence[tuple[Any, ...]], optimizer: OptimizerSpec, **settings: Any
) -> dict[str, str]:
    """Return a digest of each property that must be the same in all processes of a host."""
    told = {
        "parameters": [(p.name, p.shape, p.dtype, p.group) for p in parameters],
        "buffers": stored,
        "optimizer": (optimizer.name, optimizer.group_flags),
        **settings,
    }
    return {name: xxhash.xxh3_64_hexdigest(json.dumps(value, default=str).encode()) for name, value in told.items()}


def check_alike(ours: Mapping[str, str], theirs: Mapping[str, str], process: int) -> None:
    """Raise ModelMismatch, with the properties that differ."""
    different = [name for name in ours if ours[name] != theirs.get(name)]
    if different:
        names = " and ".join(different)
        raise ModelMismatch(f"process {process} of this host is about to train something else than process 0: {names}")
