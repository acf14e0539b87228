"""Differences are received apart from the values, and added whole or not at all."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.frames import FrameLimits, encode_header
from ps_protocol.routes import SINCE_KEY
from trainer_client.pulling.differences import Differences
from trainer_client.tensors import writable_bytes
from trainer_client.transport.frame_sink import FrameSink

from ...raising import raises_code

VALUES = torch.tensor([1.0, 2.0, 3.0])
INTEGERS, SCALES = ("w", "I8", (3,)), ("w.scales", "F32", (1,))


def frame(tensors, data: bytes) -> bytes:
    return encode_header(tensors, {SINCE_KEY: "4"}) + data


def difference(*integers: int, scale: float = 0.5) -> bytes:
    return bytes(i & 0xFF for i in integers) + torch.tensor([scale]).numpy().tobytes()


@pytest.mark.asyncio
async def test_it_is_added_once_it_is_there() -> None:
    values = VALUES.clone()
    memory = {"w": writable_bytes(values)}
    differences = Differences(memory)
    for _ in range(2):  # the memory is kept
        sink = FrameSink(memory, FrameLimits(), differences.memory)
        for byte in frame([INTEGERS, SCALES], difference(2, 0, -4)):
            sink.feed(bytes([byte]))
        assert sink.finish() == {SINCE_KEY: "4"}
        before = values.clone()
        await differences.add(sink.differing)
        assert torch.equal(values, before + torch.tensor([1.0, 0.0, -2.0]))


@pytest.mark.asyncio
async def test_a_value_in_the_same_frame_goes_where_values_are() -> None:
    values, more = VALUES.clone(), torch.zeros(2)
    memory = {"w": writable_bytes(values), "v": writable_bytes(more)}
    differences = Differences(memory)
    sink = FrameSink(memory, FrameLimits(), differences.memory)
    data = torch.tensor([8.0, 9.0]).numpy().tobytes() + difference(2, 0, -4)
    sink.feed(frame([("v", "F32", (2,)), INTEGERS, SCALES], data))
    sink.finish()
    assert more.tolist() == [8.0, 9.0]
    assert sink.differing == ["w", "w.scales"]
    await differences.add(sink.differing)
    assert values.tolist() == [2.0, 2.0, 1.0]


@pytest.mark.asyncio
@pytest.mark.parametrize("received", [["w"], ["w.scales"], ["v", "v.scales"]])
async def test_half_a_difference_is_none(received: list[str]) -> None:
    values = VALUES.clone()
    with raises_code("malformed_frame"):
        await Differences({"w": writable_bytes(values)}).add(received)
    assert torch.equal(values, VALUES)


def test_who_has_no_memory_for_it_takes_none() -> None:
    values = VALUES.clone()
    with raises_code("malformed_frame", match="'w' is not what was asked for"):
        FrameSink({"w": writable_bytes(values)}, FrameLimits()).feed(frame([INTEGERS, SCALES], difference(1, 1, 1)))
