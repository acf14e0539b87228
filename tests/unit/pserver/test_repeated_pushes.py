"""A push that comes again is compared with what is staged: bits, and not numbers, on the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ps_protocol.errors import ContributionConflict
from ps_protocol.frames import DEFAULT_LIMITS, encode_header, parse_frame
from services.pserver.bodies import Body, BufferPool
from services.pserver.contribution import Contribution
from services.pserver.tensors import StagedBlock


def receive(values: Tensor) -> StagedBlock:
    data = encode_header([("w", "F32", tuple(values.shape))])
    body = Body(BufferPool(), len(data) + values.nbytes)
    body.buffer[:] = data + values.numpy().tobytes()
    body.frame = parse_frame(body.buffer, DEFAULT_LIMITS)
    return StagedBlock(body, tuple(body.frame.tensors), len(values))


def push_again(first: Tensor, second: Tensor) -> int:
    contribution: Contribution[StagedBlock] = Contribution()
    contribution.stage(0, 1, {"w": receive(first)}, None, None)
    return contribution.stage(0, 1, {"w": receive(second)}, None, None)


@pytest.mark.parametrize("size", [1, 2, 200_000])
def test_the_same_bits_are_the_same_push(size: int) -> None:
    values = torch.tensor([float("nan"), 0.0]).repeat(size)
    assert push_again(values, values.clone()) == 0


@pytest.mark.parametrize("at", [0, 1, 65_535, 65_536, 131_072, 199_999])
def test_one_other_bit_is_another_push(at: int) -> None:
    other = torch.zeros(200_000)
    other[at] = -0.0
    with pytest.raises(ContributionConflict):
        push_again(torch.zeros(200_000), other)


def test_the_comparison_is_not_made_element_by_element() -> None:
    """As CPython compares memoryviews: half a second for 256 MiB."""
    first, second = receive(torch.ones(4_000_000)), receive(torch.ones(4_000_000))

    def seconds(compare: Callable[[], bool]) -> float:
        begin = time.thread_time()
        assert compare()
        return time.thread_time() - begin

    slow = seconds(lambda: first.bytes() == second.bytes())
    assert min(seconds(lambda: first == second) for _ in range(3)) < slow / 3
