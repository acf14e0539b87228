"""Copies between an accelerator and page-locked host memory, on streams of their own, beside the computation.

    backward ──event──► side stream: gradient ──► host ──► network
    network ──► host ──► side stream: parameter ──event──► the next forward

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ps_protocol.errors import BadModel


class SideStreams:
    """A stream for copies on each device, from torch.cuda. torch.cpu has the same interface, and blocks."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def mark(self, device: torch.device) -> Any:
        """Return an event after all work that the calling thread has given to the device."""
        module: Any = torch.get_device_module(device)
        event = module.Event()
        event.record(module.current_stream(device))
        return event

    def copy(self, target: Tensor, source: Tensor, device: torch.device, after: Any) -> Any:
        """Begin a copy after the event `after`, and return the event of its end. Keep both tensors alive until then."""
        module: Any = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream() if device.type == "cpu" else module.Stream(device=device)
        stream = self._streams[device]
        stream.wait_event(after)
        with module.stream(stream), torch.no_grad():
            if target.device == device and (target.dtype, target.stride()) != (source.dtype, source.stride()):
                source = source.to(device, non_blocking=True)  # else it would be converted here, in other memory
            target.copy_(source, non_blocking=True)
            event = module.Event()
            event.record(stream)
        return event


class GradientCopies:
    """Flat gradients of the next step on their way to host memory. Used by one thread at a time."""

    def __init__(self) -> None:
        self._streams = SideStreams()
        self._under_way: dict[str, tuple[Tensor, Tensor, Any]] = {}  # by name, in the order in which they will arrive
        self._begun: set[str] = set()

    def begin_copies(self, host: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Begin the missing copies of the next step's gradients into the tensors of `host`. Does not block.

        Missing tensors of `host` are allocated.
        """
        for name, gradient in gradients.items():
            if name in self._begun:
                continue
            self._begun.add(name)
            if name not in host or (host[name].shape, host[name].dtype) != (gradient.shape, gradient.dtype):
                host[name] = host_memory(gradient, gradient.dtype)
            done = self._streams.copy(host[name], gradient, gradient.device, self._streams.mark(gradient.device))
            self._under_way[name] = gradient, host[name], done

    def arrived(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and flat host tensors of gradients that have arrived since the last call. Does not block."""
        while self._under_way:
            name, (_, host, done) = next(iter(self._under_way.items()))
            if not done.query():
                return
            del self._under_way[name]
            yield name, host

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the remaining gradients, each as soon as it has arrived. Blocks for the device."""
        for name, (_, host, done) in self._under_way.items():
            done.synchronize()
            yield name, host
        self._under_way.clear()
        self._begun.clear()

    def discard(self) -> None:
        """Discard the copies. Blocks for the device, because the script may write to the gradients afterwards."""
        for _ in self.finish():
            pass


class ParameterCopies:
    """Copies of values from host memory to parameters on a device, between two computations with them."""

    def __init__(self, *, overlap_pulls: bool) -> None:
        """Make no copy yet. `overlap_pulls`: a computation after `wait_for_copies` waits for its parameters first."""
        self._overlap_pulls = overlap_pulls
        self._streams = SideStreams()
        self._computed: dict[torch.device, Any] = {}  # events after all computations with the values before
        self._written: list[Any] = []  # ends of copies from host memory that will be written to again

    def wait_for_copies(self, parameters: Mapping[str, Tensor]) -> None:
        """Wait until copies from the host memory have ended, so that it can receive new values. Blocks."""
        for done in self._written:
            done.synchronize()
        self._written.clear()
        if self._overlap_pulls:
            devices = {parameter.device for parameter in parameters.values()}
            self._computed = {device: self._streams.mark(device) for device in devices}

    def copy(self, parameter: Tensor, host: Tensor) -> None:
        """Begin a copy; later work of the device comes after it. Does not block."""
        device = parameter.device
        module: Any = torch.get_device_module(device)
        after = self._computed[device] if device in self._computed else self._streams.mark(device)
        done = self._streams.copy(parameter, host, device, after)
        module.current_stream(device).wait_event(done)
        self._written.append(done)


def host_memory(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous host memory for a tensor's values, page-locked if the tensor is on a device."""
    return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.device.type != "cpu")


def check_devices(tensors: Mapping[str, Tensor]) -> None:
    """Raise BadModel for a tensor on a device that has no streams, such as MPS."""
    for name, tensor in tensors.items():
        if not hasattr(getattr(torch, tensor.device.type, None), "Stream"):
            raise BadModel(
                f"{name!r} is on {tensor.device}, for which PyTorch has no streams. Move the model to the CPU or "
                "to CUDA before it is wrapped"
            )


def is_away(tensor: Tensor) -> bool:
    """Return True if the tensor is in an accelerator's memory."""
    return not tensor.is_cpu
