from __future__ import annotations

import pytest
import torch

from services.pserver.tensors import is_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_is_found_wherever_it_is(dtype, bad):
    for size in (1, 2, 7, 8, 9, 31, 33, 64, 1000):
        for at in sorted({0, size // 3, size // 2, size - 1}):
            tensor = torch.zeros(size, dtype=dtype)
            tensor[at] = bad
            assert not is_finite(tensor), (size, at)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_nan_among_large_numbers_is_found_in_a_large_tensor(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for at in (0, 12_345, 99_999, 199_998, 199_999):
            tensor = torch.full((200_000,), torch.finfo(dtype).max, dtype=dtype)
            assert is_finite(tensor)
            tensor[at] = float("nan")
            assert not is_finite(tensor)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_number_is_finite(dtype):
    finfo = torch.finfo(dtype)
    for value in (finfo.max, finfo.min, finfo.tiny, finfo.smallest_normal / 2, 0.0, -0.0):
        assert is_finite(torch.full((100,), value, dtype=dtype))  # whose sum overflows
    assert is_finite(torch.tensor([finfo.max, finfo.min] * 50, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_scalar_and_unaligned_tensors(dtype):
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.tensor(1.0, dtype=dtype))
    assert not is_finite(torch.tensor(float("nan"), dtype=dtype))
    data = torch.cat([torch.ones(99), torch.tensor([float("inf")])]).to(dtype).view(torch.uint8).numpy().tobytes()
    unaligned = torch.frombuffer(bytearray(b"\0" + data), dtype=dtype, offset=1, count=100)
    assert not is_finite(unaligned)
    assert is_finite(unaligned[:99])
