"""The C library's allocator, told that this process moves large buffers all the time."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_ONE_GIB = 1 << 30


def keep_large_buffers() -> bool:
    """Let freed buffers below 1 GiB be used again instead of going back to the kernel; whether that worked.

    By default glibc maps every buffer of some MiB anew and unmaps it when freed, so that each body is faulted in
    page by page: half the cost of receiving it. Call it once, before large buffers exist. Does nothing where the
    C library is not glibc.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has no such function
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _ONE_GIB) and mallopt(_M_TRIM_THRESHOLD, _ONE_GIB))
