"""Frames, and quantisation to eight bits per element."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.encodings import PIECE, add_delta, dequantise, pieces, quantise
from ps_protocol.errors import GradpostError
from ps_protocol.frames import (
    ALIGNMENT,
    LENGTH_BYTES,
    Frame,
    FrameLimits,
    TensorEntry,
    encode_header,
    parse_frame,
    parse_length,
)
from ps_protocol.vocabulary import DTYPE_BYTES
from ps_protocol.wire_types import GROUP

from ...raising import raises_code
from .strategies import few, names

deserialize: Any = safetensors.deserialize  # the reference parser, without any array library

NUMPY_DTYPES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
    "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip

tensor_dicts = st.dictionaries(
    names,
    st.builds(
        lambda dtype, shape, seed: np.frombuffer(
            np.random.default_rng(seed).bytes(8 * math.prod(shape)), dtype=np.uint8
        )[: DTYPE_BYTES[dtype] * math.prod(shape)].view(NUMPY_DTYPES[dtype]).reshape(shape),
        st.sampled_from(sorted(NUMPY_DTYPES.keys() - {"BOOL"})),
        st.sampled_from([(), (1,), (5,), (2, 3), (0,), (3, 0, 2)]),
        st.integers(0, 1000),
    ),
    max_size=5,
)  # fmt: skip
metadata_dicts = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)


def dtype_name(array: np.ndarray[Any, Any]) -> str:
    return next(name for name, code in NUMPY_DTYPES.items() if array.dtype == np.dtype(code))


def write_frame(tensors: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str] | None = None) -> bytes:
    header = encode_header([(name, dtype_name(a), a.shape) for name, a in tensors.items()], metadata)
    return header + b"".join(a.tobytes() for a in tensors.values())


def read_tensors(body: bytes, frame: Frame) -> dict[str, np.ndarray[Any, Any]]:
    return {
        entry.name: np.frombuffer(
            body, NUMPY_DTYPES[entry.dtype], count=math.prod(entry.shape), offset=frame.data_begin + entry.begin
        ).reshape(entry.shape)
        for entry in frame.tensors
    }


def raw_frame(header: bytes | str | dict[str, Any], data: bytes = b"") -> bytes:
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return len(header).to_bytes(8, "little") + header + data


def assert_same(left: dict[str, np.ndarray[Any, Any]], right: dict[str, np.ndarray[Any, Any]]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert (array.dtype, array.shape, array.tobytes()) == (
            right[name].dtype, right[name].shape, right[name].tobytes()
        )  # fmt: skip


# ---------------------------------------------------------------- conformance with the reference implementation


@few
@given(tensor_dicts, metadata_dicts)
def test_the_reference_reads_our_frames(tensors: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]) -> None:
    body = write_frame(tensors, metadata)
    assert_same(safetensors.numpy.load(body), tensors)


@few
@given(tensor_dicts, metadata_dicts)
def test_we_read_frames_of_the_reference(tensors: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]) -> None:
    body = safetensors.numpy.save(tensors, metadata or None)  # of {} and {} it writes what it cannot read
    frame = parse_frame(body)
    assert frame.metadata == metadata
    assert_same(read_tensors(body, frame), tensors)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_has_the_size_of_the_reference(dtype: str) -> None:
    body = encode_header([("t", dtype, (3,))]) + bytes(3 * DTYPE_BYTES[dtype])
    [(name, info)] = deserialize(body)
    assert (name, info["dtype"], info["shape"]) == ("t", dtype, [3])
    assert parse_frame(body).tensors == (TensorEntry("t", dtype, (3,), 0, 3 * DTYPE_BYTES[dtype]),)


# ---------------------------------------------------------------- writing


@few
@given(tensor_dicts, metadata_dicts, st.integers(0, 4096))
def test_data_is_aligned_and_the_header_as_long_as_asked(
    tensors: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str], min_bytes: int
) -> None:
    entries = [(name, dtype_name(a), a.shape) for name, a in tensors.items()]
    header = encode_header(entries, metadata, min_bytes=min_bytes)
    assert len(header) % ALIGNMENT == 0
    assert len(header) >= min_bytes
    assert parse_length(header, FrameLimits()) == len(header)
    assert len(encode_header(entries, min_bytes=len(header))) == len(header)  # a kept buffer takes another header


@pytest.mark.parametrize("metadata", [None, {"a": "b"}])
@pytest.mark.parametrize("entry_names", [["a", "a"], ["__metadata__"], ["\ud800"]], ids=ascii)
def test_impossible_names_are_refused_before_they_are_written(
    entry_names: list[str], metadata: dict[str, str] | None
) -> None:
    with pytest.raises(ValueError):
        encode_header([(name, "F32", ()) for name in entry_names], metadata)


# ---------------------------------------------------------------- what is refused


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [2], "data_offsets": [0, 2], **changes}


def entry_text(offsets: str, shape: str = "2") -> str:
    return f'{{"t":{{"dtype":"U8","shape":[{shape}],"data_offsets":[{offsets}]}}}}'


REFUSED = {
    "no frame": (b"", "start with the header's length"),
    "a header longer than the body": ((100).to_bytes(8, "little") + b"{}", "ends within its header"),
    "a header shorter than itself": ((30).to_bytes(8, "little") + raw_frame({"t": entry()}, b"ab")[8:], "not JSON"),
    "NUL in a name": (raw_frame('{"a\0":1}'), "not JSON"),
    "a byte order mark": (raw_frame("\ufeff{}"), "must begin with {"),
    "no UTF-8": (raw_frame(b'{"\xff":1}'), "not JSON"),
    "half a surrogate pair": (raw_frame({"\ud800": entry()}, b"ab"), "not JSON"),
    "half a pair in metadata": (raw_frame({"__metadata__": {"a": "\udfff"}}), "not JSON"),
    "deep arrays": (raw_frame('{"t":' + "[" * 100_000), "not JSON"),
    "more digits than Python parses": (raw_frame(entry_text("0," + "9" * 5000)), "not JSON"),
    "a name twice": (raw_frame(entry_text("0,2")[:-1] + "," + entry_text("0,2")[1:], b"ab"), "twice"),
    "a member twice": (raw_frame('{"t":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"a"), "twice"),
    "metadata of numbers": (raw_frame({"__metadata__": {"a": 1}}), "__metadata__ must map"),
    "metadata of numbers first": (raw_frame('{"__metadata__":{"a":1}}'), "__metadata__ must map"),
    "half a pair in metadata that come first": (raw_frame('{"__metadata__":{"a":"\\udfff"}}'), "not JSON"),
    "metadata twice": (raw_frame('{"__metadata__":{},"__metadata__":{}}'), "twice"),
    "a member of the metadata twice": (raw_frame('{"__metadata__":{"a":"","a":""}}'), "twice"),
    "a comma behind metadata": (raw_frame('{"__metadata__":{},}'), "not JSON"),
    "a brace behind metadata": (raw_frame('{"__metadata__":{}}}'), "not JSON"),
    "an entry that is a number": (raw_frame({"t": 1}), "must have dtype, shape and data_offsets"),
    "a missing member": (raw_frame({"t": {"dtype": "U8", "shape": []}}), "must have dtype, shape and data_offsets"),
    "an unknown dtype": (raw_frame({"t": entry(dtype="F31")}, b"ab"), "unknown dtype"),
    "a shape that is a number": (raw_frame({"t": entry(shape=2)}, b"ab"), "shape that is not a list"),
    "a negative size": (raw_frame({"t": entry(shape=[-2])}, b"ab"), "shape that is not a list"),
    "a size beyond 63 bits": (raw_frame({"t": entry(shape=[0, 1 << 63], data_offsets=[0, 0])}), "shape that is not"),
    "too many dimensions": (raw_frame({"t": entry(shape=[1] * 64 + [2])}, b"ab"), "shape that is not a list"),
    "one offset": (raw_frame({"t": entry(data_offsets=[2])}, b"ab"), "not two sizes"),
    "negative offsets": (raw_frame(entry_text("-2,0"), b""), "not two sizes"),
    "offsets beyond 63 bits": (raw_frame({"t": entry(data_offsets=[10**400, 10**400 + 2])}, b"ab"), "not two sizes"),
    "offsets the wrong way": (raw_frame({"t": entry(data_offsets=[2, 0])}, b"ab"), "do not fit dtype and shape"),
    "a product beyond 63 bits": (raw_frame({"t": entry(shape=[1 << 40] * 3)}, b"ab"), "do not fit dtype and shape"),
    "a hole at the start": (raw_frame({"t": entry(data_offsets=[1, 3])}, b"abc"), "hole or overlaps"),
    "an overlap": (raw_frame({"t": entry(), "u": entry(data_offsets=[1, 3])}, b"abc"), "hole or overlaps"),
    "data too short": (raw_frame({"t": entry()}, b"a"), "must be as long as the header states"),
    "data too long": (raw_frame({"t": entry()}, b"abc"), "must be as long as the header states"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED)
def test_a_malformed_frame_is_refused(body: bytes, message: str) -> None:
    with raises_code("malformed_frame", match=message) as caught:
        parse_frame(body)
    assert len(str(caught.value)) < 1000
    json.dumps(caught.value.to_problem(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "body",
    [
        raw_frame("{}"),
        raw_frame("{} \n\t\r "),
        raw_frame({"__metadata__": {}}),
        raw_frame({"__metadata__": {"\U0001f40d": "\U0001f40d"}}),  # json.dumps writes it as a surrogate pair
        raw_frame({"t": entry(shape=[], data_offsets=[0, 1])}, b"a"),
        raw_frame({"b": entry(data_offsets=[2, 4]), "a": entry()}, b"abcd"),
        raw_frame({"a": entry(), "e": entry(shape=[0, 1 << 40], data_offsets=[2, 2])}, b"ab"),
        raw_frame({"b": entry(data_offsets=[2, 4]), "e": entry(shape=[0], data_offsets=[2, 2]), "a": entry()}, b"abcd"),
        raw_frame({"t": entry(shape=[1] * 63 + [2])}, b"ab"),
    ],
)  # fmt: skip
def test_an_unusual_frame_is_read(body: bytes) -> None:
    frame = parse_frame(body)
    assert [t.begin for t in frame.tensors] == sorted(t.begin for t in frame.tensors)
    assert sorted(t.name for t in frame.tensors) == sorted(name for name, _ in deserialize(body))


def test_frames_with_the_same_tensors_have_metadata_of_their_own() -> None:
    tensors = [("a", "F32", (2,)), ("b", "BF16", (3,))]
    for metadata in (None, {"round": "1"}, {"round": "2", "norm": "{}"}, {}):
        body = encode_header(tensors, metadata) + bytes(14)
        assert json.loads(body[8 : parse_frame(body).data_begin]) == {
            **({"__metadata__": metadata} if metadata else {}),
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]},
        }
        frame = parse_frame(body)
        assert frame.metadata == (metadata or {})
        assert [(entry.name, entry.begin, entry.end) for entry in frame.tensors] == [("a", 0, 8), ("b", 8, 14)]
        with raises_code("body_too_large"):
            parse_frame(body, FrameLimits(max_tensors=1))


def test_limits() -> None:
    body = raw_frame({"a": entry(), "b": entry(data_offsets=[2, 4])}, b"abcd")
    header_bytes = int.from_bytes(body[:LENGTH_BYTES], "little")
    just = FrameLimits(max_body_bytes=len(body), max_header_bytes=header_bytes, max_tensors=2)
    assert len(parse_frame(body, just).tensors) == 2
    for limits, message in [
        (FrameLimits(max_body_bytes=len(body) - 1), "the frame is too large"),
        (FrameLimits(max_header_bytes=header_bytes - 1), "this header is too large"),
        (FrameLimits(max_tensors=1), "too many tensors"),
    ]:
        with raises_code("body_too_large", match=message):
            parse_frame(body, limits)


def test_the_number_of_tensors_cannot_be_hidden() -> None:
    with raises_code("body_too_large", match="too many tensors"):
        parse_frame(
            raw_frame('{"a":{"data_o\\u0066fsets":1},"b":{"data_o\\u0066fsets":1}}'), FrameLimits(max_tensors=1)
        )


@pytest.mark.parametrize("length", [1 << 20, 1 << 31, 1 << 62, (1 << 64) - 1])
def test_a_wrong_length_allocates_nothing(length: int) -> None:
    with pytest.raises(GradpostError, match=r"this header is too large|ends within its header"):
        parse_frame(length.to_bytes(8, "little") + b"{}")


def test_a_long_shape_costs_no_time() -> None:
    """A product of half a million sizes would take minutes."""
    with raises_code("malformed_frame", match="shape"):
        parse_frame(raw_frame(entry_text("0,0", ",".join("9" * 500_000))))


# ---------------------------------------------------------------- fuzzing


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.sampled_from([0, 0, 0, 0, 1, -1])), max_size=3))
def test_random_offsets_are_refused_or_read_as_by_the_reference(tensors: list[tuple[int, int, int]]) -> None:
    header = {
        f"t{i}": {"dtype": "U8", "shape": [size], "data_offsets": [begin, begin + size + error]}
        for i, (size, begin, error) in enumerate(tensors)
    }
    num_bytes = max((begin + size + error for size, begin, error in tensors), default=0)
    parse_or_refuse(raw_frame(header, bytes(range(num_bytes))))


mutations = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.sampled_from(["replace", "insert", "delete"]),
        st.binary(min_size=1, max_size=1)
        | st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"0", b"9", b".", b"\\u00", b"e1", b" "]),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


HONEST_FRAMES = [
    write_frame({"w": np.arange(5, dtype="f4")}),
    write_frame({'"ä\n': np.arange(6, dtype="i8").reshape(2, 3), "e": np.zeros((0, 2), "f2"), "s": np.ones((), "u1")}),
    write_frame({"w": np.arange(5, dtype="f4")}, {"num_blocks": "1", "\0": "\U0001f40d"}),
]


@settings(max_examples=300)
@given(st.sampled_from(HONEST_FRAMES), mutations)
def test_mutated_frames_are_refused_or_read_as_by_the_reference(
    frame: bytes, changes: list[tuple[int, str, bytes]]
) -> None:
    body = bytearray(frame)
    for position, kind, value in changes:
        i = position % (len(body) + 1)
        body[i : i + (kind != "insert") * len(value)] = b"" if kind == "delete" else value
    parse_or_refuse(bytes(body))


def parse_or_refuse(body: bytes) -> None:
    """Parse; what we accept, the reference accepts as well, and sees the same tensors in it."""
    try:
        frame = parse_frame(body)
    except GradpostError as error:
        json.dumps(error.to_problem(), ensure_ascii=False).encode()
        return
    if b"-0" in body[: frame.data_begin]:  # zero to us, a fraction to the reference
        return
    theirs = {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in deserialize(body)}
    data = body[frame.data_begin :]
    assert theirs == {t.name: (t.dtype, t.shape, data[t.begin : t.end]) for t in frame.tensors}


# ---------------------------------------------------------------------- quantisation


SIZES = st.sampled_from([1, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 7])


def quantised(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the integers, the scales and the rounding errors."""
    lacking = values.clone()
    integers, scales = torch.empty(len(values), dtype=torch.int8), torch.empty(-(-len(values) // GROUP))
    quantise(lacking, integers, scales)
    return integers, scales, lacking


@settings(deadline=None)
@given(size=SIZES, seed=st.integers(0, 99), exponent=st.integers(-148, 120))
def test_quantisation_is_off_by_half_a_step_at_most(size: int, seed: int, exponent: int) -> None:
    """Scales go down to subnormal numbers; smaller groups become 0."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    integers, scales, lacking = quantised(values)
    steps = scales.repeat_interleave(GROUP)[:size]
    off = (dequantise(integers, scales) - values).abs()
    assert bool(((off <= steps * 0.5001) | ((steps == 0) & (values.abs() < 4e-37))).all())
    assert torch.equal(lacking, values - dequantise(integers, scales))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_group_that_is_not_finite_has_a_scale_that_is_not_finite(bad: float) -> None:
    values = torch.ones(3 * GROUP)
    values[GROUP + 3] = bad
    _, scales, _ = quantised(values)
    assert scales.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("begin", [0, 1, 3, 63])
def test_a_difference_is_added_with_the_same_bits_wherever_it_lies(begin: int) -> None:
    """A product is rounded, then the sum is: no fused operation, in the last elements of a vector or anywhere."""
    size = PIECE + GROUP + 5
    generator = torch.Generator().manual_seed(begin)
    values = torch.randn(size, generator=generator)
    integers, scales, _ = quantised(torch.randn(size, generator=generator))
    somewhere = torch.zeros(size + 64)[begin : begin + size].copy_(values)
    add_delta(somewhere, integers, scales)
    product = integers.double() * scales.double().repeat_interleave(GROUP)[:size]
    assert torch.equal(somewhere, (values.double() + product.float().double()).float())


@given(st.integers(0, 3 * PIECE))
def test_pieces_are_all_elements_and_their_scales(num_elements: int) -> None:
    found = list(pieces(num_elements))
    assert sum(elements.stop - elements.start for elements, _ in found) == num_elements
    assert all(groups.start * GROUP == elements.start for elements, groups in found)
    assert not found or found[-1][1].stop == -(-num_elements // GROUP)
