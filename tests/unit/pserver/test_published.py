"""Values beside gradients: published values that are pulled as deltas, and optimizer state that a push brings."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.encodings import PIECE, TORCH_DTYPES
from ps_protocol.frames import parse_frame
from ps_protocol.optimizers import FRESH, MASTER, StepState, read_states, slot_key, write_states
from ps_protocol.plan import make_plan
from ps_protocol.requests import COMPUTED_ON_KEY, NUM_BLOCKS_KEY, SINCE_KEY, SLOT_NAMES_KEY, STATES_KEY
from ps_protocol.vocabulary import ParameterSpec
from ps_protocol.wire_types import GROUP, UNCHANGED, WireTypes
from services.pserver.inspection import open_shard
from services.pserver.shard.reply import VersionedBlocks
from services.pserver.shard.shard import Shard
from services.pserver.shard.shard_state import ShardState, reslice
from trainer_client.transport.destinations import Deltas
from trainer_client.transport.frame_sink import FrameSink
from trainer_client.transport.tensors import writable_bytes

from ...soaking import examples
from ..trainer.driving import drive
from .oracle import make_options, make_spec
from .support import PARAMETERS, Bench, bench, decode, encode, refused, unchanged

SIZES = {"scalar": 1, "small": 5, "group": GROUP, "more": 3 * GROUP + 7, "large": PIECE + GROUP + 1}
SPECS = [*(ParameterSpec(name, (size,)) for name, size in SIZES.items()), ParameterSpec("half", (300,), "BF16")]
NAMES = [f"{spec.name}.block0" for spec in SPECS]
DIFFERING = NAMES[:-1]
SGD = make_spec("SGD", [make_options("SGD")])
PLAN = make_plan(SPECS, 1, min_block_size=1 << 30, optimizer=SGD, wire=WireTypes(pull="int8"))


def new_shard(seed: int = 0) -> Shard:
    shard, generator = Shard(PLAN, 0), torch.Generator().manual_seed(seed)
    for name, place in shard.layout.place.items():
        values = torch.randn(place.block.num_elements, generator=generator)
        shard.set_initial({name: values.to(TORCH_DTYPES[place.dtype])}, {})
    return shard


def published(shard: Shard, name: str) -> Tensor:
    place = shard.layout.place[name]
    return shard.published.values[place.begin : place.end]


def move(shard: Shard, names: Collection[str], seed: int, exponent: int = -6) -> None:
    """Change the values in place, as an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        block = shard.block(name)
        block.add_(torch.randn(len(block), generator=generator) * 2.0**exponent)
    shard.version += 1


class Trainer:
    """Reads frames as a trainer does, into memory of its own."""

    def __init__(self, values: dict[str, Tensor] | None = None) -> None:
        if values is None:
            values = {f"{s.name}.block0": torch.empty(s.shape, dtype=TORCH_DTYPES[s.dtype]) for s in SPECS}
        self.values = values
        self.round: int | None = None
        self.memory = {name: writable_bytes(tensor) for name, tensor in values.items()}
        self.deltas = Deltas({name: self.memory[name] for name in values if values[name].dtype == torch.float32})

    def receive(self, body: bytes) -> None:
        sink = FrameSink(self.memory, deltas=self.deltas.memory)
        sink.feed(body)
        sink.finish()
        drive(self.deltas.add(sink.delta_names))

    def pull(self, shard: Shard, changed: dict[str, int]) -> None:
        versioned = VersionedBlocks(
            shard.view_pulled().read(copied=False), changed, {"round": str(shard.version)}, shard.version - 1,
            shard.borrow_deltas(),
        )  # fmt: skip
        self.receive(b"".join(versioned.parts(self.round)))
        self.round = shard.version


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


