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
from ps_protocol.requests import COMPUTED_ON_KEY, NUM_BLOCKS_KEY, SLOT_NAMES_KEY, STATES_KEY
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


ADAM: dict[str, Any] = {
    "num_trainers": 2, "optimizer": "Adam", "groups": [make_options("Adam")], "consistency": Consistency(mode="async"),
}  # fmt: skip
