"""The encodings of one tensor: safetensors, NumPy's `.npy`, or JSON."""

from __future__ import annotations

import io
import json
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ps_protocol.errors import BadInput
from ps_protocol.frames import CONTENT_TYPE, encode_header
from ps_protocol.vocabulary import DTYPE_BYTES, ParameterSpec

BinaryFormat: TypeAlias = Literal["safetensors", "npy"]
Format: TypeAlias = Literal["safetensors", "npy", "json"]

CONTENT_TYPES: Mapping[Format, str] = {
    "safetensors": CONTENT_TYPE,
    "npy": "application/octet-stream",
    "json": "application/json",
}
MAX_JSON_ELEMENTS = 1_000
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<f4"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter, whose values are read later."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    facts: Mapping[str, str]  # run, attempt, round

    def begin(self, form: BinaryFormat) -> bytes:
        """Return the bytes before the values."""
        if form == "safetensors":
            return encode_header([(self.name, self.dtype, self.shape)], self.facts)
        file = io.BytesIO()
        described = {"descr": _NUMPY[self.dtype], "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(file, described)
        return file.getvalue()

    def num_bytes(self, form: BinaryFormat) -> int:
        """Return the size of the values in this format."""
        width = np.dtype(_NUMPY[self.dtype]).itemsize if form == "npy" else DTYPE_BYTES[self.dtype]
        return math.prod(self.shape) * width

    async def convert(self, parts: AsyncIterator[bytes], form: BinaryFormat) -> AsyncIterator[bytes]:
        """Yield values in this format, from values in the wire's."""
        rest = b""
        async for part in parts:
            if form == "npy" and self.dtype == "BF16":
                part, rest = rest + part, b""
                if len(part) % 2:
                    part, rest = part[:-1], part[-1:]
                part = _widen(part).tobytes()
            yield part

    def encode_json(self, data: bytes) -> bytes:
        """Return the whole document. Values that are not finite are strings."""
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


def check_json(spec: ParameterSpec) -> None:
    """Raise BadInput if the parameter is too large for JSON."""
    if spec.num_elements > MAX_JSON_ELEMENTS:
        raise BadInput(
            f"parameter {spec.name!r} is too large for JSON; request the format safetensors or npy",
            code="invalid_message", expected=f"<= {MAX_JSON_ELEMENTS:,} elements", actual=f"{spec.num_elements:,}",
        )  # fmt: skip


def _widen(data: bytes) -> np.ndarray[Any, Any]:
    """Convert bfloat16, which NumPy does not have, to float32."""
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def _name_nonfinite(value: Any) -> Any:
    """Replace values that are not finite by strings that `float()` and `parseFloat` accept."""
    if isinstance(value, list):
        return [_name_nonfinite(one) for one in value]
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
