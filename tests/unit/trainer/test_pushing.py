"""Gradients on their way to pservers: flattened, filled into buckets, and sent once each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.consistency import Consistency
from ps_protocol.errors import BadModel, GradpostError
from ps_protocol.frames import Frame, FrameLimits, parse_frame
from ps_protocol.plan import SlicePlan, make_plan
from ps_protocol.requests import NUM_BLOCKS_KEY, Completion
from ps_protocol.vocabulary import ParameterSpec
from ps_protocol.wire_types import WireTypes
from trainer_client.client.buckets import FrameParts, PushBuckets, make_buckets
from trainer_client.client.error_feedback import ErrorFeedback
from trainer_client.client.pserver_group import DeclaredRun
from trainer_client.engines.outgoing import Outgoing
from trainer_client.engines.pipeline import Pipeline
from trainer_client.session.io_thread import IoThread
from trainer_client.transport.tensors import Flattening


def plan_of(sizes: dict[str, int], num_pservers: int = 1, **options: object) -> SlicePlan:
    specs = [ParameterSpec(name, (size,)) for name, size in sizes.items()]
    return make_plan(specs, num_pservers, **options)  # type: ignore[arg-type]


def read(frame: Frame, body: bytes) -> dict[str, Tensor]:
    """Return the float32 tensors of a frame."""
    begin = frame.data_begin
    data = {entry.name: bytearray(body[begin + entry.begin : begin + entry.end]) for entry in frame.tensors}
    return {name: torch.frombuffer(its, dtype=torch.float32) for name, its in data.items()}


# ---------------------------------------------------------------- flat gradients


def test_a_contiguous_gradient_is_not_copied() -> None:
    gradient = torch.arange(6.0).view(2, 3)
    flat = Flattening().flat("weight", gradient)
    assert (flat.shape, flat.data_ptr()) == ((6,), gradient.data_ptr())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_layout_is_copied_to_the_same_memory_each_time(dtype: torch.dtype) -> None:
    flattening = Flattening()
    places = set()
    for factor in (1, 2, 3):
        gradient = torch.arange(24, dtype=dtype).mul(factor).view(1, 4, 3, 2)
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        flat = flattening.flat("weight", gradient)
        assert flat.tolist() == [factor * n for n in range(24)]
        places.add(flat.data_ptr())
    assert len(places) == 1
    assert flattening.flat("bias", gradient).data_ptr() not in places


def test_a_gradient_of_another_form_gets_other_memory() -> None:
    flattening = Flattening()
    flattening.flat("weight", torch.ones(3, 2).t())
    assert flattening.flat("weight", torch.ones(3, 2, dtype=torch.float64).t()).dtype == torch.float64
    assert flattening.flat("weight", torch.ones(5, 2).t()).shape == (10,)


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(BadModel, match=r"the gradient of 'embedding' is sparse, .* with sparse=False"):
        Flattening().flat("embedding", torch.ones(2, 2).to_sparse())


# ---------------------------------------------------------------- buckets


def test_a_header_with_many_tensors_stays_within_the_limits_of_a_frame() -> None:
    plan = make_plan([ParameterSpec(f"layer{i}.with.a.long.name", ()) for i in range(20_000)], 1)
    [buckets] = make_buckets(plan, bucket_bytes=1 << 22)
    frames = [parse_frame(b"".join(bucket.frame()), FrameLimits()) for bucket in buckets]
    assert len(frames) > 1
    assert sum(len(frame.tensors) for frame in frames) == 20_000


def test_a_bucket_holds_about_its_bytes_and_each_pserver_has_one() -> None:
    [buckets] = make_buckets(plan_of({f"w{i}": 1000 for i in range(20)}), bucket_bytes=10_000)
    assert [len(bucket.entries) for bucket in buckets] == [2] * 10
    assert [len(shard) for shard in make_buckets(plan_of({"w": 3}, 3), bucket_bytes=1)] == [1, 1, 1]


@pytest.mark.parametrize("borrow", [False, True])
def test_a_frame_holds_the_filled_values_and_its_metadata(borrow: bool) -> None:
    sizes = {"w": 10, "large": 50_000, "v": 7, "larger": 60_000}
    flat = {name: torch.randn(size) for name, size in sizes.items()}
    shards = make_buckets(plan_of(sizes, 2, min_block_size=5), bucket_bytes=1 << 20)
    for bucket in (bucket for shard in shards for bucket in shard):
        bucket.fill(flat, borrow=borrow)
        for metadata in ({"a": "1"}, {"a": "x" * 5000}):
            body = b"".join(bucket.frame(metadata))
            frame = parse_frame(body)
            assert frame.metadata == metadata
            for entry, data in zip(bucket.entries, read(frame, body).values(), strict=True):
                assert torch.equal(data, flat[entry.block.parameter][entry.block.begin : entry.block.end])


def test_only_borrowed_gradients_are_sent_from_their_own_memory() -> None:
    plan = plan_of({"w": 50_000, "small": 3})
    [[bucket]] = make_buckets(plan, bucket_bytes=1 << 20, feedback=ErrorFeedback())
    flat = {"w": torch.zeros(50_000), "small": torch.zeros(3)}
    for borrow in (False, True, False):
        bucket.fill(flat, borrow=borrow)
        addresses = [int(np.frombuffer(part, np.uint8).ctypes.data) for part in bucket.frame()]
        assert (flat["w"].data_ptr() in addresses) == borrow


def test_a_gradient_in_another_dtype_is_copied_even_if_it_may_be_borrowed() -> None:
    plan = plan_of({"w": 50_000}, wire=WireTypes(push="bfloat16"))
    [[bucket]] = make_buckets(plan, bucket_bytes=1 << 20, feedback=ErrorFeedback())
    bucket.fill({"w": torch.ones(50_000)}, borrow=True)
    _, data = bucket.frame()
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.bfloat16), torch.ones(50_000).bfloat16())


# ---------------------------------------------------------------- frames that leave

SIZES = {"first": 30, "second": 0, "third": 500, "fourth": 7, "fifth": 90}
NUM_PSERVERS = 2
PLAN = plan_of(SIZES, NUM_PSERVERS, min_block_size=100)


class Recorder:
    """A group of pservers that records the pushed frames of each."""

    def __init__(self) -> None:
        self.pushed: list[list[tuple[Frame, bytes]]] = [[] for _ in range(NUM_PSERVERS)]

    async def push(self, step: int, pserver: int, frame: FrameParts) -> bool:
        body = b"".join(frame)
        self.pushed[pserver].append((parse_frame(body), body))
        return True


@pytest.fixture(scope="module")
def io() -> Iterator[IoThread]:
    io = IoThread()
    yield io
    io.close()


@given(st.data())
def test_each_block_is_pushed_once_and_the_last_frame_has_their_number(io: IoThread, data: st.DataObject) -> None:
    present = data.draw(st.lists(st.sampled_from(sorted(SIZES)), unique=True), label="present, in order of arrival")
    num_early = data.draw(st.integers(0, len(present)), label="of them before step()")
    bucket_bytes = data.draw(st.sampled_from([1, 300, 1000, 1 << 20]), label="bucket_bytes")
    shards = make_buckets(PLAN, bucket_bytes=bucket_bytes, feedback=ErrorFeedback())
    gradients = {name: torch.rand(SIZES[name]) for name in present}
    pservers = Recorder()
    outgoing = Outgoing(pservers, io, 1, PushBuckets(shards), None, borrow=True)  # type: ignore[arg-type]
    for name in present[:num_early]:
        outgoing.add(name, gradients[name])
    outgoing.complete(gradients, Completion(0, [{"lr": 0.5}]))
    io.run(asyncio.wait_for(outgoing.join(), timeout=10))

    pushed_blocks: Counter[str] = Counter()
    for shard, pushed in zip(PLAN.shards, pservers.pushed, strict=True):
        frames = [frame for frame, _ in pushed]
        [num_blocks] = [frame.metadata[NUM_BLOCKS_KEY] for frame in frames if NUM_BLOCKS_KEY in frame.metadata]
        assert int(num_blocks) == sum(len(frame.tensors) for frame in frames)
        assert all(frame.tensors for frame in frames if NUM_BLOCKS_KEY not in frame.metadata)
        blocks = {block.name: block for block in shard}
        for frame, body in pushed:
            for name, values in read(frame, body).items():
                pushed_blocks[name] += 1
                block = blocks[name]
                assert torch.equal(values, gradients[block.parameter][block.begin : block.end])
    assert pushed_blocks == {block.name: 1 for block in PLAN.blocks if block.parameter in gradients}


class FrameQueue:
    """A group of pservers that hands on the frames as they are read from memory."""

    def __init__(self) -> None:
        self.feedback = ErrorFeedback()
        self.frames = SimpleQueue[FrameParts]()

    def begin_pushes(self, round_: int) -> None:
        """Do nothing."""

    async def push(self, step: int, pserver: int, frame: FrameParts) -> bool:
        self.frames.put(frame)
        return True


SIZE = 50_000


def make_pipeline(io: IoThread, pservers: FrameQueue, max_delay: int = 0) -> Pipeline:
    client: Any = SimpleNamespace(
        pservers=pservers, run=DeclaredRun(plan_of({"first": SIZE, "last": SIZE})),
        joined=SimpleNamespace(consistency=Consistency(max_delay=max_delay)),
        settings=SimpleNamespace(chosen_bucket_bytes=1),
    )  # fmt: skip
    return Pipeline(client, io, {name: torch.zeros(SIZE) for name in ("first", "last")}, overlap_pulls=True)


def test_steps_on_their_way_have_memory_of_their_own(io: IoThread) -> None:
    pipeline = make_pipeline(io, FrameQueue(), max_delay=1)
    first, second, third = map(pipeline._memory_of, (1, 2, 3))
    assert first is third
    assert first.buckets is not second.buckets
    assert first.received["last"].data_ptr() != second.received["last"].data_ptr()


def test_a_request_of_discarded_gradients_may_still_read_its_memory(io: IoThread) -> None:
    pservers = FrameQueue()
    pipeline = make_pipeline(io, pservers)
    pipeline.add(1, "last", torch.ones(SIZE))
    _, data = pservers.frames.get(timeout=10)
    pipeline.discard_gradients()
    pipeline.add(1, "last", torch.full((SIZE,), 2.0))
    pservers.frames.get(timeout=10)
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), torch.ones(SIZE))


def test_nothing_is_pushed_after_a_step_that_failed(io: IoThread) -> None:
    async def fail(*_: object) -> bool:
        raise GradpostError("it was refused")

    pservers, gradients = Recorder(), {"third": torch.rand(SIZES["third"])}
    previous = None
    for step, problem in ((1, "it was refused"), (2, "the step before it failed"), (3, "the step before it failed")):
        refusing: Any = SimpleNamespace(push=fail) if step == 1 else pservers
        outgoing = Outgoing(
            refusing, io, step, PushBuckets(make_buckets(PLAN, bucket_bytes=300)), previous, borrow=True
        )
        outgoing.complete(gradients, Completion(0, []))
        with pytest.raises(GradpostError, match=problem):
            io.run(asyncio.wait_for(outgoing.join(), timeout=10))
        previous = outgoing.pushes_done
    assert pservers.pushed == [[]] * NUM_PSERVERS
