"""Collectives of torch.distributed in which nobody waits for ever: they are waited for on the I/O loop.

There the run's failure ends a wait; gloo and NCCL themselves wait for a process that is stopped, or a machine that is
gone, as long as their time-outs say.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GROUP_PATIENCE = timedelta(days=1)  # silence and ends of connections are noticed long before
POLL_SECONDS = 0.001  # between looks at a collective; event loops do not wait for less


class Collectives:
    """Of one process group, in the same order in each of its processes. Used by one thread at a time."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._begun: list[Any] = []  # works that nobody has waited for
        self._lent: list[Tensor] = []  # theirs
        self._broken: RuntimeError | None = None

    def all_reduce(self, tensor: Tensor) -> None:
        """Begin to replace a contiguous tensor by the sum of all processes'. It must not change until `settle`."""
        self._begin(tensor, lambda: self._group.allreduce([tensor]))

    def reduce(self, tensor: Tensor) -> None:
        """The same, for process 0 alone; the others' is anything afterwards."""
        options = dist.ReduceOptions()
        options.rootRank = 0
        self._begin(tensor, lambda: self._group.reduce([tensor], options))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Begin to replace a contiguous tensor by that of process `source`. It must not change until `settle`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._begin(tensor, lambda: self._group.broadcast([tensor], options))

    def _begin(self, tensor: Tensor, begin: Callable[[], Any]) -> None:
        if self._broken is None:
            self._lent.append(tensor)
            try:
                self._begun.append(begin())
            except RuntimeError as error:  # in the middle of a backward pass; `finish` says what it means
                self._broken = error

    def has_ended(self, index: int) -> bool:
        """Whether this one of those that were begun is over, and well. Does not block."""
        if index >= len(self._begun) or not self._begun[index].is_completed():
            return False
        try:
            self._begun[index].wait()  # for an accelerator: what is computed from now on comes after it
        except RuntimeError:  # `finish` says what it means
            return False
        return True

    async def finish(self) -> None:
        """Wait for all that was begun, on the I/O loop. Raises RuntimeError as torch.distributed does."""
        if self._broken is not None:
            raise self._broken
        for work in self._begun:
            # A callback would be simpler, but gloo's thread may not call Python in a process that is ending (ADR 16).
            while not work.is_completed():  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
            work.wait()  # raises what went wrong

    def release(self) -> None:
        """What has finished is over: the tensors are the caller's again."""
        for work in self._begun:
            work.wait()  # for an accelerator: what is computed from now on comes after it
        self._forget()

    def close(self) -> None:
        """Let go of it. One in which something is still under way stays as it is: its end would wait for that."""
        if not all(work.is_completed() for work in self._begun):
            _keep_for_ever((self._group, *self._begun, *self._lent))
        self._forget()
        self._group = None

    def _forget(self) -> None:
        self._begun.clear()
        self._lent.clear()


def make_group(store: Any, rank: int, size: int, device: torch.device, host: str | None) -> Any:
    """A group of our own, so that torch.distributed's one default group stays the script's. Blocks for all others.

    `host` is the address that gloo listens on; None: gloo decides.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GROUP_PATIENCE
        return dist.ProcessGroupNCCL(store, rank, size, options)
    if host is None:
        return dist.ProcessGroupGloo(store, rank, size, GROUP_PATIENCE)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = GROUP_PATIENCE
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


def choose_device(parameters: Mapping[str, Tensor]) -> torch.device:
    """Where gradients are added up: on the parameters' CUDA device, else in the processor's memory."""
    return next((p.device for p in parameters.values() if p.device.type == "cuda"), torch.device("cpu"))


async def run_aside(work: Callable[[], Any]) -> Any:
    """Run it on a thread of its own, which does not keep the process from ending. Raises RuntimeError only."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        found, error = None, None
        try:
            found = work()
        except Exception as problem:
            error = problem if isinstance(problem, RuntimeError) else RuntimeError(repr(problem))
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, found, error)

    def tell(found: Any, error: RuntimeError | None) -> None:
        if not result.done():
            result.set_result(found) if error is None else result.set_exception(error)

    threading.Thread(target=run, name="gradpost group", daemon=True).start()
    return await result


def _keep_for_ever(thing: object) -> None:
    """The end of a group waits for its collectives, and so would the end of the process, for one that is stopped.

    What such a collective works with must not end before it either: gloo's thread would then be the one to let go of a
    tensor of Python's, in a process in which there is no Python any more. A thread could hold all that, but with
    Python 3.12 none begins in a process that is ending.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
