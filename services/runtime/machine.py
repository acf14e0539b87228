"""What this process may use of the machine that it runs on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# Of a container, as it sees itself: version 2 of control groups, then version 1.
_CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def usable_memory_bytes() -> int:
    """The memory of the machine, or of the container if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            limits.append(int(file.read_text()))
    return min(limits)