@settings(deadline=None, max_examples=examples(15))
@given(rounds, st.integers(0, 99))
def test_trainers_have_the_published_bits(history: list, seed: int) -> None:
    shard, trainers = new_shard(seed), [Trainer() for _ in range(3)]
    changed = dict.fromkeys(NAMES, 0)
    for number, (stepped, exponent, who) in enumerate(history, 1):
        move(shard, stepped, seed + number, exponent)
        before = {name: published(shard, name).clone() for name in NAMES}
        shard.published.publish_round(sorted(stepped))
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
            trainers[rank].pull(shard, changed)
            assert_has_what_is_published(trainers[rank], shard)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_values_without_a_delta_are_published_unchanged(bad: float) -> None:
    shard, trainer = new_shard(), Trainer()
    name, others = "more.block0", [name for name in DIFFERING if name != "more.block0"]
    assert shard.published is not None
    shard.block(name).fill_(-3e38)
    shard.published.publish_whole(name)
    trainer.pull(shard, dict.fromkeys(NAMES, 0))
    for round_, value in enumerate((-2.9e38, bad, bad, 1.0), 1):  # after a delta it comes, stays, and goes
        move(shard, others, round_)
        shard.block(name)[300] = value
        shard.published.publish_round(NAMES)
        trainer.pull(shard, dict.fromkeys(NAMES, round_))
        is_exact = round_ == 2 or (round_ > 2 and bad != 3e38)  # which 127 steps lead back from
        assert not is_exact or torch.equal(trainer.values[name].nan_to_num(7.0), shard.block(name).nan_to_num(7.0))
        for other in others:
            assert torch.equal(trainer.values[other], published(shard, other))
            assert bool(published(shard, other).isfinite().all())


def test_published_values_are_copied_stored_and_resliced() -> None:
    shard = new_shard()
    move(shard, NAMES, 1)
    shard.published.publish_round(NAMES)
    data = b"".join(shard.state.encode(PLAN, {"run": "run1"}))
    state, _ = ShardState.decode(memoryview(bytearray(data)))
    restored = Shard(PLAN, 0)
    restored.load_state(state)
    assert restored.digest() == shard.digest()
    assert restored.borrow_deltas() == {}  # no trainer is known to have the round before
    other, _ = ShardState.decode(memoryview(bytearray(data)))
    other.published = None
    off = Shard(PLAN, 0)
    off.load_state(other)
    assert off.digest() != shard.digest()
    for each in (shard, restored):
        move(each, NAMES, 2)
        each.published.publish_round(NAMES)
    assert restored.digest() == shard.digest()
    cut = make_plan(SPECS, 3, min_block_size=100, optimizer=SGD, wire=WireTypes(pull="int8"))
    for index in range(3):
        other = Shard(cut, index)
        other.load_state(reslice([(0, shard.state)], PLAN, cut, index))
        for name, place in other.layout.place.items():
            whole = published(shard, f"{place.block.parameter}.block0")
            assert torch.equal(published(other, name), whole[place.block.begin : place.block.end])


WIRE = WireTypes(pull="int8")


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


async def play(bench: Bench, first: int, last: int) -> dict[str, Tensor]:
    """Play these rounds, and return the values of a trainer that takes part from the start."""
    trainer = Trainer(decode(await bench.get(0, first - 1))[0])
    for round_ in range(first, last + 1):
        for rank in range(2):
            await bench.push(rank, round_)
        for rank in range(2):
            await bench.barrier(rank, round_)
        body = await bench.get(0, round_, have=round_ - 1)
        assert parse_frame(body).metadata[SINCE_KEY] == str(round_ - 1)
        trainer.receive(body)
        assert_same(decode(await bench.get(1, round_))[0], trainer.values)  # a late trainer has the same
    return trainer.values


async def test_a_trainer_with_the_round_before_gets_a_delta_and_others_the_published_values() -> None:
    async with bench(wire=WIRE) as pserver:
        values = await play(pserver, 1, 3)
        for have in (None, 1):
            body = await pserver.get(1, 3, have=have)
            assert {entry.dtype for entry in parse_frame(body).tensors} == {"F32"}
            assert_same(decode(body)[0], values)
        assert_same(decode(await pserver.get(0, 3, names=["p3.block0"]))[0], {"p3.block0": values["p3.block0"]})
        async with open_shard(pserver.run, ["p3.block0"], None, 0) as stream:
            exact, _ = decode(b"".join([part async for part in stream.parts]))
        assert 0 < (exact["p3.block0"] - values["p3.block0"]).abs().max() < 0.1


