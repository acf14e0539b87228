"""Transfer of optimizer state: fetched block by block, and pushed with the trainer's next contribution."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ps_protocol.frames import encode_header
from ps_protocol.optimizers import FRESH, MASTER, SLOTS, StepState, slot_key, write_states
from ps_protocol.plan import SlicePlan
from ps_protocol.requests import STATES_KEY
from ps_protocol.vocabulary import Block, Round

from ..client.buckets import ENTRY_HEADER_BYTES, MAX_HEADER_BYTES, MIN_LENT_BYTES, FrameParts
from ..client.pserver_client import PserverClient
from ..client.run_client import RunClient
from ..transport.tensors import writable_bytes
from ..transport.work import Work
from .torch_state import ParameterState, ParameterStates, split_masters

T = TypeVar("T", bound=memoryview | StepState)


def pull_optimizer_state(
    client: RunClient, round_: Round, names: Iterable[str], slots: Collection[str] = ()
) -> Work[dict[str, ParameterState]]:
    """Return the state of these parameters as of a round that this trainer has pulled, in newly allocated memory.

    It has these slots, or by default all that the optimizer may have, with the master of a 16-bit parameter. Slots that
    no pserver has are zeros. Waits for pservers only.
    """
    plan = client.run.plan
    assert plan.optimizer is not None  # the plan of a run always has an optimizer
    held = yield from client.pservers.ask_all(lambda pserver: pserver.describe_optimizer_state(round_))
    found: dict[str, ParameterState] = {}
    wanted: list[dict[str, memoryview]] = [{} for _ in held]
    for name in names:
        blocks, spec = plan.blocks_of[name], plan.parameter[name]
        masters = () if spec.dtype == "F32" else (MASTER,)
        # In asynchronous modes blocks may differ for a moment; a checkpoint that is sliced again uses the first, too.
        state = held[blocks[0].pserver].states.get(blocks[0].name, FRESH) if blocks else FRESH
        kept = slots or (masters if state == FRESH else (*SLOTS[plan.optimizer.rule(spec.group)], *masters))
        tensors = {slot: torch.zeros(spec.num_elements, dtype=torch.float32, device="cpu") for slot in kept}
        found[name] = ParameterState(state, tensors)
        for block in blocks:
            for slot, tensor in tensors.items():
                if slot in held[block.pserver].slots:
                    data = writable_bytes(tensor[block.begin : block.end])
                    wanted[block.pserver][slot_key(slot, block.name)] = data
    portion_bytes = client.settings.chosen_bucket_bytes
    yield from client.pservers.ask_all(lambda pserver: _fetch(pserver, round_, wanted[pserver.index], portion_bytes))
    return found


def _fetch(pserver: PserverClient, round_: Round, wanted: Mapping[str, memoryview], portion_bytes: int) -> Work[None]:
    for portion in _portions(wanted.items(), portion_bytes):
        yield from pserver.get_optimizer_state(round_, dict(portion))


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
    num_entries: int  # the number of slots and step states in the frames


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
    """Optimizer state and values of parameters that the script has loaded. No method blocks.

    Both are pushed with the next step, so that all pservers have them or none. A rollback to the round before that step
    repeats it with them; a rollback behind that round loses them. State is loaded before the first step only. What is
    loaded then counts in the trainer that brings the initial values.
    """

    def __init__(self, client: RunClient, parameters: Mapping[str, Tensor]) -> None:
        """`parameters` are those of the script, which has its values in them by the next step."""
        self._client = client
        self._parameters = parameters
        self.states: ParameterStates = {}  # waits for the first step
        self._masters: Mapping[str, Tensor] = {}  # wait for the next step, by parameter, (numel,) float32
        self._frames: list[StateFrames] = []  # the encoded state and values, once they are needed
        self._after: Round = -1  # the round after which they were loaded; -1: nothing was loaded, or it is lost
        self._has_stepped = False  # this incarnation of the trainer has stepped

    @property
    def _is_waiting(self) -> bool:
        return bool(self.states or self._masters)

    def load_states(self, names: Collection[str], states: ParameterStates, begun: Round) -> None:
        """Push this state of these parameters with the first step, in place of state that was loaded before."""
        if begun > 0:
            self._client.log.info(f"the run is at round {begun} and has slots of its own: the loaded slots are ignored")
        elif self._brings_values:
            self._begin(begun)
            self.states = {**{name: self.states[name] for name in self.states.keys() - names}, **states}

    def load_masters(self, values: Mapping[str, Tensor], begun: Round) -> None:
        """Push these values of parameters, (numel,) float32, with the step after `begun`."""
        if not self._has_stepped and begun > 0:
            self._client.log.warning(
                f"the run is at round {begun} and has parameters of its own: the values that this script has "
                "loaded are ignored, and training continues from the run's values. Load a checkpoint only if "
                "optimizer.round is 0"
            )
        elif begun > 0 or self._brings_values:
            self._begin(begun)
            self._masters = {**self._masters, **values}

    @property
    def _brings_values(self) -> bool:
        return self._client.uploader == self._client.joined.rank

    def _begin(self, begun: Round) -> None:
        if self._after != begun:  # earlier values have left with their step
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
        """Note that this version, which may contain what was loaded, was pulled."""
        if version > self._after:
            self._forget()

    def note_rollback(self, version: Round) -> None:
        """Note that the run continues after this version, which may contain what was loaded, or is without it."""
        self.note_pulled(version)
        if version < self._after or (version == self._after and not self._is_waiting):
            self._forget()
            self._after = -1
            self._client.log.warning("what this script has loaded is lost with the steps after it")

    def _forget(self) -> None:
        self.states, self._masters, self._frames = {}, {}, []
