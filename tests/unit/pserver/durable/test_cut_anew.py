"""A checkpoint is restored onto other pservers and another placement without changing a bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.pserver.shard import Shard
from services.pserver.shard_state import ShardState, concatenate, reslice

from ..oracle import make_numbers
from .support import GROUPS, SPEC, gradients, new_shard, plan_for, step


def step_asynchronously(shard, number):
    """One contribution of one of two trainers."""
    for name, gradient in gradients(shard, number).items():
        shard.apply_block(name, gradient, make_numbers(SPEC, GROUPS), counter=number % 2)
    shard.version = number


def trained(plan, rounds, take_step=step):
    shards = [new_shard(plan, index) for index in range(plan.num_pservers)]
    for round_ in range(1, rounds + 1):
        for shard in shards:
            take_step(shard, round_)
    return shards


def encoded(shard, plan):
    """Through a file and back."""
    data = b"".join(shard.copy_state().encode(plan, {"run": "run1"}))
    state, metadata = ShardState.decode(memoryview(bytearray(data)))
    assert metadata["run"] == "run1"
    return state


@given(
    before=st.integers(1, 4), after=st.integers(1, 4), rounds=st.integers(0, 4),
    placement=st.sampled_from(["balanced", "round_robin", "hash"]), whole=st.booleans(),
    take_step=st.sampled_from([step, step_asynchronously]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_values_slots_counts_and_buffers_are_the_same_on_other_pservers(
    before, after, rounds, placement, whole, take_step
):
    old, new = plan_for(before), plan_for(after, placement=placement, slice_parameters=not whole)
    states = [(index, encoded(shard, old)) for index, shard in enumerate(trained(old, rounds, take_step))]
    shards = []
    for index in range(after):
        shard = Shard(new, index)
        shard.load_state(reslice(iter(states), old, new, index))
        assert (shard.is_initialised, shard.version) == (True, rounds)
        shards.append(shard)
    expected = trained(new, rounds, take_step)
    assert [s.digest() for s in shards] == [s.digest() for s in expected]
    for shard, other in zip(shards, expected, strict=True):  # and they go on alike
        take_step(shard, rounds + 1)
        take_step(other, rounds + 1)
        assert shard.digest() == other.digest()


@pytest.mark.parametrize("num_pservers", [1, 3])
def test_whole_parameters_are_put_together(num_pservers):
    plan = plan_for(num_pservers)
    states = [(index, shard.copy_state()) for index, shard in enumerate(trained(plan, 0))]
    whole = concatenate(states, plan)
    assert {name: tuple(t.shape) for name, t in whole.items()} == {"a": (130,), "b": (7, 9), "c": (1,)}
    assert torch.equal(whole["b"], torch.arange(63).reshape(7, 9) / 64)
