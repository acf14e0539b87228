"""Replies of pservers on their way into parameters: frames, deltas, and waits for single parameters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ps_protocol.encodings import TORCH_DTYPES
from ps_protocol.errors import GradpostError
from ps_protocol.frames import DTYPE_BYTES, TRUSTED_LIMITS, encode_header
from ps_protocol.plan import make_plan
from ps_protocol.requests import SINCE_KEY
from ps_protocol.vocabulary import ParameterSpec
from trainer_client.transport.destinations import Deltas, PullProgress, RowsDestination
from trainer_client.transport.frame_sink import FrameSink
from trainer_client.transport.tensors import writable_bytes

from ...raising import raises_code
from .driving import drive

METADATA = {"round": "7"}
TENSORS = [
    ("a", "F32", (3,)),
    ("empty", "F32", (0,)),
    ("b", "BF16", (5,)),
    ("scalar", "I64", ()),
    ("last", "F32", (0,)),
]


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = DTYPE_BYTES[dtype]
    for length in shape:
        size *= length
    return size


def make_frame(tensors=TENSORS, metadata=METADATA) -> bytes:
    total = sum(num_bytes(dtype, shape) for _, dtype, shape in tensors)
    return encode_header(tensors, metadata) + bytes(i % 251 for i in range(total))


class Memory(dict[str, bytearray]):
    """The memory that a frame is received into."""

    def __init__(self, tensors=TENSORS) -> None:
        super().__init__((name, bytearray(b"\xff" * num_bytes(dtype, shape))) for name, dtype, shape in tensors)

    def sink(self, **options) -> FrameSink:
        return FrameSink({name: memoryview(data) for name, data in self.items()}, **options)

    def receive(self, chunks: list[bytes]) -> dict[str, str]:
        sink = self.sink()
        for chunk in chunks:
            sink.feed(chunk)
        return dict(sink.finish())

    @property
    def data(self) -> bytes:
        return b"".join(self.values())


def cut(frame: bytes, places: list[int]) -> list[bytes]:
    places = sorted({0, len(frame), *(place % (len(frame) + 1) for place in places)})
    return [frame[a:b] for a, b in pairwise(places)]


tensor_lists = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5).filter(lambda n: n != "__metadata__"),
        st.sampled_from(["F32", "BF16", "U8", "I64"]),
        st.lists(st.integers(0, 4), max_size=2).map(tuple),
    ),
    max_size=6,
    unique_by=lambda t: t[0],
)


@given(tensors=tensor_lists, places=st.lists(st.integers(0, 10_000), max_size=12))
@example(tensors=TENSORS, places=list(range(10_000)))  # byte by byte
@example(tensors=TENSORS, places=[3])  # in the length
@example(tensors=TENSORS, places=[8])
@example(tensors=TENSORS, places=[len(encode_header(TENSORS, METADATA))])
@example(tensors=[], places=[])
def test_a_frame_may_arrive_in_any_portions(tensors, places):
    memory, frame = Memory(tensors), make_frame(tensors)
    chunks = cut(frame, places)
    assert memory.receive([b"", memoryview(chunks[0]), b"", *map(bytearray, chunks[1:])]) == METADATA
    assert memory.data == frame[len(encode_header(tensors, METADATA)) :]


@given(length=st.integers(0, len(make_frame()) - 1), places=st.lists(st.integers(0, 1000), max_size=4))
def test_a_frame_that_ends_early_is_refused_and_a_whole_one_repairs_it(length, places):
    memory = Memory()
    with raises_code("malformed_frame", match="ended early"):
        memory.receive(cut(make_frame()[:length], places))
    memory.receive([make_frame()])
    assert memory.data == make_frame()[-len(memory.data) :]


@pytest.mark.parametrize("places", [[], [len(make_frame())]])
def test_a_frame_that_is_too_long_is_refused(places):
    with raises_code("malformed_frame", match="longer than its header says"):
        Memory().receive(cut(make_frame() + b"x", places))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([*TENSORS, ("c", "F32", (1,))], "lacks 'c'"),
        ([*TENSORS, ("c", "F32", (0,))], "lacks 'c'"),
        (TENSORS[1:], "'a' was not requested in this form"),
        ([("a", "F32", (4,)), *TENSORS[1:]], "'a' was not requested in this form"),
        ([*TENSORS[:-1], ("last", "F32", (1,))], "'last' was not requested in this form"),
    ],
)
def test_another_frame_than_was_asked_for_is_refused_before_anything_is_written(wanted, message):
    memory = Memory(wanted)
    before = memory.data
    with raises_code("malformed_frame", match=message):
        memory.receive([make_frame()])
    if "lacks" not in message:
        assert memory.data == before


def test_a_header_longer_than_the_limit_is_refused_at_its_length():
    with raises_code("body_too_large"):
        FrameSink({}).feed((TRUSTED_LIMITS.max_header_bytes + 1).to_bytes(8, "little"))


@given(garbage=st.binary(max_size=60), places=st.lists(st.integers(0, 60), max_size=3))
@example(garbage=b"", places=[])
def test_garbage_is_refused_as_a_protocol_error(garbage, places):
    with pytest.raises(GradpostError):
        Memory().receive(cut(garbage, places))


@given(st.data())
def test_a_tensor_is_reported_once_its_last_byte_is_written(data: st.DataObject) -> None:
    frame, memory = make_frame(), Memory()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(frame)), max_size=8)))
    reported: list[str] = []
    sink = memory.sink(on_block=reported.append)
    begin = len(frame) - len(memory.data)
    for cut, end in pairwise([0, *cuts, len(frame)]):
        sink.feed(frame[cut:end])
        offset, expected = begin, []
        for name, its in memory.items():
            offset += len(its)
            if len(its) and end >= offset:
                expected.append(name)
        assert reported == expected


def test_tensors_that_did_not_change_are_reported_at_once() -> None:
    reported: list[str] = []
    sink = Memory().sink(on_block=reported.append)
    sink.feed(encode_header([tensor for tensor in TENSORS if tensor[0] == "b"], {SINCE_KEY: "6"}))
    assert sorted(reported) == ["a", "empty", "last", "scalar"]
    sink.feed(bytes(10))
    assert reported[-1] == "b"


# ---------------------------------------------------------------- deltas

INTEGERS, SCALES = ("w", "I8", (3,)), ("w.scales", "F32", (1,))
DELTA = bytes([2, 0, 256 - 4]) + torch.tensor([0.5]).numpy().tobytes()  # 1, 0, -2


def test_a_delta_is_added_to_the_values_once_it_is_whole() -> None:
    values, more = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(2)
    memory = {"w": writable_bytes(values), "v": writable_bytes(more)}
    deltas = Deltas(memory)
    for number in (1, 2):  # the memory of deltas is kept
        sink = FrameSink(memory, deltas=deltas.memory)
        header = encode_header([("v", "F32", (2,)), INTEGERS, SCALES], {SINCE_KEY: "4"})
        for byte in header + torch.tensor([8.0, 9.0]).numpy().tobytes() + DELTA:
            sink.feed(bytes([byte]))
        assert sink.finish() == {SINCE_KEY: "4"}
        assert sink.delta_names == ["w", "w.scales"]
        drive(deltas.add(sink.delta_names))
        assert values.tolist() == [1.0 + number, 2.0, 3.0 - 2.0 * number]
        assert more.tolist() == [8.0, 9.0]


@pytest.mark.parametrize("received", [["w"], ["w.scales"], ["v", "v.scales"]])
def test_half_of_a_delta_is_refused(received: list[str]) -> None:
    values = torch.ones(3)
    with raises_code("malformed_frame"):
        drive(Deltas({"w": writable_bytes(values)}).add(received))
    assert torch.equal(values, torch.ones(3))


def test_a_delta_that_was_not_asked_for_is_refused() -> None:
    sink = FrameSink({"w": writable_bytes(torch.ones(3))})
    with raises_code("malformed_frame", match="'w' was not requested in this form"):
        sink.feed(encode_header([INTEGERS, SCALES], {SINCE_KEY: "4"}) + DELTA)


# ---------------------------------------------------------------- waits for parameters

PLAN = make_plan(
    [ParameterSpec("w", (30,)), ParameterSpec("none", (0,)), ParameterSpec("b", (7,))], 3, min_block_size=10
)


@given(st.permutations([block.name for block in PLAN.blocks] * 2), st.integers(0, 2 * len(PLAN.blocks)))
def test_a_parameter_has_arrived_when_all_its_blocks_have(order: list[str], num_landed: int) -> None:
    arrivals = PullProgress(PLAN.blocks_of)
    for block in order[:num_landed]:
        arrivals.mark_complete(block)
    arrivals.end()
    for name, blocks in PLAN.blocks_of.items():
        assert arrivals.wait(name) == ({block.name for block in blocks} <= set(order[:num_landed]))


@pytest.mark.parametrize("arrives", [True, False])
def test_a_wait_ends_with_the_last_block_or_with_the_reply(arrives: bool) -> None:
    arrivals = PullProgress(PLAN.blocks_of)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(arrivals.wait, "b")
        if arrives:
            arrivals.mark_complete("b.block0")
        else:
            arrivals.end()
        assert waiting.result(timeout=10) == arrives


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_pulled_rows_are_written_where_autograd_sees_them(dtype: str, is_contiguous: bool) -> None:
    plan = make_plan([ParameterSpec("e", (6, 3), dtype, is_sparse=True)], 2, min_block_size=1)
    block = plan.blocks[1]  # the rows from 3 on
    destination = RowsDestination(block, plan)
    values = torch.arange(6.0).view(2, 3).to(TORCH_DTYPES[dtype])
    rows = [("e.block1.rows", "I32", (2,)), ("e.block1", dtype, (6,))]
    sink = FrameSink({}, rows={block.name: destination})
    for part in (
        encode_header(rows, METADATA),
        *map(writable_bytes, (torch.tensor([0, 2], dtype=torch.int32), values)),
    ):
        sink.feed(memoryview(part))
    sink.finish()
    parameter = torch.nn.Parameter(torch.full((6, 3), -1.0, dtype=TORCH_DTYPES[dtype]))
    if not is_contiguous:
        parameter = torch.nn.Parameter(parameter.detach().t().contiguous().t())
    expected, version = parameter.detach().clone(), parameter._version
    expected[[3, 5]] = values
    destination.write_to(parameter)
    assert torch.equal(parameter, expected)
    assert parameter._version > version