@pytest.mark.parametrize("settings", [{"durability": "log"}, {"durability": "none"}, {"checkpoint_rounds": 3}], ids=str)
async def test_a_killed_pserver_publishes_the_same_values_again(tmp_path: Path, settings: dict[str, object]) -> None:
    settings = {"durability": "log", **settings}
    async with bench(wire=WIRE, state_dir=tmp_path, **settings) as pserver:
        expected = await play(pserver, 1, 4)
        if settings["durability"] == "none":
            await pserver.run.want_checkpoint(4)
            await pserver.wait_until_published()
        digest = await pserver.digest()
    async with bench(wire=WIRE, state_dir=tmp_path, incarnation=2, **settings) as pserver:
        assert pserver.run.round == 4
        body = await pserver.get(0, 4, have=3)  # no delta: the progress of the earlier answer is unknown
        assert {entry.dtype for entry in parse_frame(body).tensors} == {"F32"}
        assert_same(decode(body)[0], expected)
        assert (await pserver.digest()).partition("-")[0] == digest.partition("-")[0]
        again = await play(pserver, 5, 6)
    async with bench(wire=WIRE) as pserver:
        assert_same(await play(pserver, 1, 6), again)


# ---------------------------------------------------------------------- loaded optimizer state


BUFFERS = {f"{p.name}.block0": torch.arange(p.num_elements, dtype=torch.float32) + 0.5 for p in PARAMETERS}
STATES = dict.fromkeys(BUFFERS, StepState(has_momentum=True))
NUM_SLOTS = 2 * len(BUFFERS)


def momentum(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {slot_key("momentum_buffer", name): values for name, values in buffers.items()}


async def push_slots(b: Bench, rank: int = 0, round_: int = 1, **changes: Any) -> dict[str, Any]:
    given = {"tensors": momentum(BUFFERS), "states": write_states(STATES), **changes}
    body = encode(given["tensors"], {STATES_KEY: given["states"]}).replace(b'"F32"', given.get("dtype", b'"F32"'))
    answer: dict[str, Any] = json.loads(await b.call("push", b.fence(rank, round_), body))
    return answer


async def push_rest(b: Bench, rank: int = 0, round_: int = 1, num_slots: int = NUM_SLOTS) -> dict[str, Any]:
    blocks = b.contribution(rank, round_)
    metadata = {**b.completion(None, len(blocks) + num_slots), COMPUTED_ON_KEY: str(round_ - 1)}
    body = encode(blocks, metadata)
    answer: dict[str, Any] = json.loads(await b.call("push", b.fence(rank, round_), body))
    return answer


async def held_slots(b: Bench, round_: int, rank: int = 0) -> tuple[dict[str, StepState], dict[str, Tensor]]:
    fence = b.fence(rank, round_)
    _, metadata = decode(await b.call("slots", fence))
    states = read_states(metadata[STATES_KEY])
    keys = [slot_key(slot, name) for slot in json.loads(metadata[SLOT_NAMES_KEY]) for name in states]
    slots, _ = decode(await b.call("slots", fence, json.dumps(keys).encode()))
    return states, slots


def stepped(b: Bench, round_: int, before: Mapping[str, Tensor], *ranks: int) -> dict[str, Tensor]:
    """Return the momentum after one step of SGD."""
    gradients = [b.contribution(rank, round_) for rank in ranks]
    means = {name: torch.stack([one[name] for one in gradients]).sum(0) / len(ranks) for name in before}
    return {name: 0.9 * values + means[name] for name, values in before.items()}


async def test_a_round_has_the_slots_that_came_with_it():
    async with bench(num_trainers=2) as b:
        assert await held_slots(b, 0) == ({}, {})
        assert await push_slots(b) == {"status": "staged", "staged": NUM_SLOTS, "duplicates": 0, "complete": False}
        assert (await push_slots(b))["duplicates"] == NUM_SLOTS
        await refused("contribution_missing", b.barrier(0, 1))
        assert (await push_rest(b))["complete"]
        assert not (await push_rest(b, 1))["complete"]  # slots that it announces are missing
        await refused("contribution_missing", b.barrier(1, 1))
        others = momentum({name: values + 9 for name, values in BUFFERS.items()})  # the lowest rank's slots count
        assert (await push_slots(b, 1, tensors=others))["complete"]
        assert await held_slots(b, 0) == ({}, {})  # not before the round
        await b.barrier(0, 1)
        await b.barrier(1, 1)
        await b.get(0, 1)
        assert (await push_slots(b))["status"] == "already_applied"
        states, slots = await held_slots(b, 1)
        assert states == STATES
        expected = momentum(stepped(b, 1, BUFFERS, 0, 1))
        for key, values in expected.items():
            torch.testing.assert_close(slots[key], values)
        assert await b.settle_used_bytes(0) == 0


W = "p1.block0"


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        ("unknown_block", {"tensors": {"momentum_buffer/w.block0": BUFFERS[W]}}),
        ("unknown_block", {"tensors": {f"exp_avg/{W}": BUFFERS[W]}}),
        ("unknown_block", {"tensors": {W: BUFFERS[W]}}),
        ("wrong_shape", {"tensors": {f"momentum_buffer/{W}": torch.zeros(4)}}),
        ("wrong_dtype", {"dtype": b'"I32"'}),
        ("unknown_block", {"states": write_states({"w.block0": FRESH})}),
        *(("malformed_frame", {"states": text}) for text in ("", "[]", "{", "[" * 100_000)),
        *(
            ("malformed_frame", {"states": f'{{"{W}": {state}}}'})
            for state in (
                "3", "[true, true, 1.0]", "[-1, true, 1.0]", "[1e3, true, 1.0]", "[1, 1, 1.0]", "[1, true, NaN]",
                "[1, true]", f"[{10**400}, true, 1.0]", "[1, true, 1e999]",
            )
        ),
    ],
)  # fmt: skip
async def test_slots_that_do_not_fit_are_refused(error: str, changes: dict[str, Any]):
    async with bench() as b:
        await push_slots(b, 1)
        await unchanged(b, error, push_slots(b, **changes))


