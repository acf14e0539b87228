"""One tensor as bytes for people and programs: safetensors, NumPy's `.npy`, or JSON."""

from __future__ import annotations

import io
import json
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ps_protocol.errors import InvalidMessage, MalformedFrame, WrongDtype, WrongShape
from ps_protocol.frames import CONTENT_TYPE, FrameLimits, encode_header, parse_frame
from ps_protocol.vocabulary import DTYPE_BYTES

BinaryFormat: TypeAlias = Literal["safetensors", "npy"]
Format: TypeAlias = Literal["safetensors", "npy", "json"]

CONTENT_TYPES: Mapping[Format, str] = {
    "safetensors": CONTENT_TYPE,
    "npy": "application/octet-stream",
    "json": "application/json",
}
MAX_JSON_ELEMENTS = 100_000
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<f4"}
_NUMPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is known of one parameter, or of a range of it, which is flat, before its values are read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    facts: Mapping[str, str]  # run, attempt, round

    def begin(self, form: BinaryFormat) -> bytes:
        """What stands before the values."""
        if form == "safetensors":
            return encode_header([(self.name, self.dtype, self.shape)], self.facts)
        file = io.BytesIO()
        described = {"descr": _NUMPY[self.dtype], "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(file, described)
        return file.getvalue()

    def num_bytes(self, form: BinaryFormat) -> int:
        """Of the values in that format."""
        width = np.dtype(_NUMPY[self.dtype]).itemsize if form == "npy" else DTYPE_BYTES[self.dtype]
        return math.prod(self.shape) * width

    async def convert(self, parts: AsyncIterator[bytes], form: BinaryFormat) -> AsyncIterator[bytes]:
        """Values as they are on the wire, as that format has them."""
        rest = b""
        async for part in parts:
            if form == "npy" and self.dtype == "BF16":
                part, rest = rest + part, b""
                if len(part) % 2:
                    part, rest = part[:-1], part[-1:]
                part = _widen(part).tobytes()
            yield part

    def encode_json(self, data: bytes) -> bytes:
        """All of it; JSON names NaN and the infinities."""
        values = _widen(data) if self.dtype == "BF16" else np.frombuffer(data, _NUMPY[self.dtype])
        listed = values.reshape(self.shape).tolist()
        document = {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            **{key: int(value) if value.isdecimal() and key != "run" else value for key, value in self.facts.items()},
            "values": listed if np.isfinite(values).all() else _name_nonfinite(listed),
        }
        return json.dumps(document, allow_nan=False).encode()


def check_json(num_elements: int) -> None:
    """Raises InvalidMessage if it is too much for JSON."""
    if num_elements > MAX_JSON_ELEMENTS:
        raise InvalidMessage(
            "that is too much for JSON: ask for a range with begin and end, or for another format",
            expected=f"<= {MAX_JSON_ELEMENTS} elements", actual=num_elements,
        )  # fmt: skip


def _widen(data: bytes) -> np.ndarray[Any, Any]:
    """Bfloat16, which NumPy does not have, as float32."""
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def _name_nonfinite(value: Any) -> Any:
    """JSON has no word for these; `float()` of Python and `parseFloat` of JavaScript know ours."""
    if isinstance(value, list):
        return [_name_nonfinite(one) for one in value]
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def decode_tensor(body: bytes, shape: tuple[int, ...], dtype: str) -> bytes:
    """The values in a safetensors file with one tensor, or in a `.npy` file, of this shape and dtype, row by row.

    NumPy has no bfloat16: of such a parameter an array is float32, and rounded. Raises WrongShape, WrongDtype,
    MalformedFrame.
    """
    if body.startswith(b"\x93NUMPY"):
        return _decode_numpy(body, shape, dtype)
    frame = parse_frame(body, FrameLimits(max_body_bytes=len(body)))
    if len(frame.tensors) != 1:
        raise MalformedFrame("the file must have one tensor", expected=1, actual=len(frame.tensors))
    [entry] = frame.tensors
    _check_alike(entry.shape, shape, entry.dtype, dtype)
    return body[frame.data_begin :]


def _decode_numpy(body: bytes, shape: tuple[int, ...], dtype: str) -> bytes:
    file = io.BytesIO(body)
    try:
        found_shape, is_fortran, found_dtype = _NUMPY_HEADERS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # NumPy hands the header to Python's parser, which raises whatever it likes
        raise MalformedFrame(f"that is no .npy file: {error!r}"[:300]) from None
    names = {np.dtype("<f4"): "F32", np.dtype("<f2"): "F16"}
    found = names.get(found_dtype, str(found_dtype))
    is_rounded = (dtype, found) == ("BF16", "F32")
    _check_alike(found_shape, shape, dtype if is_rounded else found, dtype)
    data = body[file.tell() :]  # not read by NumPy, which would believe the header and make room first
    if len(data) != (expected := math.prod(shape) * found_dtype.itemsize):
        raise MalformedFrame("the array does not have its length", expected=expected, actual=len(data))
    array = np.frombuffer(data, found_dtype).reshape(shape, order="F" if is_fortran else "C")
    if not is_rounded:
        return array.tobytes()
    bits = np.ascontiguousarray(array).view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
    return np.where(np.isnan(array), 0x7FC0, rounded).astype("<u2").tobytes()


def _check_alike(found: tuple[int, ...], shape: tuple[int, ...], found_dtype: str, dtype: str) -> None:
    if tuple(found) != shape:
        raise WrongShape("the values do not fit the parameter", expected=list(shape), actual=list(found))
    if found_dtype != dtype:
        raise WrongDtype("the values do not fit the parameter", expected=dtype, actual=found_dtype)
