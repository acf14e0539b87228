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
from ps_protocol.requests import COMPUTED_ON_KEY, NUM_BLOCKS_KEY, NUM_SLOTS_KEY, SLOT_NAMES_KEY, STATES_KEY
from ps_protocol.wire_types import UNCHANGED, WireTypes

from .oracle import make_options
from .support import PARAMETERS, Bench, bench, decode, encode, refused, unchanged

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


async def push_rest(b: Bench, rank: int = 0, round_: int = 1, num_slots: object = NUM_SLOTS) -> dict[str, Any]:
    metadata = {**b.completion(), NUM_SLOTS_KEY: str(num_slots), COMPUTED_ON_KEY: str(round_ - 1)}
    body = encode(b.contribution(rank, round_), metadata)
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
        **{"num_trainers": 1, "state_dir": tmp_path, "optimizer": "SGD", "checkpoint_rounds": 1},
        **{"durability": "none" if case == "async" else "log"},
        **{"consistency": Consistency(mode="async" if case == "async" else "sync")},
        **{"wire": WireTypes(pull="int8") if case == "deltas" else UNCHANGED},
    }
    masters = {slot_key(MASTER, W): BUFFERS[W] + 1000}
    async with bench(**settings) as b:
        start, _ = decode(await b.get(0, 0))
        await push_slots(b, tensors=masters, states="{}")
        metadata = {**b.completion(), NUM_SLOTS_KEY: "1", COMPUTED_ON_KEY: "0", NUM_BLOCKS_KEY: "0"}
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


ADAM: dict[str, Any] = {
    "num_trainers": 2, "optimizer": "Adam", "groups": [make_options("Adam")], "consistency": Consistency(mode="async"),
}  # fmt: skip


async def take_steps(b: Bench, *steps: tuple[int, int]) -> None:
    for rank, step in steps:
        await b.get(rank, step - 1)
        await b.push(rank, step)
        await b.get(rank, step)


async def counts_of(b: Bench, rank: int, step: int) -> set[int]:
    states, _ = await held_slots(b, step, rank)
    return {state.steps for state in states.values()}


async def test_trainers_count_their_own_steps_from_those_that_were_loaded_last():
    async with bench(**ADAM) as b:
        await take_steps(b, (0, 1), (0, 2), (1, 1))
        assert (await counts_of(b, 0, 2), await counts_of(b, 1, 1)) == ({2}, {1})
        loaded = dict.fromkeys(BUFFERS, StepState(7))
        await push_slots(b, 1, 2, tensors={}, states=write_states(loaded))
        await push_rest(b, 1, 2, num_slots=len(loaded))
        await take_steps(b, (1, 3), (0, 3))
        assert (await counts_of(b, 0, 3), await counts_of(b, 1, 3)) == ({8}, {9})