async def test_loaded_slots_are_in_the_log(tmp_path):
    settings = {"num_trainers": 1, "state_dir": tmp_path, "durability": "log"}
    async with bench(**settings) as b:
        await b.get(0, 0)
        await push_slots(b)
        await push_rest(b)
        await b.barrier(0, 1)
        await b.get(0, 1)
        found = await held_slots(b, 1)
        for key, values in momentum(stepped(b, 1, BUFFERS, 0)).items():
            torch.testing.assert_close(found[1][key], values)
    async with bench(**settings, incarnation=2) as b:
        states, slots = await held_slots(b, 1)
        assert states == found[0]
        assert all(torch.equal(slots[key], values) for key, values in found[1].items())


@pytest.mark.parametrize("case", ["sync", "async", "deltas"])
async def test_a_step_starts_from_the_masters_that_came_with_it(tmp_path, case):
    settings = {
        **{"num_trainers": 1, "state_dir": tmp_path, "optimizer": "SGD", "checkpoint_rounds": 1},
        **{"durability": "none" if case == "async" else "log"},
        **{"consistency": Consistency(mode="async" if case == "async" else "sync")},
        **{"wire": WireTypes(pull="int8") if case == "deltas" else UNCHANGED},
    }
    masters = {slot_key(MASTER, W): BUFFERS[W] + 1000}
    async with bench(**settings) as b:
        start, _ = decode(await b.get(0, 0))
        await push_slots(b, tensors=masters, states="{}")
        metadata = {**b.completion(), COMPUTED_ON_KEY: "0", NUM_BLOCKS_KEY: "1"}
        await b.call("push", b.fence(0, 1), encode({}, metadata))  # without any gradient
        if case != "async":
            await b.barrier(0, 1)
        pulled, _ = decode(await b.get(0, 1, **({} if case == "async" else {"have": 0})))
        expected = {**start, W: masters[slot_key(MASTER, W)]}
        for name in pulled if case != "async" else start:
            assert torch.equal(pulled[name], expected[name])
        assert W in pulled
        digest = b.run.shard.digest()
    async with bench(**settings, incarnation=2) as b:
        assert b.run.shard.digest() == digest
