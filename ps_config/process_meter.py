"""The CPU time, memory, disk and network that this process uses."""

from __future__ import annotations

import contextlib
import platform
import sys
from time import monotonic

import psutil

from ps_protocol.fence import MAX_TEXT
from ps_protocol.process_reports import ProcessFigures

MIN_SECONDS = 0.5  # between measurements, so that rates are means of a reasonable time


class ProcessMeter:
    """Measures this process at its heartbeats. A measurement takes about 0.05 ms."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._host = platform.node()[:MAX_TEXT]
        self._measured_at = -MIN_SECONDS
        self._totals: dict[str, float] = {}
        self._figures: ProcessFigures | None = None

    def measure(self, *, sent_bytes: int | None = None, received_bytes: int | None = None) -> ProcessFigures:
        """Return the newest figures, measured again unless they are younger than half a second.

        `sent_bytes` and `received_bytes` are totals that the caller has counted; None: unknown.
        """
        now = monotonic()
        seconds = now - self._measured_at
        if self._figures is not None and seconds < MIN_SECONDS:
            return self._figures
        counted = {"sent_bytes_per_second": sent_bytes, "received_bytes_per_second": received_bytes}
        totals = self._read_totals() | {name: total for name, total in counted.items() if total is not None}
        # A counter that starts again, as with the next run of a pserver, is no negative rate.
        rates = {name: max(0.0, totals[name] - self._totals[name]) / seconds for name in totals.keys() & self._totals}
        self._measured_at, self._totals = now, totals
        self._figures = ProcessFigures(
            host=self._host, resident_bytes=self._process.memory_info().rss, gpu_bytes=_count_gpu_bytes(), **rates
        )
        return self._figures

    def _read_totals(self) -> dict[str, float]:
        times = self._process.cpu_times()
        totals = {"cpu_share": times.user + times.system}
        with contextlib.suppress(AttributeError, OSError, psutil.Error):  # on macOS, or not permitted in a container
            counters = self._process.io_counters()
            totals["read_bytes_per_second"] = counters.read_bytes
            totals["written_bytes_per_second"] = counters.write_bytes
        return totals


def _count_gpu_bytes() -> int | None:
    """Return the bytes of tensors on all CUDA devices; None if the process does not use CUDA. Never imports torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(int(torch.cuda.memory_allocated(device)) for device in range(torch.cuda.device_count()))
