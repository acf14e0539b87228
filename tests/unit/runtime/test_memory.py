from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import resource
from services.runtime.process import keep_large_buffers

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        bytes(48 << 20) + b"x"  # touches every page, which zeroed memory alone does not
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default, worked = page_faults(), keep_large_buffers()
page_faults()
print(int(worked), default, page_faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_large_buffers_are_used_again() -> None:
    result = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True)
    worked, default, kept = map(int, result.stdout.split())
    if not worked:
        pytest.skip("the C library is not glibc")
    assert kept < 100
    assert default > 20 * kept
