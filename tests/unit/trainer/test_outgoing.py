"""Whatever gradients there are, in whatever order they come: every block leaves once, and is counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.frames import Frame, parse_frame
from ps_protocol.plan import make_plan
from ps_protocol.routes import NUM_BLOCKS_KEY
from ps_protocol.vocabulary import ParameterSpec
from trainer_client.io_thread import IoThread
from trainer_client.pushing.buckets import Payload, make_buckets
from trainer_client.pushing.encoding import ErrorFeedback
from trainer_client.pushing.outgoing import Outgoing, nothing_to_wait_for

SIZES = {"first": 30, "second": 0, "third": 500, "fourth": 7, "fifth": 90}
NUM_PSERVERS = 2
PLAN = make_plan([ParameterSpec(name, (size,)) for name, size in SIZES.items()], NUM_PSERVERS, min_block_size=100)


class Recorder:
    """Takes pushes as a client does, and keeps the frames."""

    def __init__(self) -> None:
        self.pushed: list[list[tuple[Frame, bytes]]] = [[] for _ in range(NUM_PSERVERS)]

    async def push(self, step: int, pserver: int, frame: Payload) -> bool:
        body = b"".join(frame)
        self.pushed[pserver].append((parse_frame(body), body))
        return True


@pytest.fixture(scope="module")
def io() -> Iterator[IoThread]:
    io = IoThread()
    yield io
    io.close()


@given(st.data())
def test_every_block_leaves_once_and_the_last_frame_says_how_many(io: IoThread, data: st.DataObject) -> None:
    present = data.draw(st.lists(st.sampled_from(sorted(SIZES)), unique=True), label="present, in order of arrival")
    num_early = data.draw(st.integers(0, len(present)), label="of them before step()")
    bucket_bytes = data.draw(st.sampled_from([1, 300, 1000, 1 << 20]), label="bucket_bytes")
    shards = make_buckets(PLAN, bucket_bytes=bucket_bytes, feedback=ErrorFeedback())
    gradients = {name: torch.rand(SIZES[name]) for name in present}
    client = Recorder()
    outgoing = Outgoing(client, io, 1, shards, nothing_to_wait_for(), borrow=True)  # type: ignore[arg-type]
    for name in present[:num_early]:
        holding = [bucket for shard in shards for bucket in shard if name in bucket.parameters]
        outgoing.add(name, gradients[name], holding)
    outgoing.complete(gradients, [{"lr": 0.5}], None)
    io.run(asyncio.wait_for(outgoing.join(), timeout=10))

    left: Counter[str] = Counter()
    for shard, pushed in zip(PLAN.shards, client.pushed, strict=True):
        frames = [frame for frame, _ in pushed]
        [said] = [frame.metadata[NUM_BLOCKS_KEY] for frame in frames if NUM_BLOCKS_KEY in frame.metadata]
        assert int(said) == sum(len(frame.tensors) for frame in frames)
        assert all(frame.tensors for frame in frames if NUM_BLOCKS_KEY not in frame.metadata)
        for frame, body in pushed:
            for entry in frame.tensors:
                left[entry.name] += 1
                [block] = [block for block in shard if block.name == entry.name]
                assert torch.equal(
                    read(frame, body, entry.begin, entry.end), gradients[block.parameter][slice_of(block)]
                )
    assert left == {block.name: 1 for block in PLAN.blocks if block.parameter in gradients}


def read(frame: Frame, body: bytes, begin: int, end: int) -> Tensor:
    return torch.frombuffer(
        bytearray(body), dtype=torch.float32, count=(end - begin) // 4, offset=frame.data_begin + begin
    )


def slice_of(block: object) -> slice:
    return slice(block.begin, block.end)  # type: ignore[attr-defined]
