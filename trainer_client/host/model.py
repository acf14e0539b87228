"""Whether all processes of a host are about to train the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from ps_protocol.errors import ModelMismatch
from ps_protocol.optimizers import OptimizerSpec
from ps_protocol.vocabulary import ParameterSpec


def describe_model(
    parameters: Sequence[ParameterSpec], stored: Sequence[tuple[Any, ...]], optimizer: OptimizerSpec, **settings: Any
) -> dict[str, str]:
    """A digest of each thing that has to be the same."""
    told = {
        "parameters": [(p.name, p.shape, p.dtype, p.group) for p in parameters],
        "buffers": stored,
        "optimizer": (optimizer.name, optimizer.group_flags),
        **settings,
    }
    return {name: xxhash.xxh3_64_hexdigest(json.dumps(value, default=str).encode()) for name, value in told.items()}


def check_alike(ours: Mapping[str, str], theirs: Mapping[str, str], process: int) -> None:
    """Raise ModelMismatch, which names what is different."""
    different = [name for name in ours if ours[name] != theirs.get(name)]
    if different:
        names = " and ".join(different)
        raise ModelMismatch(f"process {process} of this host is about to train something else than process 0: {names}")
