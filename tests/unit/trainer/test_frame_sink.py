from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ps_protocol.errors import GradpostError
from ps_protocol.frames import DTYPE_BYTES, FrameLimits, encode_header
from ps_protocol.routes import SINCE_KEY
from trainer_client.transport.frame_sink import FrameSink

from ...raising import raises_code

LIMITS = FrameLimits()
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


def make_memory(tensors=TENSORS) -> dict[str, bytearray]:
    return {name: bytearray(b"\xff" * num_bytes(dtype, shape)) for name, dtype, shape in tensors}


def feed(memory: dict[str, bytearray], chunks: list[bytes]) -> dict[str, str]:
    sink = FrameSink({name: memoryview(data) for name, data in memory.items()}, LIMITS)
    for chunk in chunks:
        sink.feed(chunk)
    return dict(sink.finish())


def cut(frame: bytes, places: list[int]) -> list[bytes]:
    places = sorted({0, len(frame), *(place % (len(frame) + 1) for place in places)})
    return [frame[a:b] for a, b in pairwise(places)]


def landed(tensors=TENSORS) -> dict[str, bytes]:
    """What must arrive where."""
    data = make_frame(tensors)[len(encode_header(tensors, METADATA)) :]
    result, offset = {}, 0
    for name, dtype, shape in tensors:
        result[name] = data[offset : offset + num_bytes(dtype, shape)]
        offset += num_bytes(dtype, shape)
    return result


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
def test_any_chunking_equals_the_whole(tensors, places):
    memory = make_memory(tensors)
    assert feed(memory, cut(make_frame(tensors), places)) == METADATA
    assert {name: bytes(data) for name, data in memory.items()} == landed(tensors)


def test_chunks_may_be_any_buffer_and_empty():
    memory = make_memory()
    frame = make_frame()
    feed(memory, [b"", memoryview(frame[:100]), b"", bytearray(frame[100:]), b""])
    assert {name: bytes(data) for name, data in memory.items()} == landed()


@given(length=st.integers(0, len(make_frame()) - 1), places=st.lists(st.integers(0, 1000), max_size=4))
def test_a_frame_that_breaks_off_is_refused_and_the_whole_one_repairs_it(length, places):
    memory = make_memory()
    with raises_code("malformed_frame", match="ended early"):
        feed(memory, cut(make_frame()[:length], places))
    feed(memory, [make_frame()])
    assert {name: bytes(data) for name, data in memory.items()} == landed()


@pytest.mark.parametrize("places", [[], [len(make_frame())]])
def test_a_frame_that_goes_on_is_refused(places):
    with raises_code("malformed_frame", match="longer than its header says"):
        feed(make_memory(), cut(make_frame() + b"x", places))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([*TENSORS, ("c", "F32", (1,))], "lacks 'c'"),
        ([*TENSORS, ("c", "F32", (0,))], "lacks 'c'"),
        (TENSORS[1:], "'a' is not what was asked for"),
        ([("a", "F32", (4,)), *TENSORS[1:]], "'a' is not what was asked for"),
        ([*TENSORS[:-1], ("last", "F32", (1,))], "'last' is not what was asked for"),
    ],
)
def test_another_frame_than_was_asked_for_is_refused_before_anything_is_written(wanted, message):
    memory = make_memory(wanted)
    before = {name: bytes(data) for name, data in memory.items()}
    with raises_code("malformed_frame", match=message):
        feed(memory, [make_frame()])
    if "lacks" not in message:
        assert {name: bytes(data) for name, data in memory.items()} == before


def test_no_reply_at_all_is_refused():
    with raises_code("malformed_frame"):
        feed({}, [])


def test_a_header_bomb_is_refused_at_its_length():
    sink = FrameSink({}, FrameLimits(max_header_bytes=1000))
    with raises_code("body_too_large"):
        sink.feed((1001).to_bytes(8, "little"))


@given(garbage=st.binary(max_size=60), places=st.lists(st.integers(0, 60), max_size=3))
def test_garbage_is_refused_as_a_protocol_error(garbage, places):
    with pytest.raises(GradpostError):
        feed(make_memory(), cut(garbage, places))


@given(st.data())
def test_a_tensor_has_landed_once_its_last_byte_has(data: st.DataObject) -> None:
    frame, memory = make_frame(), make_memory()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(frame)), max_size=8)))
    told: list[str] = []
    sink = FrameSink({name: memoryview(its) for name, its in memory.items()}, LIMITS, on_landed=told.append)
    begin = len(frame) - sum(map(len, memory.values()))
    for cut, end in pairwise([0, *cuts, len(frame)]):
        sink.feed(frame[cut:end])
        offset, expected = begin, []
        for name, its in memory.items():
            offset += len(its)
            if len(its) and end >= offset:
                expected.append(name)
        assert told == expected


def test_what_has_not_changed_has_landed_already() -> None:
    memory = make_memory()
    told: list[str] = []
    sink = FrameSink({name: memoryview(its) for name, its in memory.items()}, LIMITS, on_landed=told.append)
    some = [tensor for tensor in TENSORS if tensor[0] == "b"]
    header = encode_header(some, {SINCE_KEY: "6"})
    sink.feed(header)
    assert sorted(told) == ["a", "empty", "last", "scalar"]
    sink.feed(bytes(10))
    assert told[-1] == "b"
