"""Copies between a device and the host, with torch.cpu's streams and events, which the test delays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_client.transport.device_copies import GradientCopies, ParameterCopies


class Device:
    """A device module whose events happen when `done` is raised or an event is waited for."""

    def __init__(self) -> None:
        self.done = 0  # events that have happened
        self.recorded = 0
        self.waits: list[tuple[str, int]] = []  # which stream has to wait for which event

    def module(self, _: torch.device) -> Any:
        device = self

        class Event(torch.cpu.Event):
            def record(self, stream: Any = None) -> None:
                device.recorded += 1
                self.number = device.recorded

            def query(self) -> bool:
                return self.number <= device.done

            def synchronize(self) -> None:
                device.done = max(device.done, self.number)

        class Stream(torch.cpu.Stream):
            name = "side"

            def wait_event(self, event: Any) -> None:
                device.waits.append((self.name, event.number))

        main = Stream()
        main.name = "main"
        return SimpleNamespace(Event=Event, Stream=Stream, stream=torch.cpu.stream, current_stream=lambda _: main)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", device.module)
    return device


def test_gradients_arrive_in_order_each_after_what_made_it(device: Device) -> None:
    copies, host = GradientCopies(), dict[str, torch.Tensor]()
    copies.begin_copies(host, {"b": torch.ones(3)})
    copies.begin_copies(host, {"a": torch.full((2,), 2.0)})
    assert device.waits == [("side", 1), ("side", 3)]  # 2 and 4 are the ends of the copies
    assert list(copies.arrived()) == []
    device.done = 2
    assert [name for name, _ in copies.arrived()] == ["b"]
    copies.begin_copies(host, {"b": torch.zeros(3), "c": torch.ones(1)})
    assert [(name, copy.tolist()) for name, copy in copies.finish()] == [("a", [2.0, 2.0]), ("c", [1.0])]
    assert host["b"].tolist() == [1.0] * 3, "it was copied when it left"
    assert device.done == device.recorded


def test_memory_is_used_again(device: Device) -> None:
    copies, host = GradientCopies(), dict[str, torch.Tensor]()
    places = []
    for step in range(3):
        copies.begin_copies(host, {"a": torch.full((2,), float(step))})
        [(_, copy)] = copies.finish()
        assert copy.tolist() == [step] * 2
        places.append(copy.data_ptr())
    assert len(set(places)) == 1


def test_copies_of_discarded_gradients_end_first(device: Device) -> None:
    """The script may write to the gradients' memory then."""
    copies, host = GradientCopies(), dict[str, torch.Tensor]()
    copies.begin_copies(host, {"a": torch.zeros(2)})
    copies.discard()
    assert device.done == device.recorded
    copies.begin_copies(host, {"a": torch.full((2,), 3.0)})
    assert [(name, copy.tolist()) for name, copy in copies.finish()] == [("a", [3.0, 3.0])]


def test_gradients_may_change_their_form(device: Device) -> None:
    copies, host = GradientCopies(), dict[str, torch.Tensor]()
    for gradient in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.bfloat16)):
        copies.begin_copies(host, {"a": gradient})
        [(_, copy)] = copies.finish()
        assert (copy.dtype, copy.tolist()) == (gradient.dtype, gradient.tolist())


@pytest.mark.parametrize("overlap_pulls", [False, True])
def test_a_parameter_is_written_between_two_computations(device: Device, overlap_pulls: bool) -> None:
    copies = ParameterCopies(overlap_pulls=overlap_pulls)
    parameter = torch.zeros(2, 2)
    copies.wait_for_copies({"w": parameter})
    marked = device.recorded
    torch.get_device_module(parameter.device).Event().record()  # something else is computed, on other parameters
    copies.copy(parameter, torch.ones(2, 2, dtype=torch.bfloat16).t())
    assert parameter.tolist() == [[1.0, 1.0]] * 2
    end = device.recorded
    assert device.waits == [("side", marked if overlap_pulls else end - 1), ("main", end)]
    assert device.done == 0
    copies.wait_for_copies({"w": parameter})
    assert device.done == end, "host memory is not written to before it was copied"
