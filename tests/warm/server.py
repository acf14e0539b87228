"""A server that imports slow modules, and forks a process for each order: `python server.py DESCRIPTOR`.

The descriptor is a socket. It receives orders with the standard output and other inherited descriptors, and sends the
process ids. The server ends when the other end is closed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
OWN = ("services.coordinator.process", "services.pserver.process", "trainer_client.optimizer.remote_optimizer")
MAX_BYTES, MAX_DESCRIPTORS = 1 << 20, 16


def import_slow_modules() -> None:
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # the first one imports for seconds
    sys.path.insert(0, str(ROOT))
    for module in OWN:
        importlib.import_module(module)
    del sys.path[0]
    gc.freeze()  # objects that the collector skips are not copied


def await_order(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return in a new process for each order, with the order and its descriptors."""
    while True:
        packet, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, MAX_DESCRIPTORS)
        if not packet:
            os._exit(0)
        read_end, write_end = os.pipe()
        middle = os.fork()  # when it ends, the client becomes the parent of its child
        if middle == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            os.setsid()
            while os.getppid() == middle:
                os.sched_yield()
            channel.close()
            os.close(read_end)
            os.write(write_end, str(os.getpid()).encode())
            os.close(write_end)
            return json.loads(packet), descriptors
        for descriptor in (write_end, *descriptors):
            os.close(descriptor)
        pid = os.read(read_end, 100)
        os.close(read_end)
        os.waitpid(middle, 0)
        channel.send(pid)


def become(order: dict[str, Any], descriptors: list[int]) -> None:
    """Run the ordered program as `__main__`."""
    high = [os.dup2(descriptor, 1000 + descriptor) for descriptor in descriptors]  # beyond the requested numbers
    for descriptor in descriptors:
        os.close(descriptor)
    output, *inherited = high
    for descriptor, number in zip(inherited, order["inherits"], strict=True):
        os.dup2(descriptor, number)
    os.dup2(output, 1)
    os.dup2(output, 2)
    high.append(os.open(os.devnull, os.O_RDONLY))
    os.dup2(high[-1], 0)
    for descriptor in high:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[:] = [*order["path"], *sys.path[1:]]  # the first is this file's folder
    for action in order["warnings"]:
        warnings.simplefilter(action)
    sys.excepthook = sys.__excepthook__ = show
    sys.argv = order["arguments"]
    if order["is_module"]:
        runpy.run_module(order["arguments"][0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(order["arguments"][0], run_name="__main__")


_print_exception = sys.__excepthook__


def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a traceback from the program's first line on."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (
        __file__,
        runpy.run_path.__code__.co_filename,
    ):
        traceback = traceback.tb_next
    _print_exception(kind, error.with_traceback(traceback), traceback)


if __name__ == "__main__":
    import_slow_modules()
    become(*await_order(socket.socket(fileno=int(sys.argv[1]))))
