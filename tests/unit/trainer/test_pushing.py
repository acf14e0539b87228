"""Gradients on their way to pservers, and copies between a device and the host."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
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
from ps_protocol.frames import Frame, parse_frame
from ps_protocol.plan import SlicePlan, make_plan
from ps_protocol.requests import NUM_BLOCKS_KEY, Completion
from ps_protocol.vocabulary import ParameterSpec
from trainer_client.client.buckets import FrameParts, PushBuckets, make_buckets
from trainer_client.client.error_feedback import ErrorFeedback
from trainer_client.client.pserver_group import DeclaredRun
from trainer_client.engines.outgoing import Outgoing
from trainer_client.engines.pipeline import Pipeline
from trainer_client.session.io_thread import IoThread
from trainer_client.transport.device_copies import GradientCopies, ParameterCopies
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


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(BadModel, match=r"the gradient of 'embedding' is sparse, .* with sparse=False"):
        Flattening().flat("embedding", torch.ones(2, 2).to_sparse())


# ---------------------------------------------------------------- buckets


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


def test_a_request_of_discarded_gradients_may_still_read_its_memory(io: IoThread) -> None:
    size, frames = 50_000, SimpleQueue[FrameParts]()

    async def push(step: int, pserver: int, frame: FrameParts) -> bool:
        frames.put(frame)
        return True

    client: Any = SimpleNamespace(
        pservers=SimpleNamespace(feedback=ErrorFeedback(), begin_pushes=lambda _: None, push=push),
        run=DeclaredRun(plan_of({"first": size, "last": size})), joined=SimpleNamespace(consistency=Consistency()),
        settings=SimpleNamespace(chosen_bucket_bytes=1),
    )  # fmt: skip
    pipeline = Pipeline(client, io, {name: torch.zeros(size) for name in ("first", "last")}, overlap_pulls=True)
    pipeline.add(1, "last", torch.ones(size))
    _, data = frames.get(timeout=10)
    pipeline.discard_gradients()
    pipeline.add(1, "last", torch.full((size,), 2.0))
    frames.get(timeout=10)
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), torch.ones(size))


def test_nothing_is_pushed_after_a_step_that_failed(io: IoThread) -> None:
    previous, pservers = io.loop.create_future(), Recorder()
    io.loop.call_soon_threadsafe(previous.set_result, False)
    buckets = PushBuckets(make_buckets(PLAN, bucket_bytes=300))
    outgoing = Outgoing(pservers, io, 2, buckets, previous, borrow=True)  # type: ignore[arg-type]
    outgoing.complete({"third": torch.rand(SIZES["third"])}, Completion(0, []))
    with pytest.raises(GradpostError, match="the step before it failed"):
        io.run(asyncio.wait_for(outgoing.join(), timeout=10))
    assert pservers.pushed == [[]] * NUM_PSERVERS
    assert not outgoing.pushes_done.result(), "the next step would be pushed"


def test_a_failed_step_ends_once_no_push_reads_its_gradients(io: IoThread) -> None:
    ended: list[bool] = []

    async def push(step: int, pserver: int, frame: FrameParts) -> bool:
        if pserver == 1:
            raise GradpostError("it was refused")
        for _ in range(2):  # each loses a cancellation, as asyncio.wait_for may before Python 3.12
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        ended.append(True)
        return True

    pservers: Any = SimpleNamespace(push=push)
    outgoing = Outgoing(pservers, io, 1, PushBuckets(make_buckets(PLAN, bucket_bytes=1 << 20)), None, borrow=True)
    outgoing.complete({"third": torch.rand(SIZES["third"])}, Completion(0, []))
    with pytest.raises(GradpostError, match="it was refused"):
        io.run(outgoing.join())
    assert ended


# ---------------------------------------------------------------------- device copies


class Device:
    """A device module whose events happen when `done` is raised or an event is waited for."""

    def __init__(self) -> None:
        self.done = 0  # events that have happened
        self.recorded = 0
        self.waits: list[tuple[str, int]] = []  # which stream has to wait for which event

    def module(self, _: torch.device) -> Any:
        device = self

        class Event(torch.cpu.Event):
            def record(self, stream: Any = None) -> None:
                device.recorded += 1
                self.number = device.recorded

            def query(self) -> bool:
                return self.number <= device.done

            def synchronize(self) -> None:
                device.done = max(device.done, self.number)

        class Stream(torch.cpu.Stream):
            name = "side"

            def wait_event(self, event: Any) -> None:
                device.waits.append((self.name, event.number))

        main = Stream()
        main.name = "main"
        return SimpleNamespace(Event=Event, Stream=Stream, stream=torch.cpu.stream, current_stream=lambda _: main)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", device.module)
    return device


def test_gradients_arrive_in_order_each_after_what_made_it(device: Device) -> None:
    copies, host = GradientCopies(), dict[str, torch.Tensor]()
    copies.begin_copies(host, {"b": torch.ones(3)})
    copies.begin_copies(host, {"a": torch.full((2,), 2.0)})
    assert device.waits == [("side", 1), ("side", 3)]  # 2 and 4 are the ends of the copies
    assert list(copies.arrived()) == []
    device.done = 2
    assert [name for name, _ in copies.arrived()] == ["b"]
    copies.begin_copies(host, {"b": torch.zeros(3), "c": torch.ones(1)})
    assert [(name, copy.tolist()) for name, copy in copies.finish()] == [("a", [2.0, 2.0]), ("c", [1.0])]
    assert host["b"].tolist() == [1.0] * 3, "it was copied when it left"
    assert device.done == device.recorded


def test_copies_of_discarded_gradients_end_first(device: Device) -> None:
    """The script may write to the gradients' memory then."""
    copies, host = GradientCopies(), dict[str, torch.Tensor]()
    copies.begin_copies(host, {"a": torch.zeros(2)})
    copies.discard()
    assert device.done == device.recorded
    copies.begin_copies(host, {"a": torch.full((2,), 3.0)})
    assert [(name, copy.tolist()) for name, copy in copies.finish()] == [("a", [3.0, 3.0])]


@pytest.mark.parametrize("overlap_pulls", [False, True])
def test_a_parameter_is_written_between_two_computations(device: Device, overlap_pulls: bool) -> None:
    copies = ParameterCopies(overlap_pulls=overlap_pulls)
    parameter = torch.zeros(2, 2)
    copies.wait_for_copies({"w": parameter})
    marked = device.recorded
    torch.get_device_module(parameter.device).Event().record()  # something else is computed, on other parameters
    copies.copy(parameter, torch.ones(2, 2, dtype=torch.bfloat16).t())
    assert parameter.tolist() == [[1.0, 1.0]] * 2
    end = device.recorded
    assert device.waits == [("side", marked if overlap_pulls else end - 1), ("main", end)]
    assert device.done == 0
    copies.wait_for_copies({"w": parameter})
    assert device.done == end, "host memory is not written to before it was copied"
