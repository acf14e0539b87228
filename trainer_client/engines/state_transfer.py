"""Transfer of optimizer state: fetched block by block, and pushed with the trainer's next contribution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ps_protocol.frames import encode_header
from ps_protocol.optimizers import FRESH, MASTER, StepState, slot_key, write_states
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import STATES_KEY
from ps_protocol.vocabulary import Block, Round

from ..client.buckets import ENTRY_HEADER_BYTES, MAX_HEADER_BYTES, MIN_LENT_BYTES, FrameParts
from ..client.pserver_client import PserverClient
from ..client.run_client import RunClient
from ..transport.tensors import writable_bytes
from .torch_state import NO_STATE, ParameterState, ParameterStates, split_masters

T = TypeVar("T", bound=memoryview | StepState)


async def pull_optimizer_state(
    client: RunClient, round_: Round, needed: Callable[[str, StepState], Sequence[str]]
) -> dict[str, ParameterState]:
    """Return newly allocated slots of all stepped parameters, as of a round that this trainer has pulled.

    Waits for pservers only. `needed` says which slots of a parameter are wanted; a slot that no pserver has is zeros.
    """
    held = await client.pservers.ask_all(lambda pserver: pserver.describe_optimizer_state(round_))
    found: dict[str, ParameterState] = {}
    wanted: list[dict[str, memoryview]] = [{} for _ in held]
    for name, blocks in client.run.plan.blocks_of.items():
        if name in client.run.plan.buffer_rules:
            continue  # a buffer has no slots
        # In asynchronous modes blocks may differ for a moment; a checkpoint that is sliced again uses the first, too.
        state = held[blocks[0].pserver].states.get(blocks[0].name, FRESH) if blocks else FRESH
        names = needed(name, state)
        if state == FRESH and not names:
            continue
        size = client.run.plan.parameter[name].num_elements
        slots = {slot: torch.zeros(size, dtype=torch.float32, device="cpu") for slot in names}
        found[name] = ParameterState(state, slots)
        for block in blocks:
            for slot, tensor in slots.items():
                if slot in held[block.pserver].slots:
                    data = writable_bytes(tensor[block.begin : block.end])
                    wanted[block.pserver][slot_key(slot, block.name)] = data
    portion_bytes = client.settings.chosen_bucket_bytes
    await client.pservers.ask_all(lambda pserver: _fetch(pserver, round_, wanted[pserver.index], portion_bytes))
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

    frames: list[FrameParts]
    num_slots: int  # the number of slots and step states in the frames


def make_state_frames(
    plan: SlicePlan, states: ParameterStates, masters: Mapping[str, Tensor], *, bucket_bytes: int
) -> list[StateFrames]:
    """Return frames of about `bucket_bytes` for each pserver: slots and values of its blocks.

    The blocks of parameters that are not in `states` keep their slots. `masters` are values by parameter, of shape
    (numel,), float32. The frames read these tensors, which must not change as long as they are used.
    """
    result = []
    for shard in plan.shards:
        portions = list(_portions(_items(shard, states, masters), bucket_bytes))
        result.append(StateFrames([_encode(portion) for portion in portions], sum(map(len, portions))))
    return result


def _items(
    shard: Sequence[Block], states: ParameterStates, masters: Mapping[str, Tensor]
) -> Iterator[tuple[str, memoryview | StepState]]:
    for block in shard:
        tensors: dict[str, Tensor] = {}
        if block.parameter in states:
            state, slots = states[block.parameter]
            yield block.name, state
            tensors.update(slots)
        if block.parameter in masters:
            tensors[MASTER] = masters[block.parameter]
        for slot, tensor in tensors.items():
            yield slot_key(slot, block.name), writable_bytes(tensor[block.begin : block.end])


def _encode(portion: Sequence[tuple[str, memoryview | StepState]]) -> FrameParts:
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


class Loading:
    """Optimizer state and values that one trainer has loaded. No method blocks.

    State that is loaded after round r *waits* for step r + 1, which is repeated if the run goes back to r. It is
    *applied* once a later version than r was pulled. If the run then goes back to r or before, it is lost.
    Before the first round only the trainer that brings the initial values pushes loaded state.
    """

    def __init__(self, client: RunClient, parameters: Mapping[str, Tensor]) -> None:
        """`parameters` are those of the script, which has its values in them by the next step."""
        self._parameters = parameters
        self.states: ParameterStates = {}  # the state that waits; NO_STATE removes that of a parameter
        self._masters: Mapping[str, Tensor] = {}  # the values that wait, by parameter, (numel,) float32
        self._frames: list[StateFrames] = []  # the encoded state and values, once they are needed
        self._client = client
        self._after: Round = -1  # r; -1: nothing was loaded, or it is lost
        self._has_stepped = False  # this incarnation of the trainer has stepped

    @property
    def _is_waiting(self) -> bool:
        return bool(self.states or self._masters)

    def load(self, states: ParameterStates, begun: Round) -> None:
        """Push the state of these parameters with the step after `begun`, in place of earlier state that waits."""
        if not self._is_pushed_here(begun):
            return
        if self._belongs_to_run(begun):
            self._client.log.info(f"the run is at round {begun} and has slots of its own: the loaded slots are ignored")
            return
        before = self.states if self._after == begun else {}
        waiting = {**before, **states}
        if begun == 0:  # there is nothing that NO_STATE could remove
            waiting = {name: state for name, state in waiting.items() if state is not NO_STATE}
        if before or waiting:
            self._begin(begun)
            self.states = waiting

    def load_masters(self, values: Mapping[str, Tensor], begun: Round) -> None:
        """Push these values of parameters, (numel,) float32, with the step after `begun`."""
        if self._belongs_to_run(begun):
            self._client.log.warning(
                f"the run is at round {begun} and has parameters of its own: the values that this script has "
                "loaded are ignored, and training continues from the run's values. Load a checkpoint only if "
                "optimizer.round is 0"
            )
            return
        if self._is_pushed_here(begun):
            self._begin(begun)
            self._masters = {**self._masters, **values}

    def _is_pushed_here(self, begun: Round) -> bool:
        # Later the trainer of the initial values may be gone, and the state of the lowest rank in the round counts.
        is_alone = begun == 0 or self._client.joined.consistency.is_async
        return not is_alone or self._client.uploader == self._client.joined.rank

    def _belongs_to_run(self, begun: Round) -> bool:
        return not self._has_stepped and begun > 0

    def _begin(self, begun: Round) -> None:
        if self._after != begun:  # earlier state has left with its step
            self._forget()
        self._after, self._frames = begun, []

    def frames_for(self, step: Round) -> list[StateFrames] | None:
        """Return the frames for each pserver that belong to this step; None if there are none."""
        self._has_stepped = True
        if not self._is_waiting or step > self._after + 1:
            return None
        if not self._frames:
            states, exact = split_masters(self.states, self._parameters)
            masters = {**self._masters, **exact}  # those of the states are more exact than the values loaded with them
            size = self._client.settings.chosen_bucket_bytes
            self._frames = make_state_frames(self._client.run.plan, states, masters, bucket_bytes=size)
        return self._frames

    def note_pulled(self, version: Round) -> None:
        """Note that this version, which may contain the loaded state, was pulled."""
        if version > self._after:
            self._forget()

    def note_rollback(self, version: Round) -> None:
        """Note that the run continues after this version, which may contain the loaded state, or is without it."""
        self.note_pulled(version)
        if version < self._after or (version == self._after and not self._is_waiting):
            self._forget()
            self._after = -1
            self._client.log.warning("the state that this script has loaded is lost with the steps after it")

    def _forget(self) -> None:
        self.states, self._masters, self._frames = {}, {}, []
