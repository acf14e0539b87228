"""Collectives of torch.distributed that wait on the I/O loop, where the run's failure ends the wait.

gloo and NCCL would wait for a stopped process, or a lost machine, until their own time-outs.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GROUP_TIMEOUT = timedelta(days=1)  # heartbeats notice a lost process long before
POLL_SECONDS = 0.001  # between checks of a collective; event loops do not wait for less


class Collectives:
    """Collectives of one process group, in the same order in each process. Used by one thread at a time."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._begun: list[Any] = []  # works, in order
        self._tensors: list[Tensor] = []  # keeps the tensors of begun works alive
        self._broken: RuntimeError | None = None

    def all_reduce(self, tensor: Tensor) -> None:
        """Begin to replace a contiguous tensor by the sum of all processes. It must not change until `release`."""
        self._begin(tensor, lambda: self._group.allreduce([tensor]))

    def reduce(self, tensor: Tensor) -> None:
        """Begin to sum a contiguous tensor into that of process 0. The others' tensors are undefined afterwards."""
        options = dist.ReduceOptions()
        options.rootRank = 0
        self._begin(tensor, lambda: self._group.reduce([tensor], options))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Begin to replace a contiguous tensor by that of process `source`. It must not change until `release`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._begin(tensor, lambda: self._group.broadcast([tensor], options))

    def _begin(self, tensor: Tensor, begin: Callable[[], Any]) -> None:
        if self._broken is None:
            self._tensors.append(tensor)
            try:
                self._begun.append(begin())
            except RuntimeError as error:  # in the middle of a backward pass; `finish` says what it means
                self._broken = error

    def has_ended(self, index: int) -> bool:
        """Return True if the collective with this index has succeeded. Does not block."""
        if index >= len(self._begun) or not self._begun[index].is_completed():
            return False
        try:
            self._begun[index].wait()  # for an accelerator: what is computed from now on comes after it
        except RuntimeError:  # `finish` says what it means
            return False
        return True

    async def finish(self) -> None:
        """Wait on the I/O loop for all collectives that were begun. Raises RuntimeError as torch.distributed does."""
        if self._broken is not None:
            raise self._broken
        for work in self._begun:
            # A callback would be simpler, but gloo's thread may not call Python in a process that is ending (ADR 16).
            while not work.is_completed():  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
            work.wait()  # raises what went wrong

    def release(self) -> None:
        """Forget the finished collectives; their tensors may change again."""
        for work in self._begun:
            work.wait()  # for an accelerator: what is computed from now on comes after it
        self._forget()

    def close(self) -> None:
        """Drop the group. An unfinished collective keeps it alive, because its destructor would wait."""
        if not all(work.is_completed() for work in self._begun):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._group, *self._begun, *self._tensors)))
        self._forget()
        self._group = None

    def _forget(self) -> None:
        self._begun.clear()
        self._tensors.clear()


def make_group(store: Any, rank: int, size: int, device: torch.device, host: str | None) -> Any:
    """Return a new process group; torch.distributed's default group stays the script's. Blocks for all processes.

    `host` is the address that gloo listens on; None: gloo decides.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)
    if host is None:
        return dist.ProcessGroupGloo(store, rank, size, GROUP_TIMEOUT)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = GROUP_TIMEOUT
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


def choose_device(parameters: Mapping[str, Tensor]) -> torch.device:
    """Return the device on which gradients are summed: the parameters' CUDA device, else the CPU."""
    return next((p.device for p in parameters.values() if p.device.type == "cuda"), torch.device("cpu"))


async def run_aside(work: Callable[[], Any]) -> Any:
    """Run `work` on a daemon thread, which does not keep the process alive. Raises RuntimeError only."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a cancelled caller leaves the thread alone

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error if isinstance(error, RuntimeError) else RuntimeError(repr(error)))

    threading.Thread(target=run, name="gradpost group", daemon=True).start()
    return await asyncio.wrap_future(future)
