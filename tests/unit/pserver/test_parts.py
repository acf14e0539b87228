"""Ranges of what was pushed are the same, whatever it was on the wire."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.frames import DEFAULT_LIMITS, encode_header, parse_frame
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from ps_protocol.wire_types import GROUP, WireTypes
from services.pserver.bodies import Body, BufferPool
from services.pserver.layout import ShardLayout
from services.pserver.pushes import read_blocks
from services.pserver.tensors import Part, QuantisedPart, SparsePart, check_blocks

from ...raising import raises_code

SIZE = 5 * GROUP + 7


def quantised() -> tuple[Part, torch.Tensor]:
    integers = torch.randint(-127, 128, (SIZE,), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(-(-SIZE // GROUP), generator=torch.Generator().manual_seed(1))
    return QuantisedPart(integers, scales), integers.float() * scales.repeat_interleave(GROUP)[:SIZE]


def sparse() -> tuple[Part, torch.Tensor]:
    indices = torch.arange(3, SIZE, 11, dtype=torch.int32)
    values = torch.randn(len(indices), generator=torch.Generator().manual_seed(2))
    return SparsePart(values, indices, SIZE), torch.zeros(SIZE).index_put((indices.long(),), values)


@pytest.mark.parametrize("make", [quantised, sparse])
@given(cuts=st.lists(st.integers(0, SIZE // GROUP).map(GROUP.__mul__), max_size=4))
def test_ranges_are_those_of_the_whole(make, cuts: list[int]) -> None:
    part, expected = make()
    assert part.shape == expected.shape
    assert torch.equal(part[:], expected)
    edges = sorted({0, SIZE, *cuts})
    pieces = [part[begin:end] for begin, end in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(pieces), expected)


def receive(push: str, tensors: dict[str, torch.Tensor], size: int = 1000) -> dict[str, torch.Tensor]:
    """What is read from a push of these tensors to a shard with one block `w.block0` of so many elements."""
    layout = ShardLayout(make_plan([ParameterSpec("w", (size,))], 1, wire=WireTypes(push=push, topk=0.002)), 0)
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.int32: "I32"}
    header = encode_header([(name, names[t.dtype], tuple(t.shape)) for name, t in tensors.items()])
    data = header + b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors.values())
    body = Body(BufferPool(), len(data))
    body.buffer[:] = data
    body.frame = parse_frame(body.buffer, DEFAULT_LIMITS)
    blocks = read_blocks(body, layout)
    check_blocks(blocks)
    return {name: block.tensor() for name, block in blocks.items()}


def test_each_type_is_read_as_what_it_stands_for() -> None:
    ones = torch.ones(1000)
    assert torch.equal(receive("float32", {"w.block0": ones})["w.block0"], ones)
    assert torch.equal(receive("bfloat16", {"w.block0": ones.bfloat16()})["w.block0"], ones.bfloat16())
    bytes_ = {"w.block0": torch.ones(1000, dtype=torch.int8), "w.block0.scales": torch.full((4,), 2.0)}
    assert torch.equal(receive("int8", bytes_)["w.block0"], 2 * ones)
    some = {"w.block0": torch.tensor([5.0, 6.0]), "w.block0.indices": torch.tensor([7, 999], dtype=torch.int32)}
    assert receive("topk", some)["w.block0"].nonzero().flatten().tolist() == [7, 999]


INTEGERS = torch.ones(1000, dtype=torch.int8)


@pytest.mark.parametrize(
    ("push", "tensors", "error"),
    [
        ("int8", {"w.block0": INTEGERS}, "malformed_frame"),
        ("int8", {"w.block0.scales": torch.ones(4)}, "malformed_frame"),
        ("int8", {"w.block0": INTEGERS, "w.block0.scales": torch.ones(5)}, "wrong_shape"),
        ("int8", {"w.block0": torch.ones(1000), "w.block0.scales": torch.ones(4)}, "wrong_dtype"),
        ("int8", {"w.block0": INTEGERS, "w.block0.indices": torch.ones(4)}, "malformed_frame"),
        ("float32", {"w.block0": torch.ones(1000), "w.block0.scales": torch.ones(4)}, "unknown_block"),
        ("bfloat16", {"w.block0": torch.ones(1000)}, "wrong_dtype"),
        *(
            ("topk", {"w.block0": torch.ones(2), "w.block0.indices": torch.tensor(indices, dtype=torch.int32)}, error)
            for indices, error in (
                ([3, 3], "malformed_frame"),
                ([4, 3], "malformed_frame"),
                ([-1, 3], "malformed_frame"),
                ([3, 1000], "malformed_frame"),
                ([3], "wrong_shape"),
            )
        ),
    ],
)
def test_what_does_not_fit_is_refused(push: str, tensors: dict[str, torch.Tensor], error: str) -> None:
    with raises_code(error):
        receive(push, tensors)
