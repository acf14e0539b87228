"""The round that docs/protocol.md shows byte by byte is what a pserver takes and answers."""

from __future__ import annotations

import json
import struct

import pytest
import safetensors.torch
import torch

from ps_protocol.fence import Fence
from ps_protocol.frames import LENGTH_BYTES, encode_header, parse_frame
from ps_protocol.plan import SlicePlan

from .example import ACKNOWLEDGED, GET, PLAN, PUSHED, REPLIED, SEND, TEXT, run_example
from .markdown import codes, tables

FRAMES = pytest.mark.parametrize("frame", [PUSHED, REPLIED], ids=["pushed", "reply"])
ANNOTATED = list(zip((PUSHED, REPLIED), tables(TEXT), strict=True))


@pytest.mark.parametrize(("frame", "rows"), ANNOTATED, ids=["pushed", "reply"])
def test_every_annotation(frame: bytes, rows: list[dict[str, str]]) -> None:
    parsed = parse_frame(frame)
    spans = [tuple(int(text, 16) for text in codes(row["bytes"])) for row in rows]
    assert [begin for begin, _ in spans] == [0, *(end + 1 for _, end in spans[:-1])]
    assert spans[-1][1] == len(frame) - 1
    length, text, padding, *tensors = [frame[begin : end + 1] for begin, end in spans]
    values = [row["value"] for row in rows]
    assert (len(length), int.from_bytes(length, "little")) == (LENGTH_BYTES, int(values[0]))
    assert values[1] == f"{len(text)} bytes"
    json.loads(text)
    assert text == text.strip()
    assert padding == b" " * int(values[2].split()[0])
    assert f"begins at {parsed.data_begin}, a multiple of 64" in rows[2]["what"]
    for row, data, entry in zip(rows[3:], tensors, parsed.tensors, strict=True):
        assert codes(row["what"]) == [entry.name]
        assert row["what"].endswith(f", {entry.dtype}")
        assert len(data) == entry.end - entry.begin
        assert [float(value) for value in row["value"].split(", ")] == unpack(data, entry.dtype)


def unpack(data: bytes, dtype: str) -> list[float]:
    if dtype == "F32":
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    assert dtype == "BF16"  # the upper half of a float32
    return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(0, len(data), 2)]


@FRAMES
def test_safetensors_reads_them(frame: bytes) -> None:
    ours = parse_frame(frame)
    theirs = safetensors.torch.load(frame)
    assert {entry.name: list(entry.shape) for entry in ours.tensors} == {n: list(t.shape) for n, t in theirs.items()}
    for entry in ours.tensors:
        data = frame[ours.data_begin + entry.begin : ours.data_begin + entry.end]
        assert theirs[entry.name].double().tolist() == unpack(data, entry.dtype)
    assert theirs["s.block0"].dtype == torch.bfloat16


@FRAMES
def test_our_writer_writes_them(frame: bytes) -> None:
    parsed = parse_frame(frame)
    header = encode_header([(e.name, e.dtype, e.shape) for e in parsed.tensors], parsed.metadata)
    assert frame == header + frame[parsed.data_begin :]


def test_the_headers() -> None:
    plan = SlicePlan.from_json(PLAN)
    for request, body in ((SEND, PUSHED), (GET, b"")):
        fence = Fence.from_headers(request.headers)
        assert (fence.plan, fence.round) == (plan.digest, 1)
        assert request.headers["content-length"] == str(len(body))


@pytest.mark.asyncio
async def test_a_pserver_answers_so() -> None:
    """The requests of the document, sent to a real pserver, give its answers bit for bit."""
    async with run_example() as http:
        acknowledged = await SEND.send(http, PUSHED)
        replied = await GET.send(http)
    assert (acknowledged.status_code, acknowledged.json()) == (200, ACKNOWLEDGED)
    assert (replied.status_code, replied.content) == (200, REPLIED)
