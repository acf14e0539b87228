"""Buckets stay within what a pserver accepts, whatever the model looks like."""

from __future__ import annotations

import torch

from ps_protocol.frames import FrameLimits, parse_frame
from ps_protocol.plan import make_plan
from ps_protocol.vocabulary import ParameterSpec
from trainer_client.buckets import make_buckets

LIMITS = FrameLimits()


def test_many_small_tensors_travel_in_several_frames():
    plan = make_plan([ParameterSpec(f"layer{i}.with.a.long.name", ()) for i in range(20_000)], 1)
    [buckets] = make_buckets(plan, plan.parameter, bucket_bytes=1 << 22)
    frames = [parse_frame(bucket.frame(), LIMITS) for bucket in buckets]
    assert len(frames) > 1
    assert sum(len(frame.tensors) for frame in frames) == 20_000


def test_a_bucket_holds_about_its_bytes():
    plan = make_plan([ParameterSpec(f"w{i}", (1000,)) for i in range(20)], 1)
    [buckets] = make_buckets(plan, plan.parameter, bucket_bytes=10_000)
    assert [len(bucket.slots) for bucket in buckets] == [2] * 10


def test_every_pserver_gets_a_bucket_even_if_it_owns_nothing():
    plan = make_plan([ParameterSpec("w", (3,))], 3)
    assert [len(shard) for shard in make_buckets(plan, ["w"], bucket_bytes=1)] == [1, 1, 1]


def test_what_was_filled_is_what_the_frame_holds():
    plan = make_plan([ParameterSpec("w", (10,))], 2, min_block_size=5)
    buckets = make_buckets(plan, ["w"], bucket_bytes=1000, metadata_bytes=100)
    for bucket in (bucket for shard in buckets for bucket in shard):
        bucket.fill({"w": torch.arange(10.0)})
        for metadata in ({"a": "1"}, {"a": "x" * 5000}, {"a": "2"}):  # grows beyond its room, and shrinks again
            body = bucket.frame(metadata)
            frame = parse_frame(body)
            assert frame.metadata == metadata
            assert len(frame.tensors) == 1
            data = torch.frombuffer(bytearray(body[frame.data_begin :]), dtype=torch.float32)
            assert torch.equal(data, torch.arange(10.0)[bucket.slots[0].block.begin : bucket.slots[0].block.end])
