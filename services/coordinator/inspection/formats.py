"""One tensor as bytes for people and programs: safetensors, NumPy's `.npy`, or JSON."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ps_protocol.errors import InvalidMessage, MalformedFrame, WrongDtype, WrongShape
from ps_protocol.frames import CONTENT_TYPE, FrameLimits, encode_header, parse_frame
from ps_protocol.vocabulary import Round

Format: TypeAlias = Literal["safetensors", "npy", "json"]

CONTENT_TYPES: Mapping[Format, str] = {
    "safetensors": CONTENT_TYPE,
    "npy": "application/octet-stream",
    "json": "application/json",
}
MAX_JSON_ELEMENTS = 100_000
_NUMPY = {"F32": "<f4", "F16": "<f2"}
_NUMPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Values of one parameter as they are on the wire, or a range of them, which is flat."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    facts: Mapping[str, str]  # run, attempt, round

    @property
    def version(self) -> Round:
        """The round; in asynchronous modes contributions, those of the pserver that has the fewest."""
        return int(self.facts["round"])

    def encode(self, form: Format) -> bytes:
        """As that format has it. Raises InvalidMessage if it is too much for JSON."""
        if form == "safetensors":
            return encode_header([(self.name, self.dtype, self.shape)], self.facts) + self.data
        if form == "npy":
            file = io.BytesIO()
            np.lib.format.write_array(file, self.to_numpy(), allow_pickle=False)
            return file.getvalue()
        return self._encode_json()

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """An array of the shape; bfloat16, which NumPy does not have, becomes float32."""
        if self.dtype == "BF16":
            bits = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return bits.view("<f4").reshape(self.shape)
        return np.frombuffer(self.data, _NUMPY[self.dtype]).reshape(self.shape)

    def _encode_json(self) -> bytes:
        if math.prod(self.shape) > MAX_JSON_ELEMENTS:
            raise InvalidMessage(
                "that is too much for JSON: ask for a range with begin and end, or for another format",
                expected=f"<= {MAX_JSON_ELEMENTS} elements", actual=math.prod(self.shape),
            )  # fmt: skip
        values = self.to_numpy()
        document = {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            **{key: int(value) if value.isdecimal() and key != "run" else value for key, value in self.facts.items()},
            "values": values.tolist() if np.isfinite(values).all() else _name_nonfinite(values.tolist()),
        }
        return json.dumps(document, allow_nan=False).encode()


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
