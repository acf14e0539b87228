"""The figures that a process measures of itself for its heartbeats."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from ps_config.process_meter import measure_process


class FakeProcess:
    """A process whose counters a test sets."""

    def __init__(self) -> None:
        self.cpu, self.read, self.written = 0.0, 0, 0

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.cpu / 2, system=self.cpu / 2)

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=4096)

    def io_counters(self) -> SimpleNamespace:
        return SimpleNamespace(read_bytes=self.read, write_bytes=self.written)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> FakeProcess:
    process = FakeProcess()
    monkeypatch.setattr(psutil, "Process", lambda: process)
    return process


def test_figures_are_totals(process: FakeProcess) -> None:
    process.cpu, process.read, process.written = 3.0, 600, 20
    found = measure_process(sent_bytes=300, received_bytes=10)
    assert (found.resident_bytes, found.cpu_seconds, found.read_bytes, found.written_bytes) == (4096, 3.0, 600, 20)
    assert (found.sent_bytes, found.received_bytes) == (300, 10)


def test_gpu_memory_is_that_of_all_devices_once_cuda_is_in_use(
    process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_process().gpu_bytes is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1024 + device)
    assert measure_process().gpu_bytes == 2049


def test_a_platform_without_counters_of_disks_has_the_other_figures(
    process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeProcess, "io_counters")
    figures = measure_process()
    assert (figures.cpu_seconds, figures.read_bytes, figures.written_bytes, figures.gpu_bytes) == (0, None, None, None)
