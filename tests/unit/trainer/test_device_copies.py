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
    copies = GradientCopies(1)
    copies.begin_copies(1, {"b": torch.ones(3)})
    copies.begin_copies(1, {"a": torch.full((2,), 2.0)})
    assert device.waits == [("side", 1), ("side", 3)]  # 2 and 4 are the ends of the copies
    assert list(copies.arrived()) == []
    device.done = 2
    assert [name for name, _ in copies.arrived()] == ["b"]
    copies.begin_copies(1, {"b": torch.zeros(3), "c": torch.ones(1)})
    assert [(name, host.tolist()) for name, host in copies.finish()] == [("a", [2.0, 2.0]), ("c", [1.0])]
    assert copies.host(1, "b").tolist() == [1.0] * 3, "it was copied when it left"
    assert device.done == device.recorded


def test_memory_is_kept_and_belongs_to_a_step(device: Device) -> None:
    copies = GradientCopies(2)
    places = []
    for step in range(4):
        copies.begin_copies(step, {"a": torch.full((2,), float(step))})
        [(_, host)] = copies.finish()
        places.append(host.data_ptr())
    assert places[:2] == places[2:]
    assert places[0] != places[1]


def test_what_is_given_up_may_still_be_read(device: Device) -> None:
    copies = GradientCopies(1)
    copies.begin_copies(1, {"a": torch.ones(2)})
    [(_, before)] = copies.finish()
    copies.begin_copies(1, {"a": torch.zeros(2)})
    copies.forget()
    assert device.done == device.recorded, "the gradient's memory may be given back"
    copies.begin_copies(1, {"a": torch.full((2,), 3.0)})
    [(_, host)] = copies.finish()
    assert host.data_ptr() != before.data_ptr()


def test_gradients_may_change_their_form(device: Device) -> None:
    copies = GradientCopies(1)
    for gradient in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.bfloat16)):
        copies.begin_copies(1, {"a": gradient})
        [(_, host)] = copies.finish()
        assert (host.dtype, host.tolist()) == (gradient.dtype, gradient.tolist())


@pytest.mark.parametrize("are_awaited", [False, True])
def test_a_parameter_is_written_between_two_computations(device: Device, are_awaited: bool) -> None:
    copies = ParameterCopies(are_awaited=are_awaited)
    parameter = torch.zeros(2, 2)
    copies.wait_for_copies({"w": parameter})
    marked = device.recorded
    torch.get_device_module(parameter.device).Event().record()  # something else is computed, on other parameters
    copies.copy(parameter, torch.ones(2, 2, dtype=torch.bfloat16).t())
    assert parameter.tolist() == [[1.0, 1.0]] * 2
    end = device.recorded
    assert device.waits == [("side", marked if are_awaited else end - 1), ("main", end)]
    assert device.done == 0
    copies.wait_for_copies({"w": parameter})
    assert device.done == end, "host memory is not written to before it was copied"
