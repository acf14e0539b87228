"""The shard: the values of one pserver's blocks, and everything that is done to them.

Synchronous and not thread-safe: one thread computes. What happens in a round:

    gradient, present = shard.aggregate(contributions)       # in rank order
    shard.apply(gradient, present, hyper_parameters)
    shard.publish(present)                                   # if trainers pull differences
    chunks = shard.encode(metadata={"round": "7"})           # the same bytes for everyone
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
import xxhash
from torch import Tensor

from ps_protocol.errors import BadInput
from ps_protocol.frames import encode_header
from ps_protocol.optimizers import HyperParameters
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import SLOT_NAMES_KEY, STATES_KEY, STEPS_KEY
from ps_protocol.slots import FRESH, MASTER, split_key, write_states
from ps_protocol.vocabulary import PserverIndex, Rank

from .aggregation import Aggregator
from .captures import Probes
from .layout import ShardLayout
from .optimizer_blocks import LoadedState, OptimizerBlocks
from .published import BorrowedTensor, Published
from .reply_chunks import ChunkEncoder
from .shard_state import ShardState
from .tensors import TORCH_DTYPES, Part, view_bytes

MASTER_BYTES = 4  # of an element


class Shard:
    """Masters are float32, whatever a parameter's dtype. Buffers are stored as they came and never stepped."""

    def __init__(self, plan: SlicePlan, pserver: PserverIndex) -> None:
        self.layout = ShardLayout(plan, pserver)
        self.values = torch.zeros(self.layout.num_elements)  # flat float32; blocks are views of it
        self.version = 0  # rounds so far; in asynchronous modes contributions, which the run counts
        self.versions = dict.fromkeys(self.layout.place, 0)  # the same of each block; an absent gradient adds none
        self.optimizer = None if plan.optimizer is None else OptimizerBlocks(self.layout, plan.optimizer)
        self.probes = Probes()
        # What trainers have, where that is not the values themselves.
        self.published = Published(self.layout, self.values) if plan.wire.pulls_deltas else None
        self._aggregator = Aggregator(self.layout, self.values)
        self._encoder = ChunkEncoder(self.values)
        self._pulled_encoder = self._encoder if self.published is None else ChunkEncoder(self.published.values)
        self._buffer_specs = {spec.name: spec for spec in plan.buffers if spec.pserver == pserver}
        self._buffers: dict[str, bytes] = {}
        self._initialised: set[str] = set()

    def block(self, name: str) -> Tensor:
        """The master values of one block: a view of shape (num_elements,), float32. Raises BadInput."""
        place = self.layout.place.get(name)
        if place is None:
            raise BadInput(f"block {name!r} is not in this shard", code="unknown_block")
        return self.values[place.begin : place.end]

    def set_initial(self, name: str, source: Tensor) -> None:
        """Copy a block's first values from a tensor of shape (num_elements,) in the parameter's dtype.

        Raises BadInput.
        """
        block = self.block(name)
        dtype = TORCH_DTYPES[self.layout.place[name].dtype]
        if source.dtype != dtype:
            raise BadInput(f"block {name!r}", code="wrong_dtype", expected=str(dtype), actual=str(source.dtype))
        if source.shape != block.shape:
            raise BadInput(f"block {name!r}", code="wrong_shape", expected=list(block.shape), actual=list(source.shape))
        block.copy_(source)
        if self.published is not None:
            self.published.set(name)
        self._initialised.add(name)

    def set_initial_buffer(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Store a buffer's bytes. Raises BadInput."""
        spec = self._buffer_specs.get(name)
        if spec is None:
            raise BadInput(f"buffer {name!r} is not in this shard", code="unknown_block")
        if len(data) != spec.num_bytes:
            raise BadInput(
                f"buffer {name!r}", code="wrong_shape", expected=f"{spec.num_bytes} bytes", actual=f"{len(data)} bytes"
            )
        self._buffers[name] = bytes(data)

    @property
    def is_initialised(self) -> bool:
        """Whether every block and buffer has had its first values; a shard without any has from the start."""
        return len(self._initialised) == len(self.layout.place) and len(self._buffers) == len(self._buffer_specs)

    def aggregate(self, contributions: Sequence[Mapping[str, Part]]) -> tuple[Tensor, tuple[str, ...]]:
        """Average contributions, which stand in rank order; see `Aggregator.aggregate`.

        Returns the flat float32 gradient, which holds until the next call, and the names of the present blocks.
        """
        return self._aggregator.aggregate(contributions)

    def sum_of_squares(self, present: Sequence[str]) -> float:
        """Of these blocks of the newest aggregate, in float64."""
        return self._aggregator.sum_of_squares(present)

    def scale_gradient(self, coefficient: float) -> None:
        """Multiply the newest aggregate, in place."""
        self._aggregator.scale(coefficient)

    def apply(self, gradient: Tensor, present: Collection[str], hyper_parameters: list[HyperParameters]) -> None:
        """Step the present blocks once with a gradient of the layout. Raises BadInput if there is none.

        After any other exception the shard is in an unknown state.
        """
        probed = self.probes.take(present, self.block)
        self._step(gradient, present, hyper_parameters)
        self.version += 1
        self.probes.tell(probed, self.block, self.version)

    def _step(
        self,
        gradient: Tensor,
        present: Collection[str],
        hyper_parameters: list[HyperParameters],
        *,
        counter: Rank | None = None,
    ) -> None:
        if self.optimizer is None:
            raise BadInput("this plan has no optimizer", code="unsupported_optimizer")
        self.optimizer.apply(self.values, gradient, present, hyper_parameters, counter=counter)
        for name in present:
            self.versions[name] += 1

    def apply_block(
        self, name: str, gradient: Tensor, hyper_parameters: list[HyperParameters], *, counter: Rank | None = None
    ) -> None:
        """Step one block once with a gradient of shape (num_elements,) in any floating dtype, which is only read.

        `counter`: see `OptimizerBlocks.apply`.
        """
        whole = self._aggregator.load_block(name, gradient)
        probed = self.probes.take((name,), self.block)
        self._step(whole, (name,), hyper_parameters, counter=counter)
        self.probes.tell(probed, self.block, self.version)

    def encode_gradient(self, present: Sequence[str] | None) -> list[memoryview]:
        """The bytes of the newest aggregate, for the log; see `Aggregator.encode`."""
        return self._aggregator.encode(present)

    def load_slots(self, loaded: LoadedState) -> list[str]:
        """Give blocks the slots and the values that a trainer has loaded; return the blocks with other values.

        Raises BadInput if there is no optimizer.
        """
        if self.optimizer is None:
            raise BadInput("this plan has no optimizer", code="unsupported_optimizer")
        slots = dict(loaded.tensors)
        masters = {split_key(key)[1]: slots.pop(key) for key in loaded.tensors if split_key(key)[0] == MASTER}
        self.optimizer.load_blocks(loaded.states, slots)
        for name, values in masters.items():
            self.block(name).copy_(values)
        return list(masters)

    def publish(self, stepped: Collection[str], loaded: Collection[str] = ()) -> None:
        """Bring the published values, if they are kept, close to what these blocks are after a round.

        Blocks whose values were `loaded` in the round are published whole.
        """
        if self.published is not None:
            self.published.follow(stepped, loaded)

    def replay(
        self,
        data: memoryview,
        present: Sequence[str] | None,
        hyper_parameters: list[HyperParameters],
        loaded: str | None = None,
    ) -> None:
        """Apply a logged gradient, and what is behind it, with the very same bits as the first time."""
        data, masters = self._replay_slots(data, loaded)
        names = tuple(place.name for place in self.layout.places) if present is None else present
        self.apply(self._aggregator.decode(data, present), names, hyper_parameters)
        self.publish(names, masters)
        if self.published is not None:
            self.published.discard_deltas()

    def replay_blocks(
        self,
        gradient: memoryview,
        present: Sequence[str],
        hyper_parameters: list[HyperParameters],
        *,
        counter: Rank | None = None,
        loaded: str | None = None,
    ) -> None:
        """Step these blocks one by one, as asynchronous modes do, with the float32 gradient of one contribution."""
        gradient, _ = self._replay_slots(gradient, loaded)
        whole = self._aggregator.decode(gradient, present)
        for name in present:
            self._step(whole, (name,), hyper_parameters, counter=counter)

    def _replay_slots(self, data: memoryview, loaded: str | None) -> tuple[memoryview, list[str]]:
        """Load the slots at the end of a record's data; return the data before them, and blocks with other values."""
        if loaded is None:
            return data, []
        slots, data = LoadedState.from_log(loaded, data, self.layout)
        return data, self.load_slots(slots)

    def copy_state(self) -> ShardState:
        """A copy of everything, for a checkpoint."""
        state = self.view_state()
        return replace(
            state,
            values=state.values.clone(),
            published=None if state.published is None else state.published.clone(),
            slots={name: slot.clone() for name, slot in state.slots.items()},
        )

    def view_state(self) -> ShardState:
        """The same with our own tensors, which holds until the next step."""
        optimizer = self.optimizer
        return ShardState(
            version=self.version,
            values=self.values,
            published=None if self.published is None else self.published.values,
            slots=optimizer.slots() if optimizer else {},
            states=optimizer.states() if optimizer else {},
            versions=dict(self.versions),
            counted=optimizer.counted() if optimizer else {},
            buffers=dict(self._buffers),
        )

    def load_state(self, state: ShardState) -> None:
        """Become what a copy was of; its tensors are only read."""
        self.values.copy_(state.values)
        if self.published is not None:
            self.published.load(state.published)
        self.version, self.versions = state.version, dict(state.versions)
        if self.optimizer is not None:
            self.optimizer.load(state.slots, state.states, state.counted)
        self._buffers = dict(state.buffers)
        self._initialised = set(self.layout.place)

    def encode(
        self,
        blocks: Collection[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        *,
        encoder: ChunkEncoder | None = None,
        pulled: bool = False,
    ) -> list[bytes]:
        """A frame of these blocks (all by default) in plan order: the values, or as trainers pull them.

        The header comes first, then chunks of about 1 MiB. The bytes are copies: they stay when the shard goes on.
        Another `encoder` reads a copy of the values, or reads them on another thread.
        """
        for name in blocks or ():
            self.block(name)  # raises BadInput
        wanted = self.layout.place.keys() if blocks is None else frozenset(blocks)
        places = [place for name, place in self.layout.place.items() if name in wanted]
        entries = [(p.name, p.pulled if pulled else p.dtype, (p.block.num_elements,)) for p in places]
        encoder = encoder or (self._pulled_encoder if pulled else self._encoder)
        return [encode_header(entries, metadata), *encoder.encode(places, pulled=pulled)]

    def borrow(self) -> list[BorrowedTensor]:
        """All blocks as trainers pull them, in plan order: views of the values, which hold until these change."""
        places = list(self.layout.place.values())
        tensors = [(p.name, p.pulled, (p.block.num_elements,)) for p in places]
        return list(zip(tensors, self._pulled_encoder.borrow(places), strict=True))

    def borrow_deltas(self) -> dict[str, Sequence[BorrowedTensor]]:
        """The same of blocks that need not be sent whole to who has them as they were one round before."""
        return {} if self.published is None else self.published.borrow_deltas()

    def encode_buffers(self, metadata: Mapping[str, str] | None = None) -> list[bytes]:
        """A frame of the buffers that were set, in plan order and with their shapes."""
        specs = [spec for name, spec in self._buffer_specs.items() if name in self._buffers]
        header = encode_header([(spec.name, spec.dtype, spec.shape) for spec in specs], metadata)
        return [header, *(self._buffers[spec.name] for spec in specs)]

    def encode_all(self, metadata: Mapping[str, str] | None = None) -> list[bytes]:
        """A frame of everything that lives here: the blocks in plan order, then the buffers."""
        places = list(self.layout.place.values())
        specs = [spec for name, spec in self._buffer_specs.items() if name in self._buffers]
        entries = [(place.name, place.dtype, (place.block.num_elements,)) for place in places]
        header = encode_header([*entries, *((spec.name, spec.dtype, spec.shape) for spec in specs)], metadata)
        return [header, *self._encoder.encode(places), *(self._buffers[spec.name] for spec in specs)]

    def encode_slots(self, names: Collection[str], metadata: Mapping[str, str] | None = None) -> list[bytes]:
        """A frame of the optimizer's slots of these blocks, float32: `{slot}/{block}`, all blocks of a slot together.

        A slot that no update has needed yet is not in it. The metadata's `steps` counts each block's updates.
        """
        slots = self.optimizer.slots() if self.optimizer else {}
        states = self.optimizer.states() if self.optimizer else {}
        places = [self.layout.place[name] for name in dict.fromkeys(names)]
        entries = [(f"{slot}/{p.name}", "F32", (p.block.num_elements,)) for slot in sorted(slots) for p in places]
        steps = json.dumps({place.name: states[place.name].steps for place in places if place.name in states})
        header = encode_header(entries, {**(metadata or {}), STEPS_KEY: steps})
        data = [bytes(view_bytes(slots[slot][p.begin : p.end])) for slot in sorted(slots) for p in places]
        return [header, *data]

    def encode_state(self, keys: Collection[str], metadata: Mapping[str, str], counter: Rank) -> list[bytes]:
        """A frame of these slots, called `{slot}/{block}`, for a trainer. Raises BadInput.

        Without any its metadata says which slots there are, and the states of the blocks that have been stepped: by
        this counter's own steps, where each counts for itself.
        """
        slots = self.optimizer.slots() if self.optimizer else {}
        if any(place.has_master for place in self.layout.places):
            slots[MASTER] = self.values
        if not keys:
            states = self.optimizer.states(counter) if self.optimizer else {}
            stepped = {name: state for name, state in states.items() if state != FRESH}
            return [
                encode_header(
                    [], {**metadata, STATES_KEY: write_states(stepped), SLOT_NAMES_KEY: json.dumps(sorted(slots))}
                )
            ]
        views: dict[str, Tensor] = {}
        for key in keys:
            slot, name = split_key(key)
            if slot not in slots:
                raise BadInput(f"slot {key!r} is not in this shard", code="unknown_block")
            self.block(name)  # raises BadInput
            place = self.layout.place[name]
            views[key] = slots[slot][place.begin : place.end]
        header = encode_header([(key, "F32", (len(view),)) for key, view in views.items()], metadata)
        return [header, *(bytes(view_bytes(view)) for view in views.values())]

    def digest(self) -> str:
        """XXH3 of values, published ones, slots, step states and buffers: equal exactly if two shards hold the same."""
        digest = xxhash.xxh3_128()
        slots = self.optimizer.slots() if self.optimizer else {}
        states = self.optimizer.states() if self.optimizer else {}
        flat = {"": view_bytes(self.values)} | {name: view_bytes(slot) for name, slot in sorted(slots.items())}
        if self.published is not None:
            flat["published"] = view_bytes(self.published.values)
        for name, place in self.layout.place.items():
            digest.update(repr((name, tuple(states.get(name, ())))).encode())
            for slot_name, data in flat.items():
                digest.update(slot_name.encode())
                digest.update(data[4 * place.begin : 4 * place.end])
        if self.optimizer is not None and (counted := self.optimizer.counted()):
            digest.update(repr(sorted(map(repr, counted.items()))).encode())
        for name in self._buffer_specs:
            if name in self._buffers:
                digest.update(name.encode())
                digest.update(self._buffers[name])
        return digest.hexdigest()
