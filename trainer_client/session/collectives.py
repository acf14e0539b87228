"""Collectives of torch.distributed between the processes of a host, or the trainers of a ring.

They run in process groups of our own, so that a script's own collectives may come in between. Every collective has a
time-out. Nothing that arrives is unpickled.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ps_protocol.errors import GradpostError

FIRST_PAUSE_SECONDS = 0.0001  # between two checks of a collective; later ones are longer
MAX_PAUSE_SECONDS = 0.001


class Collectives:
    """Collectives of one process group, in the same order in each process. Used by one thread at a time."""

    def __init__(
        self,
        group: Any,
        timeout: timedelta,
        on_broken: Callable[[str], GradpostError],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Use a group whose collectives take at most `timeout`.

        `on_broken` returns the error for a collective that has failed, from torch's reason. `check` is called during
        waits, and ends them with the error that it raises.
        """
        self.timeout = timeout  # of the collectives that begin from now on
        self._group = group
        self._on_broken = on_broken
        self._check = check
        self._begun: list[Any] = []  # works, in order; they keep their tensors alive
        self._broken: RuntimeError | None = None

    def all_reduce(self, tensor: Tensor) -> None:
        """Begin to replace a contiguous tensor by the sum of all processes. It must not change until `finish`."""
        self._begin(tensor, dist.AllreduceOptions(), "allreduce")

    def reduce(self, tensor: Tensor) -> None:
        """Begin to sum a contiguous tensor into that of process 0. The others' tensors are undefined afterwards."""
        self._begin(tensor, dist.ReduceOptions(), "reduce")

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Begin to replace a contiguous tensor by that of process `source`. It must not change until `finish`."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._begin(tensor, options, "broadcast")

    def _begin(self, tensor: Tensor, options: Any, name: str) -> None:
        if self._broken is None:
            options.timeout = self.timeout
            try:
                self._begun.append(getattr(self._group, name)([tensor], options))
            except RuntimeError as error:  # in the middle of a backward pass; `finish` reports it
                self._broken = error

    def has_ended(self, index: int) -> bool:
        """Return True if the collective with this index has succeeded. Does not block."""
        if index >= len(self._begun) or not self._begun[index].is_completed():
            return False
        try:
            self._begun[index].wait()  # for an accelerator: what is computed from now on comes after it
        except RuntimeError:  # `finish` reports it
            return False
        return True

    def finish(self) -> None:
        """Wait for all collectives that were begun; their tensors may change again.

        Raises the error of a broken group, or of `check`. An error or an interrupt closes the group.
        """
        try:
            if self._broken is not None:
                raise self._broken
            for work in self._begun:
                pause = FIRST_PAUSE_SECONDS
                while not work.is_completed():  # `work.wait` alone would delay an interrupt
                    self._check()
                    time.sleep(pause)
                    pause = min(2 * pause, MAX_PAUSE_SECONDS)
                work.wait()  # raises what went wrong; on an accelerator, what is computed from now on comes after it
        except RuntimeError as error:
            self._broken = error
            self.close()
            raise self._on_broken(str(error).partition("\n")[0]) from error
        except BaseException:
            self.close()
            raise
        self._begun.clear()

    def exchange(self, facts: object, source: int = 0) -> Any:
        """Return the facts of process `source`, which travel as JSON. Blocks for the process."""
        text = bytearray(json.dumps(facts, default=str).encode())
        size = torch.tensor([len(text)])
        self.broadcast(size, source)
        self.finish()
        is_source = self._group.rank() == source
        message = torch.frombuffer(text, dtype=torch.uint8) if is_source else torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(message, source)
        self.finish()
        return json.loads(message.numpy().tobytes())

    def close(self) -> None:
        """Drop the group. An unfinished collective keeps it alive, because its destructor would wait."""
        if not all(work.is_completed() for work in self._begun):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._group, *self._begun)))
        self._begun.clear()
        self._broken = self._broken or RuntimeError("the connections are closed")
        self._group = None


def make_group(store: Any, rank: int, size: int, device: torch.device, host: str | None, timeout: timedelta) -> Any:
    """Return a new process group; torch.distributed's default group stays the script's. Blocks for all processes.

    `host` is the address that gloo listens on; None: gloo decides.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_default_device() if host is None else gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


def choose_device(parameters: Mapping[str, Tensor]) -> torch.device:
    """Return the device on which gradients are summed: the parameters' CUDA device, else the CPU."""
    return next((p.device for p in parameters.values() if p.device.type == "cuda"), torch.device("cpu"))
