"""The shard: the values of one pserver's blocks, and every operation on them.

Synchronous and not thread-safe: one thread computes. A round takes these calls:

    gradient, present = shard.aggregator.aggregate(contributions)       # in rank order
    shard.apply(gradient, present, hyper_parameters)
    chunks = shard.encode(metadata={"round": "7"})                      # the same bytes for all trainers
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from ps_protocol.encodings import TORCH_DTYPES, Rows
from ps_protocol.errors import BadInput
from ps_protocol.frames import encode_header
from ps_protocol.optimizers import FRESH, MASTER, HyperParameters, split_key, write_states
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import SINCE_KEY, SLOT_NAMES_KEY, STATES_KEY
from ps_protocol.vocabulary import DTYPE_BYTES, BufferSpec, PserverIndex, Rank
from ps_protocol.wire_types import WireTensor, sparse

from .aggregation import Aggregator
from .bodies import view_bytes
from .layout import BlockPlace, ShardLayout
from .optimizer import LoadedState, OptimizerBlocks
from .published import BorrowedTensor, Published
from .reply import EncodedRows, PulledViews, copy_blocks
from .row_changes import RowChanges
from .shard_state import ShardState

MASTER_BYTES = 4  # size of an element
SMALL_ELEMENTS = 1 << 16


class Shard:
    """The shard. Blocks are float32 masters of parameters. Buffers are stored as they came and never stepped."""

    def __init__(self, plan: SlicePlan, pserver: PserverIndex) -> None:
        assert plan.optimizer is not None  # the plan of a run always has an optimizer
        self.layout = ShardLayout(plan, pserver)
        self._dense = [place for place in self.layout.find_places(None) if not place.width]  # in plan order
        self.values = torch.zeros(self.layout.num_elements)  # flat float32; blocks are views of it
        self.version = 0  # applied rounds; in asynchronous modes applied contributions, which the run counts
        self.versions = dict.fromkeys(self.layout.place, 0)  # updates of each block; an absent gradient is none
        self.optimizer = OptimizerBlocks(self.layout, plan.optimizer)
        self.published = Published(self.layout, self.values) if plan.wire.pulls_deltas else None
        self.aggregator = Aggregator(self.layout, self.values)
        self.changes = RowChanges(self.layout, 0)
        self._whole: tuple[int, EncodedRows] | None = None  # all rows at a position of `changes`
        self._buffer_specs = {spec.name: spec for spec in plan.buffers if spec.pserver == pserver}
        self._buffers: dict[str, bytes] = {}
        self._initialised: set[str] = set()

    def block(self, name: str) -> Tensor:
        """Return the master values of one block: a view of shape (num_elements,), float32."""
        place = self.layout.place[name]
        return self.values[place.begin : place.end]

    @property
    def _pulled_values(self) -> Tensor:
        return self.values if self.published is None else self.published.values

    @property
    def is_small(self) -> bool:
        """True if a copy takes less time than waking another thread, as does an update of few blocks."""
        return len(self.values) <= SMALL_ELEMENTS

    # ------------------------------------------------------------------ initial values

    def set_initial(self, blocks: Mapping[str, Tensor], buffers: Mapping[str, bytes | memoryview]) -> None:
        """Copy the first values of blocks, each of shape (num_elements,) in the parameter's dtype, and of buffers.

        Does nothing if all have their values: a late duplicate must not overwrite later steps.
        """
        if self.is_initialised:
            return
        for name, values in blocks.items():
            self.block(name).copy_(values)
            if self.published is not None:
                self.published.publish_whole(name)
        self._initialised.update(blocks)
        self._buffers.update({name: bytes(data) for name, data in buffers.items()})

    @property
    def is_initialised(self) -> bool:
        """True if every block and buffer has its first values."""
        return len(self._initialised) == len(self.layout.place) and len(self._buffers) == len(self._buffer_specs)

    # ------------------------------------------------------------------ updates

    def apply(
        self,
        gradient: Tensor,
        present: Collection[str],
        hyper_parameters: list[HyperParameters],
        loaded: LoadedState | None = None,
    ) -> list[str]:
        """Step the present blocks once with a gradient of the layout, after loading optimizer state if there is any.

        Returns the blocks whose values have changed. After an exception the shard is in an unknown state.
        """
        masters = self._load(loaded) if loaded else []
        self.version += 1
        self._step(gradient, present, hyper_parameters, masters)
        if self.published is not None:
            self.published.publish_round(present, masters)
        return [*present, *masters]

    def apply_blocks(
        self,
        gradients: Mapping[str, Tensor],
        hyper_parameters: list[HyperParameters],
        rows: Mapping[str, Rows] = {},
        *,
        counter: Rank | None = None,
    ) -> None:
        """Step each of these blocks once. Its gradient is only read: shape (num_elements,), any floating dtype.

        `rows` has those of sparse parameters. `counter`: see `OptimizerBlocks.apply`.
        """
        gradient = self.aggregator.load_blocks(gradients, rows)
        self._step(gradient, [*gradients, *rows], hyper_parameters, counter=counter)

    def _step(
        self,
        gradient: Tensor,
        present: Collection[str],
        hyper_parameters: list[HyperParameters],
        loaded: Collection[str] = (),
        counter: Rank | None = None,
    ) -> None:
        self._whole = None
        rows = {name: its for name, its in self.aggregator.rows.items() if name in present}
        self.optimizer.apply(self.values, gradient, present, hyper_parameters, rows, counter=counter)
        for name in present:
            self.versions[name] += 1
        self.changes.advance(rows, loaded)

    def load_slots(self, loaded: LoadedState) -> None:
        """Replace optimizer state and masters by what a trainer has loaded, beside an update."""
        self.changes.advance({}, self._load(loaded))

    def _load(self, loaded: LoadedState) -> list[str]:
        """Replace optimizer state and masters. Return the blocks whose values changed."""
        slots = dict(loaded.tensors)
        masters = {split_key(key)[1]: slots.pop(key) for key in loaded.tensors if split_key(key)[0] == MASTER}
        self.optimizer.load_blocks(loaded.states, slots)
        for name, values in masters.items():
            self.block(name).copy_(values)
        return list(masters)

    # ------------------------------------------------------------------ the whole state

    @property
    def state(self) -> ShardState:
        """The whole state, with the shard's own tensors and mappings, which are valid until the next step."""
        published = None if self.published is None else self.published.values
        return ShardState(self.version, self.values, published, self.optimizer.state, self.versions, self._buffers)

    def load_state(self, state: ShardState) -> None:
        """Replace the whole state by another one, whose tensors are only read."""
        self.values.copy_(state.values)
        if self.published is not None:
            self.published.load(state.published)
        self.version, self.versions = state.version, dict(state.versions)
        self.optimizer.load(state.optimizer)
        self._buffers = dict(state.buffers)
        self._initialised = set(self.layout.place)
        self.changes, self._whole = RowChanges(self.layout, self.version), None

    def digest(self) -> str:
        """Return XXH3 of values, published values, optimizer state and buffers. Equal shards have equal digests."""
        digest = xxhash.xxh3_128()
        state = self.optimizer.state
        flat = {"": view_bytes(self.values)} | {name: view_bytes(slot) for name, slot in sorted(state.slots.items())}
        if self.published is not None:
            flat["published"] = view_bytes(self.published.values)
        for name, place in self.layout.place.items():
            digest.update(repr((name, tuple(state.steps.get(name, ())))).encode())
            for slot_name, data in flat.items():
                digest.update(slot_name.encode())
                digest.update(data[4 * place.begin : 4 * place.end])
        if state.counted:
            digest.update(repr(sorted(map(repr, state.counted.items()))).encode())
        for spec in self._stored_buffers():
            digest.update(spec.name.encode())
            digest.update(self._buffers[spec.name])
        return digest.hexdigest()

    # ------------------------------------------------------------------ frames

    def encode(
        self,
        blocks: Collection[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        *,
        pulled: bool = False,
        with_buffers: bool = False,
    ) -> list[bytes | memoryview]:
        """Return a frame of these blocks (all by default) in plan order: the values, or as trainers pull them.

        The buffers that were set follow, if wanted, in plan order and with their shapes. The bytes are copies, which
        later updates do not change.
        """
        chosen = [(place, place.pulled if pulled else place.dtype) for place in self.layout.find_places(blocks)]
        specs = self._stored_buffers() if with_buffers else []
        entries, data = _copy_places(self._pulled_values if pulled else self.values, chosen)
        entries += [(spec.name, spec.dtype, spec.shape) for spec in specs]
        return [encode_header(entries, metadata), data, *(self._buffers[spec.name] for spec in specs)]

    def encode_since(self, base: int | None, metadata: Mapping[str, str]) -> list[bytes | memoryview]:
        """Return a frame of all blocks as trainers pull them, copied: see `encode_changes`."""
        changed, rows = self.encode_changes(base)
        entries, data = _copy_places(self.values, [(place, place.pulled) for place in self._dense])
        metadata = metadata if base is None else {**metadata, SINCE_KEY: str(base)}
        return [encode_header(entries + changed, metadata), data, rows]

    def encode_changes(self, base: int | None) -> EncodedRows:
        """Return the rows of sparse blocks that have changed since a position of `changes`, copied.

        A block is whole where that is smaller, or the position is not known.
        """
        whole, position = self._whole, self.changes.position
        if base is None and whole is not None and whole[0] == position:
            return whole[1]  # one copy for all trainers
        tensors: list[WireTensor] = []
        sources: list[Tensor] = []
        for place in self.layout.sparse if base is None or base >= 0 else ():  # no trainer has a version before 0
            table = self.block(place.name).view(-1, place.width)
            indices = self.changes.find(place.name, base)
            if indices is None or len(indices) * (place.width + 1) >= place.block.num_elements:
                tensors.append((place.name, place.pulled, (place.block.num_elements,)))
                sources.append(table)
            elif len(indices):
                tensors += sparse(place.name, place.pulled, len(indices), place.width)
                sources += [indices, table.index_select(0, indices)]
        encoded = tensors, _copy_tensors(sources, [dtype for _, dtype, _ in tensors])
        if base is None:
            self._whole = position, encoded
        return encoded

    def view_pulled(self) -> PulledViews:
        """Return views of all dense blocks as trainers pull them, in plan order."""
        return PulledViews(self._pulled_values, self._dense)

    def borrow_deltas(self) -> dict[str, Sequence[BorrowedTensor]]:
        """Return the delta of each block to the round before, where there is one; valid until the next step."""
        return {} if self.published is None else self.published.borrow_deltas()

    def _stored_buffers(self) -> list[BufferSpec]:
        return [spec for name, spec in self._buffer_specs.items() if name in self._buffers]

    def encode_state(self, keys: Collection[str], metadata: Mapping[str, str], counter: Rank) -> list[bytes]:
        """Return a frame of these slots, called `{slot}/{block}`, for a trainer. Raises BadInput.

        Without keys its metadata lists the slots that exist, and the states of the blocks that have been stepped: with
        this counter's own steps, where each counter has its own.
        """
        slots = {**self.optimizer.state.slots, MASTER: self.values}
        if not keys:
            stepped = {name: state for name, state in self.optimizer.steps_for(counter).items() if state != FRESH}
            names = json.dumps(sorted(slots))
            return _encode_views({}, {**metadata, STATES_KEY: write_states(stepped), SLOT_NAMES_KEY: names})
        return _encode_views({key: self._view_slot(slots, *split_key(key)) for key in keys}, metadata)

    def _view_slot(self, slots: Mapping[str, Tensor], slot: str, name: str) -> Tensor:
        place = self.layout.place.get(name)
        if place is None or slot not in slots:
            raise BadInput(f"slot '{slot}/{name}' is not in this shard", code="unknown_block")
        return slots[slot][place.begin : place.end]


def _copy_places(values: Tensor, chosen: Sequence[tuple[BlockPlace, str]]) -> tuple[list[WireTensor], memoryview]:
    """Return the entries of blocks in a frame, each in the dtype beside it, and a copy of their bytes."""
    entries: list[WireTensor] = [(place.name, dtype, (place.block.num_elements,)) for place, dtype in chosen]
    data = np.empty(sum(DTYPE_BYTES[dtype] * count for _, dtype, (count,) in entries), np.uint8).data
    copy_blocks(values, chosen, data)
    return entries, data


def _copy_tensors(tensors: Sequence[Tensor], dtypes: Sequence[str]) -> memoryview:
    """Return the bytes of these tensors one after another, each in the dtype beside it."""
    sizes = [tensor.numel() * DTYPE_BYTES[dtype] for tensor, dtype in zip(tensors, dtypes, strict=True)]
    data, at = np.empty(sum(sizes), np.uint8).data, 0
    for tensor, dtype, size in zip(tensors, dtypes, sizes, strict=True):
        torch.frombuffer(data[at : at + size], dtype=TORCH_DTYPES[dtype]).copy_(tensor.view(-1))
        at += size
    return data


def _encode_views(views: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes]:
    header = encode_header([(key, "F32", (len(view),)) for key, view in views.items()], metadata)
    return [header, *(bytes(view_bytes(view)) for view in views.values())]
