"""Slicing parameters into blocks, placing blocks on pservers, and the plan of both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import BadModel, GradpostError
from ps_protocol.optimizers import MEAN, OptimizerSpec
from ps_protocol.plan import (
    MAX_PSERVERS,
    MAX_ROWS,
    PLACE,
    SizedName,
    SlicePlan,
    make_plan,
    place_balanced,
    place_hash,
    slice_parameter,
)
from ps_protocol.vocabulary import DTYPE_BYTES, PLACEMENTS, ParameterSpec, Placement, is_name, is_shape, is_size
from ps_protocol.wire_types import PushType, WireTypes

from .strategies import (
    all_min_block_sizes,
    all_num_pservers,
    few,
    json_values,
    names,
    over_the_wire,
    plan_arguments,
    plans,
)

SEED_MODEL = [ParameterSpec("w1", (10, 1000)), ParameterSpec("w2", (1, 10))]


# ---------------------------------------------------------------- what a plan is


@few
@given(plans)
def test_shards_hold_every_block_once_and_all_bytes(plan: SlicePlan) -> None:
    wire_names = [block.name for block in plan.blocks] + [buffer.name for buffer in plan.buffers]
    assert len(set(wire_names)) == len(wire_names)
    assert len(plan.shards) == plan.num_pservers
    assert all(block.pserver == i for i, shard in enumerate(plan.shards) for block in shard)
    assert sorted((b for shard in plan.shards for b in shard), key=plan.blocks.index) == list(plan.blocks)
    assert sum(map(plan.shard_bytes, range(plan.num_pservers))) == sum(
        spec.num_elements * DTYPE_BYTES[spec.dtype] for spec in plan.parameters
    )


def test_scalars_have_a_block_and_empty_parameters_none() -> None:
    plan = make_plan([ParameterSpec("s", ()), ParameterSpec("e", (3, 0, 2)), ParameterSpec("one", (1, 1))], 4)
    assert [(b.name, b.begin, b.end) for b in plan.blocks] == [("s.block0", 0, 1), ("one.block0", 0, 1)]
    assert (make_plan([], 2).blocks, make_plan([], 2).shards) == ((), ((), ()))


def test_a_sparse_parameter_is_cut_between_rows() -> None:
    plan = make_plan([ParameterSpec("w", (32, 2, 4), is_sparse=True)], 5, min_block_size=100)  # 13 rows
    assert [(block.begin // 8, block.end // 8, block.begin % 8) for block in plan.blocks] == [
        (0, 11, 0), (11, 22, 0), (22, 32, 0),
    ]  # fmt: skip


def test_balanced_counts_bytes_and_not_elements() -> None:
    parameters = [ParameterSpec("half", (6,), "BF16"), ParameterSpec("full", (5,), "F32"), ParameterSpec("b", (2,))]
    assert [block.pserver for block in make_plan(parameters, 2).blocks] == [1, 0, 1]


def test_buffers_stay_whole_and_are_distributed_in_turn() -> None:
    buffers = [("mean", (100_000,), "F32"), ("count", (), "I64"), ("var", (100_000,), "F64")]
    plan = make_plan(SEED_MODEL, 2, min_block_size=1, buffers=buffers)
    assert [(b.name, b.pserver, b.num_bytes) for b in plan.buffers] == [
        ("mean", 0, 400_000), ("count", 1, 8), ("var", 0, 800_000)
    ]  # fmt: skip


# ---------------------------------------------------------------- the digest


def test_the_digest_is_the_same_in_every_release() -> None:
    """A change here makes every running cluster refuse the new release: raise PROTOCOL_VERSION with it."""
    assert make_plan(SEED_MODEL, 3, placement="hash").digest == "c57aba09e5087b6555831e639c0a265b"


@few
@given(plan_arguments(), plan_arguments())
def test_plans_are_equal_exactly_if_their_digests_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    plan, again = make_plan(**one), make_plan(**one)
    assert plan == again
    assert plan.digest == again.digest
    for key, value in other.items():  # one argument of another plan, as far as it fits
        try:
            neighbour = make_plan(**{**one, key: value})
        except BadModel:
            continue
        assert (neighbour.digest == plan.digest) == (neighbour == plan)


# ---------------------------------------------------------------- over the wire


@few
@given(plans)
def test_a_plan_survives_the_wire(plan: SlicePlan) -> None:
    received = SlicePlan.from_json(over_the_wire(plan))
    assert received == plan
    assert received.digest == plan.digest
    assert SlicePlan.from_json(plan.as_json) == plan


@few
@given(json_values)
def test_any_json_gives_a_plan_or_our_error(value: Any) -> None:
    with pytest.raises(GradpostError):
        SlicePlan.from_json(value)


@pytest.mark.parametrize("push", ["float16", "int8", "topk"])
def test_buffers_are_exact_on_the_wire(push: PushType) -> None:
    parameters = [ParameterSpec("w", (10_000,)), ParameterSpec("mean", (10_000,), group=1)]
    optimizer = SGD.with_buffers((MEAN,))
    wire = WireTypes(push, "bfloat16")
    plan = SlicePlan.from_json(over_the_wire(make_plan(parameters, 1, optimizer=optimizer, wire=wire)))
    pushed = {block.parameter: plan.pushed(block) for block in plan.blocks}
    assert pushed["mean"] == [("mean.block0", "F32", (10_000,))]
    assert pushed["w"] != [("w.block0", "F32", (10_000,))]
    assert (plan.pulled("mean"), plan.pulled("w")) == ("F32", "BF16")


# ---------------------------------------------------------------- models that cannot be planned

TABLE = ParameterSpec("w", (30, 4), is_sparse=True)
SGD = OptimizerSpec("SGD", ({"maximize": False, "nesterov": False},))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parameters": [ParameterSpec("", (3,))]}, "a parameter cannot be called ''"),
        ({"buffers": [("__metadata__", (3,), "F32")]}, "a buffer cannot be called '__metadata__'"),
        ({"parameters": [ParameterSpec("w", ()), ParameterSpec("w", ())]}, "two tensors are called 'w'"),
        ({"buffers": [("w", (), "F32")]}, "two tensors are called 'w'"),
        ({"buffers": [("w.block1", (), "F32")]}, "'w.block1' has the name of a block of parameter 'w'"),
        ({"buffers": [("m", (-1,), "F32")]}, "buffer 'm' has an impossible shape"),
        ({"buffers": [("m", (), "float32")]}, "buffer 'm' has a wrong dtype"),
        ({"parameters": [ParameterSpec("w", (), "I64")]}, "parameter 'w' has a wrong dtype .*F32, BF16, F16.*I64"),
        ({"parameters": [ParameterSpec("w", (), "F64")]}, r"parameter 'w' has a wrong dtype; call model\.float\(\)"),
        ({"parameters": [ParameterSpec("w", (2, -1))]}, "parameter 'w' has an impossible shape"),
        ({"parameters": [ParameterSpec("w", (True,))]}, "impossible shape"),
        ({"parameters": [ParameterSpec("w", (1 << 63,))]}, "impossible shape"),
        ({"parameters": [ParameterSpec("w", (1 << 31, 1 << 31))]}, "impossible shape"),
        ({"parameters": [ParameterSpec("w", (1,) * 65)]}, "impossible shape"),
        ({"parameters": [ParameterSpec("w", (), group=-2)]}, "a group that the optimizer does not have"),
        ({"num_pservers": 0}, "the number of pservers is out of range"),
        ({"num_pservers": MAX_PSERVERS + 1}, "the number of pservers is out of range"),
        ({"min_block_size": 0}, "min_block_size is too small"),
        *(
            ({"parameters": [TABLE], "optimizer": OptimizerSpec(rule, ({},))}, message)
            for rule, message in (
                ("Adam", r"Adam does not support the sparse gradients of 'w'. Use SparseAdam, .*wrap_optimizers"),
                ("AdamW", "AdamW does not support the sparse gradients of 'w'"),
            )
        ),
        ({"optimizer": OptimizerSpec("SparseAdam", ({},))}, "does not support dense gradients, such as that of 'w'"),
        (
            {"parameters": [ParameterSpec("w", (MAX_ROWS + 1, 0), is_sparse=True)], "optimizer": SGD},
            r"SGD does not support the sparse .* at most 2147483647 rows; actual SGD, shape \[2147483648, 0\]",
        ),
        ({"parameters": [ParameterSpec("w", (), is_sparse=True)], "optimizer": SGD}, r"actual SGD, shape \[\]"),
        *(
            ({"parameters": [TABLE], "wire": wire}, "sparse gradients have no push_type int8 and topk, and no pull_ty")
            for wire in (WireTypes("int8"), WireTypes("topk"), WireTypes(pull="int8"))
        ),
        ({"placement": "random"}, "there is no such placement .*balanced or round_robin or hash.*'random'"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_planned(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadModel, match=message):
        make_plan(**{"parameters": [ParameterSpec("w", (3,))], "num_pservers": 2, **arguments})


def test_a_buffer_may_look_like_the_block_of_nothing() -> None:
    plan = make_plan([ParameterSpec("w", (3,))], 2, buffers=[("v.block0", (), "F32"), ("w.blocked", (), "F32")])
    assert len(plan.buffers) == 2


# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(
    ("is_valid", "right", "wrong"),
    [
        (is_size, [0, 1, (1 << 63) - 1], [-1, 1 << 63, True, 1.0, "1", None]),
        (is_shape, [(), (1,) * 64], [(1,) * 65, (True,), [1]]),
        (is_name, ["w", "\n", "__metadata__.weight", "\U0001f40d", "\ue000"],
         ["", "__metadata__", "a\ud800", "\udfff", None, 1]),
    ],
)  # fmt: skip
def test_sizes_shapes_and_names_are_checked(is_valid: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [is_valid(value) for value in right] == [True] * len(right)
    assert [is_valid(value) for value in wrong] == [False] * len(wrong)


# ---------------------------------------------------------------- slicing

all_num_elements = st.integers(0, 100_000) | st.integers(0, 1 << 62)


@given(all_num_elements, all_num_pservers, all_min_block_sizes)
def test_a_parameter_is_tiled_by_the_smallest_number_of_equal_blocks(
    num_elements: int, num_pservers: int, min_block_size: int
) -> None:
    blocks = slice_parameter(num_elements, num_pservers, min_block_size=min_block_size)
    position = 0
    for begin, end in blocks:
        assert begin == position < end
        position = end
    assert position == num_elements
    assert len(blocks) == min((num_elements + min_block_size - 1) // min_block_size, num_pservers)
    sizes = [end - begin for begin, end in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1
    whole = slice_parameter(num_elements, num_pservers, min_block_size=min_block_size, whole=True)
    assert whole == ([(0, num_elements)] if num_elements else [])


# ---------------------------------------------------------------- placement

sized_names = st.lists(st.tuples(names, st.integers(1, 1 << 40)), max_size=20)
few_sized_names = st.lists(st.tuples(names, st.integers(1, 12)), min_size=1, max_size=7)


def loads(blocks: Sequence[SizedName], owners: Sequence[int], num_pservers: int) -> list[int]:
    return [
        sum(size for (_, size), owner in zip(blocks, owners, strict=True) if owner == i) for i in range(num_pservers)
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
@few
@given(blocks=sized_names, num_pservers=all_num_pservers)
def test_every_block_has_an_owner_that_exists(placement: Placement, blocks: list[SizedName], num_pservers: int) -> None:
    owners = PLACE[placement](blocks, num_pservers)
    assert len(owners) == len(blocks)
    assert all(0 <= owner < num_pservers for owner in owners)


def test_hash_is_the_same_on_every_machine() -> None:
    """From `printf %s NAME | sha256sum`: the first 16 hexadecimal digits modulo 7."""
    by_hand = {
        "w1.block0": 0x9E80B0B2FA71E537,
        "weiß.block1": 0x281080D3240BE4A5,
    }
    assert place_hash([(name, 1) for name in by_hand], 7) == [digits % 7 for digits in by_hand.values()]


@few
@given(few_sized_names, st.integers(1, 3))
def test_balanced_is_within_a_third_of_the_best(blocks: list[SizedName], num_pservers: int) -> None:
    best = min(
        max(loads(blocks, owners, num_pservers))
        for owners in itertools.product(range(num_pservers), repeat=len(blocks))
    )
    held = loads(blocks, place_balanced(blocks, num_pservers), num_pservers)
    assert 3 * num_pservers * max(held) <= (4 * num_pservers - 1) * best  # (4/3 - 1/(3 M)) * best
