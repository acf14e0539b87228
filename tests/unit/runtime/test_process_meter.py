"""The figures that a process measures of itself for its heartbeats."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from ps_config import process_meter
from ps_config.process_meter import ProcessMeter


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list whose only element is the time."""
    now = [100.0]
    monkeypatch.setattr(process_meter, "monotonic", lambda: now[0])
    return now


def test_rates_are_means_since_the_measurement_before(process: FakeProcess, clock: list[float]) -> None:
    meter = ProcessMeter()
    first = meter.measure(sent_bytes=100, received_bytes=1000)
    assert (first.resident_bytes, first.cpu_share, first.sent_bytes_per_second) == (4096, None, None)
    clock[0] += 2
    process.cpu, process.read, process.written = 3.0, 600, 20
    second = meter.measure(sent_bytes=300, received_bytes=10)  # the counter of received bytes has started again
    assert (second.cpu_share, second.read_bytes_per_second, second.written_bytes_per_second) == (1.5, 300, 10)
    assert (second.sent_bytes_per_second, second.received_bytes_per_second) == (100, 0)


def test_figures_that_are_young_are_not_measured_again(process: FakeProcess, clock: list[float]) -> None:
    meter = ProcessMeter()
    meter.measure()
    clock[0] += 1
    process.cpu = 1.0
    second = meter.measure()
    clock[0] += 0.4
    process.cpu = 9.0
    assert meter.measure() is second
    clock[0] += 0.6
    assert meter.measure().cpu_share == 8.0


def test_gpu_memory_is_that_of_all_devices_once_cuda_is_in_use(
    process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ProcessMeter().measure().gpu_bytes is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1024 + device)
    assert ProcessMeter().measure().gpu_bytes == 2049


def test_a_platform_without_counters_of_disks_has_the_other_figures(
    process: FakeProcess, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeProcess, "io_counters")
    meter = ProcessMeter()
    meter.measure()
    clock[0] += 1
    figures = meter.measure()
    assert figures.cpu_share == 0
    assert (figures.read_bytes_per_second, figures.written_bytes_per_second, figures.gpu_bytes) == (None, None, None)
