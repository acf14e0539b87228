"""What trainers have of a shard that is pulled as differences: the same bits as here, and close to the values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.frames import FrameLimits
from ps_protocol.plan import make_plan
from ps_protocol.quantisation import PIECE
from ps_protocol.vocabulary import ParameterSpec
from ps_protocol.wire_types import GROUP, WireTypes
from services.pserver.reply import VersionedBlocks
from services.pserver.shard import Shard
from services.pserver.shard_state import ShardState, reslice
from trainer_client.destinations import Differences
from trainer_client.tensors import TORCH_DTYPES, writable_bytes
from trainer_client.transport.frame_sink import FrameSink

from .oracle import make_options, make_spec

SIZES = {"scalar": 1, "small": 5, "group": GROUP, "more": 3 * GROUP + 7, "large": PIECE + GROUP + 1}
PARAMETERS = [*(ParameterSpec(name, (size,)) for name, size in SIZES.items()), ParameterSpec("half", (300,), "BF16")]
NAMES = [f"{spec.name}.block0" for spec in PARAMETERS]
DIFFERING = NAMES[:-1]
SGD = make_spec("SGD", [make_options("SGD")])
PLAN = make_plan(PARAMETERS, 1, min_block_size=1 << 30, optimizer=SGD, wire=WireTypes(pull="int8"))


def new_shard(seed: int = 0) -> Shard:
    shard, generator = Shard(PLAN, 0), torch.Generator().manual_seed(seed)
    for name, place in shard.layout.place.items():
        values = torch.randn(place.block.num_elements, generator=generator)
        shard.set_initial(name, values.to(TORCH_DTYPES[place.dtype]))
    return shard


def published(shard: Shard, name: str) -> Tensor:
    assert shard.published is not None
    place = shard.layout.place[name]
    return shard.published.values[place.begin : place.end]


def move(shard: Shard, names: Collection[str], seed: int, exponent: int = -6) -> None:
    """What an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        block = shard.block(name)
        block.add_(torch.randn(len(block), generator=generator) * 2.0**exponent)
    shard.version += 1


@dataclass
class Trainer:
    """Reads frames as a trainer does, into memory of its own."""

    values: dict[str, Tensor]
    round: int | None = None

    @classmethod
    def new(cls) -> Trainer:
        dtypes = {f"{spec.name}.block0": TORCH_DTYPES[spec.dtype] for spec in PARAMETERS}
        return cls({f"{s.name}.block0": torch.empty(s.shape, dtype=dtypes[f"{s.name}.block0"]) for s in PARAMETERS})

    def __post_init__(self) -> None:
        self.memory = {name: writable_bytes(tensor) for name, tensor in self.values.items()}
        self.differences = Differences({name: self.memory[name] for name in DIFFERING})

    def read(self, body: bytes) -> list[str]:
        """Returns what was no value but a difference, after it was received and before it is added."""
        sink = FrameSink(self.memory, FrameLimits(), self.differences.memory)
        sink.feed(body)
        sink.finish()
        return sink.differing

    async def pull(self, shard: Shard, changed: dict[str, int]) -> int:
        """How many bytes it takes."""
        versioned = VersionedBlocks(
            shard.borrow(), changed, {"round": str(shard.version)}, shard.version - 1, shard.borrow_deltas()
        )
        body = b"".join(versioned.parts(self.round))
        await self.differences.add(self.read(body))
        self.round = shard.version
        return len(body)


def assert_has_what_is_published(trainer: Trainer, shard: Shard) -> None:
    for name in NAMES:
        assert torch.equal(trainer.values[name].float(), published(shard, name).to(trainer.values[name].dtype).float())


