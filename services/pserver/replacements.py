"""Values that an administrator sets: kept until the round after which they count, and then gone."""

from __future__ import annotations

import torch
from torch import Tensor

from ps_protocol.errors import ApplyFailed, UnknownBlock, WrongDtype, WrongShape
from ps_protocol.frames import FrameLimits, parse_frame
from ps_protocol.messages import Controls
from ps_protocol.vocabulary import Round

from .layout import ShardLayout
from .tensors import TORCH_DTYPES


class Replacements:
    """By parameter and digest of its values, so that what comes again is the same. Float32, as masters are."""

    def __init__(self, layout: ShardLayout) -> None:
        self._layout = layout
        self._kept: dict[tuple[str, str], tuple[Round, dict[str, Tensor]]] = {}

    def add(self, parameter: str, digest: str, since: Round, body: bytes) -> None:
        """Take a frame of this pserver's blocks of one parameter. Raises what does not fit, and keeps nothing then."""
        frame = parse_frame(body, FrameLimits(max_body_bytes=len(body)))
        blocks: dict[str, Tensor] = {}
        for entry in frame.tensors:
            place = self._layout.place.get(entry.name)
            if place is None or place.block.parameter != parameter:
                raise UnknownBlock(f"block {entry.name!r} of {parameter!r} is not on this pserver")
            if entry.dtype != place.dtype:
                raise WrongDtype(f"block {entry.name!r}", expected=place.dtype, actual=entry.dtype)
            if entry.shape != (place.block.num_elements,):
                raise WrongShape(f"block {entry.name!r}", expected=[place.block.num_elements], actual=list(entry.shape))
            data = bytearray(body[frame.data_begin + entry.begin : frame.data_begin + entry.end])
            blocks[entry.name] = torch.frombuffer(data, dtype=TORCH_DTYPES[entry.dtype]).float()
        mine = {place.name for place in self._layout.places if place.block.parameter == parameter}
        if missing := mine - blocks.keys():
            raise UnknownBlock(f"the values of block {min(missing)!r} are missing")
        self._kept[parameter, digest] = since, blocks

    def blocks_for(self, round_: Round, controls: Controls) -> dict[str, Tensor]:
        """Those that this round sets here, in the order of the layout."""
        if controls.since != round_ or not controls.replaced:
            return {}
        found: dict[str, Tensor] = {}
        for key in controls.replaced.items():
            if key not in self._kept:
                raise ApplyFailed(f"the values that round {round_} sets {key[0]!r} to are not here")
            found |= self._kept[key][1]
        return {place.name: found[place.name] for place in self._layout.places if place.name in found}

    def forget(self, applied: Round) -> None:
        """Rounds up to this one are over."""
        for key in [key for key, (since, _) in self._kept.items() if since <= applied]:
            del self._kept[key]
