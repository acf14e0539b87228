"""The encodings of tensors: safetensors, NumPy's `.npy`, or JSON."""

from __future__ import annotations

import io
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ps_protocol.errors import BadInput
from ps_protocol.frames import CONTENT_TYPE
from ps_protocol.vocabulary import DTYPE_BYTES, PserverIndex

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
    """A tensor whose values are read later: from pservers in order, a number of bytes from each (None: zeros)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[tuple[PserverIndex | None, int]]

    @property
    def num_bytes(self) -> int:
        """The size of the values in the tensor's own dtype."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def begin_npy(tensor: Tensor) -> tuple[bytes, int]:
    """Return the header of an `.npy` file, and the size of the values after it."""
    file = io.BytesIO()
    described = {"descr": _NUMPY[tensor.dtype], "fortran_order": False, "shape": tensor.shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue(), math.prod(tensor.shape) * np.dtype(_NUMPY[tensor.dtype]).itemsize


async def convert_to_npy(dtype: str, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield values of a dtype as NumPy has them. Parts may end within an element."""
    rest = b""
    async for part in parts:
        if dtype == "BF16":
            whole = rest + part
            end = len(whole) // 2 * 2
            part, rest = _widen(whole[:end]).tobytes(), whole[end:]
        yield part


def check_json(name: str, num_elements: int) -> None:
    """Raise BadInput if a parameter is too large for JSON."""
    if num_elements > MAX_JSON_ELEMENTS:
        raise BadInput(
            f"parameter {name!r} is too large for JSON; request the format safetensors or npy",
            code="invalid_message", expected=f"<= {MAX_JSON_ELEMENTS:,} elements", actual=f"{num_elements:,}",
        )  # fmt: skip


def encode_json(tensor: Tensor, facts: Mapping[str, str], data: bytes) -> bytes:
    """Return the whole document. Values that are not finite are strings."""
    values = _widen(data) if tensor.dtype == "BF16" else np.frombuffer(data, _NUMPY[tensor.dtype])
    listed = values.reshape(tensor.shape).tolist()
    document = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        **{key: int(value) if value.isdecimal() and key != "run" else value for key, value in facts.items()},
        "values": listed if np.isfinite(values).all() else _name_nonfinite(listed),
    }
    return json.dumps(document, allow_nan=False).encode()


def _widen(data: bytes) -> np.ndarray[Any, Any]:
    """Convert bfloat16, which NumPy does not have, to float32."""
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def _name_nonfinite(value: Any) -> Any:
    """Replace values that are not finite by strings that `float()` and `parseFloat` accept."""
    if isinstance(value, list):
        return [_name_nonfinite(element) for element in value]
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
