"""The software of this process, the CPU time, memory, disk and network that it uses, and the lag of its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import psutil

from ps_protocol.fence import MAX_TEXT
from ps_protocol.fields import ProcessFigures, Software

INTERVAL_SECONDS = 0.25  # between measurements of the loop's lag


@functools.cache
def installed_software() -> Software:
    """Return the installed versions of Gradpost, Python and torch, without importing any of them.

    A package is `unknown` where it is only on the path, as in a checkout that is not installed.
    """
    return Software(gradpost=_version("gradpost"), python=platform.python_version(), torch=_version("torch"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def measure_process(*, sent_bytes: int | None = None, received_bytes: int | None = None) -> ProcessFigures:
    """Return the figures of this process, which takes about 0.1 ms. The caller has counted the bytes; None: unknown."""
    process, disk = psutil.Process(), dict[str, Any]()
    with contextlib.suppress(AttributeError, OSError, psutil.Error):  # on macOS, or not permitted in a container
        counters = process.io_counters()
        disk = {"read_bytes": counters.read_bytes, "written_bytes": counters.write_bytes}
    times = process.cpu_times()
    return ProcessFigures(
        host=platform.node()[:MAX_TEXT],
        cpu_seconds=times.user + times.system,
        resident_bytes=process.memory_info().rss,
        gpu_bytes=_count_gpu_bytes(),
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        **disk,
    )


def _count_gpu_bytes() -> int | None:
    """Return the bytes of tensors on all CUDA devices; None if the process does not use CUDA. Never imports torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(int(torch.cuda.memory_allocated(device)) for device in range(torch.cuda.device_count()))


async def watch_loop_lag(observe: Callable[[float], object], *, interval_seconds: float = INTERVAL_SECONDS) -> None:
    """Observe in an endless loop by how many seconds a sleep of `interval_seconds` is late, as other tasks are."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_seconds
        await asyncio.sleep(interval_seconds)
        observe(max(0.0, loop.time() - due))
