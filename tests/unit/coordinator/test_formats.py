"""Values that somebody sends: what fits is taken as it is, anything else is a clear refusal, however odd."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save

from ps_protocol.errors import MalformedFrame, WrongDtype, WrongShape
from services.coordinator.inspection.formats import decode_tensor

VALUES = np.arange(6, dtype="<f4").reshape(2, 3)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def with_header(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(24)


@pytest.mark.parametrize("array", [VALUES, np.asfortranarray(VALUES), VALUES[::-1][::-1]])
def test_arrays_row_by_row(array: np.ndarray) -> None:
    assert decode_tensor(npy(array), (2, 3), "F32") == VALUES.tobytes()


def test_nothing_is_taken_as_nothing() -> None:
    assert decode_tensor(npy(np.zeros((0, 3), dtype="<f4")), (0, 3), "F32") == b""


def test_bfloat16_is_rounded_as_torch_does_it() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3e38, np.inf, 0.0], dtype="<f4")
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().tobytes()
    assert decode_tensor(npy(values), (6,), "BF16") == expected
    assert decode_tensor(save({"x": torch.from_numpy(values).bfloat16()}), (6,), "BF16") == expected
    nan = bytearray(decode_tensor(npy(np.array([np.nan], dtype="<f4")), (1,), "BF16"))
    assert torch.frombuffer(nan, dtype=torch.bfloat16).isnan().all()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (npy(VALUES.T), WrongShape),
        (npy(VALUES.astype("<f8")), WrongDtype),
        (npy(VALUES.astype(">f4")), WrongDtype),
        (npy(VALUES)[:-1], MalformedFrame),
        (npy(VALUES) + b"x", MalformedFrame),
        (b"\x93NUMPY", MalformedFrame),
        (b"\x93NUMPY\x09\x00" + bytes(40), MalformedFrame),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000000,)}"), WrongShape),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (10**30,)}"), MalformedFrame),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -3)}"), WrongShape),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3"), MalformedFrame),
        (with_header("{'descr': '|O', 'fortran_order': False, 'shape': (2, 3)}"), WrongDtype),
        (with_header("{'descr': '|V0', 'fortran_order': False, 'shape': (2, 3)}"), WrongDtype),
        (with_header("(" * 9000), MalformedFrame),
        (with_header("'''"), MalformedFrame),
        (with_header("{[]: 1}"), MalformedFrame),
        (b"", MalformedFrame),
        (save({"x": torch.zeros(2, 3), "y": torch.zeros(1)}), MalformedFrame),
    ],
)
def test_what_does_not_fit_is_refused(body: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_tensor(body, (2, 3), "F32")
