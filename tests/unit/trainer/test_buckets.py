"""Buckets stay within what a pserver accepts, whatever the model looks like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ps_protocol.frames import FrameLimits, parse_frame
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from ps_protocol.wire_types import WireTypes
from trainer_client.pushing.buckets import make_buckets
from trainer_client.pushing.encoding import ErrorFeedback

LIMITS = FrameLimits()


def test_many_small_tensors_travel_in_several_frames():
    plan = make_plan([ParameterSpec(f"layer{i}.with.a.long.name", ()) for i in range(20_000)], 1)
    [buckets] = make_buckets(plan, bucket_bytes=1 << 22)
    frames = [parse_frame(b"".join(bucket.frame()), LIMITS) for bucket in buckets]
    assert len(frames) > 1
    assert sum(len(frame.tensors) for frame in frames) == 20_000


def test_a_bucket_holds_about_its_bytes():
    plan = make_plan([ParameterSpec(f"w{i}", (1000,)) for i in range(20)], 1)
    [buckets] = make_buckets(plan, bucket_bytes=10_000)
    assert [len(bucket.slots) for bucket in buckets] == [2] * 10


def test_every_pserver_gets_a_bucket_even_if_it_owns_nothing():
    plan = make_plan([ParameterSpec("w", (3,))], 3)
    assert [len(shard) for shard in make_buckets(plan, bucket_bytes=1)] == [1, 1, 1]


@pytest.mark.parametrize("borrow", [False, True])
def test_what_was_filled_is_what_the_frame_holds(borrow: bool) -> None:
    sizes = {"w": 10, "large": 50_000, "v": 7, "larger": 60_000}
    plan = make_plan([ParameterSpec(name, (size,)) for name, size in sizes.items()], 2, min_block_size=5)
    flat = {name: torch.randn(size) for name, size in sizes.items()}
    for bucket in (bucket for shard in make_buckets(plan, bucket_bytes=1 << 20) for bucket in shard):
        bucket.fill(flat, borrow=borrow)
        for metadata in ({"a": "1"}, {"a": "x" * 5000}):
            body = bytearray(b"".join(bucket.frame(metadata)))
            frame = parse_frame(body)
            assert frame.metadata == metadata
            for slot, entry in zip(bucket.slots, frame.tensors, strict=True):
                data = torch.frombuffer(
                    body, dtype=torch.float32, count=entry.shape[0], offset=frame.data_begin + entry.begin
                )
                assert torch.equal(data, flat[slot.block.parameter][slot.block.begin : slot.block.end])


def test_only_what_is_borrowed_is_sent_from_where_it_lies() -> None:
    plan = make_plan([ParameterSpec("w", (50_000,)), ParameterSpec("small", (3,))], 1)
    [[bucket]] = make_buckets(plan, bucket_bytes=1 << 20, feedback=ErrorFeedback())
    flat = {"w": torch.zeros(50_000), "small": torch.zeros(3)}
    for borrow in (False, True, False):
        bucket.fill(flat, borrow=borrow)
        frame = bucket.frame()
        flat["w"].add_(1.0)
        shares = any(memory_of(part) == flat["w"].data_ptr() for part in frame)
        assert shares == borrow


def test_a_gradient_in_another_dtype_is_copied_even_if_it_may_be_borrowed() -> None:
    plan = make_plan([ParameterSpec("w", (50_000,))], 1, wire=WireTypes(push="bfloat16"))
    [[bucket]] = make_buckets(plan, bucket_bytes=1 << 20, feedback=ErrorFeedback())
    bucket.fill({"w": torch.ones(50_000)}, borrow=True)
    _, data = bucket.frame()
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.bfloat16), torch.ones(50_000).bfloat16())


def memory_of(part: memoryview) -> int:
    return int(np.frombuffer(part, np.uint8).ctypes.data)
