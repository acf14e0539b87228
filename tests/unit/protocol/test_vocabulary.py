from __future__ import annotations

from typing import Any

import pytest

from ps_protocol.vocabulary import Block, BufferSpec, ParameterSpec, is_name, is_shape, is_size


@pytest.mark.parametrize(("shape", "num_elements"), [((), 1), ((0,), 0), ((3, 0), 0), ((10, 1000), 10_000)])
def test_number_of_elements(shape: tuple[int, ...], num_elements: int) -> None:
    assert ParameterSpec("w", shape).num_elements == num_elements
    assert BufferSpec("w", shape, "I64", 0).num_bytes == 8 * num_elements


def test_a_block_is_named_for_its_parameter() -> None:
    block = Block("layers.0.weight", 2, 10, 15, 1)
    assert (block.name, block.num_elements) == ("layers.0.weight.block2", 5)


@pytest.mark.parametrize("value", [0, 1, (1 << 63) - 1])
def test_sizes(value: Any) -> None:
    assert is_size(value)


@pytest.mark.parametrize("value", [-1, 1 << 63, True, 1.0, "1", None])
def test_no_sizes(value: Any) -> None:
    assert not is_size(value)


@pytest.mark.parametrize(
    ("value", "expected"), [((), True), ((1,) * 64, True), ((1,) * 65, False), ((True,), False), ([1], False)]
)
def test_shapes(value: Any, expected: bool) -> None:
    assert is_shape(value) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("w", True), ("\n", True), ("__metadata__.weight", True), ("\U0001f40d", True), ("\ue000", True), ("", False),
     ("__metadata__", False), ("a\ud800", False), ("\udfff", False), (None, False), (1, False)],
    ids=ascii,
)  # fmt: skip
def test_names(value: Any, expected: bool) -> None:
    assert is_name(value) is expected
