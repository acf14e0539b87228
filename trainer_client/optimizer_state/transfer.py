"""Transfer of optimizer state: fetched block by block, and pushed with a contribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ps_protocol.frames import encode_header
from ps_protocol.optimizers import FRESH, MASTER, StepState, slot_key, write_states
from ps_protocol.plan import SlicePlan
from ps_protocol.routes import STATES_KEY
from ps_protocol.vocabulary import Block, Round

from ..client import ParameterClient
from ..pserver_client import PserverClient
from ..pushing.buckets import ENTRY_HEADER_BYTES, MAX_HEADER_BYTES, MIN_LENT_BYTES, Payload
from ..tensors import writable_bytes
from .torch_state import OptimizerState, ParameterState

T = TypeVar("T", bound=memoryview | StepState)
NOTHING = ParameterState(FRESH, {})


async def pull_optimizer_state(
    client: ParameterClient, round_: Round, needed: Callable[[str, StepState], Sequence[str]]
) -> dict[str, ParameterState]:
    """Return newly allocated slots of all stepped parameters, as of a round that this trainer has pulled.

    Waits for pservers alone. `needed` says which slots of a parameter are wanted; one that no pserver has is zeros.
    """
    held = await client.ask_all(lambda pserver: pserver.describe_optimizer_state(round_))
    found: dict[str, ParameterState] = {}
    wanted: list[dict[str, memoryview]] = [{} for _ in held]
    for name, blocks in client.plan.blocks_of.items():
        if name in client.plan.means:
            continue  # a buffer has no slots
        # In asynchronous modes blocks may differ for a moment; a checkpoint that is sliced again uses the first, too.
        state = held[blocks[0].pserver].states.get(blocks[0].name, FRESH) if blocks else FRESH
        names = needed(name, state)
        if state == FRESH and not names:
            continue
        size = client.plan.parameter[name].num_elements
        slots = {slot: torch.zeros(size, dtype=torch.float32, device="cpu") for slot in names}
        found[name] = ParameterState(state, slots)
        for block in blocks:
            for slot, tensor in slots.items():
                if slot in held[block.pserver].slots:
                    data = writable_bytes(tensor[block.begin : block.end])
                    wanted[block.pserver][slot_key(slot, block.name)] = data
    portion_bytes = client.settings.chosen_bucket_bytes
    await client.ask_all(lambda pserver: _fetch(pserver, round_, wanted[pserver.index], portion_bytes))
    return found


async def _fetch(pserver: PserverClient, round_: Round, wanted: Mapping[str, memoryview], portion_bytes: int) -> None:
    for portion in _portions(wanted.items(), portion_bytes):
        await pserver.get_optimizer_state(round_, dict(portion))


def _portions(items: Iterable[tuple[str, T]], max_bytes: int) -> Iterator[list[tuple[str, T]]]:
    """Split tensors (as bytes) and step states into parts for one frame each, whose headers are not too long."""
    portion: list[tuple[str, T]] = []
    size = header = 0
    for key, value in items:
        num_bytes = len(value) if isinstance(value, memoryview) else ENTRY_HEADER_BYTES
        if portion and (size + num_bytes > max_bytes or header + len(key) > MAX_HEADER_BYTES):
            yield portion
            portion, size, header = [], 0, 0
        portion.append((key, value))
        size, header = size + num_bytes, header + len(key) + ENTRY_HEADER_BYTES
    if portion:
        yield portion


class StateFrames(NamedTuple):
    """The frames of optimizer state that go to one pserver with a contribution."""

    frames: list[Payload]
    num_slots: int  # and step states


def make_state_frames(
    plan: SlicePlan, slots: OptimizerState | None, masters: Mapping[str, Tensor], *, bucket_bytes: int
) -> list[StateFrames]:
    """Return frames of about `bucket_bytes` for each pserver: slots and values of its blocks.

    The slots are those of all blocks, none for parameters that are not in `slots`; without `slots` all blocks keep
    theirs. `masters` are values by parameter, of shape (numel,), float32. The frames read these tensors, which must not
    change as long as they are used.
    """
    result = []
    for shard in plan.shards:
        portions = list(_portions(_items(shard, slots, masters), bucket_bytes))
        result.append(StateFrames([_encode(portion) for portion in portions], sum(map(len, portions))))
    return result


def _items(
    shard: Sequence[Block], slots: OptimizerState | None, masters: Mapping[str, Tensor]
) -> Iterator[tuple[str, memoryview | StepState]]:
    for block in shard:
        tensors: dict[str, Tensor] = {}
        if slots is not None:
            state, loaded = slots.get(block.parameter, NOTHING)
            yield block.name, state
            tensors.update(loaded)
        if block.parameter in masters:
            tensors[MASTER] = masters[block.parameter]
        for slot, tensor in tensors.items():
            yield slot_key(slot, block.name), writable_bytes(tensor[block.begin : block.end])


def _encode(portion: Sequence[tuple[str, memoryview | StepState]]) -> Payload:
    """Return the parts of a frame; adjacent small tensors are one part."""
    states = {key: value for key, value in portion if isinstance(value, StepState)}
    tensors = [(key, data) for key, data in portion if isinstance(data, memoryview)]
    entries = [(key, "F32", (len(data) // torch.float32.itemsize,)) for key, data in tensors]
    parts: list[memoryview] = []
    small = bytearray(encode_header(entries, {STATES_KEY: write_states(states)}))
    for _, data in tensors:
        if len(data) < MIN_LENT_BYTES:
            small += data
            continue
        parts += [memoryview(small), data]
        small = bytearray()
    return tuple(part for part in (*parts, memoryview(small)) if len(part))