rounds = st.lists(
    st.tuples(
        st.sets(st.sampled_from(NAMES)),  # stepped
        st.integers(-140, 100),  # how far
        st.sets(st.integers(0, 2)),  # who pulls
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=40)
@given(rounds, st.integers(0, 99))
async def test_trainers_have_the_bits_that_are_published(history: list, seed: int) -> None:
    """Whoever has missed rounds gets what has changed since as it is published."""
    shard, trainers = new_shard(seed), [Trainer.new() for _ in range(3)]
    changed = dict.fromkeys(NAMES, 0)
    for number, (stepped, exponent, who) in enumerate(history, 1):
        move(shard, stepped, seed + number, exponent)
        before = {name: published(shard, name).clone() for name in NAMES}
        shard.publish(sorted(stepped))
        changed |= dict.fromkeys(stepped, number)
        for name in stepped & set(DIFFERING):  # within half a step of the values, and of what a sum of floats rounds
            difference = shard.block(name) - before[name]
            steps = torch.cat([group.abs().max().expand(len(group)) for group in difference.split(GROUP)]) / 127
            off = (shard.block(name) - published(shard, name)).abs()
            ulps = published(shard, name).abs() * 2.0**-23
            assert bool((off <= steps * 0.5001 + ulps + 4e-37).all())
        for name in set(DIFFERING) - stepped:
            assert torch.equal(published(shard, name), before[name])
        for rank in who:
            await trainers[rank].pull(shard, changed)
            assert_has_what_is_published(trainers[rank], shard)


async def test_a_difference_is_a_quarter_of_the_bytes() -> None:
    shard, trainer, late = new_shard(), Trainer.new(), Trainer.new()
    all_of_it = await trainer.pull(shard, dict.fromkeys(NAMES, 0))
    move(shard, NAMES, 1)
    shard.publish(NAMES)
    assert await trainer.pull(shard, dict.fromkeys(NAMES, 1)) < 0.27 * all_of_it
    assert await late.pull(shard, dict.fromkeys(NAMES, 1)) >= all_of_it
    assert_has_what_is_published(trainer, shard)
    assert_has_what_is_published(late, shard)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
async def test_what_has_no_difference_is_published_as_it_is(bad: float) -> None:
    """3e38 is finite, and how far it is from -3e38 is not."""
    shard, trainer = new_shard(), Trainer.new()
    name, others = "more.block0", [name for name in DIFFERING if name != "more.block0"]
    shard.set_initial(name, torch.full((SIZES["more"],), -3e38))
    await trainer.pull(shard, dict.fromkeys(NAMES, 0))
    for round_, value in enumerate((bad, bad, 1.0), 1):  # it comes, stays, and goes
        move(shard, others, round_)
        shard.block(name)[300] = value
        shard.publish(NAMES)
        await trainer.pull(shard, dict.fromkeys(NAMES, round_))
        is_exact = round_ == 1 or bad != 3e38  # which 127 steps lead back from
        assert not is_exact or torch.equal(trainer.values[name].nan_to_num(7.0), shard.block(name).nan_to_num(7.0))
        for other in others:
            assert torch.equal(trainer.values[other], published(shard, other))
            assert bool(published(shard, other).isfinite().all())


def test_a_reply_that_breaks_off_adds_nothing() -> None:
    shard, trainer = new_shard(), Trainer.new()
    before = VersionedBlocks(shard.borrow(), dict.fromkeys(NAMES, 0), {})
    trainer.read(b"".join(before.parts()))
    kept = {name: values.clone() for name, values in trainer.values.items()}
    move(shard, DIFFERING, 1)
    shard.publish(DIFFERING)
    changed = {**dict.fromkeys(DIFFERING, 1), "half.block0": 0}
    body = b"".join(VersionedBlocks(shard.borrow(), changed, {}, 0, shard.borrow_deltas()).parts(0))
    sink = FrameSink(trainer.memory, FrameLimits(), trainer.differences.memory)
    sink.feed(body[:-1])
    assert all(torch.equal(trainer.values[name], kept[name]) for name in NAMES)


def test_it_is_in_copies_and_files_and_moves_with_its_elements() -> None:
    shard = new_shard()
    move(shard, NAMES, 1)
    shard.publish(NAMES)
    data = b"".join(shard.copy_state().encode(PLAN, {"run": "run1"}))
    state, _ = ShardState.decode(memoryview(bytearray(data)))
    restored = Shard(PLAN, 0)
    restored.load_state(state)
    assert restored.digest() == shard.digest()
    assert restored.borrow_deltas() == {}  # nobody is known to have the round before
    other, _ = ShardState.decode(memoryview(bytearray(data)))
    other.published = None
    off = Shard(PLAN, 0)
    off.load_state(other)
    assert off.digest() != shard.digest()
    for each in (shard, restored):
        move(each, NAMES, 2)
        each.publish(NAMES)
    assert restored.digest() == shard.digest()
    cut = make_plan(PARAMETERS, 3, min_block_size=100, optimizer=SGD, wire=WireTypes(pull="int8"))
    for index in range(3):
        other = Shard(cut, index)
        other.load_state(reslice([(0, shard.copy_state())], PLAN, cut, index))
        for name, place in other.layout.place.items():
            whole = published(shard, f"{place.block.parameter}.block0")
            assert torch.equal(published(other, name), whole[place.block.begin : place.block.end])


def test_from_a_run_that_pulled_values_these_are_what_trainers_have() -> None:
    plain = make_plan(PARAMETERS, 1, min_block_size=1 << 30, optimizer=SGD)
    shard = Shard(plain, 0)
    shard.load_state(reslice([(0, new_shard().copy_state())], PLAN, plain, 0))
    assert shard.published is None
    assert shard.copy_state().published is None
    back = Shard(PLAN, 0)
    back.load_state(reslice([(0, shard.copy_state())], plain, PLAN, 0))
    assert all(torch.equal(published(back, name), back.block(name)) for name in NAMES)


def test_trainers_pull_what_is_published_and_others_see_the_values() -> None:
    shard = new_shard()
    move(shard, NAMES, 1)
    shard.publish(NAMES)
    values, pulled = (b"".join(shard.encode(["more.block0"], pulled=pulled)) for pulled in (False, True))
    assert values.endswith(shard.block("more.block0").numpy().tobytes())
    assert pulled.endswith(published(shard, "more.block0").numpy().tobytes())
    assert values != pulled
