"""Optimizer state that a contribution brings, and the step counts of trainers in asynchronous modes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.optimizers import FRESH, MASTER, StepState, read_states, slot_key, write_states
from ps_protocol.routes import COMPUTED_ON_KEY, NUM_BLOCKS_KEY, NUM_SLOTS_KEY, SLOT_NAMES_KEY, STATES_KEY
from ps_protocol.wire_types import UNCHANGED, WireTypes
from services.pserver.durable.update_log import Update
from services.pserver.shard import Shard

from .oracle import Options, TorchOracle, assert_same_bits, make_options
from .support import PARAMETERS, Bench, bench, decode, encode, gradients_of, initial_values, refused, unchanged
from .test_async_run import until

BUFFERS = {f"{p.name}.block0": torch.arange(p.num_elements, dtype=torch.float32) + 0.5 for p in PARAMETERS}
STATES = dict.fromkeys(BUFFERS, StepState(has_momentum=True))
NUM_SLOTS = 2 * len(BUFFERS)


def momentum(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {slot_key("momentum_buffer", name): values for name, values in buffers.items()}


async def push_slots(b: Bench, rank: int = 0, round_: int = 1, **changes: Any) -> dict[str, Any]:
    given = {"tensors": momentum(BUFFERS), "states": write_states(STATES), **changes}
    body = encode(given["tensors"], {STATES_KEY: given["states"]}).replace(b'"F32"', given.get("dtype", b'"F32"'))
    answer: dict[str, Any] = json.loads(await b.call("send", b.fence(rank, round_), body))
    return answer


async def push_rest(b: Bench, rank: int = 0, round_: int = 1, num_slots: object = NUM_SLOTS) -> dict[str, Any]:
    metadata = {**b.completion(), NUM_SLOTS_KEY: str(num_slots), COMPUTED_ON_KEY: str(round_ - 1)}
    body = encode(b.contribution(rank, round_), metadata)
    answer: dict[str, Any] = json.loads(await b.call("send", b.fence(rank, round_), body))
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
        assert await push_slots(b) == {
            "status": "staged", "staged": NUM_SLOTS, "duplicates": 0, "complete": False, "finite": True
        }  # fmt: skip
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


async def test_the_memory_of_loaded_slots_is_returned():
    async with bench(num_trainers=1) as b:
        await b.play_round(1)
        await b.settle_used_bytes(0)
        idle = b.pserver.pool.idle_bytes
        await push_slots(b, round_=2)
        await push_rest(b, round_=2)
        await b.barrier(0, 2)
        await b.get(0, 2)
        await b.settle_used_bytes(0)
        assert b.pserver.pool.idle_bytes == idle


async def test_blocks_without_slots_begin_fresh():
    async with bench(num_trainers=1) as b:
        await b.play_round(1)
        fresh = dict.fromkeys(BUFFERS, FRESH)
        await push_slots(b, round_=2, tensors={}, states=write_states(fresh))
        await push_rest(b, round_=2, num_slots=len(fresh))
        await b.barrier(0, 2)
        await b.get(0, 2)
        _, slots = await held_slots(b, 2)
        for key, gradient in momentum(b.contribution(0, 2)).items():
            assert torch.equal(slots[key], gradient)  # undampened, as in a first step


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


async def test_staged_slots_do_not_change():
    async with bench() as b:
        await push_slots(b)
        others = momentum({W: BUFFERS[W] + 1})
        await unchanged(b, "contribution_conflict", push_slots(b, tensors=others))
        await unchanged(b, "contribution_conflict", push_slots(b, states=write_states({W: FRESH})))
        await unchanged(b, "contribution_conflict", push_rest(b, num_slots=NUM_SLOTS - 1))
        await unchanged(b, "malformed_frame", push_rest(b, num_slots="x"))
        assert (await push_rest(b))["complete"]
        await unchanged(b, "contribution_conflict", push_rest(b, num_slots=NUM_SLOTS + 1))
        await unchanged(b, "contribution_conflict", push_rest(b, num_slots=0))
    async with bench() as b:
        await push_rest(b, num_slots=1)
        await unchanged(b, "contribution_conflict", push_slots(b))


async def test_slots_are_of_the_round_that_is_asked_for():
    async with bench(num_trainers=1) as b:
        await refused("try_again", b.call("slots", b.fence(0, 1)))
        await refused("future_round", b.call("slots", b.fence(0, 2)))
        await refused("stale_trainer", b.call("slots", b.fence(1, 0)))
        await b.play_round(1)
        await refused("stale_round", b.call("slots", b.fence(0, 0)))
        for key in ("p1.block0", "momentum_buffer/w.block0", "exp_avg/p1.block0", "", "/p1.block0"):
            await refused("unknown_block", b.call("slots", b.fence(0, 1), json.dumps([key]).encode()))
        await refused("malformed_frame", b.call("slots", b.fence(0, 1), b"{}"))


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
        **{"num_trainers": 1, "state_dir": tmp_path, "durability": "log", "optimizer": "SGD"},
        **{"consistency": Consistency(mode="async" if case == "async" else "sync")},
        **{"wire": WireTypes(pull="int8") if case == "deltas" else UNCHANGED},
    }
    masters = {slot_key(MASTER, W): BUFFERS[W] + 1000}
    async with bench(**settings) as b:
        start, _ = decode(await b.get(0, 0))
        await push_slots(b, tensors=masters, states="{}")
        metadata = {**b.completion(), NUM_SLOTS_KEY: "1", COMPUTED_ON_KEY: "0", NUM_BLOCKS_KEY: "0"}
        await b.call("send", b.fence(0, 1), encode({}, metadata))  # without any gradient
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


SAVED_STEPS = 7
COUNTS = ("step", "mu_product")
State = dict[str, dict[str, Tensor]]  # by parameter, as torch has it


class Oracle(TorchOracle):
    def __init__(self, name: str, groups: list[Options]) -> None:
        super().__init__(name, PARAMETERS, groups, initial_values())
        self._groups = groups
        self._begun: State = {}  # counts by parameter
        self._own: dict[int | None, State] = {}  # the same by trainer

    def step_as(self, rank: int | None, round_: int, gradients: dict[str, Tensor]) -> None:
        """A step of a trainer; None: one that counts for all."""
        own = self._own.get(rank, self._begun)
        for name, parameter in self.parameters.items():
            for key, count in own.get(name, {}).items():
                self._optimizer.state[parameter][key].copy_(count)
            if name not in own and self._optimizer.state.get(parameter):
                self._optimizer.state[parameter]["step"].zero_()
                if "mu_product" in self._optimizer.state[parameter]:
                    self._optimizer.state[parameter]["mu_product"].fill_(1.0)
        self.step(gradients, self._groups)
        self._own[rank] = self.counts()
        if rank is None:
            self._begun = self.counts()

    def counts(self) -> State:
        return {
            name: {key: value.clone() for key, value in self.state(name).items() if key in COUNTS}
            for name in self.parameters
        }

    def load(self, state: State) -> None:
        for name, parameter in self.parameters.items():
            self._optimizer.state[parameter] = {key: value.clone() for key, value in state[name].items()}
        self._begun, self._own = self.counts(), {}

    def steps_of(self, rank: int) -> set[int]:
        return {int(counts["step"]) for counts in self._own[rank].values()}


def saved_state(name: str, groups: list[Options]) -> State:
    """The state of an optimizer in one process that has taken some steps."""
    oracle = TorchOracle(name, PARAMETERS, groups, initial_values())
    for step in range(SAVED_STEPS):
        oracle.step(gradients_of(9, step), groups)
    return {name: oracle.state(name) for name in oracle.parameters}


async def bring(b: Bench, rank: int, step: int, state: State) -> None:
    """Push a step with these slots."""
    states, tensors = {}, {}
    for name, values in state.items():
        block = f"{name}.block0"
        states[block] = StepState(int(values["step"]), mu_product=float(values.get("mu_product", 1.0)))
        tensors |= {slot_key(key, block): value for key, value in values.items() if key not in COUNTS}
    await push_slots(b, rank, step, tensors=tensors, states=write_states(states))
    assert (await push_rest(b, rank, step, num_slots=len(states) + len(tensors)))["complete"]


async def take_step(b: Bench, oracle: Oracle, rank: int, step: int, state: State | None = None) -> None:
    """A step of a trainer, with slots that it has loaded, on both."""
    await b.get(rank, step - 1)
    if state is None:
        await b.push(rank, step)
    else:
        await bring(b, rank, step, state)
        oracle.load(state)
    oracle.step_as(rank, step, gradients_of(rank, step))
    await assert_same(b, oracle, rank, step)


async def assert_same(b: Bench, oracle: Oracle, rank: int, step: int) -> None:
    """Values, slots and counts, as this trainer gets them."""
    values, _ = decode(await b.get(rank, step))
    states, slots = await held_slots(b, step, rank)
    for name, parameter in oracle.parameters.items():
        block = f"{name}.block0"
        assert_same_bits(values[block], parameter, name)
        for key, value in oracle.state(name).items():
            if key == "step":
                assert states[block].steps == value.item()
            elif key == "mu_product":
                assert states[block].mu_product == value.item()
            else:
                assert_same_bits(slots[slot_key(key, block)], value, f"{key} of {name}")


@pytest.mark.parametrize(("durability", "interval"), [("log", 0), ("log", 3), ("none", 0)])
@pytest.mark.parametrize("name", ["Adam", "NAdam"])
async def test_every_step_count_begins_with_the_loaded_state(tmp_path, name, durability, interval):
    groups = [make_options(name)]
    oracle, state = Oracle(name, groups), saved_state(name, groups)
    settings: dict[str, Any] = {
        "optimizer": name, "groups": groups, "consistency": Consistency(mode="async"), "state_dir": tmp_path,
        "durability": durability, "checkpoint_rounds": interval, "keep_checkpoints": 3,
    }  # fmt: skip

    async def end_of_life(b: Bench) -> None:
        if durability == "none":
            await b.run.want_checkpoint(b.run.round)
            await until(lambda: b.run.round in b.run.storage.checkpoints)

    async with bench(2, **settings) as b:
        await take_step(b, oracle, 0, 1)
        await take_step(b, oracle, 1, 1)
        await take_step(b, oracle, 0, 2)
        assert (oracle.steps_of(0), oracle.steps_of(1)) == ({2}, {1})
        await end_of_life(b)
    async with bench(2, incarnation=2, **settings) as b:
        await take_step(b, oracle, 1, 2)
        await take_step(b, oracle, 0, 3, state)
        await take_step(b, oracle, 1, 3)
        await take_step(b, oracle, 1, 4)
        assert (oracle.steps_of(0), oracle.steps_of(1)) == ({SAVED_STEPS + 1}, {SAVED_STEPS + 2})
        await end_of_life(b)
    async with bench(members={0: 1, 1: 2, 2: 1}, starts={1: 5, 2: 1}, incarnation=3, **settings) as b:
        await take_step(b, oracle, 0, 4)
        await take_step(b, oracle, 1, 5)  # of another life of the trainer
        await take_step(b, oracle, 2, 1)  # of a trainer that is new
        assert [oracle.steps_of(rank) for rank in (0, 1, 2)] == [{9}, {10}, {8}]
        states, _ = await held_slots(b, 4, rank=0)
        assert {state.steps for state in states.values()} == {9}  # its own, not those of the newest step


async def test_a_log_of_an_earlier_version_is_replayed_as_it_was_counted(tmp_path, monkeypatch):
    groups = [make_options("Adam")]
    oracle = Oracle("Adam", groups)
    settings: dict[str, Any] = {
        "optimizer": "Adam", "groups": groups, "consistency": Consistency(mode="async"), "state_dir": tmp_path,
        "durability": "log",
    }  # fmt: skip
    describe, apply_block = Update.to_metadata, Shard.apply_block

    def describe_without(update: Update) -> dict[str, str]:
        return {key: value for key, value in describe(update).items() if key != "counter"}

    def apply_for_all(shard: Shard, name: str, gradient: Tensor, numbers: Any, *, counter: int) -> None:
        apply_block(shard, name, gradient, numbers, counter=None)

    with monkeypatch.context() as earlier:
        earlier.setattr(Update, "to_metadata", describe_without)
        earlier.setattr(Shard, "apply_block", apply_for_all)
        async with bench(2, **settings) as b:
            for rank in (0, 1):
                await b.get(rank, 0)
                await b.push(rank, 1)
                await b.get(rank, 1)
                oracle.step_as(None, 1, gradients_of(rank, 1))
            digest = b.run.shard.digest()
    for life in (2, 3):
        async with bench(2, incarnation=life, **settings) as b:
            assert b.run.shard.digest() == digest
            for rank in (0, 1):
                await take_step(b, oracle, rank, life)
            digest = b.run.shard.digest()
    assert [oracle.steps_of(rank) for rank in (0, 1)] == [{4}, {4}]
