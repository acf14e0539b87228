"""The process of a service: imports, open files and memory."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from .logs import get_logger

log = get_logger()

RESERVED = 128  # for logs, checkpoints, other connections and Python itself
_MAX_FILES = 1 << 16  # enough here; some systems allow a billion
_M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_ONE_GIB = 1 << 30
# The limits of a container: control groups version 2, then version 1.
_CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def import_process(role: str) -> ModuleType:
    """Return the imported module of a role's process, and exclude all imported objects from garbage collection.

    Collection takes at least a tenth of the imports' time, and later blocks the event loop for 0.1 s now and then.
    https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.disable()
    try:
        return importlib.import_module(f"services.{role}.process")
    finally:
        gc.freeze()
        gc.enable()


def allow_many_files() -> None:
    """Raise the soft limit of open files, often 1,024, towards the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bound_connections(wanted: int) -> int:
    """Return `wanted`, or a smaller number of connections if the limit of open files requires it; log that."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, soft - RESERVED) if soft != resource.RLIM_INFINITY else wanted
    if most < wanted:
        log.warning("fewer connections than max_connections: raise the limit of open files (ulimit -n)", most=most)
    return min(wanted, most)


def keep_large_buffers() -> bool:
    """Let the C library reuse freed buffers below 1 GiB; return True if that worked.

    By default glibc returns every buffer of a few MiB to the kernel, so that each body causes page faults: half the
    cost of receiving it. Call it once, before large buffers exist. It does nothing without glibc.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has no such function
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _ONE_GIB) and mallopt(_M_TRIM_THRESHOLD, _ONE_GIB))


def use_huge_pages() -> None:
    """Let torch request huge pages for tensors of 2 MiB and more, as numpy does. Call it before torch allocates any.

    With pages of 4 KiB most accesses to the rows of a large table miss the TLB.
    https://github.com/pytorch/pytorch/pull/107697
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def usable_memory_bytes() -> int:
    """Return the memory of the machine, or of the container if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # the file is missing, or contains "max"
            limits.append(int(file.read_text()))
    return min(limits)
