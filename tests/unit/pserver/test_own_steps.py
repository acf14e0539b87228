"""In asynchronous modes each trainer counts its own steps, and what is loaded is where all counts begin.

The oracle is one `torch.optim` whose slots all trainers share, and which steps with the count of the trainer at hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.slots import StepState, slot_key, write_states
from services.pserver.durable.update_log import Update
from services.pserver.shard import Shard

from .oracle import Options, TorchOracle, assert_same_bits, make_options
from .support import PARAMETERS, Bench, bench, decode, gradients_of, initial_values
from .test_async_run import until
from .test_loaded_slots import held_slots, push_rest, push_slots

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
async def test_every_count_begins_with_what_was_loaded(
    tmp_path: Path, name: str, durability: str, interval: int
) -> None:
    """Whatever is started again: the pserver, from its log and its checkpoints, or a trainer."""
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


async def test_a_log_of_an_earlier_version_is_replayed_as_it_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted the updates of all trainers; the counts of each go on from there."""
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
