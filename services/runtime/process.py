"""The process of a service: its imports, its files, and its memory."""

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

RESERVED = 128  # for logs, checkpoints, connections to others and what Python needs
_MOST = 1 << 16  # more are of no use here, and some systems name a billion
_M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_ONE_GIB = 1 << 30
# Of a container, as it sees itself: version 2 of control groups, then version 1.
_CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def import_process(role: str) -> ModuleType:
    """Import what a role runs, without looking for garbage meanwhile, nor ever again among what was imported.

    That takes a tenth of the imports at least, and 0.1 s of the event loop now and then. https://docs.python.org/3/library/gc.html
    """
    gc.disable()
    try:
        return importlib.import_module(f"services.{role}.process")
    finally:
        gc.freeze()
        gc.enable()


def allow_many_files() -> None:
    """Raise the process's own limit as far as the system lets it: often 1,024 is what it begins with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bound_connections(wanted: int) -> int:
    """As many connections as are wanted, or fewer if there could not be files for them; that is said."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(1, soft - RESERVED) if soft != resource.RLIM_INFINITY else wanted
    if most < wanted:
        log.warning("fewer connections than max_connections: raise the limit of open files (ulimit -n)", most=most)
    return min(wanted, most)


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


def usable_memory_bytes() -> int:
    """The memory of the machine, or of the container if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            limits.append(int(file.read_text()))
    return min(limits)
