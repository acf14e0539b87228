"""Between an accelerator and the network: copies on streams of their own, to and from page-locked host memory.

    backward ──event──► side stream: gradient ──► host ──► network
    network ──► host ──► side stream: parameter ──event──► the next forward

So they go on while the accelerator computes. https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ps_protocol.errors import BadModel


class SideStreams:
    """For each device one stream for copies. Its modules are those of torch.cuda; torch.cpu has the same, and waits."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def of(self, device: torch.device) -> Any:
        """Made when it is first needed."""
        if device not in self._streams:
            module: Any = torch.get_device_module(device)
            self._streams[device] = module.Stream() if device.type == "cpu" else module.Stream(device=device)
        return self._streams[device]

    def mark(self, device: torch.device) -> Any:
        """An event after all that the calling thread has given the device to do."""
        module: Any = torch.get_device_module(device)
        event = module.Event()
        event.record(module.current_stream(device))
        return event

    def copy(self, target: Tensor, source: Tensor, device: torch.device, after: Any) -> Any:
        """Begin a copy once `after` has happened; returns the event of its end. Both must stay until then."""
        module: Any = torch.get_device_module(device)
        stream = self.of(device)
        stream.wait_event(after)
        with module.stream(stream), torch.no_grad():
            if target.device == device and (target.dtype, target.stride()) != (source.dtype, source.stride()):
                source = source.to(device, non_blocking=True)  # else it would be converted here, in other memory
            target.copy_(source, non_blocking=True)
            event = module.Event()
            event.record(stream)
        return event


class GradientCopies:
    """Flat gradients of one step after the other, on their way to the host. Used by one thread at a time.

    Their memory is the step's until that was pulled, and there are as many sets of it as steps can be on their way.
    """

    def __init__(self, num_sets: int) -> None:
        self._sets: list[dict[str, Tensor]] = [{} for _ in range(num_sets)]
        self._streams = SideStreams()
        self._under_way: dict[str, tuple[Tensor, Tensor, Any]] = {}  # by name, in the order in which they will arrive
        self._begun: set[str] = set()  # of the step that begins next

    def begin(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Begin to copy those of this step that were not begun before. Does not block."""
        host = self._sets[step % len(self._sets)]
        for name, gradient in gradients.items():
            if name in self._begun:
                continue
            self._begun.add(name)
            if name not in host or (host[name].shape, host[name].dtype) != (gradient.shape, gradient.dtype):
                host[name] = host_memory(gradient, gradient.dtype)
            done = self._streams.copy(host[name], gradient, gradient.device, self._streams.mark(gradient.device))
            self._under_way[name] = gradient, host[name], done

    def arrived(self) -> Iterator[tuple[str, Tensor]]:
        """Names, and flat host tensors, of those that have arrived since. Does not block."""
        while self._under_way:
            name, (_, host, done) = next(iter(self._under_way.items()))
            if not done.query():
                return
            del self._under_way[name]
            yield name, host

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """All that are left, each as soon as it is there. Blocks for the device."""
        for name, (_, host, done) in self._under_way.items():
            done.synchronize()
            yield name, host
        self._under_way.clear()
        self._begun.clear()

    def host(self, step: int, name: str) -> Tensor:
        """Of a gradient that has arrived."""
        return self._sets[step % len(self._sets)][name]

    def forget(self) -> None:
        """Give up what was begun. A request that was given up may still read its memory: leave that alone."""
        for _, _, done in self._under_way.values():
            done.synchronize()
        self._under_way.clear()
        self._begun.clear()
        self._sets = [{} for _ in self._sets]


class ParameterCopies:
    """Values on their way from host memory to parameters on a device, between two computations with them."""

    def __init__(self, *, are_awaited: bool) -> None:
        """`are_awaited`: from `begin` on nobody computes with a parameter before its new value has been copied."""
        self._are_awaited = are_awaited
        self._streams = SideStreams()
        self._computed: dict[torch.device, Any] = {}  # after all that has computed with the values before
        self._written: list[Any] = []  # ends of copies from host memory that will be written to again

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """New values are to come, into the same host memory. Blocks for copies from it."""
        for done in self._written:
            done.synchronize()
        self._written.clear()
        if self._are_awaited:
            devices = {parameter.device for parameter in parameters.values()}
            self._computed = {device: self._streams.mark(device) for device in devices}

    def copy(self, parameter: Tensor, host: Tensor) -> None:
        """Begin to copy; what is computed on the device from now on comes after it. Does not block."""
        device = parameter.device
        module: Any = torch.get_device_module(device)
        after = self._computed[device] if device in self._computed else self._streams.mark(device)
        done = self._streams.copy(parameter, host, device, after)
        module.current_stream(device).wait_event(done)
        self._written.append(done)


def host_memory(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous memory for its values, page-locked if it is on a device, which can copy by itself then."""
    return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.device.type != "cpu")


def check_devices(tensors: Mapping[str, Tensor]) -> None:
    """Raise BadModel for a tensor on a device that has no streams, such as MPS."""
    for name, tensor in tensors.items():
        if not hasattr(getattr(torch, tensor.device.type, None), "Stream"):
            raise BadModel(
                f"{name!r} is on {tensor.device}, and PyTorch has no streams to copy it there: move the model to the "
                "CPU or to CUDA before it is wrapped"
            )


def is_away(tensor: Tensor) -> bool:
    """Whether it is in an accelerator's own memory."""
    return tensor.device.type != "cpu"
