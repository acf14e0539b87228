"""The position of each block in a shard's flat float32 tensors.

All flat tensors of a shard (values, gradient, every slot) share one layout: by parameter group, then in plan order, so
that the optimizer steps a whole group with one call. Blocks of sparse parameters are the last ones, whose gradients are
rows: the flat gradient ends before them.

Results must not depend on the slicing of parameters. A SIMD kernel processes 8 or 16 elements at a time and the last
few of a tensor one by one, and the compiler fuses multiplications and additions of the latter differently: SGD with
momentum, Adam and AdamW round them differently. So each element keeps its offset modulo 64 in its parameter, a block is
stepped in whole windows of 64 elements, and only the parameter's own last window is shorter:

    parameter of 150 elements     |0      64      128  150|
    block 0, elements [0, 75)     |xxxxxxx|x......|            stepped as [0, 128)
    block 1, elements [75, 150)           |.xxxxxx|xxxx|       stepped as [64, 150)

Thus every window is computed exactly as `torch.optim` computes it on the whole parameter, for any slicing, number of
pservers, vector width (at most 64 elements) and number of threads (torch gives each thread whole cache lines). The dots
are padding: zeros at first, stepped along, never read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ps_protocol.errors import BadInput
from ps_protocol.plan import SlicePlan
from ps_protocol.vocabulary import WINDOW, Block, PserverIndex
from ps_protocol.wire_types import WireTensor


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """One block in the flat tensors; all positions count elements of the flat tensor.

    `[begin, end)` are the block's own elements, `[step_begin, step_end)` those that an update rule steps. The block
    occupies the flat tensor from `step_begin`, a multiple of 64, to `padded_end`, the next one.
    """

    name: str
    block: Block
    group: int
    buffer_rule: str | None  # of a float buffer, whose pushes contain values instead of gradients
    dtype: str  # the parameter's, by safetensors' name; the flat tensor is float32
    pushed: tuple[WireTensor, ...]  # the tensors of its gradient on the wire
    pulled: str  # the dtype that trainers pull
    width: int  # elements of a row of a sparse parameter; 0 for others
    begin: int
    end: int
    step_begin: int
    step_end: int
    padded_end: int


class ShardLayout:
    """The places of one pserver's blocks, and the length of its flat tensors."""

    def __init__(self, plan: SlicePlan, pserver: PserverIndex) -> None:
        self._pserver = pserver
        blocks = plan.shards[pserver]
        places: list[BlockPlace] = []
        offset = 0
        specs = plan.parameter
        for block in sorted(  # stable, so in plan order
            blocks, key=lambda b: (specs[b.parameter].is_sparse, specs[b.parameter].group)
        ):
            parameter = specs[block.parameter]
            begin = offset + block.begin % WINDOW
            end = begin + block.num_elements
            padded_end = end + -end % WINDOW
            places.append(
                BlockPlace(
                    name=block.name,
                    block=block,
                    group=parameter.group,
                    buffer_rule=plan.buffer_rules.get(parameter.name),
                    dtype=parameter.dtype,
                    pushed=tuple(plan.pushed(block)),
                    pulled=plan.pulled(block.parameter),
                    width=parameter.width if parameter.is_sparse else 0,
                    begin=begin,
                    end=end,
                    step_begin=offset,
                    step_end=min(padded_end, begin + parameter.num_elements - block.begin),
                    padded_end=padded_end,
                )
            )
            offset = padded_end
        self.num_elements = offset  # padding included
        self.num_dense = min((place.step_begin for place in places if place.width), default=offset)
        # The gradients of dense parameters end here. The groups of buffers are the last ones.
        self.num_stepped = min((place.step_begin for place in places if place.buffer_rule), default=self.num_dense)
        self.places = tuple(places)  # in the order of the flat tensor
        self.dense = tuple(place for place in places if not place.width)
        self.sparse = tuple(place for place in places if place.width)
        self.place_of_pushed = {name: place for place in places for name, _, _ in place.pushed}  # by tensor on the wire
        by_name = {place.name: place for place in places}
        self.place = {block.name: by_name[block.name] for block in blocks}  # by block name, in plan order

    def check_names(self, names: Iterable[str]) -> None:
        """Raise BadInput unless this shard has all of these blocks."""
        for name in names:
            if name not in self.place:
                raise BadInput(f"block {name!r} is not on pserver {self._pserver}", code="unknown_block")

    def find_places(self, names: Collection[str] | None) -> list[BlockPlace]:
        """Return the places of these blocks, or of all, in plan order."""
        wanted = self.place.keys() if names is None else frozenset(names)
        return [place for name, place in self.place.items() if name in wanted]
